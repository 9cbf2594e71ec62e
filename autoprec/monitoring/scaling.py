"""Gradient scales of FP16 regions while a run goes on: gradients without them, and which scales suit those."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autoprec.formats import FP16
from autoprec.graphs import OpGraph, Role
from autoprec.planning.pricing import fp16_gradient_scale_log2, told_scale
from autoprec.planning.regions import summed_in_fp16
from autoprec.plans import Plan, Region
from autoprec.profiles import Profile

__all__ = [
    "LEAST_ROOM_LOG2",
    "RegionScales",
    "adapted",
    "gradient_ranges",
    "rescaled",
    "scaled_tensors",
    "summed_parameters",
    "usual_scales",
]


#: Octaves below FP16's largest value in which gradients get another scale; planning leaves eight. Runs that were played
#: through with these two had no overflow, and few new scales (python -m tests.room_study, docs/measurements/room.md).
LEAST_ROOM_LOG2 = 4.0

#: Octaves that are no reason for another scale: 14 of normal numbers are left below the largest gradient, and what is
#: smaller has next to no energy (measured as well). Where a tensor is otherwise, the judge says so.
_MOST_ROOM_LOG2 = 16.0


class RegionScales:
    """Of a plan: which scale each op and each gradient has, as the exponent of 2."""

    def __init__(self, plan: Plan, graph: OpGraph) -> None:
        self._plan, self._graph = plan, graph
        self._of = {op: r.scale_log2 for r in plan.regions for op in r.ops}

    def of(self, op: str) -> int:
        """Of gradients that the op has in FP16."""
        return self._of.get(op, 0)

    def carried(self, tensor: str) -> int:
        """What the gradient of a tensor carries where it is seen: the scale of the region that it was made in."""
        return self.of(self._graph.producer.get(tensor, "")) if self.is_made_in_fp16(tensor) else 0

    def is_made_in_fp16(self, tensor: str) -> bool:
        """Whether the gradient of a tensor is in FP16 where it is seen."""
        return self._plan.format_of.get((self._graph.producer.get(tensor, ""), Role.OUTPUT)) == "fp16"


def usual_scales(plan: Plan, graph: OpGraph, before: Profile | None) -> RegionScales:
    """The scales that suited the gradients of calibration."""
    known = () if before is None else before.tensors
    amax_of = {t.id: t.gradients.amax for t in known if t.gradients is not None}
    return RegionScales(replace(plan, regions=tuple(_suited(r, plan, graph, amax_of) for r in plan.regions)), graph)


def gradient_ranges(window: Profile, scales: RegionScales) -> dict[str, float]:
    """Tensor → the largest magnitude of its gradient, without a scale."""
    return {
        t.id: math.ldexp(t.gradients.amax, -scales.carried(t.id)) for t in window.tensors if t.gradients is not None
    }


def scaled_tensors(region: Region, plan: Plan, graph: OpGraph) -> Iterator[str]:
    """Whose gradients a region has under its scale: of the activations that its ops read and make, and of parameters
    where FP16 sums them up."""
    for op in (graph.op_by_id[op] for op in region.ops if op in graph.op_by_id):
        yield from (t for t in (*op.inputs, *op.outputs) if not t.startswith(("param:", "buffer:")))
    yield from _sums(region, plan, graph)


def _sums(region: Region, plan: Plan, graph: OpGraph) -> Iterator[str]:
    for op in (graph.op_by_id[op] for op in region.ops if op in graph.op_by_id):
        yield from summed_in_fp16(op, graph, plan.format_of)


def rescaled(
    plan: Plan, graph: OpGraph, amax_of: Mapping[str, float], wanted: Callable[[Region], bool] = lambda _: True
) -> Plan:
    """The plan with the scales of the `wanted` regions chosen for these gradients, by the same rule as when planning. A
    region whose gradients nobody has seen keeps its own; one with a sum that nobody has seen gets no larger one."""

    def chosen(region: Region) -> Region:
        best = _suited(region, plan, graph, amax_of) if wanted(region) else region
        unseen = any(t not in amax_of for t in _sums(region, plan, graph))
        return region if unseen and best.scale_log2 > region.scale_log2 else best

    regions = tuple(map(chosen, plan.regions))
    return plan if regions == plan.regions else replace(plan, regions=regions)


def _suited(region: Region, plan: Plan, graph: OpGraph, amax_of: Mapping[str, float]) -> Region:
    """The region with the scale that suits these gradients; itself where none of them was seen."""
    found = [(amax_of[t], t) for t in scaled_tensors(region, plan, graph) if amax_of.get(t, 0.0) > 0.0]
    if not found:
        return region
    (amax, where), (least, _) = max(found), min(found)
    scale = fp16_gradient_scale_log2(amax, least)
    if scale == region.scale_log2:
        return region
    return replace(region, scale_log2=scale, reason=told_scale(amax, f"{where}, in a window", scale))


def adapted(plan: Plan, before: Plan, graph: OpGraph, amax_of: Mapping[str, float]) -> Plan:
    """A plan that was made from calibration, while another one runs, with scales that suit these gradients: its own,
    so that a plan that comes back is the same plan and need not be compiled again; else those that its ops have now;
    else the best."""
    running = {op: r.scale_log2 for r in before.regions for op in r.ops}

    def suits(region: Region) -> bool:
        amax = max((amax_of.get(t, 0.0) for t in scaled_tensors(region, plan, graph)), default=0.0)
        room_log2 = math.log2(FP16.max_value / amax) - region.scale_log2 if amax > 0.0 else _MOST_ROOM_LOG2
        return LEAST_ROOM_LOG2 <= room_log2 <= _MOST_ROOM_LOG2

    def kept(region: Region) -> Region:
        now = {running[op] for op in region.ops if op in running}
        return region if suits(region) or len(now) != 1 else replace(region, scale_log2=now.pop(), reason="as it was")

    return rescaled(
        replace(plan, regions=tuple(map(kept, plan.regions))), graph, amax_of, lambda region: not suits(region)
    )


def summed_parameters(plan: Plan, graph: OpGraph) -> frozenset[str]:
    """FQNs of the parameters whose gradients are summed up in FP16."""
    if not plan.regions:
        return frozenset()
    found = (t for op in graph.ops for t in summed_in_fp16(op, graph, plan.format_of))
    return frozenset(t.removeprefix("param:") for t in found)
