"""The backward passes of products, and the limits on the gradients of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoprec.devices import Device
from autoprec.formats import COMPUTE_FORMATS
from autoprec.graphs import Op, Role
from autoprec.planning.activations import Activations
from autoprec.planning.codes import bytes_of
from autoprec.planning.flow import Flow
from autoprec.planning.standing import passing_bytes, readers_of_parameters
from autoprec.planning.values import Gemm, Unit, WeightRow
from autoprec.planning.workspaces import mixed_workspace, places_read

__all__ = ["Products"]


class Products:
    """All ops with a `grad_input` role, in forward order; their places here are their numbers."""

    def __init__(self, flow: Flow, units: Sequence[Unit], products: Sequence[Op], device: Device) -> None:
        self._graph, self._roots, self._prices = flow.graph, flow.roots, flow.prices
        self._unit_of, self._numbers = flow.unit_of, flow.numbers
        self._units, self._products, self._device = units, products, device
        self._moment = {op.id: i for i, op in enumerate(flow.graph.ops)}
        self._several = readers_of_parameters(flow.graph, flow.roots)

    def gemms(self, index: Mapping[str, int]) -> tuple[Gemm, ...]:
        """`index`: places of root tensors in the problem."""
        places = (index[self._roots.root_of[op.inputs[0]]] for op in self._products)
        pairs = zip(self._products, places, strict=True)
        return tuple(self._gemm(op, k, x) for k, (op, x) in enumerate(pairs))

    def _gemm(self, op: Op, number: int, x: int) -> Gemm:
        unit = {role: self._unit_of[op.id, role] for role in op.roles}
        x_noise, stored, arriving, energy, upstream = self._prices.gemm_noise(op)
        specs = self._graph.tensor_by_id
        needed = self._units[unit[Role.GRAD_INPUT]].needed
        read = op.inputs[:1] if op.weights else tuple(t for t in op.inputs if specs[t].is_float32)
        of_gradients = [t for t in read if op.weights or specs[t].requires_grad]
        two = needed and not op.weights and op.is_plain_product
        pieces = self._pieces(op, Role.GRAD_INPUT)
        return Gemm(
            number=number,
            op=op.id,
            moment=self._moment[op.id],
            output=unit[Role.OUTPUT],
            grad_input=unit[Role.GRAD_INPUT],
            grad_weight=unit.get(Role.GRAD_WEIGHT, unit[Role.GRAD_INPUT]),
            x=x,
            x_numel=sum(specs[t].numel for t in of_gradients),
            operands_numel=sum(specs[t].numel for t in read) if needed and not op.weights and not two else 0,
            pairs=self._pairs(op) if two else (),
            out_numel=specs[op.outputs[0]].numel,
            variance=self._numbers[op.outputs[0]],
            has_grad_input=needed,
            has_grad_weight=bool(op.weights) and self._units[unit[Role.GRAD_WEIGHT]].needed,
            x_noise=tuple(x_noise.items()),
            stored_noise=tuple(stored.items()),
            gradient_noise=tuple(arriving.items()),
            x_energy=energy,
            seen_numel=places_read(op, self._graph),
            plain_extra=(self._plain_extra(op, Role.GRAD_INPUT), self._plain_extra(op, Role.GRAD_WEIGHT)),
            summed=self._summed(op),
            input_pieces=pieces,
            weight_pieces=self._pieces(op, Role.GRAD_WEIGHT),
            spared=self._spared(op, self._units[unit[Role.GRAD_INPUT]], pieces),
            weight_bytes=passing_bytes(op, self._graph),
            emulated=self._emulated(op),
            upstream=upstream,
        )

    def _pairs(self, op: Op) -> tuple[tuple[int, int], ...]:
        """`Gemm.pairs`. Of a tensor that is multiplied by itself both are of it."""
        left, right = (self._graph.tensor_by_id[t] for t in (op.inputs[0], op.inputs[-1]))
        return tuple((x.numel, other.numel) for x, other in ((left, right), (right, left)) if x.requires_grad)

    def _emulated(self, op: Op) -> tuple[str, ...]:
        """`Gemm.emulated`."""
        return tuple(f for f in ("fp16", "bf16") if op.is_plain_product and f not in self._device.native)

    def _plain_extra(self, op: Op, role: Role) -> int:
        """Workspace that torch's own product takes beside that of ours, both in FP32, as measured; they are the same
        in compiled code."""
        if self._graph.compiled and (op.timing_key, role, "fp32") in self._device.compiled_workspace_by_key:
            return 0
        plain = self._device.workspace_by_key.get((op.timing_key, role, "fp32"), (0, 0))[0]
        mixed = mixed_workspace(op, role, self._graph, self._device)
        return 0 if mixed is None else plain - mixed

    def _pieces(self, op: Op, role: Role) -> tuple[tuple[str, float], ...]:
        """`Gemm.input_pieces` and `Gemm.weight_pieces`. What is compiled goes all at once."""
        if self._graph.compiled:
            return ()
        known = self._device.piece_frac_by_key
        return tuple((f, known[key]) for f in COMPUTE_FORMATS if (key := (op.timing_key, role, f)) in known)

    def _spared(self, op: Op, unit: Unit, pieces: Sequence[tuple[str, float]]) -> tuple[tuple[str, int], ...]:
        """`Gemm.spared`: the workspace was measured of all images, unless the result is larger than what it is made of
        or its operands are copied anyway, and beside the result, of which there are pieces in two formats now."""
        specs, found = self._graph.tensor_by_id, list[tuple[str, int]]()
        numel = specs[op.inputs[0]].numel
        sizes = dict(zip(unit.options, unit.workspace, strict=True))
        for f, frac in pieces:
            if f in sizes and numel <= specs[op.outputs[0]].numel and f not in self._emulated(op):
                found.append((f, sizes[f] - round((sizes[f] + numel * bytes_of(f)) * frac)))
        return tuple(found)

    def _summed(self, op: Op) -> tuple[int, int] | None:
        """`Gemm.summed`: a linear layer sends the transpose of what it made, and autograd adds nothing to that."""
        weight = f"param:{op.weights[0]}" if op.weights and op.kind == "linear" else ""
        if weight not in self._several or self._graph.compiled:
            return None
        *_, before, last = self._several[weight]
        spec = self._graph.tensor_by_id[weight]
        return (before, 4 * spec.numel) if spec.requires_grad and last == self._moment[op.id] else None

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
