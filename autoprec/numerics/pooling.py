"""Max pooling that keeps one byte for each of its results, and gives the same bits forward and backward.

torch's keeps its input, for the sake of its shape, and where in the input's plane each maximum was, in eight bytes.
Where in its window it was says as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["max_pool1d", "max_pool2d", "max_pool3d", "pooling_of"]

_POOLS = {2: torch.ops.aten.max_pool2d_with_indices, 3: torch.ops.aten.max_pool3d_with_indices}
_BACK = {2: torch.ops.aten.max_pool2d_with_indices_backward, 3: torch.ops.aten.max_pool3d_with_indices_backward}
_LAYOUTS = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """Where a pooling looks, each a tuple with one entry per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def arguments(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]:
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    def fit_a_byte(self, x: Tensor) -> bool:
        """Whether a byte says which place of its window any place of the plane is."""
        steps = self.steps(x.shape)
        reach = [(k - 1) * step for k, step in zip(self.kernel, steps, strict=True)]
        apart = all(sum(reach[i + 1 :]) < step for i, step in enumerate(steps))
        return math.prod(self.kernel) <= 256 and apart

    def steps(self, shape: torch.Size) -> list[int]:
        """By dimension, how far apart two neighbours of a window are in the plane."""
        plane = shape[-len(self.kernel) :]
        return [d * math.prod(plane[i + 1 :]) for i, d in enumerate(self.dilation)]

    def origins(self, shape: torch.Size, places: Tensor) -> Tensor:
        """Where in the plane each window begins, padding before it included."""
        n = len(self.kernel)
        plane, found = shape[-n:], torch.zeros((), dtype=torch.int64, device=places.device)
        for i, count in enumerate(places.shape[-n:]):
            first = torch.arange(count, device=places.device) * self.stride[i] - self.padding[i]
            found = found.unsqueeze(-1) + first * math.prod(plane[i + 1 :])
        return found

    def packed(self, indices: Tensor, shape: torch.Size) -> Tensor:
        """Places in windows, from places in planes."""
        left = (indices - self.origins(shape, indices)).to(torch.int32)
        place = torch.zeros_like(left)
        for k, step in zip(self.kernel, self.steps(shape), strict=True):
            along = left.div(step, rounding_mode="floor")
            left -= along * step
            place.mul_(k).add_(along)
        return place.to(torch.uint8)

    def unpacked(self, places: Tensor, shape: torch.Size) -> Tensor:
        """Places in planes, from places in windows."""
        inside = torch.zeros((), dtype=torch.int64, device=places.device)
        for k, step in zip(self.kernel, self.steps(shape), strict=True):
            inside = inside.unsqueeze(-1) + torch.arange(k, device=places.device) * step
        found = inside.view(-1)[places.to(torch.int32)]
        return found.add_(self.origins(shape, places))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: _Windows) -> Tensor:
        n = len(windows.kernel)
        y, indices = _POOLS[n](x, *windows.arguments)
        ctx.windows, ctx.shape = windows, x.shape
        ctx.layout = torch.contiguous_format
        if x.dim() == n + 2 and not x.is_contiguous() and x.is_contiguous(memory_format=_LAYOUTS[n]):
            ctx.layout = _LAYOUTS[n]
        ctx.save_for_backward(windows.packed(indices, x.shape))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        return _Spread.apply(grad, *ctx.saved_tensors, ctx.windows, ctx.shape, ctx.layout), None


class _Spread(torch.autograd.Function):
    """Each number at its place in the plane, added up where windows share it."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, places: Tensor, windows: _Windows, shape: torch.Size, layout: torch.memory_format
    ) -> Tensor:
        ctx.windows, ctx.shape = windows, shape
        ctx.save_for_backward(places)
        made = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=layout)
        back, indices = _BACK[len(windows.kernel)].grad_input, windows.unpacked(places, shape)
        # Of the input torch's kernel reads the shape alone: what it is about to fill has it too.
        back(grad, made, *windows.arguments, indices, grad_input=made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (places,), n = ctx.saved_tensors, len(ctx.windows.kernel)
        indices = ctx.windows.unpacked(places, ctx.shape)
        found = grad.flatten(-n).gather(-1, indices.flatten(-n)).view(indices.shape)
        return found, None, None, None, None


def _each(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _max_pool(n: int, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    """`F.max_pool{n}d`; what torch computes by other kernels, or refuses, is torch's."""
    plain = getattr(F, f"max_pool{n}d")
    numbers = [v for group in (kernel, stride or kernel, padding, dilation) for v in _each(group, n)]
    known = all(type(v) is int for v in numbers) and len(numbers) == 4 * n and x.device.type in ("cpu", "cuda")
    needed = torch.is_grad_enabled() and x.requires_grad and x.numel() > 0 and x.dim() in (n + 1, n + 2)
    # A compiler keeps a byte by itself; a transform (`torch.func`) must see torch's ops.
    elsewhere = get_proxy_mode() is not None or torch._C._functorch.peek_interpreter_stack() is not None
    if elsewhere or not (known and needed):
        return plain(x, kernel, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]
    parts = [tuple(numbers[i * n : (i + 1) * n]) for i in range(4)]
    if n == 1:  # as torch does
        parts = [(one, *part) for one, part in zip((1, 1, 0, 1), parts, strict=True)]
    given = x.unsqueeze(-2) if n == 1 else x
    windows = _Windows(kernel=parts[0], stride=parts[1], padding=parts[2], dilation=parts[3], ceil_mode=ceil_mode)
    if not windows.fit_a_byte(given):
        return plain(x, kernel, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]
    result = _MaxPool.apply(given, windows)
    assert isinstance(result, Tensor)
    return result.squeeze(-2) if n == 1 else result


def max_pool1d(
    input: Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """`F.max_pool1d` without its indices; it keeps a byte per element of the result."""
    return _max_pool(1, input, kernel_size, stride, padding, dilation, ceil_mode)


def max_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """`F.max_pool2d` without its indices; it keeps a byte per element of the result."""
    return _max_pool(2, input, kernel_size, stride, padding, dilation, ceil_mode)


def max_pool3d(
    input: Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """`F.max_pool3d` without its indices; it keeps a byte per element of the result."""
    return _max_pool(3, input, kernel_size, stride, padding, dilation, ceil_mode)


_LEAN = {
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), max_pool1d),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), max_pool2d),
    **dict.fromkeys((F.max_pool3d, torch.max_pool3d), max_pool3d),
}


def pooling_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function of this module that stands for a call's target, or the target itself."""
    indices = kwargs.get("return_indices", args[6] if len(args) > 6 else False)
    return target if indices is not False or not callable(target) else _LEAN.get(target, target)
