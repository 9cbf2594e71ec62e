"""What products with a parameter read, keep for their backward pass, and give their parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.formats import is_scaled, result_format
from autoprec.numerics.compilers import is_traced
from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.packing import Packed
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.remaking import Kept, Remade

__all__ = ["begin", "channel_sums", "made_in", "read_operand", "refuse_copies", "saved_operand", "unscaled"]


def read_operand(x: Tensor, operand: Packed | None, spec: GemmSpec) -> Tensor | Packed:
    """What the output is computed from: `x`, or its copy in a format with a scale, made now if nobody made it yet."""
    if not is_scaled(spec.output):
        return x
    return spec.packed(x if operand is None else operand, spec.output)


#: Elements of a narrow tensor that are summed at a time: few enough for the caches, enough for torch to be busy
#: (docs/measurements/pieces.md).
_SUMMED_AT_ONCE = 1 << 18


def channel_sums(grad: Tensor, fmt: str) -> Tensor:
    """Sums over all dimensions but the second (channels), with FP32 accumulation; the weight's gradient is in `fmt`.

    On a CPU those of rows are rounded to BF16 as that gradient is: a seventh of the time (docs/measurements/pieces.md).
    For others, and for sums in FP32, torch makes a copy of a narrow tensor there, so it is given slices of it.
    """
    dims = [0, *range(2, grad.dim())]
    on_cpu = grad.device.type == "cpu"
    by_rows = grad.dim() == 2 or not grad.is_contiguous()  # channels last among them
    if on_cpu and by_rows and grad.dtype is torch.bfloat16 and result_format(fmt) == "bf16":
        return grad.sum(dims)
    rows = max(1, _SUMMED_AT_ONCE // max(1, grad[:1].numel())) if on_cpu else grad.shape[0]
    wide = torch.promote_types(grad.dtype, torch.float32)
    if grad.dtype is wide or is_traced(grad) or grad.shape[0] <= rows:
        return grad.sum(dims, dtype=wide)
    total = grad.new_zeros(grad.shape[1], dtype=wide)
    for part in grad.split(rows):
        total += part.sum(dims, dtype=wide)
    return total


def begin(
    ctx: Any, x: Tensor, weight: Tensor, operand: Packed | None, kept: Kept | None, spec: GemmSpec
) -> Tensor | Packed:
    """The forward pass of a product with a parameter: what it reads; that, or what is kept instead, is saved, if the
    parameter wants a gradient."""
    ctx.spec, ctx.x_dtype, ctx.x_shape = spec, x.dtype, x.shape
    read = read_operand(x, operand, spec)
    _save(ctx, (read if kept is None else kept) if ctx.needs_input_grad[1] else None, weight)
    return read


def _save(ctx: Any, saved: Tensor | Kept | None, weight: Tensor) -> None:
    ctx.kept_as, ctx.again = None, None
    if isinstance(saved, Remade):
        ctx.again = saved.again
        ctx.save_for_backward(weight, *saved.tensors)
    elif isinstance(saved, Packed):
        ctx.kept_as = saved.format
        ctx.save_for_backward(weight, saved.payload, saved.inverse_scale)
    else:
        ctx.save_for_backward(weight, *([] if saved is None else [saved]))


def saved_operand(ctx: Any) -> tuple[Tensor | Packed | None, Tensor]:
    """The input as it was kept, None where the weight wants no gradient, and the weight. Once: inside a checkpoint a
    second look would ask for another recomputation, and unless the graph is retained nothing is kept any more: what is
    returned can be let go of before the input's gradient is made."""
    weight, *kept = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()
    if not kept:
        return None, weight
    if ctx.again is not None:
        return ctx.again(kept), weight
    return (kept[0] if ctx.kept_as is None else Packed(*kept, ctx.kept_as)), weight


def refuse_copies(ctx: Any) -> None:
    """A copy has lost its way back to what it is a copy of."""
    if ctx.kept_as is not None:
        refuse_double_backward("a layer that keeps its input in a narrow format")
    if ctx.again is not None:
        refuse_double_backward("a layer whose input is made again for its backward pass")
    if not ctx.spec.plain:
        refuse_double_backward("a product in TF32, FP8 or a format of one's own")


def made_in(spec: GemmSpec, grad: Tensor, weight: Tensor) -> torch.dtype:
    """In which the gradient of a weight is to come for `unscaled`: as the device makes it, where that is as exact."""
    narrow = spec.grad_weight == "bf16" and "bf16" in spec.native and grad.device.type == "cpu"
    return torch.bfloat16 if narrow and weight.dtype is torch.float32 else weight.dtype


def unscaled(ctx: Any, grad: Tensor, like: torch.dtype) -> Tensor:
    """The gradient of a parameter without its region's factor, in FP32 or wider, then as the parameter is."""
    spec: GemmSpec = ctx.spec
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return (grad.mul_(2.0**-spec.scale_log2) if spec.scale_log2 else grad).to(like)
