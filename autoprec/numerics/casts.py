"""Casts: plain, saturating, and across the border of an FP16 region.

A narrowing cast rounds to nearest even and lets magnitudes beyond the format become inf, as torch does, unless it is
marked saturating (masks and constants that leave the format by design).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.compilers import is_traced
from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.packing import piece_numel, pieces

__all__ = ["cast", "enter_region", "leave_region", "saturating_cast", "scaled_cast", "within"]

#: Elements whose multiplication takes as long as the calls that it takes (docs/measurements/pieces.md).
_LEAST_PIECE = 1 << 14


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; its gradient comes back in `x.dtype`."""
    return x.to(dtype)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; finite magnitudes beyond its largest value become that value, ±inf stays ±inf."""
    return within(x, dtype).to(dtype)


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, finite magnitudes beyond the largest value of `dtype` as that value."""
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(x.dtype).max:
        return x
    return torch.where(x.isinf(), x, x.clamp(-limit, limit))


def scaled_cast(x: Tensor, scale_log2: int, dtype: torch.dtype) -> Tensor:
    """`x` times 2**scale_log2 in `dtype`, multiplied in FP32: in place, or where the result is another, by pieces."""
    factor = 2.0**scale_log2
    if torch.is_grad_enabled() or is_traced(x):
        return (x.float() * factor).to(dtype)
    made = torch.empty_like(x, dtype=dtype)
    # BF16 has the exponents of FP32: an FP16 number that is rounded first is, times a power of two, one rounded last.
    if dtype is torch.float32 or (x.dtype is torch.float16 and dtype is torch.bfloat16):
        return made.copy_(x).mul_(factor)
    # A quarter at a time: half the result's bytes are made on the way, at the cost of three calls more for each.
    most = min(piece_numel(x), max(_LEAST_PIECE, x.numel() // 4))
    for source, target in pieces(x, made, most=most):
        target.copy_(torch.empty_like(source, dtype=torch.float32).copy_(source).mul_(factor))
    return made


class _EnterRegion(torch.autograd.Function):
    """FP32/BF16 → FP16; the gradient that leaves the region is divided by the scale in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, scale_log2: int) -> Tensor:
        ctx.source, ctx.scale_log2 = x.dtype, scale_log2
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse(ctx.scale_log2)
        return scaled_cast(grads[0], -ctx.scale_log2, ctx.source), None, None


class _LeaveRegion(torch.autograd.Function):
    """FP16 → FP32/BF16; the gradient that enters the region is multiplied by the scale in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, scale_log2: int) -> Tensor:
        ctx.source, ctx.scale_log2 = x.dtype, scale_log2
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse(ctx.scale_log2)
        return scaled_cast(grads[0], ctx.scale_log2, ctx.source), None, None


def _refuse(scale_log2: int) -> None:
    """A second derivative reaches the region's own values by ways that do not carry the scale."""
    if scale_log2:
        refuse_double_backward("an FP16 region with a gradient scale")


def enter_region(x: Tensor, dtype: torch.dtype, scale_log2: int) -> Tensor:
    """Cast into an FP16 region whose gradients carry the factor 2**scale_log2."""
    result = _EnterRegion.apply(x, dtype, scale_log2)
    assert isinstance(result, Tensor)
    return result


def leave_region(x: Tensor, dtype: torch.dtype, scale_log2: int) -> Tensor:
    """Cast out of an FP16 region whose gradients carry the factor 2**scale_log2."""
    result = _LeaveRegion.apply(x, dtype, scale_log2)
    assert isinstance(result, Tensor)
    return result
