"""Linears, convolutions and matrix products with a format for each role, and a storage for the input they keep.

Each role rounds its operands to its format (`numerics.products`). Parameters come in as FP32 masters: they are cast
inside and cast again in the backward pass, so no weight copy is kept. Gradients of parameters are returned in FP32. A
layer whose output is computed in FP8 keeps the FP8 copy of its input that it read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoprec.formats import is_scaled, other_operand, result_format
from autoprec.numerics.compilers import is_traced
from autoprec.numerics.operands import begin, made_in, read_operand, refuse_copies, saved_operand, unscaled
from autoprec.numerics.packing import Packed, decode
from autoprec.numerics.products import GemmSpec, operands_product, rows_times_rows
from autoprec.numerics.remaking import Kept

__all__ = [
    "ConvOptions",
    "GemmSpec",
    "conv",
    "linear",
    "matmul",
    "rows_of",
]


@dataclass(frozen=True, kw_only=True)
class ConvOptions:
    """Options of a convolution, each a tuple with one entry per spatial dimension. A transposed one has its weight as
    (in, out / groups, …)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def last(self) -> tuple[bool, tuple[int, ...], int]:
        """What torch's convolutions take behind the dilation: transposed, output padding, groups."""
        return self.transposed, self.output_padding or (0,) * len(self.stride), self.groups


def rows_of(x: Tensor) -> Tensor:
    """All leading dimensions as one: (…, n) → (rows, n), also where n or the number of rows is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


#: Elements of a narrow tensor that are summed at a time: few enough for the caches, enough for torch to be busy
#: (docs/measurements/pieces.md).
_SUMMED_AT_ONCE = 1 << 18


def _channel_sums(grad: Tensor, fmt: str) -> Tensor:
    """Sums over all dimensions but the second (channels), with FP32 accumulation; the weight's gradient is in `fmt`.

    On a CPU they are rounded to BF16 as that gradient is: by rows a seventh of the time (docs/measurements/pieces.md).
    For sums in FP32 torch makes a copy of a narrow tensor there, so it is given slices of it.
    """
    dims = [0, *range(2, grad.dim())]
    on_cpu = grad.device.type == "cpu"
    if on_cpu and grad.dtype is torch.bfloat16 and result_format(fmt) == "bf16":
        return grad.sum(dims)
    rows = max(1, _SUMMED_AT_ONCE // max(1, grad[:1].numel())) if on_cpu else grad.shape[0]
    wide = torch.promote_types(grad.dtype, torch.float32)
    if grad.dtype is wide or is_traced(grad) or grad.shape[0] <= rows:
        return grad.sum(dims, dtype=wide)
    total = grad.new_zeros(grad.shape[1], dtype=wide)
    for part in grad.split(rows):
        total += part.sum(dims, dtype=wide)
    return total


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
        del read  # made for this pass, as like as not: it need not be there beside the input's gradient
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(spec, flat, weight, ctx.x_dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[2]:
            grad_b = unscaled(ctx, _channel_sums(flat, spec.grad_weight), weight.dtype)
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


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operand: Packed | None,
        kept: Kept | None,
        spec: GemmSpec,
        options: ConvOptions,
    ) -> Tensor:
        ctx.options = options
        read = begin(ctx, x, weight, operand, kept, spec)
        w = spec.operand(weight, other_operand(spec.output))
        b = None if bias is None else bias.to(spec.result).to(w.dtype)
        x_read, o = spec.operand(read, spec.output), options
        with spec.computing(spec.output):
            return torch.convolution(x_read, w, b, o.stride, o.padding, o.dilation, *o.last).to(spec.result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        read, weight = saved_operand(ctx)
        grad_x = grad_w = grad_b = None
        refuse_copies(ctx)
        if read is not None:
            product = _conv_weight_gradient(spec, ctx.options, grad, read, weight)
            product = spec.product(product, spec.grad_weight, made_in(spec, grad, weight))
            grad_w = unscaled(ctx, product, weight.dtype)
        there = read if isinstance(read, Tensor) and ctx.again is None else None
        del read  # as in `_Linear`
        if ctx.needs_input_grad[0]:
            product = _conv_input_gradient(spec, ctx.options, grad, there, ctx.x_shape, weight)
            grad_x = spec.product(product, spec.grad_input, ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            grad_b = unscaled(ctx, _channel_sums(grad, spec.grad_weight), weight.dtype)
        return grad_x, grad_w, grad_b, None, None, None, None


def _places(o: ConvOptions, weight: Tensor) -> tuple[slice, ...] | None:
    """Where a convolution reads its input, if its kernel is one place and its stride leaves some out."""
    if math.prod(weight.shape[2:]) > 1 or math.prod(o.stride) == 1 or any(o.padding) or o.transposed:
        return None
    return (slice(None), slice(None), *(slice(None, None, step) for step in o.stride))


def _places_read(o: ConvOptions, x: Tensor | Packed, weight: Tensor) -> tuple[Tensor | Packed, ConvOptions]:
    """The places of its input that a convolution reads, where a kernel of one place leaves some out, and how it then
    reads them: only those are decoded and cast."""
    places = _places(o, weight)
    if places is None:
        return x, o
    seen = x._replace(payload=x.payload[places]) if isinstance(x, Packed) else x[places]
    return seen, replace(o, stride=(1,) * len(o.stride))


def _conv_weight_gradient(
    spec: GemmSpec, options: ConvOptions, grad: Tensor, read: Tensor | Packed, weight: Tensor
) -> Tensor:
    """A function of its own, as the next one is, so that what it makes on the way is gone when it returns."""
    g = spec.operand(spec.gradient(grad, spec.grad_weight), spec.grad_weight)
    seen, options = _places_read(options, read, weight)
    x = spec.operand(seen, other_operand(spec.grad_weight))
    w = torch.empty_like(weight, dtype=x.dtype)  # its shape is all that its own gradient takes of it
    with spec.computing(spec.grad_weight):
        return _conv_backward(options, g, x, w, 1)


def _conv_input_gradient(
    spec: GemmSpec, o: ConvOptions, grad: Tensor, read: Tensor | None, shape: torch.Size, weight: Tensor
) -> Tensor:
    """The same for the input.

    The input's values do not enter its own gradient, only its shape does: where it is not there, or in another format,
    which would take a copy, the adjoint convolution is asked for, which is the same kernel.
    """
    g = spec.operand(spec.gradient(grad, spec.grad_input), spec.grad_input)
    w = spec.operand(weight, other_operand(spec.grad_input))
    with spec.computing(spec.grad_input):
        if (places := _places(o, weight)) is not None:
            made = g.new_zeros(shape)
            seen = made[places]
            seen.copy_(_conv_adjoint(replace(o, stride=(1,) * len(o.stride)), g, seen.shape, w))
            return made
        if read is not None and read.dtype == w.dtype:
            return _conv_backward(o, g, read, w, 0)
        return _conv_adjoint(o, g, shape, w)


def _conv_adjoint(o: ConvOptions, g: Tensor, shape: torch.Size, w: Tensor) -> Tensor:
    sizes = zip(shape[2:], g.shape[2:], w.shape[2:], o.stride, o.padding, o.dilation, strict=True)
    rest = [0 if o.transposed else n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
    made = torch.convolution(g, w, None, o.stride, o.padding, o.dilation, not o.transposed, rest, o.groups)
    return made[tuple(map(slice, shape))]


def _conv_backward(o: ConvOptions, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    result = torch.ops.aten.convolution_backward(grad, x, weight, None, o.stride, o.padding, o.dilation, *o.last, mask)[
        which
    ]
    assert isinstance(result, Tensor)
    return result


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


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Kept | None,
    spec: GemmSpec,
    options: ConvOptions,
    *,
    operand: Packed | None = None,
) -> Tensor:
    """Convolution (1-D to 3-D, or transposed) of a batched input, as torch.convolution defines it."""
    return _apply(_Conv.apply, x, weight, bias, operand, kept, spec, options)


def matmul(a: Tensor, b: Tensor, spec: GemmSpec) -> Tensor:
    """a @ b for operands of at least two dimensions, in `spec.output`."""
    return _apply(_Matmul.apply, a, b, spec)
