"""Where every byte of a step's predicted peak is: by layer and by kind, a plan beside FP32 and BF16."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import Step
from autoprec.planning.problem import Problem, fixed_bytes
from autoprec.planning.solutions import Choice, Solution
from autoprec.plans import Holding

__all__ = ["OTHERS", "holders", "holdings"]

#: The layers that hold less than this share of the peak, of every plan that is compared, are one.
_LEAST_FRAC = 1e-3
OTHERS = "others"

#: The id of an op or a tensor in what a step says of its bytes: `workspace of blocks.0:gelu#0`.
_ID = re.compile(r"(?P<layer>\S*):\S+")


def holdings(graph: OpGraph, solved: Mapping[str, tuple[Problem, Solution]]) -> tuple[Holding, ...]:
    """Bytes at the peak of each solution of a problem: of "plan", "fp32" and, where there is one, "bf16"; most of the
    plan first, after what a step holds whatever the plan."""
    found = {name: _at_peak(problem, s) for name, (problem, s) in solved.items()}
    least = _LEAST_FRAC * max(s.evaluation.peak_bytes for _, s in solved.values())
    layers = {layer for held in found.values() for layer, _ in held}
    of_layer = {y: max(sum(n for (x, _), n in held.items() if x == y) for held in found.values()) for y in layers}
    for name, held in found.items():
        merged: Counter[tuple[str, str]] = Counter()
        for (layer, kind), size in held.items():
            merged[layer if of_layer[layer] >= least else OTHERS, kind] += size
        found[name] = merged

    def made(layer: str, kind: str, sizes: Mapping[str, int]) -> Holding:
        return Holding(layer=layer, kind=kind, fp32=sizes["fp32"], bf16=sizes.get("bf16"), plan=sizes["plan"])

    living = {name: fixed_bytes(graph) - problem.fixed_bytes for name, (problem, _) in solved.items()}
    parameters = {name: graph.parameter_bytes - size for name, size in living.items()}
    always = [made("", "parameters", parameters)] if any(parameters.values()) else []
    fixed = {"gradients": graph.gradient_bytes, "optimizer": graph.optimizer_bytes, "inputs": graph.input_bytes}
    always += [made("", kind, dict.fromkeys(found, size)) for kind, size in fixed.items() if size]
    keys = {key for held in found.values() for key in held}
    rest = [made(*key, {name: held[key] for name, held in found.items()}) for key in keys]
    return (*always, *sorted(rest, key=lambda h: (-h.plan, -h.fp32, h.layer, h.kind)))


def _at_peak(problem: Problem, solution: Solution) -> Counter[tuple[str, str]]:
    step, phase = Step(problem, solution.choice).whole(), solution.evaluation.peak_phase
    held: Counter[tuple[str, str]] = Counter()
    for (what, first, last, size), kind in zip(step.held, step.kinds, strict=True):
        if first <= phase <= last:
            named = _ID.search(what)
            held[named["layer"] if named else "", kind] += size
    return held


def holders(problem: Problem, choice: Choice, phase: int, count: int = 3) -> list[tuple[str, int]]:
    """What holds the most bytes in a phase, largest first (parameters and inputs not counted)."""
    sizes: dict[str, int] = {}
    for what, first, last, size in Step(problem, choice).whole().held:
        if first <= phase <= last:
            sizes[what] = sizes.get(what, 0) + size
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:count]
