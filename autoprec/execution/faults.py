"""Faults that are put into a step on purpose, at one op of a graph that runs (see `autoprec.testing`).

A fault is part of the step: whatever replays the step has it too, in every format, so that what is found in a replay is
what happened. Factors are read off the tensor when the fault first runs, and stay for as long as it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autoprec.plans import Plan
from autoprec.rewriting.calls import With
from autoprec.tracing.bindings import OpNode
from autoprec.tracing.checkpoints import Change
from autoprec.tracing.gemms import gemm_arguments

__all__ = ["Fault", "FlippedWeight", "ScaledGradient", "ScaledResult", "flipped", "largest_to"]


class Fault(Protocol):
    """Something that happens to an op in some steps."""

    def change(self, op: OpNode, plan: Plan | None, attempt: int, parameters: Mapping[str, Tensor]) -> Change | None:
        """What happens to this op in the step with this number (bad ones counted), if anything does."""


Factor = Callable[[Tensor], float]


def largest_to(value: float) -> Factor:
    """The factor that takes a tensor's largest element to a value; 1 for a tensor of zeros."""

    def factor(x: Tensor) -> float:
        amax = float(x.detach().abs().max()) if x.numel() else 0.0
        return value / amax if 0.0 < amax < math.inf else 1.0

    return factor


def _times(x: Tensor, factor: float) -> Tensor:
    """In float64, so that a huge factor makes no NaN of zeros; rounded once."""
    return (x.double() * factor).to(x.dtype)


class _Fixed:
    """A factor that is chosen at the first tensor that it is asked about, and kept."""

    def __init__(self, choose: Factor) -> None:
        self._choose, self._chosen = choose, math.nan

    def __call__(self, x: Tensor) -> float:
        if math.isnan(self._chosen):
            self._chosen = self._choose(x)
        return self._chosen


class ScaledResult(Change):
    """The op's result times a factor; its gradient is as if it were not, so that nothing before it is disturbed."""

    def __init__(self, factor: Factor) -> None:
        self._factor = _Fixed(factor)

    def result(self, y: Any) -> Any:
        """Of several results, the first that has floating-point numbers."""
        return _changed(y, lambda x: _Straight.apply(x, lambda value: _times(value, self._factor(value))))


class ScaledGradient(Change):
    """The gradient of the op's result times a factor; the result as it is."""

    def __init__(self, factor: Factor) -> None:
        self._factor = _Fixed(factor)

    def result(self, y: Any) -> Any:
        """See above."""
        return _changed(y, lambda x: _InBackward.apply(x, lambda g: _times(g, self._factor(g))))


class FlippedWeight(Change):
    """One element of a product's weight, as it was cast for the op, is another; its gradient is as if it were not."""

    in_cast = True

    def __init__(self, kind: str, index: int, value: float) -> None:
        self._kind, self._index, self._value = kind, index, value

    def arguments(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """With the other element, in the forward and the backward pass of the op."""
        ours = isinstance(n.target, With)  # (input, weight, …) of the rewritten call
        weight = args[1] if ours else gemm_arguments(self._kind, args, kwargs)["weight"]
        other = _WithElement.apply(weight, self._index, self._value)
        return fx.node.map_aggregate((args, kwargs), lambda v: other if v is weight else v)


def flipped(x: float, dtype: torch.dtype) -> float:
    """What a number that is held as `dtype` becomes when the highest bit of its exponent flips."""
    whole = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    bits = torch.tensor([x], dtype=dtype).view(whole) ^ (1 << (8 * dtype.itemsize - 2))
    return float(bits.view(dtype))


def _changed(y: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(y, Tensor):
        return change(y) if y.is_floating_point() else y
    if not isinstance(y, (tuple, list)):
        return y
    first = next((i for i, x in enumerate(y) if isinstance(x, Tensor) and x.is_floating_point()), None)
    return type(y)(change(x) if i == first else x for i, x in enumerate(y))


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.change(g), None


class _WithElement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int, value: float) -> Tensor:
        other = x.detach().contiguous().clone()
        other.view(-1)[index] = value
        return other

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g, None, None
