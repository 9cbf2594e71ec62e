"""Linears, convolutions and matrix products with a format for each role, and a storage for the input they keep.

`output` runs in the format of the input that is handed in; `grad_input` and `grad_weight` cast what they read. Where
the device has no GEMM in a format, operands rounded to it are upcast to FP32 (exact), multiplied, and the result is
rounded once. Parameters come in as FP32 masters: they are cast inside and cast again in the backward pass, so no
weight copy is kept. Gradients of parameters are returned in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.packing import Packed, decode, pack_bits, unpack_bits

__all__ = [
    "ConvOptions",
    "GemmSpec",
    "conv",
    "grouped_linear",
    "linear",
    "matmul",
    "relu_keeping_bits",
    "rows_of",
]


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """The arithmetic of one op: dtypes by role, which of them the device computes itself, and the FP16 region's scale
    (gradients that arrive carry the factor 2**scale_log2). Where only gradient roles are FP16, the arriving gradient
    is multiplied by 2**local_scale_log2 before it is rounded, and each product divided by it."""

    output: torch.dtype
    grad_input: torch.dtype
    grad_weight: torch.dtype
    native: tuple[torch.dtype, ...]
    scale_log2: int = 0
    local_scale_log2: int = 0

    def operand(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` rounded to `dtype`, in the dtype in which the product is computed."""
        x = x.to(dtype)
        return x if dtype in self.native else x.float()

    def gradient(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        """The arriving gradient as an operand in `dtype`."""
        if self.local_scale_log2 and dtype is torch.float16:
            g = g.float() * 2.0**self.local_scale_log2
        return self.operand(g, dtype)

    def product(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """A product of `gradient(…, dtype)`, without the local scale."""
        if self.local_scale_log2 and dtype is torch.float16:
            return p.float() * 2.0**-self.local_scale_log2
        return p


@dataclass(frozen=True, kw_only=True)
class ConvOptions:
    """Options of a convolution, each a tuple with one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def rows_of(x: Tensor) -> Tensor:
    """All leading dimensions as one: (…, n) → (rows, n), also where n or the number of rows is 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _saved_input(ctx: Any, first: Tensor, second: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not ctx.packed:
        return first
    refuse_double_backward("a layer that keeps its input in a narrow format")
    return decode(Packed(first, second), dtype)


def _save(ctx: Any, x: Tensor, weight: Tensor, payload: Tensor | None, inverse_scale: Tensor | None) -> None:
    ctx.packed = payload is not None
    if payload is None:
        ctx.save_for_backward(x, None, weight)
    else:
        ctx.save_for_backward(payload, inverse_scale, weight)


def _unscaled(ctx: Any, grad: Tensor, like: torch.dtype) -> Tensor:
    spec: GemmSpec = ctx.spec
    grad = grad.float()
    return (grad.mul_(2.0**-spec.scale_log2) if spec.scale_log2 else grad).to(like)


#: Elements of a narrow tensor that are summed at a time: few enough for the caches, enough for torch to be busy
#: (docs/measurements/pieces.md).
_SUMMED_AT_ONCE = 1 << 18


def _channel_sums(grad: Tensor) -> Tensor:
    """Sums over all dimensions but the second (channels), in FP32. On a CPU torch makes an FP32 copy of a narrow tensor
    for that, so it is given slices of it."""
    dims = [0, *range(2, grad.dim())]
    rows = max(1, _SUMMED_AT_ONCE // max(1, grad[:1].numel())) if grad.device.type == "cpu" else grad.shape[0]
    if grad.dtype is torch.float32 or grad.shape[0] <= rows:
        return grad.sum(dims, dtype=torch.float32)
    total = grad.new_zeros(grad.shape[1], dtype=torch.float32)
    for part in grad.split(rows):
        total += part.sum(dims, dtype=torch.float32)
    return total


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as it was accumulated, in FP32, where the device gives it: a scaled sum over rows can leave FP16."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _input_gradient(spec: GemmSpec, grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A function of its own, so that what it makes on the way is gone when the weight's gradient is made."""
    product = spec.gradient(grad, spec.grad_input) @ spec.operand(weight, spec.grad_input)
    return spec.product(product, spec.grad_input).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        payload: Tensor | None,
        inverse_scale: Tensor | None,
        spec: GemmSpec,
    ) -> Tensor:
        ctx.spec, ctx.x_dtype, ctx.has_bias = spec, x.dtype, bias is not None
        _save(ctx, x, weight, payload, inverse_scale)
        b = None if bias is None else spec.operand(bias, spec.output)
        return F.linear(spec.operand(x, spec.output), spec.operand(weight, spec.output), b).to(spec.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        # Read once: inside a checkpoint a second look would ask for another recomputation.
        first, second, weight = ctx.saved_tensors
        grad_x = grad_w = grad_b = None
        flat = rows_of(grad)
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(spec, flat, weight, ctx.x_dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            x = spec.operand(_saved_input(ctx, first, second, spec.grad_weight), spec.grad_weight)
            product = _wide_product(spec.gradient(flat, spec.grad_weight).t(), rows_of(x))
            grad_w = _unscaled(ctx, spec.product(product, spec.grad_weight), weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_b = _unscaled(ctx, _channel_sums(flat), weight.dtype)
        return grad_x, grad_w, grad_b, None, None, None


class _GroupedLinear(torch.autograd.Function):
    """Rows between two ends of `offs` times the weight of their expert; rows after the last end give zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        payload: Tensor | None,
        inverse_scale: Tensor | None,
        offs: Tensor,
        spec: GemmSpec,
    ) -> Tensor:
        ctx.spec, ctx.x_dtype, ctx.groups = spec, x.dtype, _groups(offs)
        _save(ctx, x, weight, payload, inverse_scale)
        rows, w = spec.operand(x, spec.output), spec.operand(weight, spec.output)
        y = rows.new_zeros(x.shape[0], weight.shape[2])
        for i, group in enumerate(ctx.groups):
            torch.mm(rows[group], w[i], out=y[group])
        return y.to(spec.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_double_backward("grouped products (experts)")
        spec: GemmSpec = ctx.spec
        first, second, weight = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            g, w = spec.gradient(grad, spec.grad_input), spec.operand(weight, spec.grad_input)
            grad_x = g.new_zeros(grad.shape[0], weight.shape[1])
            for i, group in enumerate(ctx.groups):
                torch.mm(g[group], w[i].t(), out=grad_x[group])
            grad_x = spec.product(grad_x, spec.grad_input).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            g = spec.gradient(grad, spec.grad_weight)
            x = spec.operand(_saved_input(ctx, first, second, spec.grad_weight), spec.grad_weight)
            product = torch.stack([_wide_product(x[group].t(), g[group]) for group in ctx.groups])
            grad_w = _unscaled(ctx, spec.product(product, spec.grad_weight), weight.dtype)
        return grad_x, grad_w, None, None, None, None


def _groups(offs: Tensor) -> list[slice]:
    """The rows of each expert. Waits for the device once."""
    ends = offs.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        payload: Tensor | None,
        inverse_scale: Tensor | None,
        spec: GemmSpec,
        options: ConvOptions,
    ) -> Tensor:
        ctx.spec, ctx.x_dtype, ctx.has_bias, ctx.options = spec, x.dtype, bias is not None, options
        _save(ctx, x, weight, payload, inverse_scale)
        b = None if bias is None else spec.operand(bias, spec.output)
        o = options
        return torch.convolution(
            spec.operand(x, spec.output),
            spec.operand(weight, spec.output),
            b,
            o.stride,
            o.padding,
            o.dilation,
            False,
            (0,) * len(o.stride),
            o.groups,
        ).to(spec.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        # Read once: inside a checkpoint a second look would ask for another recomputation.
        first, second, weight = ctx.saved_tensors
        grad_x = grad_w = grad_b = None
        x = spec.operand(_saved_input(ctx, first, second, spec.grad_weight), spec.grad_weight)
        if ctx.needs_input_grad[0]:
            w = spec.operand(weight, spec.grad_input)
            # The input's values do not enter its own gradient, only its shape does.
            grad_x = _conv_backward(ctx.options, spec.gradient(grad, spec.grad_input), x.to(w.dtype), w, 0)
            grad_x = spec.product(grad_x, spec.grad_input).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            w = spec.operand(weight, spec.grad_weight)
            g = spec.gradient(grad, spec.grad_weight)
            product = _conv_backward(ctx.options, g, x, w, 1)
            grad_w = _unscaled(ctx, spec.product(product, spec.grad_weight), weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_b = _unscaled(ctx, _channel_sums(grad), weight.dtype)
        return grad_x, grad_w, grad_b, None, None, None, None


def _conv_backward(o: ConvOptions, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    result = torch.ops.aten.convolution_backward(
        grad, x, weight, None, o.stride, o.padding, o.dilation, False, (0,) * len(o.stride), o.groups, mask
    )[which]
    assert isinstance(result, Tensor)
    return result


class _Matmul(torch.autograd.Function):
    """a @ b of two activations, each at least 2-D, leading dimensions broadcast; only the narrow operands are kept."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, spec: GemmSpec) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(a, b)
        return (spec.operand(a, spec.output) @ spec.operand(b, spec.output)).to(spec.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        a, b = ctx.saved_tensors
        g = spec.operand(grad, spec.output)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _product_to(g, spec.operand(b, spec.output).mT, a.shape).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = _product_to(spec.operand(a, spec.output).mT, g, b.shape).to(b.dtype)
        return grad_a, grad_b, None


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


class _ReluBits(torch.autograd.Function):
    """relu whose backward needs one bit per element instead of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        # torch's own formula: the gradient is stopped where y ≤ 0, so it passes a NaN.
        ctx.shape = y.shape
        ctx.save_for_backward(pack_bits(~(y <= 0)))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack_bits(bits, ctx.shape), grad, grad.new_zeros(()))


def _apply(function: Callable[..., Any], *args: Any) -> Tensor:
    result = function(*args)
    assert isinstance(result, Tensor)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed | None, spec: GemmSpec) -> Tensor:
    """x·Wᵀ + b; x (…, K) in `spec.output`'s dtype, weight (N, K) and bias (N,) masters; returns (…, N)."""
    payload, inverse_scale = packed if packed is not None else (None, None)
    return _apply(_Linear.apply, x, weight, bias, payload, inverse_scale, spec)


def grouped_linear(x: Tensor, weight: Tensor, offs: Tensor, packed: Packed | None, spec: GemmSpec) -> Tensor:
    """x (rows, in), sorted by expert, times weight (experts, in, out); `offs` (experts,) are the ends of their rows."""
    payload, inverse_scale = (None, None) if packed is None else packed
    return _apply(_GroupedLinear.apply, x, weight, payload, inverse_scale, offs, spec)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed | None, spec: GemmSpec, options: ConvOptions
) -> Tensor:
    """Convolution (1-D to 3-D) of a batched input, as torch.convolution defines it."""
    payload, inverse_scale = packed if packed is not None else (None, None)
    return _apply(_Conv.apply, x, weight, bias, payload, inverse_scale, spec, options)


def matmul(a: Tensor, b: Tensor, spec: GemmSpec) -> Tensor:
    """a @ b for operands of at least two dimensions, in `spec.output`."""
    return _apply(_Matmul.apply, a, b, spec)


def relu_keeping_bits(x: Tensor) -> Tensor:
    """relu(x), bitwise the same forward and backward, keeping one bit per element."""
    return _apply(_ReluBits.apply, x)
