"""The backward pass of a product of two activations (`numerics.gemm.matmul`), which makes one gradient after the other,
each beside those before it: what is there at a time, for whoever adds it up (evaluator, tables, integer program)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TypeVar

__all__ = ["Part", "Pairs", "stages"]

T = TypeVar("T")

#: For each gradient in turn, its elements and those of the operand that is read again for it.
Pairs = Sequence[tuple[T, T]]


class Part(Enum):
    """What elements may be there as. With an emulated format the product is one of FP32 copies, in FP32."""

    MADE = auto()  # a gradient as it is given
    PRODUCT = auto()  # a gradient as it was multiplied
    ROUNDED = auto()  # the same, if that is not how it is given
    GIVEN = auto()  # what it then becomes
    ARRIVING = auto()  # the copy of the arriving gradient that is multiplied, if there is one
    OPERAND = auto()  # that of an operand, if there is one
    CASTING = auto()  # the arriving gradient, cast, beside its FP32 copy; only of emulated formats
    READING = auto()  # the same of an operand
    WORKSPACE = auto()  # of the kernel, in bytes; of emulated formats, that of FP32


def stages(out: T, pairs: Pairs[T], given: T, one: T) -> list[list[tuple[Part, T, int]]]:
    """Terms (part, elements, sign) of the bytes at each stage, above the gradients of the operands, which count as
    there all the time. `out`: elements of the gradient that arrives; `given`: those of the operands' (a tensor that is
    multiplied by itself has one); `one`: 1 of their type."""
    found = [[(Part.CASTING, out, 1)]]
    before: list[tuple[Part, T, int]] = []
    for numel, other in pairs:
        there = [(Part.ARRIVING, out, 1), *before]
        found.append([*there, (Part.READING, other, 1)])
        found.append([*there, (Part.OPERAND, other, 1), (Part.PRODUCT, numel, 1), (Part.WORKSPACE, one, 1)])
        found.append([*there, (Part.ROUNDED, numel, 1), (Part.GIVEN, numel, 1)])
        before.append((Part.MADE, numel, 1))
    return [[*stage, (Part.MADE, given, -1)] for stage in found]
