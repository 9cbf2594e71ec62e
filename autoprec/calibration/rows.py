"""Squared norms of the rows that meet in a weight-gradient product.

∇W = gᵀ·x over rows (tokens, output positions). Rounding x by δ changes it by gᵀ·δ, so E‖δ∇W‖² = Σ δ²·‖g_row‖²; rounding
g likewise with ‖x_row‖². For a convolution the rows are output positions and x takes part in several: its weight is
the sum of ‖g‖² over the positions whose window covers it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import grad as conv_grad

from autoprec.numerics.gemm import rows_of
from autoprec.numerics.histograms import Sample
from autoprec.tracing.gemms import linear_layout

__all__ = ["RowWeights", "row_weights"]


class RowWeights(Protocol):
    """Row norms for one call of a GEMM with a weight."""

    def for_input(self, g: Tensor, taken: Sample) -> Tensor | None:
        """Weight of each sampled element of the input, given the output's gradient."""

    def for_gradient(self, taken: Sample) -> Tensor | None:
        """Weight of each sampled element of the output's gradient."""


def row_weights(kind: str, arguments: dict[str, Any], x: Tensor, y_shape: torch.Size) -> RowWeights:
    """For a product with a weight called with `arguments` (named as in torch.nn.functional) on input `x`."""
    if kind.startswith("conv"):
        return _ConvRows(kind, arguments, x, y_shape)
    inner = outer = 1
    if kind == "einsum" and (layout := linear_layout(arguments["equation"])) is not None:
        inner, _ = layout
        outer = arguments["weight"].dim() - inner
    return _LinearRows(x.flatten(-inner), y_shape, outer)


#: Elements that are squared in float64 at a time: an observed step must not need much more memory than a plain one.
_SQUARED_AT_ONCE = 1 << 16


def _square_sums(t: Tensor, dim: int) -> Tensor:
    """Σ t² over one dimension (not the first) in float64, a few slices along the first at a time."""
    rows = max(1, _SQUARED_AT_ONCE // max(1, t[:1].numel()))
    sums = [part.double().square().sum(dim) for part in t.split(rows)]
    return torch.cat(sums) if sums else t.double().sum(dim)


class _LinearRows:
    """`outer`: of the result's dimensions, how many one row has."""

    def __init__(self, x: Tensor, y_shape: torch.Size, outer: int) -> None:
        self._outer = outer
        self._x_length, self._y_length = x.shape[-1], y_shape[-outer:].numel()
        self._x_rows = _square_sums(rows_of(x), 1)

    def for_input(self, g: Tensor, taken: Sample) -> Tensor:
        return _square_sums(rows_of(g.flatten(-self._outer)), 1)[taken.rows(self._x_length)]

    def for_gradient(self, taken: Sample) -> Tensor:
        return self._x_rows[taken.rows(self._y_length)]


class _ConvRows:
    """A transposed convolution is a convolution from its output to its input: the two change places."""

    def __init__(self, kind: str, arguments: dict[str, Any], x: Tensor, y_shape: torch.Size) -> None:
        self._groups = int(arguments.get("groups", 1))
        self._options = {k: arguments[k] for k in ("stride", "padding", "dilation") if k in arguments}
        kernel = arguments["weight"].shape[2:]
        self._ones = torch.ones(self._groups, 1, *kernel, dtype=torch.float64, device=x.device)
        self._x_shape, self._y_shape = x.shape, y_shape
        self._transposed = kind.startswith("conv_transpose")
        self._gathered = getattr(torch.nn.functional, f"conv{kind[-2:]}")
        self._spread = getattr(conv_grad, f"conv{kind[-2:]}_input")
        self._x_rows = self._covering(x, y_shape, gathered=not self._transposed)

    def _covering(self, t: Tensor, shape: torch.Size, *, gathered: bool) -> Tensor:
        """For each place of a tensor of this shape, by group: Σ t² over the places of t that a window joins with it.

        `gathered` if t is the input of the convolution, which its windows gather, else they spread t.
        """
        squares = _square_sums(t.reshape(t.shape[0], self._groups, -1, *t.shape[2:]), 2)
        if gathered:
            return self._gathered(squares, self._ones, None, groups=self._groups, **self._options)
        size = (shape[0], self._groups, *shape[2:])
        return self._spread(size, self._ones, squares, groups=self._groups, **self._options)

    def _picked(self, weights: Tensor, taken: Sample, shape: torch.Size) -> Tensor:
        """The weight of each sampled element of a tensor of this shape: that of its group, at its place."""
        channels, places = shape[1], shape[2:].numel()
        index = torch.arange(0, taken.numel, taken.stride, device=weights.device)
        rest, place = index // places, index % places
        group = rest % channels // (channels // self._groups)
        return weights.reshape(-1)[(rest // channels * self._groups + group) * places + place]

    def for_input(self, g: Tensor, taken: Sample) -> Tensor:
        return self._picked(self._covering(g, self._x_shape, gathered=self._transposed), taken, self._x_shape)

    def for_gradient(self, taken: Sample) -> Tensor:
        return self._picked(self._x_rows, taken, self._y_shape)
