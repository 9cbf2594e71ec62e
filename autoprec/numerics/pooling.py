"""Max pooling that keeps one byte for each of its results, and gives the same bits forward and backward.

torch's keeps its input, for the sake of its shape, and where in the input's plane each maximum was, in eight bytes.
Where in its window it was says as much.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
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

    def fit_a_byte(self, shape: torch.Size) -> bool:
        """Whether a byte says which place of its window any place of the plane is."""
        inside = self._inside(shape) if math.prod(self.kernel) <= 256 else []
        return len(set(inside)) == math.prod(self.kernel)

    def _inside(self, shape: torch.Size) -> list[int]:
        """How far each place of a window is from its first one, in the plane."""
        plane = shape[-len(self.kernel) :]
        steps = [d * math.prod(plane[i + 1 :]) for i, d in enumerate(self.dilation)]
        return [sum(map(operator.mul, place, steps)) for place in itertools.product(*map(range, self.kernel))]

    def _origins(self, shape: torch.Size, places: Tensor) -> Tensor:
        """Where in the plane each window begins, padding before it included."""
        n, found = len(self.kernel), torch.zeros((), dtype=torch.int64, device=places.device)
        for i in range(n):
            first = torch.arange(places.shape[i - n], device=places.device) * self.stride[i] - self.padding[i]
            found = found.unsqueeze(-1) * shape[i - n] + first
        return found

    def packed(self, indices: Tensor, shape: torch.Size) -> Tensor:
        """Places in windows, from places in planes, which are overwritten."""
        inside = self._inside(shape)
        number = torch.zeros(max(inside) + 1, dtype=torch.uint8, device=indices.device)
        number[torch.tensor(inside, device=indices.device)] = torch.arange(
            len(inside), dtype=torch.uint8, device=indices.device
        )
        return _looked_up(number, indices.sub_(self._origins(shape, indices)))

    def unpacked(self, places: Tensor, shape: torch.Size) -> Tensor:
        """Places in planes, from places in windows."""
        inside = torch.tensor(self._inside(shape), device=places.device)
        return _looked_up(inside, places.int()).add_(self._origins(shape, places))


def _looked_up(values: Tensor, places: Tensor) -> Tensor:
    """`values[places]`, three times as fast on a CPU."""
    return values.index_select(0, places.reshape(-1)).view(places.shape)


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
    if not windows.fit_a_byte(given.shape):
        return plain(x, kernel, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]
    result = _MaxPool.apply(given, windows)
    assert isinstance(result, Tensor)
    return result.squeeze(-2) if n == 1 else result


def _named(n: int) -> Callable[..., Tensor]:
    def pool(
        input: Tensor,  # noqa: A002
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        return _max_pool(n, input, kernel_size, stride, padding, dilation, ceil_mode)

    # By its name it has torch's kind, and the code of a graph finds it.
    pool.__name__ = pool.__qualname__ = f"max_pool{n}d"
    pool.__doc__ = f"`F.max_pool{n}d` without its indices; it keeps a byte per element of the result."
    return pool


max_pool1d, max_pool2d, max_pool3d = map(_named, (1, 2, 3))

_LEAN = {
    F.max_pool1d: max_pool1d, F.max_pool2d: max_pool2d, F.max_pool3d: max_pool3d,
    torch.max_pool1d: max_pool1d, torch.max_pool2d: max_pool2d, torch.max_pool3d: max_pool3d,
}  # fmt: skip


def pooling_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function of this module that stands for a call's target, or the target itself."""
    indices = kwargs.get("return_indices", args[6] if len(args) > 6 else False)
    return target if indices is not False or not callable(target) else _LEAN.get(target, target)
