"""Products with a weight of their own for each group of rows: experts, and batches with a weight for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.formats import other_operand
from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.operands import begin, made_in, refuse_copies, saved_operand, unscaled
from autoprec.numerics.packing import Packed
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.remaking import Kept

__all__ = ["batched_linear", "grouped_linear"]


class _GroupedLinear(torch.autograd.Function):
    """Rows between two ends of `offs` times the weight of their expert; rows after the last end give zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        operand: Packed | None,
        kept: Kept | None,
        offs: Tensor,
        spec: GemmSpec,
    ) -> Tensor:
        ctx.groups, read = _groups(offs), begin(ctx, x, weight, operand, kept, spec)
        rows, w = spec.operand(read, spec.output), spec.operand(weight, other_operand(spec.output))
        y = rows.new_zeros(x.shape[0], weight.shape[2])
        with spec.computing(spec.output):
            for i, group in enumerate(ctx.groups):
                torch.mm(rows[group], w[i], out=y[group])
        return y.to(spec.result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_double_backward("grouped products (experts)")
        spec: GemmSpec = ctx.spec
        read, weight = saved_operand(ctx)
        grad_x = grad_w = None
        if read is not None:
            g = spec.operand(spec.gradient(grad, spec.grad_weight), spec.grad_weight)
            x = spec.operand(read, other_operand(spec.grad_weight))
            with spec.computing(spec.grad_weight):
                product = torch.stack([_wide_product(x[group].t(), g[group]) for group in ctx.groups])
            product = spec.product(product, spec.grad_weight, made_in(spec, grad, weight))
            grad_w = unscaled(ctx, product, weight.dtype)
            del x, g, product
        del read  # as in a linear: it need not be there beside the input's gradient
        if ctx.needs_input_grad[0]:
            g = spec.operand(spec.gradient(grad, spec.grad_input), spec.grad_input)
            w = spec.operand(weight, other_operand(spec.grad_input))
            grad_x = g.new_zeros(grad.shape[0], weight.shape[1])
            with spec.computing(spec.grad_input):
                for i, group in enumerate(ctx.groups):
                    torch.mm(g[group], w[i].t(), out=grad_x[group])
            grad_x = spec.product(grad_x, spec.grad_input, ctx.x_dtype)
        return grad_x, grad_w, None, None, None, None


def _groups(offs: Tensor) -> list[slice]:
    """The rows of each expert. Waits for the device once."""
    ends = offs.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as it was accumulated, in FP32, where the device gives it: a scaled sum over rows can leave FP16."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a @ b


class _BatchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operand: Packed | None,
        kept: Kept | None,
        spec: GemmSpec,
    ) -> Tensor:
        ctx.bias_shape = None if bias is None else bias.shape
        read = begin(ctx, x, weight, operand, kept, spec)
        rows, w = spec.operand(read, spec.output), spec.operand(weight, other_operand(spec.output))
        with spec.computing(spec.output):
            y = rows @ w if bias is None else torch.baddbmm(bias.to(spec.result).to(w.dtype), rows, w)
        return y.to(spec.result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        read, weight = saved_operand(ctx)
        grad_x = grad_w = grad_b = None
        refuse_copies(ctx)
        if read is not None:
            product = _batched_weight_gradient(spec, grad, read, made_in(spec, grad, weight))
            grad_w = unscaled(ctx, product, weight.dtype)
            del product
        del read  # as in a linear: it need not be there beside the input's gradient
        if ctx.needs_input_grad[0]:
            grad_x = _batched_input_gradient(spec, grad, weight, ctx.x_dtype)
        if ctx.bias_shape is not None and ctx.needs_input_grad[2]:
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad_b = unscaled(ctx, wide.sum_to_size(ctx.bias_shape), weight.dtype)
        return grad_x, grad_w, grad_b, None, None, None


def _batched_weight_gradient(spec: GemmSpec, grad: Tensor, read: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    g = spec.operand(spec.gradient(grad, spec.grad_weight), spec.grad_weight)
    with spec.computing(spec.grad_weight):
        product = _wide_product(spec.operand(read, other_operand(spec.grad_weight)).mT, g)
    return spec.product(product, spec.grad_weight, dtype)


def _batched_input_gradient(spec: GemmSpec, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A function of its own, so that what it makes on the way is gone when it returns."""
    g = spec.operand(spec.gradient(grad, spec.grad_input), spec.grad_input)
    with spec.computing(spec.grad_input):
        product = g @ spec.operand(weight, other_operand(spec.grad_input)).mT
    return spec.product(product, spec.grad_input, dtype)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    kept: Kept | None,
    spec: GemmSpec,
    *,
    operand: Packed | None = None,
) -> Tensor:
    """x (rows, in), sorted by expert, times weight (experts, in, out); `offs` (experts,) are the ends of their rows."""
    return _made(_GroupedLinear.apply(x, weight, operand, kept, offs, spec))


def batched_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Kept | None,
    spec: GemmSpec,
    *,
    operand: Packed | None = None,
) -> Tensor:
    """x (batch, rows, in) times weight (batch, in, out), a master; (batch, rows, out) in `spec.result`. The bias, a
    master too, is anything that is broadcast to that. `kept` and `operand` are those of `linear`."""
    return _made(_BatchedLinear.apply(x, weight, bias, operand, kept, spec))


def _made(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result
