"""Rounding to any format by integer arithmetic on float32 patterns, and the codes of formats of a byte or less.

torch has casts to its own dtypes alone; a format is more often tried than built. The two agree bit for bit where both
exist (`tests/test_casts.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.formats import Format

__all__ = ["from_codes", "rounded", "to_codes"]

_FLOAT32_MANTISSA, _FLOAT32_MIN_LOG2 = 23, -126


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """`x` (float32) rounded to nearest, ties to even, as float32.

    Magnitudes that round beyond the format's largest become that value or inf, as `fmt.overflow` says. ±inf and NaN
    stay what they are.
    """
    dropped = _FLOAT32_MANTISSA - fmt.mantissa_bits
    if not dropped:
        return x
    bits = x.view(torch.int32)
    odd = (bits >> dropped) & 1  # ties go to even
    normal = ((bits + ((1 << (dropped - 1)) - 1) + odd) & -(1 << dropped)).view(torch.float32)
    # Numbers near this one are as far apart as the subnormals, so adding it rounds to them.
    anchor = 1.5 * 2.0 ** (_FLOAT32_MANTISSA + fmt.min_normal_log2 - fmt.mantissa_bits)
    subnormal = ((x + anchor) - anchor).copysign(x)
    y = torch.where(x.abs() < fmt.min_normal, subnormal, normal)
    if fmt.overflow == "saturate":
        y = y.clamp(-fmt.max_value, fmt.max_value)
    else:
        y = torch.where(y.abs() > fmt.max_value, torch.full_like(y, float("inf")).copysign(y), y)
    return torch.where(x.isfinite(), y, x)


def to_codes(y: Tensor, fmt: Format) -> Tensor:
    """The codes (uint8: sign, exponent, mantissa, from the highest bit) of finite numbers of a format of a byte or
    less, given as float32.

    Two's complement has no place here: an integer is a sign and a magnitude.
    """
    # Multiplied so that the format's smallest normal number is float32's, the two count subnormals alike.
    shifted = y * 2.0 ** (_FLOAT32_MIN_LOG2 - fmt.min_normal_log2)
    magnitude = shifted.abs().view(torch.int32) >> (_FLOAT32_MANTISSA - fmt.mantissa_bits)
    return (magnitude | (y.signbit().to(torch.int32) << (fmt.bits - 1))).to(torch.uint8)


def from_codes(codes: Tensor, fmt: Format) -> Tensor:
    """The numbers, as float32, that codes stand for; codes of inf and NaN are not among them."""
    wide = codes.to(torch.int32)
    sign, magnitude = wide >> (fmt.bits - 1), wide & ((1 << (fmt.bits - 1)) - 1)
    shifted = (magnitude << (_FLOAT32_MANTISSA - fmt.mantissa_bits)).view(torch.float32)
    # In float64, because an integer's factor of 2^133 is none of float32's numbers.
    y = (shifted.double() * 2.0 ** (fmt.min_normal_log2 - _FLOAT32_MIN_LOG2)).float()
    return torch.where(sign.bool(), -y, y)
