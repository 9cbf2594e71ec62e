"""Squared norms of the rows that meet in a weight-gradient product.

∇W = gᵀ·x over rows (tokens, output positions). Rounding x by δ changes it by gᵀ·δ, so E‖δ∇W‖² = Σ δ²·‖g_row‖²; rounding
g likewise with ‖x_row‖². For a convolution the rows are output positions and x takes part in several: its weight is
the sum of ‖g‖² over the positions whose window covers it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import grad as conv_grad

from autoprec.numerics.contractions import Contraction, Layout, in_order
from autoprec.numerics.convolutions import ConvOptions
from autoprec.numerics.gemm import rows_of
from autoprec.numerics.histograms import Sample

__all__ = ["RowWeights", "row_weights"]


class RowWeights(Protocol):
    """Row norms for one call of a GEMM with a weight."""

    def for_input(self, g: Tensor, taken: Sample) -> Tensor | None:
        """Weight of each sampled element of the input, given the output's gradient."""

    def for_gradient(self, taken: Sample) -> Tensor | None:
        """Weight of each sampled element of the output's gradient."""


def row_weights(how: Layout, weight: Tensor, x: Tensor, y_shape: torch.Size) -> RowWeights:
    """For a product with a weight (None: of rows sorted by expert), called on the input `x`."""
    if isinstance(how, ConvOptions):
        return _ConvRows(how, weight, x, y_shape)
    return _MatrixRows(_EXPERTS if how is None else how, x, y_shape)


#: Each row meets the weight of its expert alone.
_EXPERTS = Contraction("ri", "io", "ro")


#: Elements that are squared in float64 at a time: an observed step must not need much more memory than a plain one.
_SQUARED_AT_ONCE = 1 << 16


def _square_sums(t: Tensor, dim: int) -> Tensor:
    """Σ t² over one dimension (not the first) in float64, a few slices along the first at a time."""
    rows = max(1, _SQUARED_AT_ONCE // max(1, t[:1].numel()))
    sums = [part.double().square().sum(dim) for part in t.split(rows)]
    return torch.cat(sums) if sums else t.double().sum(dim)


class _MatrixRows:
    """Rows of matrix products, of each matrix of a batch."""

    def __init__(self, how: Contraction, x: Tensor, y_shape: torch.Size) -> None:
        self._how, self._x_shape, self._y_shape = how, x.shape, y_shape
        self._x_rows = self._squares(x, how.x)

    def _squares(self, t: Tensor, have: str) -> Tensor:
        """Σ t² of each row."""
        rows = self._how.batch + self._how.rows
        rest = "".join(c for c in have if c not in rows)
        t = in_order(t, have, rows + rest).flatten(-len(rest))
        return _square_sums(rows_of(t), 1)

    def _numbers(self, taken: Sample, shape: torch.Size, have: str) -> Tensor:
        """The row of each sampled element of a tensor of this shape."""
        rows = self._how.batch + self._how.rows
        if have.startswith(rows):
            return taken.rows(shape[len(rows) :].numel())
        index, size, step = taken.rows(1), dict(zip(have, shape, strict=True)), shape.numel()
        place, number = {}, torch.zeros_like(index)
        for letter, length in size.items():
            step //= length
            place[letter] = index // step % length
        for letter in rows:
            number = number * size[letter] + place[letter]
        return number

    def for_input(self, g: Tensor, taken: Sample) -> Tensor:
        return self._squares(g, self._how.made)[self._numbers(taken, self._x_shape, self._how.x)]

    def for_gradient(self, taken: Sample) -> Tensor:
        return self._x_rows[self._numbers(taken, self._y_shape, self._how.made)]


class _ConvRows:
    """A transposed convolution is a convolution from its output to its input: the two change places."""

    def __init__(self, how: ConvOptions, weight: Tensor, x: Tensor, y_shape: torch.Size) -> None:
        self._groups = how.groups
        self._options = {"stride": how.stride, "padding": how.padding, "dilation": how.dilation}
        kernel = weight.shape[2:]
        self._ones = torch.ones(self._groups, 1, *kernel, dtype=torch.float64, device=x.device)
        self._x_shape, self._y_shape = x.shape, y_shape
        self._transposed = how.transposed
        self._gathered = getattr(torch.nn.functional, f"conv{len(kernel)}d")
        self._spread = getattr(conv_grad, f"conv{len(kernel)}d_input")
        self._x_rows = self._covering(x, y_shape, gathered=not self._transposed)

    def _covering(self, t: Tensor, shape: torch.Size, *, gathered: bool) -> Tensor:
        """For each place of a tensor of this shape, by group: Σ t² over the places of t that a window joins with it.

        `gathered` if t is the input of the convolution, which its windows gather, else they spread t.
        """
        squares = _square_sums(t.unflatten(1, (self._groups, t.shape[1] // self._groups)), 2)
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
