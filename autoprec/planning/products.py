"""The backward passes of products, and the limits on the gradients of their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoprec.devices import Device
from autoprec.graphs import Op, OpGraph, Role
from autoprec.planning.activations import Activations
from autoprec.planning.flow import Flow
from autoprec.planning.standing import passing_bytes
from autoprec.planning.values import Gemm, PlanTensor, Remaking, Unit, WeightRow
from autoprec.plans import RECOMPUTED

__all__ = ["Products", "mixed_workspace"]


class Products:
    """All ops with a `grad_input` role, in forward order; their places here are their numbers."""

    def __init__(self, flow: Flow, units: Sequence[Unit], products: Sequence[Op], device: Device) -> None:
        self._graph, self._roots, self._prices = flow.graph, flow.roots, flow.prices
        self._unit_of, self._numbers = flow.unit_of, flow.numbers
        self._units, self._products, self._device = units, products, device
        self._moment = {op.id: i for i, op in enumerate(flow.graph.ops)}

    def gemms(self, index: Mapping[str, int], tensors: Sequence[PlanTensor]) -> tuple[Gemm, ...]:
        """`index`: places of root tensors in the problem."""
        places = (index[self._roots.root_of[op.inputs[0]]] for op in self._products)
        pairs = zip(self._products, places, strict=True)
        return tuple(self._gemm(op, k, x, tensors[x].remaking) for k, (op, x) in enumerate(pairs))

    def _gemm(self, op: Op, number: int, x: int, remaking: Remaking | None) -> Gemm:
        unit = {role: self._unit_of[op.id, role] for role in op.roles}
        x_noise, stored, arriving, upstream = self._prices.gemm_noise(op)
        rows = self._prices.input_weight_grad(op)
        if remaking is not None and stored and rows is not None:  # what is made again is rounded to be read, too
            stored[RECOMPUTED] = remaking.noise * rows.energy / self._prices.steps + x_noise.get("bf16", 0.0)
        specs = self._graph.tensor_by_id
        needed = self._units[unit[Role.GRAD_INPUT]].needed
        read = op.inputs[:1] if op.weights else tuple(t for t in op.inputs if specs[t].is_float32)
        of_gradients = [t for t in read if op.weights or specs[t].requires_grad]
        return Gemm(
            number=number,
            op=op.id,
            moment=self._moment[op.id],
            output=unit[Role.OUTPUT],
            grad_input=unit[Role.GRAD_INPUT],
            grad_weight=unit.get(Role.GRAD_WEIGHT, unit[Role.GRAD_INPUT]),
            x=x,
            x_numel=sum(specs[t].numel for t in of_gradients),
            operands_numel=sum(specs[t].numel for t in read) if needed and not op.weights else 0,
            out_numel=specs[op.outputs[0]].numel,
            variance=self._numbers[op.outputs[0]],
            has_grad_input=needed,
            has_grad_weight=bool(op.weights) and self._units[unit[Role.GRAD_WEIGHT]].needed,
            x_noise=tuple(x_noise.items()),
            stored_noise=tuple(stored.items()),
            gradient_noise=tuple(arriving.items()),
            seen_numel=places_read(op, self._graph),
            plain_extra=(self._plain_extra(op, Role.GRAD_INPUT), self._plain_extra(op, Role.GRAD_WEIGHT)),
            weight_bytes=passing_bytes(op, self._graph),
            upstream=upstream,
        )

    def _plain_extra(self, op: Op, role: Role) -> int:
        """Workspace that torch's own product takes beside that of ours, both in FP32, as measured."""
        plain = self._device.workspace_by_key.get((op.timing_key, role, "fp32"), (0, 0))[0]
        mixed = mixed_workspace(op, role, self._graph, self._device)
        return 0 if mixed is None else plain - mixed

    def rows(self, limit: float, activations: Activations) -> tuple[WeightRow, ...]:
        """One for each weight whose gradient can be judged; `limit` is the policy's `noise.gradient`."""
        prices, by_weight = self._prices, dict[str, list[int]]()
        passing: dict[str, list[tuple[int, float]]] = {}
        for op in self._graph.ops:
            for w in prices.inner_weights(op):
                passing[w] = [(self._numbers[f"param:{w}"], prices.weight_energy(w))]
        for k, op in enumerate(self._products):
            if prices.has_row(op) and not prices.unjudged(op):
                by_weight.setdefault(op.weights[0], []).append(k)
                passing.setdefault(op.weights[0], []).append(activations.into_weight(op))
        return tuple(
            WeightRow(weight=w, reference=(r := prices.reference(w)), limit=limit**2 * r,
                      gemms=tuple(by_weight.get(w, ())), passing=tuple(passing.get(w, ())))
            for w in dict.fromkeys((*by_weight, *passing))
        )  # fmt: skip


def places_read(op: Op, graph: OpGraph) -> int | None:
    """Elements of its input that a convolution of one place reads, where its stride leaves others out."""
    weight = graph.tensor_by_id.get(f"param:{op.weights[0]}") if op.weights else None
    x, y = graph.tensor_by_id[op.inputs[0]], graph.tensor_by_id[op.outputs[0]]
    if weight is None or not op.kind.startswith("conv") or len(weight.shape) < 3 or "transpose" in op.kind:
        return None
    if math.prod(weight.shape[2:]) > 1 or len(x.shape) != len(weight.shape):
        return None
    seen = math.prod((*x.shape[:2], *y.shape[2:]))
    return seen if seen < x.numel else None


def mixed_workspace(op: Op, role: Role, graph: OpGraph, device: Device) -> int | None:
    """Workspace of a gradient role in FP32 in a product that is not all FP32; None if nobody has measured it. It was
    measured of an FP32 input, of which a strided convolution copies what it reads: here that is cast, which counts by
    itself."""
    found = device.mixed_workspace_by_key.get((op.timing_key, role))
    if found is None or role is not Role.GRAD_WEIGHT or (seen := places_read(op, graph)) is None:
        return found
    return max(0, found - 4 * seen)
