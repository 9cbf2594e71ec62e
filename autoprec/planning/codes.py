"""Units and formats as the planning program speaks of them: what goes with a unit's format, and bytes of formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from autoprec.formats import format_named, held_as, other_operand, result_format
from autoprec.plans import RECOMPUTED

__all__ = [
    "bytes_of",
    "copy_of",
    "format_of",
    "of_format",
    "other_operand_of",
    "owner",
    "result_of",
    "rounds_again",
]


@cache
def bytes_of(format_name: str) -> int:
    """Bytes per element of a format; none of a storage that is none."""
    return 0 if format_name == RECOMPUTED else format_named(format_name).bytes


def of_format(found: Callable[[str], str], name: str) -> str:
    """What goes with a format; with recomputation goes nothing else."""
    return name if name == RECOMPUTED else found(name)


@cache
def rounds_again(storage: str, operand: str) -> bool:
    """Whether what is kept in a storage is rounded once more where an operand has this format: not by as many bits, of
    whatever range, since a scale is a power of two."""
    kept, read = format_named(storage), format_named(operand)
    return read.mantissa_bits < kept.mantissa_bits


#: Beside units, by number, programs speak of what goes with them: 2^30, 2^31 and 2^32 apart.
_RESULT, _BESIDE, _COPY = 1 << 30, 1 << 31, 1 << 32


def result_of(unit: int | None) -> int | None:
    """What stands for the format in which a unit's op is given tensors and gives its result (BF16 for FP8)."""
    return None if unit is None else unit | _RESULT


def other_operand_of(unit: int) -> int:
    """What stands for the format of the operand beside the one that a gradient role rounds to its own."""
    return unit | _BESIDE


def copy_of(unit: int | None) -> int | None:
    """What stands for the format of the copy that a unit's op, or what goes with it, reads (FP32 for TF32)."""
    return None if unit is None else unit | _COPY


def owner(unit: int) -> int:
    """The unit that something goes with, or that it is."""
    return unit & ~(_RESULT | _BESIDE | _COPY)


def format_of(unit: int, options: tuple[str, ...]) -> tuple[str, ...]:
    """By option of a unit, its format, or the format of what goes with it."""
    if unit & _RESULT:
        return tuple(map(result_format, options))
    if unit & _BESIDE:
        options = tuple(map(other_operand, options))
    return tuple(map(held_as, options)) if unit & _COPY else options
