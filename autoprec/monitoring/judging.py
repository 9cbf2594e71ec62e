"""Which ops of a plan are unstable, by the ranges of a window.

Judged before the cast where a wider tensor is read in a narrow format, and on the result where a tensor is born in one
(an overflow shows as a non-finite value there).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.formats import Format, format_named
from autoprec.graphs import Op, OpGraph, Role
from autoprec.plans import Plan
from autoprec.policies import Monitor
from autoprec.profiles import Profile, RangeHistogram

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An op that must leave a format, and why."""

    op: str
    format: str
    trigger: str
    evidence: str


def judge(plan: Plan, graph: OpGraph, window: Profile, limits: Monitor) -> tuple[Verdict, ...]:
    """Overflow (non-finite, or beyond the format's largest value before the cast) and saturation (within the top
    quarter octave of the format), per op and format, worst first found per op."""
    verdicts = []
    for op in graph.ops:
        fmt_name = plan.format_of.get((op.id, Role.OUTPUT))
        if fmt_name is None:
            continue
        fmt = format_named(fmt_name)
        if fmt.scaled or fmt.max_value > 1e38:  # nothing that is finite leaves a scaled format, or float32's own range
            continue
        verdict = _judge_op(op, fmt, window, limits)
        if verdict is not None:
            verdicts.append(verdict)
    return tuple(verdicts)


def _judge_op(op: Op, fmt: Format, window: Profile, limits: Monitor) -> Verdict | None:
    for tensor_id in dict.fromkeys((*op.outputs, *op.inputs)):
        seen = window.tensor_by_id.get(tensor_id)
        if seen is None or tensor_id.startswith("buffer:"):
            continue
        for what, found in (("value", seen.values), ("gradient", seen.gradients)):
            verdict = None if found is None else _judge_histogram(op, fmt, tensor_id, what, found, limits)
            if verdict is not None:
                return verdict
    return None


def _judge_histogram(
    op: Op, fmt: Format, tensor_id: str, what: str, found: RangeHistogram, limits: Monitor
) -> Verdict | None:
    elements = max(found.elements, 1.0)
    if what == "value" and found.nonfinite > 0 or found.amax > fmt.max_value:
        overflow_frac = max(found.nonfinite, found.weight_above(fmt.max_value)) / elements
        evidence = (
            f"{what} of {tensor_id}: amax {found.amax:.4g} against {fmt.max_value:g} of {fmt.name},"
            f" overflow_frac {overflow_frac:.2g}"
        )
        return Verdict(op=op.id, format=fmt.name, trigger="overflow", evidence=evidence)
    top = fmt.max_value * 0.75
    saturation_frac = found.weight_above(top) / elements if found.amax > top else 0.0
    if saturation_frac > limits.saturation_frac:
        evidence = (
            f"{what} of {tensor_id}: saturation_frac {saturation_frac:.2g} above {limits.saturation_frac:g}"
            f" (amax {found.amax:.4g} of {fmt.max_value:g})"
        )
        return Verdict(op=op.id, format=fmt.name, trigger="saturation", evidence=evidence)
    return None
