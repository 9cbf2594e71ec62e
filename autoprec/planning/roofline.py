"""From a `Datasheet` and a graph to a `Device` whose seconds are modelled: the roofline.

A kernel takes launch_seconds + max(FLOPs / attainable FLOP/s in its format, bytes / attainable bytes/s)
(Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009; the launch is the fixed part). Kernels and bytes are
counted as eager torch needs them at least: each operand is read from memory once, each result is written once. The keys
are those of `calibration.timing`: products with a parameter role by role, other ops forward and backward together as
their `output`, and what checkpoints recompute as often as it runs.

* Casts of activations, which the planner prices itself, are not in a role. A product's casts of its parameters, and of
  its weight's gradient back to FP32, are.
* A product in a format that the device lacks: operands upcast, multiplied in FP32, the result rounded, a kernel each;
  for TF32 operands rounded and multiplied in FP32.
* Norms in FP16 are computed in FP32, and once more in the backward pass (`numerics.norms`).
* Views, and ops that are not known, cost nothing, as where they are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoprec.devices import CastTiming, Datasheet, Device, OpTiming
from autoprec.formats import COMPUTE_FORMATS, format_named, held_as, is_operands_only, is_scaled, result_format
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind, TensorSpec
from autoprec.planning.options import reads_narrow
from autoprec.planning.problem import ITEM_BYTES

__all__ = ["modelled_device"]

#: Ops whose operands' gradients are the one that arrives, or views of it.
_PASSING_ON = ("add", "cat", "stack")

#: Norms that run in FP32 on FP16 tensors.
_WIDE_NORMS = ("layer_norm", "group_norm", "batch_norm")


def modelled_device(sheet: Datasheet, graph: OpGraph) -> Device:
    """The device of a datasheet with modelled seconds of every op of the graph, in every format that it may take."""
    model = _Model(sheet, graph)
    timings: dict[str, tuple[OpTiming, ...]] = {}
    for op in graph.ops:
        if op.timing_key and op.timing_key not in timings:
            timings[op.timing_key] = tuple(
                OpTiming(
                    timing_key=op.timing_key,
                    role=role,
                    format=name,
                    seconds=seconds,
                    forward_seconds=model.forward(op, name),
                )  # fmt: skip
                for name in _formats(op)
                for role, seconds in model.roles(op, name)
            )
    return Device(
        name=f"{sheet.name} (modelled from its datasheet)",
        type=sheet.type,
        native=sheet.native,
        timings=tuple(t for found in timings.values() for t in found),
        casts=tuple(model.casts()),
        source="modelled",
    )


def _formats(op: Op) -> tuple[str, ...]:
    """Those in which the op's seconds can be asked for; the same as `calibration.timing` measures."""
    if op.op_class is OpClass.WIDE:
        return () if op.kind.startswith("hop.") else ("fp32",)
    if not op.roles:
        return ()
    if op.pinned:
        return ("fp32",)
    return tuple(f for f in COMPUTE_FORMATS if op.is_plain_product or not is_operands_only(f))


class _Model:
    """Seconds of kernels on a device, and of the ops of a graph."""

    def __init__(self, sheet: Datasheet, graph: OpGraph) -> None:
        compute, bandwidth = sheet.attainable_compute_frac.value, sheet.attainable_bandwidth_frac.value
        self.graph = graph
        self.launch = sheet.launch_seconds.value
        self.flops_per_second = {p.format: p.value * compute for p in sheet.peak_flops_per_second}
        self.bytes_per_second = sheet.memory_bytes_per_second.value * bandwidth

    # Kernels

    def kernel(self, flops: float, size: float, name: str) -> float:
        """Seconds of one kernel that moves `size` bytes, with arithmetic in a format (FP32's where it is lacking)."""
        rate = self.flops_per_second.get(name, self.flops_per_second["fp32"])
        return self.launch + max(flops / rate, size / self.bytes_per_second)

    def cast(self, source: str, target: str) -> tuple[float, float]:
        """(seconds per call, seconds per element). Packing reads twice: for the largest magnitude, and to round. From
        one format with a scale to another the way is BF16."""
        if is_scaled(source) and is_scaled(target):
            (up, per_up), (down, per_down) = self.cast(source, "bf16"), self.cast("bf16", target)
            return up + down, per_up + per_down
        passes = 2 if is_scaled(target) else 1
        size = passes * format_named(source).bytes + format_named(target).bytes
        return passes * self.launch, size / self.bytes_per_second

    def _cast_seconds(self, source: str, target: str, numel: int) -> float:
        source, target = held_as(source), held_as(target)
        call, element = self.cast(source, target)
        return call + element * numel if source != target and numel else 0.0

    def casts(self) -> Iterator[CastTiming]:
        """Between all formats that a tensor can be in."""
        held = dict.fromkeys(map(held_as, COMPUTE_FORMATS))
        for source in held:
            for target in held:
                if source != target:
                    call, element = self.cast(source, target)
                    yield CastTiming(source=source, target=target, seconds_per_element=element, seconds_per_call=call)

    def product(self, flops: int, operands: list[int], result: int, name: str) -> float:
        """Seconds of a matrix product, by numbers of elements."""
        if name in self.flops_per_second:
            size = format_named(name).bytes * sum(operands) + format_named(result_format(name)).bytes * result
            return self.kernel(flops, size, name)
        if is_scaled(name):  # emulated in BF16, as exactly as there
            up, per_up = self.cast(name, "bf16")
            return len(operands) * up + per_up * sum(operands) + self.product(flops, operands, result, "bf16")
        up, per_up = self.cast(name, "fp32")  # for TF32: rounded, in as many bytes
        if held_as(name) == "fp32":
            return len(operands) * up + per_up * sum(operands) + self.product(flops, operands, result, "fp32")
        down, per_down = self.cast("fp32", name)
        around = len(operands) * up + per_up * sum(operands) + down + per_down * result
        return around + self.product(flops, operands, result, "fp32")

    # Ops

    def roles(self, op: Op, name: str) -> Iterator[tuple[Role, float]]:
        """(role, seconds of one call) in a format."""
        if op.op_class is not OpClass.GEMM:
            yield Role.OUTPUT, sum(self._forward_and_backward(op, name))
        elif not op.is_plain_product:
            yield from zip(op.roles, self._forward_and_backward(op, name), strict=True)
        elif not op.weights:
            yield from self._product_of_activations(op, name)
        else:
            yield from self._product_with_parameter(op, name)

    def forward(self, op: Op, name: str) -> float | None:
        """Seconds of one forward pass, of an op with one role."""
        return None if op.op_class is OpClass.GEMM else self._forward_and_backward(op, name)[0] / _runs(op)

    def _product_with_parameter(self, op: Op, name: str) -> Iterator[tuple[Role, float]]:
        x, y = self._spec(op.inputs[0]).numel, self._spec(op.outputs[0]).numel
        parameters = [self.graph.tensor_by_id.get(f"param:{fqn}") for fqn in op.weights]
        w = 0 if parameters[0] is None else parameters[0].numel
        others = [t for t in parameters[1:] if t is not None]
        cast = sum(self._cast_seconds("fp32", name, t.numel) for t in parameters if t is not None)
        own = cast + self.product(op.flops, [x, w, *(t.numel for t in others)], y, name)
        yield Role.OUTPUT, _runs(op) * own
        made = result_format(name)
        # A product in FP8 rounds the gradient that arrives itself.
        arriving = self._cast_seconds(made, name, y)
        made_x = self._cast_seconds("fp32", name, w) + self.product(op.flops, [y, w], x, name)
        yield Role.GRAD_INPUT, arriving + made_x
        width = format_named(made).bytes
        sums = sum(self.kernel(0, width * y + 4 * t.numel, made) for t in others if t.requires_grad)
        back = self._cast_seconds(made, "fp32", w)
        yield Role.GRAD_WEIGHT, arriving + self.product(op.flops, [x, y], w, name) + back + sums

    def _product_of_activations(self, op: Op, name: str) -> Iterator[tuple[Role, float]]:
        operands = [t for t in map(self._spec, op.inputs) if t.is_float32]
        sizes, y = [t.numel for t in operands], self._spec(op.outputs[0])
        yield Role.OUTPUT, _runs(op) * self.product(op.flops, sizes, y.numel, name)
        wanted = [(i, t.numel) for i, t in enumerate(operands) if t.requires_grad and y.requires_grad]
        beside = [[y.numel, *sizes[:i], *sizes[i + 1 :]] for i, _ in wanted]
        products = (self.product(op.flops, b, n, name) for b, (_, n) in zip(beside, wanted, strict=True))
        yield Role.GRAD_INPUT, sum(products)

    def _forward_and_backward(self, op: Op, name: str) -> tuple[float, float]:
        """A kernel forward, and one backward where a gradient is asked for. The products inside attention and recurrent
        layers have two gradients, each with the forward's FLOPs."""
        if op.op_class is OpClass.NORM and name == "fp16" and op.kind in _WIDE_NORMS:
            return self._norm_in_fp32(op, name)
        if op.op_class is OpClass.LOOKUP and name != "fp32":
            return self._lookup(op, name)
        seconds = _runs(op) * self.kernel(op.flops, self._forward_bytes(op, name), name)
        size = self._backward_bytes(op, name)
        return seconds, self.kernel(2 * op.flops, size, name) if size else 0.0

    def _norm_in_fp32(self, op: Op, name: str) -> tuple[float, float]:
        call, element = self.cast(name, "fp32")
        around = call + element * self._spec(op.outputs[0]).numel  # there or back: as many bytes
        forward = self.kernel(0, self._forward_bytes(op, "fp32"), "fp32")
        seconds = _runs(op) * (forward + 2 * around)
        size = self._backward_bytes(op, "fp32")
        return seconds, 3 * around + forward + self.kernel(0, size, "fp32") if size else 0.0

    def _lookup(self, op: Op, name: str) -> tuple[float, float]:
        """As in FP32, and a cast of the result and of its gradient."""
        forward, backward = self._forward_and_backward(op, "fp32")
        numel = sum(self._spec(t).numel for t in op.outputs)
        seconds = forward + _runs(op) * self._cast_seconds("fp32", name, numel)
        return seconds, backward + self._cast_seconds(name, "fp32", numel) if backward else 0.0

    def _forward_bytes(self, op: Op, name: str) -> float:
        """What is read and made; of a table as much is read as is given."""
        made = [self._spec(t) for t in op.outputs]
        limit = sum(t.numel for t in made) if op.op_class is OpClass.LOOKUP else math.inf
        read = sum(min(t.numel, limit) * self._width(op, t, name) for t in map(self._spec, op.inputs))
        return read + sum(t.numel * self._width(op, t, name) for t in made)

    def _backward_bytes(self, op: Op, name: str) -> float:
        """Gradients that arrive, what was kept, gradients that are made; 0 without a kernel."""
        arriving = [t for t in map(self._spec, op.outputs) if t.requires_grad]
        wanted = [t for t in map(self._spec, dict.fromkeys(op.inputs)) if t.requires_grad] if arriving else []
        if op.kind in _PASSING_ON:  # what was broadcast is summed
            whole = max((t.numel for t in arriving), default=0)
            wanted = [t for t in wanted if op.kind == "add" and t.numel < whole]
        if not wanted:
            return 0.0
        kept = [self._spec(t) for t in op.saves]
        moved = sum(t.numel * self._width(op, t, name) for t in (*arriving, *kept, *wanted))
        return moved + op.private_saved_bytes

    def _width(self, op: Op, t: TensorSpec, name: str) -> int:
        """Bytes per element of a tensor that the op reads or makes."""
        if t.is_float32 and (t.kind is TensorKind.ACTIVATION or reads_narrow(op, t.id, self.graph)):
            return format_named(name).bytes
        return ITEM_BYTES.get(t.dtype, 4)

    def _spec(self, tensor: str) -> TensorSpec:
        return self.graph.tensor_by_id[tensor]


def _runs(op: Op) -> int:
    """How often its forward pass runs in a step, for each call."""
    return 1 + len(op.checkpoints)
