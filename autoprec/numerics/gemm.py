"""Linears and matrix products with a format for each role, and a storage for the input they keep.

Each role rounds its operands to its format (`numerics.products`). Parameters come in as FP32 masters: they are cast
inside and cast again in the backward pass, so no weight copy is kept. Gradients of parameters are returned in FP32. A
layer whose output is computed in FP8 keeps the FP8 copy of its input that it read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoprec.formats import is_scaled, other_operand
from autoprec.numerics.operands import (
    begin,
    channel_sums,
    made_in,
    read_operand,
    refuse_copies,
    saved_operand,
    unscaled,
)
from autoprec.numerics.packing import Packed, decode
from autoprec.numerics.products import GemmSpec, operands_product, rows_times_rows
from autoprec.numerics.remaking import Kept

__all__ = [
    "GemmSpec",
    "linear",
    "matmul",
    "rows_of",
]


def rows_of(x: Tensor) -> Tensor:
    """All leading dimensions as one: (…, n) → (rows, n), also where n or the number of rows is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Linear(torch.autograd.Function):
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
        read = begin(ctx, x, weight, operand, kept, spec)
        # Detached, because torch lets nobody change a view in place that a custom function returns.
        return rows_times_rows(read, weight, spec.output, spec, spec.result, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        read, weight = saved_operand(ctx)
        grad_x = grad_w = grad_b = None
        flat = rows_of(grad)
        if ctx.needs_input_grad[1] or not spec.plain:
            refuse_copies(ctx)
        if read is not None:
            product = _weight_gradient(spec, flat, read, made_in(spec, grad, weight))
            grad_w = unscaled(ctx, product, weight.dtype)
            del product
        del read  # it need not be there beside the input's gradient
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(spec, flat, weight, ctx.x_dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[2]:
            grad_b = unscaled(ctx, channel_sums(flat, spec.grad_weight), weight.dtype)
        return grad_x, grad_w, grad_b, None, None, None


def _weight_gradient(spec: GemmSpec, grad: Tensor, read: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    fmt = spec.grad_weight
    if is_scaled(fmt):  # with a scale for each row of the product's operands, or for all
        return rows_times_rows(grad.t(), _columns(read, spec, other_operand(fmt)), fmt, spec, dtype)
    return spec.product(_weight_product(spec, grad, read, dtype).to(dtype), fmt, dtype)


def _weight_product(spec: GemmSpec, grad: Tensor, read: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    """A function of its own, as the next one is, so that what it makes on the way is gone when it returns. Each operand
    is rounded by itself, so that where it is upcast the narrow one is gone before the next is made."""
    g = spec.operand(spec.gradient(grad, spec.grad_weight), spec.grad_weight)
    x = rows_of(spec.operand(read, other_operand(spec.grad_weight)))
    return operands_product(g.t(), x, spec.grad_weight, spec, dtype)


def _input_gradient(spec: GemmSpec, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    fmt = spec.grad_input
    made = torch.float32 if spec.shifts(fmt) and grad.is_cuda else dtype  # there as it was accumulated
    if is_scaled(fmt):
        return rows_times_rows(grad, weight.t(), fmt, spec, made)
    return spec.product(_input_product(spec, grad, weight, made).to(made), fmt, dtype)


def _input_product(spec: GemmSpec, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    g = spec.operand(spec.gradient(grad, spec.grad_input), spec.grad_input)
    return operands_product(g, spec.operand(weight, other_operand(spec.grad_input)), spec.grad_input, spec, dtype)


def _columns(x: Tensor | Packed, spec: GemmSpec, fmt: str) -> Tensor | Packed:
    """Columns as rows, (…, K) → (K, M): the second operand of a weight's gradient, in a format with a scale. One scale
    serves them too."""
    if isinstance(x, Packed) and (x.format != fmt or spec.rowwise):
        x = decode(x, spec.wide(x.format))
    if not isinstance(x, Packed):
        return rows_of(x).t()
    return x._replace(payload=rows_of(x.payload).t())


class _Matmul(torch.autograd.Function):
    """a @ b of two activations, each at least 2-D, leading dimensions broadcast; of the narrow operands those are kept
    that the other one's gradient reads."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, spec: GemmSpec) -> Tensor:
        ctx.spec, ctx.dtypes, ctx.shapes = spec, (a.dtype, b.dtype), (a.shape, b.shape)
        left, right = read_operand(a, None, spec), read_operand(b, None, spec)
        ctx.kept_as = left.format if isinstance(left, Packed) else None
        ctx.again = None
        read_again = (left if ctx.needs_input_grad[1] else None, right if ctx.needs_input_grad[0] else None)
        kept = [(t.payload, t.inverse_scale) if isinstance(t, Packed) else (t, None) for t in read_again]
        ctx.save_for_backward(*kept[0], *kept[1])
        with spec.computing(spec.output):
            return (spec.operand(left, spec.output) @ spec.operand(right, spec.output)).to(spec.result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        refuse_copies(ctx)
        a, scale_a, b, scale_b = ctx.saved_tensors
        if ctx.kept_as is not None:
            a, b = Packed(a, scale_a, ctx.kept_as), Packed(b, scale_b, ctx.kept_as)
        fmt = spec.grad_input
        g = spec.operand(spec.gradient(grad, fmt), fmt)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = spec.product(_product_with(spec, g, b, ctx.shapes[0], left=True), fmt, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            grad_b = spec.product(_product_with(spec, g, a, ctx.shapes[1], left=False), fmt, ctx.dtypes[1])
        return grad_a, grad_b, None


def _product_with(spec: GemmSpec, g: Tensor, other: Tensor | Packed, shape: torch.Size, *, left: bool) -> Tensor:
    """g · otherᵀ, or otherᵀ · g. A function of its own, so that the copy of the other is gone when it returns."""
    read = spec.operand(other, other_operand(spec.grad_input)).mT
    with spec.computing(spec.grad_input):
        return _product_to(g, read, shape) if left else _product_to(read, g, shape)


def _product_to(a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """a @ b, summed over the leading dimensions that `shape` lacks or has as 1, as one product: rounded once."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    wanted = (1,) * (len(batch) + 2 - len(shape)) + tuple(shape[:-2])
    summed = [d for d, (n, w) in enumerate(zip(batch, wanted, strict=True)) if n != w]
    if not summed:
        return a @ b
    # The summed dimensions join the inner one, which the product sums over.
    last = list(range(len(batch) - len(summed), len(batch)))
    left = a.expand(*batch, *a.shape[-2:]).movedim(summed, last).movedim(-2, last[0]).flatten(last[0] + 1)
    right = b.expand(*batch, *b.shape[-2:]).movedim(summed, last).flatten(last[0], -2)
    return (left @ right).reshape(shape)


def _apply(function: Callable[..., Any], *args: Any) -> Tensor:
    result = function(*args)
    assert isinstance(result, Tensor)
    return result


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Kept | None,
    spec: GemmSpec,
    *,
    operand: Packed | None = None,
) -> Tensor:
    """x·Wᵀ + b; x (…, K), weight (N, K) and bias (N,) masters; returns (…, N) in `spec.result`.

    `kept` is what the backward pass reads x from, if not from what the product read. `operand` is x in the format of
    the output role where that carries a scale, if somebody made it already; the gradient goes to x.
    """
    return _apply(_Linear.apply, x, weight, bias, operand, kept, spec)


def matmul(a: Tensor, b: Tensor, spec: GemmSpec) -> Tensor:
    """a @ b for operands of at least two dimensions, in `spec.output`."""
    return _apply(_Matmul.apply, a, b, spec)
