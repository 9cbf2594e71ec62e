"""Convolutions with a format for each role, and a storage for the input they keep: as `numerics.gemm` has linears.

On a CPU the images of a batch are convolved a few at a time, where that takes less memory. Kernels there copy operands
and results into layouts of their own, and narrow operands are decoded or upcast before that: of a few images it is a
fraction, for at most a seventh more time (docs/measurements/pieces.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoprec.formats import is_scaled, other_operand, result_format
from autoprec.numerics.compilers import is_traced
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.operands import begin, channel_sums, made_in, refuse_copies, saved_operand, unscaled
from autoprec.numerics.packing import Packed
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.remaking import Kept

__all__ = ["ConvOptions", "compiled_kernels", "conv", "piece_fracs"]

#: Elements of the larger of input and result that a thread of a CPU convolves at a time, by the bytes of one: kernels
#: for BF16 copy less, and lose more by pieces (docs/measurements/pieces.md).
_CONVOLVED_AT_ONCE = {2: 1 << 20, 4: 1 << 18, 8: 1 << 18}


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
        return _output(spec, options, read, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        spec: GemmSpec = ctx.spec
        read, weight = saved_operand(ctx)
        grad_x = grad_w = grad_b = None
        refuse_copies(ctx)
        if ctx.needs_input_grad[2]:  # before there is anything else beside what it takes
            grad_b = unscaled(ctx, channel_sums(grad, spec.grad_weight), weight.dtype)
        if read is not None:
            product = _weight_gradient(spec, ctx.options, grad, read, weight)
            product = spec.product(product, spec.grad_weight, made_in(spec, grad, weight))
            grad_w = unscaled(ctx, product, weight.dtype)
            del product
        del read  # it need not be there beside the input's gradient
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(spec, ctx.options, grad, ctx.x_shape, weight, ctx.x_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None


def _output(spec: GemmSpec, o: ConvOptions, read: Tensor | Packed, weight: Tensor, bias: Tensor | None) -> Tensor:
    w = spec.operand(weight, other_operand(spec.output))
    b = None if bias is None else bias.to(spec.result).to(w.dtype)

    def some(images: slice | None) -> Tensor:
        x = spec.operand(_of(read, images), spec.output)
        return torch.convolution(x, w, b, o.stride, o.padding, o.dilation, *o.last).to(spec.result)

    first = read.payload if isinstance(read, Packed) else read
    is_copied = isinstance(read, Packed) or not read.dtype is w.dtype is spec.result
    few = _few(first, w.dtype, first.shape, _result_shape(o, first.shape, w.shape)) if is_copied else [None]
    with spec.computing(spec.output):
        return _joined(some, few)


def _weight_gradient(
    spec: GemmSpec, options: ConvOptions, grad: Tensor, read: Tensor | Packed, weight: Tensor
) -> Tensor:
    """A function of its own, as the next one is, so that what it makes on the way is gone when it returns. Of a few
    images at a time it is added up in FP32."""
    arriving = _as_operand(spec, grad, spec.grad_weight)
    seen, o = _places_read(options, read, weight)
    if is_scaled(fmt := other_operand(spec.grad_weight)):  # with one scale for all images
        seen = spec.packed(seen, fmt)
    few = _few(grad, spec.computed_in(spec.grad_weight), grad.shape, _shape(seen))
    total: Tensor | None = None
    with spec.computing(spec.grad_weight):
        for images in few:
            part = _weight_gradient_of(spec, o, _of(arriving, images), _of(seen, images), weight)
            if images is None:
                return part
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            total = wide if total is None else total.add_(wide)
            del part, wide  # they need not be there beside the next
    assert total is not None
    return total


def _weight_gradient_of(
    spec: GemmSpec, o: ConvOptions, grad: Tensor | Packed, x: Tensor | Packed, weight: Tensor
) -> Tensor:
    g = _operand(spec, grad, spec.grad_weight)
    read = spec.operand(x, other_operand(spec.grad_weight))
    # Its shape is all that its own gradient takes of it.
    w = weight if weight.dtype is read.dtype else torch.empty_like(weight, dtype=read.dtype)
    return _backward(o, g, read, w, 1)


def _input_gradient(
    spec: GemmSpec,
    o: ConvOptions,
    grad: Tensor,
    shape: torch.Size,
    weight: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The same for the input, in `dtype`.

    The input's values do not enter its own gradient, only its shape does: the adjoint convolution is asked for, which
    is the same kernel and needs no input to be there.
    """
    arriving = _as_operand(spec, grad, spec.grad_input)
    w = spec.operand(weight, other_operand(spec.grad_input))
    places = _places(o, weight)

    def some(images: slice | None) -> Tensor:
        g = _operand(spec, _of(arriving, images), spec.grad_input)
        of = torch.Size((g.shape[0], *shape[1:]))
        if places is not None:
            made = g.new_zeros(of)
            seen = made[places]
            seen.copy_(_adjoint(replace(o, stride=(1,) * len(o.stride)), g, seen.shape, w))
        else:
            made = _adjoint(o, g, of, w)
        del g  # a copy, as like as not: it need not be there beside two of the result
        return spec.product(made, spec.grad_input, dtype)

    rounded = dtype_of(result_format(spec.grad_input))  # and computed in FP32, where there are no instructions for it
    is_copied = isinstance(arriving, Packed) or not rounded is grad.dtype is w.dtype is dtype
    few = _few(grad, w.dtype, grad.shape, shape) if is_copied or shape.numel() > grad.numel() else [None]
    with spec.computing(spec.grad_input):
        return _joined(some, few)


def _as_operand(spec: GemmSpec, grad: Tensor, fmt: str) -> Tensor | Packed:
    """The arriving gradient, in a format with a scale if it is to have one: the same for all images."""
    return spec.packed(spec.gradient(grad, fmt), fmt) if is_scaled(fmt) else grad


def _operand(spec: GemmSpec, grad: Tensor | Packed, fmt: str) -> Tensor:
    """What `_as_operand` made, or a part of it, as the product reads it."""
    return spec.operand(grad if isinstance(grad, Packed) else spec.gradient(grad, fmt), fmt)


def _of(x: Tensor | Packed, images: slice | None) -> Any:
    """Some of the images of a tensor, or the tensor."""
    if images is None:
        return x
    return x._replace(payload=x.payload[images]) if isinstance(x, Packed) else x[images]


def _shape(x: Tensor | Packed) -> torch.Size:
    return x.payload.shape if isinstance(x, Packed) else x.shape


def _few(x: Tensor, dtype: torch.dtype, *shapes: Sequence[int]) -> list[slice] | list[None]:
    """The images of a batch that are convolved in `dtype`, a few at a time, and two at least, because torch does not
    leave one alone to oneDNN. All of them, as None, elsewhere than on a CPU, and while a compiler traces."""
    if x.device.type != "cpu" or is_traced(x) or (count := _count(x.shape[0], dtype, *shapes)) < 2:
        return [None]
    ends = [x.shape[0] * k // count for k in range(count + 1)]
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def _count(batch: int, dtype: torch.dtype, *shapes: Sequence[int]) -> int:
    largest = max(math.prod(shape[1:]) for shape in shapes)
    at_once = _CONVOLVED_AT_ONCE[dtype.itemsize] * torch.get_num_threads()
    return batch // max(2, at_once // max(1, largest))


def piece_fracs(o: ConvOptions, x: Tensor, y: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """On a CPU, the largest share of a batch that is there at a time, copied, where the products for the gradients of
    input and weight are computed in `dtype`; 1.0 where all is. `y`: the result."""
    if (batch := x.shape[0]) == 0:
        return 1.0, 1.0
    seen = x.shape if _places(o, weight) is None else (*x.shape[:2], *y.shape[2:])
    counts = (max(1, _count(batch, dtype, y.shape, of)) for of in (x.shape, seen))
    of_input, of_weight = (-(-batch // count) / batch for count in counts)
    return of_input, of_weight


def compiled_kernels(o: ConvOptions, x: Tensor, weight: Tensor, grad: Tensor) -> Iterator[Callable[[], object]]:
    """What compiled code on a CPU runs of a 2-D convolution in the dtype of these: for its result, the gradient of its
    input and that of its weight; with copies that it makes of the weight. All images at once, their channels last."""
    x, grad = _with_channels_last(x), _with_channels_last(grad)
    seen, own = _places_read(o, x, weight)
    last = partial(torch.clone, weight, memory_format=torch.channels_last)
    yield lambda: torch.convolution(x, last(), None, o.stride, o.padding, o.dilation, *o.last)
    yield lambda: _adjoint(own, grad, _shape(seen), last())
    yield lambda: _backward(own, grad, seen, last(), 1).float()


def _with_channels_last(x: Tensor) -> Tensor:
    """Also in what the strides say of images of one channel, which are so in any case."""
    made = x.contiguous(memory_format=torch.channels_last)
    n, c, h, w = made.shape
    return made.as_strided((n, c, h, w), (h * w * c, 1, w * c, c))


def _joined(some: Callable[[slice | None], Tensor], few: list[slice] | list[None]) -> Tensor:
    """What is made of a few images at a time, in the memory order of the first."""
    made: Tensor | None = None
    for images in few:
        part = some(images)
        if images is None:
            return part
        if made is None:
            shape, order = (few[-1].stop, *part.shape[1:]), _memory_order(part)
            made = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=order)
        made[images] = part
        del part  # it need not be there beside the next
    assert made is not None
    return made


def _memory_order(x: Tensor) -> torch.memory_format:
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = orders.get(x.dim(), torch.contiguous_format)
    return last if x.is_contiguous(memory_format=last) and not x.is_contiguous() else torch.contiguous_format


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


def _result_shape(o: ConvOptions, x: Sequence[int], w: Sequence[int]) -> tuple[int, ...]:
    """Of a convolution, from the shapes of its input and its weight."""
    kernels = [d * (k - 1) for d, k in zip(o.dilation, w[2:], strict=True)]
    if o.transposed:
        more = o.last[1]
        sizes = zip(x[2:], kernels, o.stride, o.padding, more, strict=True)
        return (x[0], w[1] * o.groups, *((n - 1) * s - 2 * p + k + m + 1 for n, k, s, p, m in sizes))
    plain = zip(x[2:], kernels, o.stride, o.padding, strict=True)
    return (x[0], w[0], *((n + 2 * p - k - 1) // s + 1 for n, k, s, p in plain))


def _adjoint(o: ConvOptions, g: Tensor, shape: torch.Size, w: Tensor) -> Tensor:
    sizes = zip(shape[2:], g.shape[2:], w.shape[2:], o.stride, o.padding, o.dilation, strict=True)
    rest = [0 if o.transposed else n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
    made = torch.convolution(g, w, None, o.stride, o.padding, o.dilation, not o.transposed, rest, o.groups)
    return made[tuple(map(slice, shape))]


def _backward(o: ConvOptions, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    mask = [which == 0, which == 1, False]
    result = torch.ops.aten.convolution_backward(grad, x, weight, None, o.stride, o.padding, o.dilation, *o.last, mask)[
        which
    ]
    assert isinstance(result, Tensor)
    return result


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
    result = _Conv.apply(x, weight, bias, operand, kept, spec, options)
    assert isinstance(result, Tensor)
    return result
