"""Number formats as values: what a format can represent, and nothing about torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    "STORAGE_FORMATS",
    "Format",
    "format_named",
    "wider",
]

Overflow = Literal["inf", "saturate"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: what policies, plans and tables call it.
        exponent_bits, mantissa_bits: stored bits of each (the leading one is not stored).
        max_value: largest finite magnitude.
        min_normal_log2: exponent of the smallest normal number; subnormals reach
            `2**(min_normal_log2 - mantissa_bits)`.
        overflow: what a magnitude beyond `max_value` becomes in *our* casts.
        bytes: bytes per element in memory.
        scaled: True if tensors in this format carry a scale (their amax is mapped to `max_value`).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_value: float
    min_normal_log2: int
    overflow: Overflow
    bytes: int
    scaled: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.exponent_bits <= 11 or not 0 <= self.mantissa_bits <= 52:
            raise InputError(
                f"format {self.name!r}: {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits"
                " are outside 1..11 and 0..52"
            )
        if not (math.isfinite(self.max_value) and self.max_value > 0):
            raise InputError(f"format {self.name!r}: max_value must be finite and positive, not {self.max_value}")

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number."""
        return math.ldexp(1.0, self.min_normal_log2)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number."""
        return math.ldexp(1.0, self.min_normal_log2 - self.mantissa_bits)


FP32 = Format(
    name="fp32",
    exponent_bits=8,
    mantissa_bits=23,
    max_value=3.4028234663852886e38,
    min_normal_log2=-126,
    overflow="inf",
    bytes=4,
)
BF16 = Format(
    name="bf16",
    exponent_bits=8,
    mantissa_bits=7,
    max_value=3.3895313892515355e38,
    min_normal_log2=-126,
    overflow="inf",
    bytes=2,
)
FP16 = Format(
    name="fp16",
    exponent_bits=5,
    mantissa_bits=10,
    max_value=65504.0,
    min_normal_log2=-14,
    overflow="inf",
    bytes=2,
)
FP8_E4M3 = Format(
    name="fp8_e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    max_value=448.0,
    min_normal_log2=-6,
    overflow="saturate",
    bytes=1,
    scaled=True,
)
FP8_E5M2 = Format(
    name="fp8_e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    max_value=57344.0,
    min_normal_log2=-14,
    overflow="saturate",
    bytes=1,
    scaled=True,
)

#: The built-in formats, widest first.
FORMATS: tuple[Format, ...] = (FP32, BF16, FP16, FP8_E5M2, FP8_E4M3)

#: Formats that an op can compute in, and narrow storages of saved tensors, that are implemented.
COMPUTE_FORMATS = ("fp32", "bf16", "fp16")
STORAGE_FORMATS = ("bf16", "fp8_e4m3")


def format_named(name: str) -> Format:
    """The built-in format called `name`; `InputError` with the nearest name otherwise."""
    for fmt in FORMATS:
        if fmt.name == name:
            return fmt
    raise InputError(f"unknown format {name!r}.{nearest(name, [f.name for f in FORMATS])}")


def wider(name: str) -> tuple[str, ...]:
    """Formats whose largest value is above that of `name`, nearest range first."""
    limit = format_named(name).max_value
    above = [f for f in FORMATS if f.max_value > limit and not f.scaled]
    return tuple(f.name for f in sorted(above, key=lambda f: (f.max_value, f.bytes)))
