"""What a policy would have to give up for a smaller budget: the smallest peak without each of its limits."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.errors import DeviceError, InfeasibleError
from autoprec.formats import STORAGE_FORMATS
from autoprec.graphs import OpGraph
from autoprec.planning.highs import smallest_peak
from autoprec.planning.problem import build_problem
from autoprec.planning.proposals import Question
from autoprec.planning.reasons import bytes_text
from autoprec.policies import Policy

__all__ = ["what_to_change"]

#: Smallest peaks are compared, not adopted: within a hundredth is enough.
_GAP = 0.01

#: Times the noise limits.
_WIDER = 10.0


def what_to_change(question: Question, smallest_bytes: int) -> list[str]:
    """A phrase for each change of the policy that lowers the smallest feasible peak, the most helpful first."""
    found: list[tuple[int, str]] = []
    for what, changed in _changes(question.graph, question.policy):
        try:
            problem = build_problem(question.graph, question.profile, question.device, changed)
        except (InfeasibleError, DeviceError):  # the rules leave an op no format, or nobody timed that format here
            continue
        solution = smallest_peak(problem, relative_gap=_GAP)
        if solution is not None and solution.evaluation.peak_bytes < smallest_bytes:
            peak = solution.evaluation.peak_bytes
            found.append((peak, f"{what}: {peak} bytes ({bytes_text(peak - smallest_bytes, True)})"))
    return [text for _, text in sorted(found)]


def _changes(graph: OpGraph, policy: Policy) -> Iterator[tuple[str, Policy]]:
    policy = policy.replaced(budget=None)
    for i, rule in enumerate(policy.rules):
        if any(rule.matches(op) for op in graph.ops):
            rest = (*policy.rules[:i], *policy.rules[i + 1 :])
            yield f"without rules[{i}] ({rule})", policy.replaced(rules=rest)
    wider = {"gradient": _WIDER * policy.noise.gradient, "loss": _WIDER * policy.noise.loss}
    yield f"with noise limits {_WIDER:g} times as wide", policy.replaced(noise=wider)
    formats = tuple(dict.fromkeys(("fp32", "bf16", "fp16", *policy.formats)))
    if len(formats) > len(policy.formats):
        yield f"with formats [{', '.join(formats)}]", policy.replaced(formats=formats)
    if set(policy.storage.formats) != set(STORAGE_FORMATS):
        storage = {"formats": STORAGE_FORMATS}
        yield f"with storage.formats [{', '.join(STORAGE_FORMATS)}]", policy.replaced(storage=storage)
