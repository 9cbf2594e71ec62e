"""Number formats as values: what a format can represent, and nothing about torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from autoprec.errors import InputError, nearest

__all__ = [
    "BF16",
    "COMPUTE_FORMATS",
    "FORMATS",
    "FP16",
    "FP32",
    "FP8_E4M3",
    "FP8_E5M2",
    "NAME_PATTERN",
    "STORAGE_FORMATS",
    "TF32",
    "Format",
    "format_named",
    "held_as",
    "is_operands_only",
    "is_scaled",
    "is_storage",
    "other_operand",
    "result_format",
    "wider",
]

Overflow = Literal["inf", "saturate"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary number format: a sign, an exponent and a mantissa, laid out as IEEE 754 does. All else follows.

    `Format(name="fp8_e3m4", exponent_bits=3, mantissa_bits=4)` may be used wherever its name may. A format of one's own
    is called after what it is, so that the name in a policy or plan file says all there is to know: `fp8_e3m4`, with
    `fn` at the end if it is `finite`, or `int8` for an integer of that many bits, which has no exponent.

    Attributes:
        name: what policies, plans and tables call it.
        exponent_bits, mantissa_bits: stored bits of each (the leading one is not stored). Without an exponent the
            numbers are evenly spaced: those of an integer.
        finite: whether the largest exponent is one of numbers too, as in E4M3 of the OCP specification: there is no
            infinity, and all ones is NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    def __post_init__(self) -> None:
        if self.exponent_bits not in (0, *range(2, 9)) or not 1 <= self.mantissa_bits <= 23:
            raise InputError(
                f"format {self.name!r}: {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits"
                " are not 0 or 2..8 and 1..23"
            )

    @property
    def bits(self) -> int:
        """Of one number, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> int:
        """Bytes per element in memory: 1, 2 or 4, there is no packing. TF32 is a way to read FP32 numbers."""
        return 1 if self.bits <= 8 else 2 if self.bits <= 16 else 4

    @property
    def scaled(self) -> bool:
        """Whether tensors carry a scale, which maps their amax to `max_value`: all formats of a byte or less."""
        return self.bytes == 1

    @property
    def operands_only(self) -> bool:
        """Whether operands of products alone are rounded to it, and what they make is wider: a format of a byte or
        less, and TF32. A format in which ops compute has 16 or 32 bits."""
        return self.bits not in (16, 32)

    @property
    def overflow(self) -> Overflow:
        """What a magnitude beyond `max_value` becomes in *our* casts."""
        return "saturate" if self.scaled else "inf"

    @cached_property
    def min_normal_log2(self) -> int:
        """Exponent of the smallest normal number; subnormals reach `2**(min_normal_log2 - mantissa_bits)`. Integers
        are all subnormal, with a step of 1."""
        return 2 - 2 ** (self.exponent_bits - 1) if self.exponent_bits else self.mantissa_bits

    @cached_property
    def max_value(self) -> float:
        """Largest finite magnitude."""
        if not self.exponent_bits:
            return 2.0**self.mantissa_bits - 1.0
        largest = 2 ** (self.exponent_bits - 1) - (0 if self.finite else 1)
        below_two = 2.0**-self.mantissa_bits * (2 if self.finite else 1)
        return math.ldexp(2.0 - below_two, largest)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number."""
        return math.ldexp(1.0, self.min_normal_log2)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number."""
        return math.ldexp(1.0, self.min_normal_log2 - self.mantissa_bits)


FP32 = Format(name="fp32", exponent_bits=8, mantissa_bits=23)
TF32 = Format(name="tf32", exponent_bits=8, mantissa_bits=10)
BF16 = Format(name="bf16", exponent_bits=8, mantissa_bits=7)
FP16 = Format(name="fp16", exponent_bits=5, mantissa_bits=10)
FP8_E4M3 = Format(name="fp8_e4m3", exponent_bits=4, mantissa_bits=3, finite=True)
FP8_E5M2 = Format(name="fp8_e5m2", exponent_bits=5, mantissa_bits=2)

#: The built-in formats, widest first.
FORMATS: tuple[Format, ...] = (FP32, TF32, BF16, FP16, FP8_E5M2, FP8_E4M3)

#: The built-in formats that an op can compute in, and the narrow storages of saved tensors that policies have unless
#: they say otherwise. Formats that are named after what they are can be both.
COMPUTE_FORMATS = tuple(f.name for f in FORMATS)
STORAGE_FORMATS = ("bf16", "fp8_e4m3")

_BUILT_IN = {f.name: f for f in FORMATS}
_FLOAT = re.compile(r"fp([1-9]\d?)_e(\d)m(\d\d?)(fn)?")
_INTEGER = re.compile(r"int([2-8])")

#: Of names of formats of one's own, for schemas.
NAME_PATTERN = f"{_FLOAT.pattern}|{_INTEGER.pattern}"


@cache
def format_named(name: str) -> Format:
    """The built-in format called `name`, or the one that the name describes (`fp8_e3m4`, `fp6_e3m2fn`, `int8`).

    `InputError` for any other name, with the nearest one, and for descriptions that contradict themselves or that a
    built-in format has another name for.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if found := _INTEGER.fullmatch(name):
        return Format(name=name, exponent_bits=0, mantissa_bits=int(found[1]) - 1)
    found = _FLOAT.fullmatch(name)
    if found is None:
        longer = [known for known in _BUILT_IN if name and known.startswith(name)]
        hint = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, list(_BUILT_IN))
        own = " A format of your own is named after its bits, like fp8_e3m4 or int8." if "fp" in name else ""
        raise InputError(f"unknown format {name!r}.{hint}{own}")
    bits, exponent, mantissa = int(found[1]), int(found[2]), int(found[3])
    if bits != 1 + exponent + mantissa or exponent < 2 or not mantissa or bits > 8:
        raise InputError(
            f"format {name!r}: a sign, {exponent} exponent bits and {mantissa} mantissa bits make"
            f" {1 + exponent + mantissa} bits, not {bits}; possible are at least 2 and 1 of them, and 8 bits in all"
        )
    fmt = Format(name=name, exponent_bits=exponent, mantissa_bits=mantissa, finite=bool(found[4]))
    for known in FORMATS:
        if (known.exponent_bits, known.mantissa_bits, known.finite) == (exponent, mantissa, fmt.finite):
            raise InputError(f"format {name!r} is {known.name}; call it that")
    return fmt


def is_scaled(name: str) -> bool:
    """Whether tensors in this format carry a scale."""
    return format_named(name).scaled


def is_operands_only(name: str) -> bool:
    """Whether operands of products alone are rounded to the format."""
    return format_named(name).operands_only


def held_as(name: str) -> str:
    """The format of the copy that a product in `name` reads: for TF32 there is none, the tensor is FP32's."""
    return FP32.name if name == TF32.name else name


def is_storage(name: str) -> bool:
    """Whether a tensor may be kept in the format: FP16 saves no byte over BF16, and has not its range."""
    return name == BF16.name or is_scaled(name)


def result_format(name: str) -> str:
    """The format in which the result of a product is born whose operands are in `name`.

    Sums of products need more bits than their operands: the results of products in FP8, or in a format of one's own,
    are BF16, and those of products in TF32 are FP32. In the same format the operands are handed in, and gradients
    passed on.
    """
    return BF16.name if is_scaled(name) else held_as(name)


def other_operand(name: str) -> str:
    """The format of the operand beside one in `name`: E4M3 beside E5M2, whose range only gradients need (and no
    hardware multiplies two E5M2 matrices), else the same."""
    return FP8_E4M3.name if name == FP8_E5M2.name else name


def wider(name: str) -> tuple[str, ...]:
    """Formats whose largest value is above that of `name`, nearest range first."""
    limit = format_named(name).max_value
    above = [f for f in FORMATS if f.max_value > limit and not f.operands_only]
    return tuple(f.name for f in sorted(above, key=lambda f: (f.max_value, f.bytes)))
