"""Products with a parameter that are a matrix product up to the order of their dimensions: `x @ W`, batches with a
weight for each, and every einsum of two operands. Convolutions and experts beside them, behind one call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from autoprec.numerics.convolutions import ConvOptions, conv
from autoprec.numerics.experts import batched_linear, grouped_linear
from autoprec.numerics.gemm import linear
from autoprec.numerics.packing import Packed
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.remaking import Kept, Remade

__all__ = ["Contraction", "Layout", "contract", "einsum_contraction", "in_order", "weighted_product"]


@dataclass(frozen=True)
class Contraction:
    """Which dimensions of an input meet which of a weight. A dimension is a letter, as in an einsum.

    Attributes:
        x, weight, made: the dimensions of the input, the weight and the result, each letter once. A letter is in two
            of them (`rows`, `summed`, `columns`), or in all three (`batch`: a weight of its own for each).
    """

    x: str
    weight: str
    made: str

    @cached_property
    def batch(self) -> str:
        """Dimensions of all three, in the input's order."""
        return "".join(c for c in self.x if c in self.weight and c in self.made)

    @cached_property
    def rows(self) -> str:
        """Dimensions of the input and the result, in the input's order."""
        return "".join(c for c in self.x if c not in self.weight)

    @cached_property
    def summed(self) -> str:
        """Dimensions that are summed over, in the input's order."""
        return "".join(c for c in self.x if c not in self.made)

    @cached_property
    def columns(self) -> str:
        """Dimensions of the weight and the result, in the result's order."""
        return "".join(c for c in self.made if c not in self.x)

    @cached_property
    def is_by_rows(self) -> bool:
        """Whether the input's last dimension, and no other, is summed over, with one weight for all rows: a scale for
        each row of the product is then one for each row of the input."""
        return not self.batch and self.x[-1] == self.summed


#: What a product with a parameter multiplies; None: rows sorted by expert with their expert's weight.
Layout = Contraction | ConvOptions | None


def einsum_contraction(equation: object, x_dims: int, weight_dims: int) -> Contraction | None:
    """The contraction that an einsum of an input and a weight is, None if it is none: something is summed over that is
    not in both, a diagonal is taken, or both have dots."""
    if not isinstance(equation, str):
        return None
    left, arrow, made = equation.replace(" ", "").partition("->")
    if left.count(",") != 1:
        return None
    x, weight = left.split(",")
    if not arrow:  # dots first, then what occurs once, by the alphabet
        letters = (x + weight).replace(".", "")
        made = "..." * ("..." in left) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    dots = _unused(x + weight, x_dims - len(x.replace("...", "")))
    if "..." in weight or ("..." in x) != ("..." in made):
        return None
    x, made = x.replace("...", dots), made.replace("...", dots)
    if len(x) != x_dims or len(weight) != weight_dims or any(len(set(part)) < len(part) for part in (x, weight, made)):
        return None
    if any((c in x) + (c in weight) + (c in made) < 2 for c in x + weight + made):
        return None
    found = Contraction(x, weight, made)
    return found if found.summed and found.columns else None


def _unused(letters: str, count: int) -> str:
    """So many letters that an equation does not have."""
    return "".join(c for c in map(chr, range(ord("a"), ord("z") + 1)) if c not in letters)[: max(0, count)]


def in_order(t: Tensor, have: str, want: str) -> Tensor:
    """The tensor with its dimensions `have` in the order `want`: a view."""
    return t if have == want else t.permute([have.index(c) for c in want])


def contract(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Kept | None,
    spec: GemmSpec,
    how: Contraction,
    *,
    operand: Packed | None = None,
) -> Tensor:
    """The product of an input and a weight as one matrix product, or, with a batch, one for each of it.

    x and weight (a master) have the dimensions of `how`; the bias (a master) is that of `linear` or `batched_linear`,
    for one row dimension and one column dimension; `kept` and `operand` as for `linear`.
    """
    size = dict(zip(how.x, x.shape, strict=True)) | dict(zip(how.weight, weight.shape, strict=True))
    if isinstance(kept, Remade):
        kept = kept.seen(lambda t: _matrices(t, how))
    elif kept is not None:
        kept = kept._replace(payload=_matrices(kept.payload, how))
    if operand is not None:
        operand = operand._replace(payload=_matrices(operand.payload, how))
    matrices = _matrices(x, how)
    w = in_order(weight, how.weight, how.batch + how.columns + how.summed)
    batches = len(how.batch)
    w = w.flatten(batches + len(how.columns)).flatten(batches, batches + len(how.columns) - 1)
    if not batches:
        y = linear(matrices, w, bias, kept, spec, operand=operand).unflatten(-1, _sizes(how.columns, size))
    else:
        y = batched_linear(matrices, w.flatten(0, batches - 1).mT, bias, kept, spec, operand=operand)
        y = y.reshape(_sizes(how.batch + how.rows + how.columns, size))
    return in_order(y, how.batch + how.rows + how.columns, how.made)


def _sizes(letters: str, size: dict[str, int]) -> tuple[int, ...]:
    return tuple(size[c] for c in letters)


def _matrices(x: Tensor, how: Contraction) -> Tensor:
    """The input as (…, summed), or as (batch, rows, summed)."""
    x = in_order(x, how.x, how.batch + how.rows + how.summed).flatten(-len(how.summed))
    if not how.batch:
        return x
    batches = len(how.batch)
    return x.reshape(math.prod(x.shape[:batches]), math.prod(x.shape[batches:-1]), x.shape[-1])


def weighted_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Kept | None,
    offs: Tensor | None,
    spec: GemmSpec,
    how: Layout,
    *,
    operand: Packed | None = None,
) -> Tensor:
    """Any product with a parameter; `offs`: where the rows of each expert end, if they are sorted so."""
    if isinstance(how, Contraction):
        return contract(x, weight, bias, kept, spec, how, operand=operand)
    if how is not None:
        return conv(x, weight, bias, kept, spec, how, operand=operand)
    assert offs is not None
    return grouped_linear(x, weight, offs, kept, spec, operand=operand)
