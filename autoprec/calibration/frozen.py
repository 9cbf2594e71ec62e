"""What the rounding of a frozen weight does to the loss.

Rounding W by δ changes the loss by Σ ∂L/∂W·δ, as with every tensor (E(δL)² = Σ (∂L/∂W)²·E δ²), but nobody computes the
gradient of a frozen weight. It is gᵀ·x, summed over the rows that meet in a product; so a part of it is made here, of a
few of the columns of x, which are kept until g arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoprec.numerics.contractions import Contraction, Layout
from autoprec.numerics.convolutions import ConvOptions
from autoprec.numerics.histograms import Sample
from autoprec.numerics.packing import amax_of

__all__ = ["FrozenWeight", "frozen_weight"]

#: Of the dimension of an input that a product sums over, how many places are looked at.
_PLACES = 32


class FrozenWeight:
    """A part of a weight, and how its gradient is found.

    Attributes:
        taken: magnitudes of the part, standing for the whole weight.
    """

    def __init__(self, part: Tensor, weight: Tensor, gradient: Callable[[Tensor], Tensor]) -> None:
        amax = float(amax_of(weight))
        self.taken = Sample(part.detach().reshape(-1).float().abs(), 1, weight.numel(), amax, 0.0)
        self._gradient = gradient

    def squares(self, g: Tensor) -> Tensor:
        """(∂L/∂W)² of the part, given the gradient of the product's result."""
        return self._gradient(g).reshape(-1).double().square()


def frozen_weight(how: Layout, weight: Tensor, x: Tensor) -> FrozenWeight | None:
    """For a product called on `x`; None for those whose weights are grouped or transposed, or by expert."""
    with torch.no_grad():
        if isinstance(how, Contraction):
            return _of_contraction(how, weight, x.detach())
        if isinstance(how, ConvOptions) and how.groups == 1 and not how.transposed:
            return _of_convolution(how, weight, x.detach())
    return None


def _some(x: Tensor, dim: int) -> Tensor:
    """Places along a dimension, evenly apart."""
    size = x.shape[dim]
    return torch.arange(0, size, max(1, -(-size // _PLACES)), device=x.device)


def _of_contraction(how: Contraction, weight: Tensor, x: Tensor) -> FrozenWeight | None:
    if not how.summed:
        return None
    letter = max(how.summed, key=lambda c: x.shape[how.x.index(c)])
    dim = how.x.index(letter)
    places = _some(x, dim)
    columns, part = x.index_select(dim, places), weight.index_select(how.weight.index(letter), places)

    def gradient(g: Tensor) -> Tensor:
        return torch.einsum(f"{how.x},{how.made}->{how.weight}", columns.float(), g.float())

    return FrozenWeight(part, weight, gradient)


def _of_convolution(how: ConvOptions, weight: Tensor, x: Tensor) -> FrozenWeight:
    places = _some(x, 1)
    columns, part = x.index_select(1, places), weight.index_select(1, places)

    def gradient(g: Tensor) -> Tensor:
        options = (None, how.stride, how.padding, how.dilation, *how.last, [False, True, False])
        found = torch.ops.aten.convolution_backward(g.float(), columns.float(), part.float(), *options)[1]
        assert isinstance(found, Tensor)
        return found

    return FrozenWeight(part, weight, gradient)
