"""Bytes of an op that are no tensor of the graph: held while it runs, or kept privately for its backward pass."""

from __future__ import annotations

import math

from autoprec.devices import PIECE_NUMEL, Device
from autoprec.formats import held_as, is_scaled, result_format
from autoprec.graphs import Op, OpGraph, Role, TensorKind
from autoprec.planning.codes import bytes_of
from autoprec.planning.kept_inputs import KeptInputs

__all__ = ["Workspaces", "mixed_workspace", "places_read"]


class Workspaces:
    """What ops of a graph take on a device."""

    def __init__(self, kept: KeptInputs, device: Device, as_written: OpGraph) -> None:
        """`as_written`: the graph before some of what ops keep privately was counted as what they are given."""
        self._graph, self._device, self._beside = kept.graph, device, kept.copied_bytes
        private = {op.id: op.private_saved_bytes for op in as_written.ops}
        self._copied = {op.id: private[op.id] - op.private_saved_bytes for op in kept.graph.ops}

    def of(self, op: Op, role: Role, format_name: str, weights: int) -> tuple[int, int]:
        """Bytes held while a role runs in a format, and in the backward pass of an op with one role: as measured, and
        where the device was not asked, by what is known to be cast. `weights`: elements of the weights that it casts.

        A narrow product holds the casts of its weights; where the device does not compute in the format, also the
        operands upcast to FP32 (or rounded there, for TF32) and the product before it is rounded. Copies in FP32 that
        count as what they are copies of are there beside it while they are made.
        """
        copied = self._beside.get(op.id, 0) * op.calls if role is Role.OUTPUT and format_name == "fp32" else 0
        key = (op.timing_key, role, format_name)
        if self._graph.compiled and (compiled := self._device.compiled_workspace_by_key.get(key)) is not None:
            return compiled + copied, 0
        measured = self._device.workspace_by_key.get(key)
        if measured is not None and format_name == "fp32":  # torch's own product takes more: `Gemm.plain_extra`
            mixed = mixed_workspace(op, role, self._graph, self._device)
            return (measured[0] if mixed is None else mixed) + copied, measured[1]
        if measured is not None:
            return measured
        if not op.is_plain_product or format_name == "fp32":
            return copied, 0
        size = weights * bytes_of(format_name) if held_as(format_name) == format_name else 0
        if is_scaled(format_name):
            size += weights * bytes_of(result_format(format_name))
        elif format_name not in self._device.native:
            specs = [self._graph.tensor_by_id[t] for t in (*op.inputs, *op.outputs)]
            activations = sum(t.numel for t in specs if t.is_float32 and t.kind is not TensorKind.PARAMETER)
            size += 4 * (weights + activations)
        return size, 0

    def made_again(self, op: Op) -> tuple[int, int]:
        """`Replacement.spared`, and `Replacement.workspace` of the backward pass, of attention that runs op by op: ours
        makes all again there that torch's keeps, copies of what it is given among it, and its result; and takes on the
        way what it takes forward, before there are gradients of what it is given."""
        specs = self._graph.tensor_by_id
        now, (then, _) = self.of(op, Role.OUTPUT, "fp32", 0)[0], self.of(op, Role.GRAD_INPUT, "fp32", 0)
        gradients = sum(4 * specs[t].numel for t in dict.fromkeys(op.inputs) if specs[t].requires_grad)
        made = self._copied[op.id] * op.calls + 4 * specs[op.outputs[0]].numel
        return op.private_saved_bytes * op.calls, max(now - gradients, then + made) - then

    def a_few_rows(self, op: Op) -> tuple[int, int]:
        """`Replacement.workspace` of a cross entropy. Ours, which goes a few rows at a time, holds the logarithms of
        their probabilities, and in its backward pass three tensors of so many."""
        logits = self._graph.tensor_by_id[op.inputs[0]]
        row = logits.numel // max(1, logits.shape[0])
        piece = 4 * min(logits.numel, max(row, PIECE_NUMEL[self._device.type] // max(1, row) * row))
        now, then = self.of(op, Role.OUTPUT, "fp32", 0)
        return piece - now, 3 * piece - then

    def private(self, op: Op, format_name: str) -> int:
        """Bytes of its own that an op keeps in a format; as calibrated where the device was not asked.

        Of an input that is not contiguous torch's products keep a copy, and ours, which are narrow, the cast.
        """
        found = self._device.private_bytes_by_key.get((op.timing_key, format_name))
        if format_name == "fp32":
            return op.private_saved_bytes * op.calls
        copied = 0
        if op.is_plain_product and op.weights and op.inputs[0] not in op.saves:
            numel = self._graph.tensor_by_id[op.inputs[0]].numel
            copied = numel if op.private_saved_bytes >= 4 * numel else 0
        keeps = op.private_saved_bytes - 4 * copied if found is None else found
        return (keeps + copied * bytes_of(format_name)) * op.calls


def mixed_workspace(op: Op, role: Role, graph: OpGraph, device: Device) -> int | None:
    """Workspace of a gradient role in FP32 in a product that is not all FP32; None if nobody has measured it. It was
    measured of an FP32 input, of which a strided convolution copies what it reads: here that is cast, which counts by
    itself."""
    found = device.mixed_workspace_by_key.get((op.timing_key, role))
    if found is None or role is not Role.GRAD_WEIGHT or (seen := places_read(op, graph)) is None:
        return found
    return max(0, found - 4 * seen)


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
