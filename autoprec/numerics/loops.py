"""Single passes over the elements of CPU tensors, compiled by numba, for what torch takes up to ten passes for.

Bits as the torch paths beside them make (`tests/test_loops_of_elements.py`). All arrays are one-dimensional and
contiguous; BF16 and FP32 numbers are given as their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np

__all__ = [
    "decode_e4m3_bf16",
    "decode_e4m3_fp32",
    "encode_e4m3_bf16",
    "encode_e4m3_fp32",
    "largest",
    "masked",
    "pack",
    "unpack",
]

U8, U16, U32, F32 = np.uint8, np.uint16, np.uint32, np.float32


def _loop(function: Callable[..., Any]) -> Any:
    """Compiled at the first call, and kept for the next process where there is a place that can be written to."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # there is none
        return numba.njit(nogil=True)(function)


# numba makes 64-bit integers of most results, and a register holds fewer of those: hence the many casts.


@_loop
def largest(bits: Any, magnitude: Any) -> Any:
    """Largest of `bits & magnitude`: of the bits of floats without their signs, those of the largest magnitude."""
    found = bits.dtype.type(0)
    for i in range(bits.size):
        found = max(found, bits.dtype.type(bits[i] & magnitude))
    return found


@_loop
def _to_e4m3(x: Any) -> Any:
    """Bits of an FP32 number to those of E4M3, to nearest, ties to even; NaN for what is beyond 464."""
    sign = U32(x & U32(0x80000000))
    u = U32(x ^ sign)
    # Below 2^-6 the sum with 2^14, whose last place is 2^-9, rounds as E4M3's subnormals do.
    small = U32(F32(U32(u).view(F32) + F32(16384.0)).view(U32) - U32(141 << 23))
    odd = U32(U32(u >> U32(20)) & U32(1))
    normal = U32(U32(U32(U32(u - U32(120 << 23)) + U32(0x7FFFF)) + odd) >> U32(20))
    found = small if u < U32(121 << 23) else normal
    found = U32(0x7F) if u >= U32(1087 << 20) else found
    return U8(U32(found | U32(sign >> U32(24))))


@_loop
def encode_e4m3_bf16(bits: Any, payload: Any, scale: Any) -> None:
    """E4M3 of BF16 numbers times `scale`."""
    for i in range(bits.size):
        payload[i] = _to_e4m3(F32(U32(U32(bits[i]) << U32(16)).view(F32) * scale).view(U32))


@_loop
def encode_e4m3_fp32(bits: Any, payload: Any, scale: Any) -> None:
    """E4M3 of FP32 numbers times `scale`."""
    for i in range(bits.size):
        payload[i] = _to_e4m3(F32(U32(bits[i]).view(F32) * scale).view(U32))


@_loop
def _from_e4m3(code: Any) -> Any:
    """E4M3 as FP32, NaN as 480. No FP32 number on the way is subnormal."""
    magnitude = U32(U32(code) & U32(0x7F))
    normal = F32(U32(U32(magnitude << U32(20)) + U32(120 << 23)).view(F32))
    value = F32(F32(magnitude) * F32(2.0**-9)) if magnitude < U32(8) else normal
    return -value if code & U8(0x80) else value


@_loop
def decode_e4m3_bf16(payload: Any, bits: Any, scale: Any) -> None:
    """E4M3 times `scale`, a power of two of at least 2^-124 or NaN, as BF16, which has the result."""
    for i in range(payload.size):
        bits[i] = U16(F32(_from_e4m3(payload[i]) * scale).view(U32) >> U32(16))


@_loop
def decode_e4m3_fp32(payload: Any, bits: Any, scale: Any) -> None:
    """E4M3 times `scale` as FP32."""
    for i in range(payload.size):
        bits[i] = F32(_from_e4m3(payload[i]) * scale).view(U32)


@_loop
def pack(numbers: Any, magnitude: Any, packed: Any) -> None:
    """Where `numbers & magnitude` is not 0, eight to a byte, big end first; `packed` is 0 before."""
    kind, whole = numbers.dtype.type, numbers.size // 8
    for k in range(whole):
        byte = U8(0)
        for j in range(8):
            byte = U8(U8(byte << U8(1)) | U8(kind(numbers[8 * k + j] & magnitude) != 0))
        packed[k] = byte
    for i in range(8 * whole, numbers.size):
        packed[whole] |= U8(U8(kind(numbers[i] & magnitude) != 0) << U8(7 - i % 8))


@_loop
def unpack(packed: Any, bools: Any) -> None:
    """Bytes that are 0 or 1, as `pack` was given them."""
    whole = bools.size // 8
    for k in range(whole):
        byte = packed[k]
        for j in range(8):
            bools[8 * k + j] = U8(U8(byte >> U8(7 - j)) & U8(1))
    for i in range(8 * whole, bools.size):
        bools[i] = U8(U8(packed[whole] >> U8(7 - i % 8)) & U8(1))


@_loop
def masked(numbers: Any, packed: Any, result: Any) -> None:
    """Numbers where their bit is set, 0 elsewhere."""
    whole = numbers.size // 8
    for k in range(whole):
        byte = packed[k]
        for j in range(8):
            keep = numbers.dtype.type(U8(byte >> U8(7 - j)) & U8(1))
            result[8 * k + j] = numbers.dtype.type(numbers[8 * k + j] * keep)
    for i in range(8 * whole, numbers.size):
        keep = numbers.dtype.type(U8(packed[whole] >> U8(7 - i % 8)) & U8(1))
        result[i] = numbers.dtype.type(numbers[i] * keep)
