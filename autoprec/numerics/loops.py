"""Single passes over the elements of CPU tensors, compiled by numba, for what torch takes up to ten passes for.

Bits as the torch paths beside them make (`tests/test_elements.py`). They are called as C functions, with addresses and
counts that nobody checks: numba's own calls, and arrays around the memory of tensors, take up to 100 µs where their
code is out of the caches, as it is in a training step (docs/measurements/pieces.md). BF16 and FP32 numbers are given as
their bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
from numba import carray, types

__all__ = [
    "Loop",
    "decode_e4m3_bf16",
    "decode_e4m3_fp32",
    "encode_e4m3_bf16",
    "encode_e4m3_fp32",
    "largest",
    "masked",
    "pack",
    "unpack",
]

U8, U16, U32, F32, COUNT = np.uint8, np.uint16, np.uint32, np.float32, np.int64

#: In a signature, the unsigned integers that a loop is asked for.
KIND = object()

_C_TYPES = {
    U8: ctypes.c_uint8,
    U16: ctypes.c_uint16,
    U32: ctypes.c_uint32,
    F32: ctypes.c_float,
    COUNT: ctypes.c_int64,
    None: None,
}


class Loop:
    """A function of numbers and of the addresses of arrays, `[of these]`. Compiled when it is first asked for, and kept
    for the next process where there is a place that can be written to."""

    def __init__(self, function: Callable[..., Any], result: Any, arguments: tuple[Any, ...]) -> None:
        self._function, self._result, self._arguments = function, result, arguments
        self._compiled: dict[Any, tuple[Any, Callable[..., Any]]] = {}

    def of(self, kind: Any = None) -> Callable[..., Any]:
        """The C function, of bits of this kind."""
        if kind not in self._compiled:
            numbas, cs = zip(*(_types(a, kind) for a in (self._result, *self._arguments)), strict=True)
            made = _kept(numba.cfunc, numbas[0](*numbas[1:]))(self._function)
            self._compiled[kind] = made, ctypes.CFUNCTYPE(*cs)(made.address)
        return self._compiled[kind][1]


def _types(told: Any, kind: Any) -> tuple[Any, Any]:
    """numba's and C's."""
    if isinstance(told, list):
        return types.CPointer(_types(told[0], kind)[0]), ctypes.c_void_p
    told = kind if told is KIND else told
    return types.void if told is None else numba.from_dtype(np.dtype(told)), _C_TYPES[told]


def _kept(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A compiler that keeps what it makes on the disk, or nowhere."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return compiler(*arguments, cache=True, **options)(function)
        except RuntimeError:  # there is no place
            return compiler(*arguments, **options)(function)

    return compiled


def _loop(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Loop]:
    return lambda function: Loop(function, result, arguments)


# numba makes 64-bit integers of most results, and a register holds fewer of those: hence the many casts.


@_loop(KIND, [KIND], KIND, COUNT)
def largest(at: Any, magnitude: Any, count: Any) -> Any:
    """Largest of `bits & magnitude`: of the bits of floats without their signs, those of the largest magnitude."""
    bits = carray(at, count)
    found = bits.dtype.type(0)
    for i in range(bits.size):
        found = max(found, bits.dtype.type(bits[i] & magnitude))
    return found


@_kept(numba.njit)
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


@_loop(None, [U16], [U8], F32, COUNT)
def encode_e4m3_bf16(at: Any, to: Any, scale: Any, count: Any) -> None:
    """E4M3 of BF16 numbers times `scale`."""
    bits, payload = carray(at, count), carray(to, count)
    for i in range(bits.size):
        payload[i] = _to_e4m3(F32(U32(U32(bits[i]) << U32(16)).view(F32) * scale).view(U32))


@_loop(None, [U32], [U8], F32, COUNT)
def encode_e4m3_fp32(at: Any, to: Any, scale: Any, count: Any) -> None:
    """E4M3 of FP32 numbers times `scale`."""
    bits, payload = carray(at, count), carray(to, count)
    for i in range(bits.size):
        payload[i] = _to_e4m3(F32(U32(bits[i]).view(F32) * scale).view(U32))


@_kept(numba.njit)
def _from_e4m3(code: Any) -> Any:
    """E4M3 as FP32, NaN as 480. No FP32 number on the way is subnormal."""
    magnitude = U32(U32(code) & U32(0x7F))
    normal = F32(U32(U32(magnitude << U32(20)) + U32(120 << 23)).view(F32))
    value = F32(F32(magnitude) * F32(2.0**-9)) if magnitude < U32(8) else normal
    return -value if code & U8(0x80) else value


@_loop(None, [U8], [U16], F32, COUNT)
def decode_e4m3_bf16(at: Any, to: Any, scale: Any, count: Any) -> None:
    """E4M3 times `scale`, a power of two of at least 2^-124 or NaN, as BF16, which has the result."""
    payload, bits = carray(at, count), carray(to, count)
    for i in range(payload.size):
        bits[i] = U16(F32(_from_e4m3(payload[i]) * scale).view(U32) >> U32(16))


@_loop(None, [U8], [U32], F32, COUNT)
def decode_e4m3_fp32(at: Any, to: Any, scale: Any, count: Any) -> None:
    """E4M3 times `scale` as FP32."""
    payload, bits = carray(at, count), carray(to, count)
    for i in range(payload.size):
        bits[i] = F32(_from_e4m3(payload[i]) * scale).view(U32)


@_loop(None, [KIND], KIND, [U8], COUNT)
def pack(at: Any, magnitude: Any, to: Any, count: Any) -> None:
    """Where `numbers & magnitude` is not 0, eight to a byte, big end first, the last filled with 0."""
    numbers, packed = carray(at, count), carray(to, (count + 7) // 8)
    kind, whole = numbers.dtype.type, numbers.size // 8
    for k in range(whole):
        byte = U8(0)
        for j in range(8):
            byte = U8(U8(byte << U8(1)) | U8(kind(numbers[8 * k + j] & magnitude) != 0))
        packed[k] = byte
    if 8 * whole < numbers.size:
        packed[whole] = 0
    for i in range(8 * whole, numbers.size):
        packed[whole] |= U8(U8(kind(numbers[i] & magnitude) != 0) << U8(7 - i % 8))


@_loop(None, [U8], [U8], COUNT)
def unpack(at: Any, to: Any, count: Any) -> None:
    """Bytes that are 0 or 1, as `pack` was given them."""
    packed, bools = carray(at, (count + 7) // 8), carray(to, count)
    whole = bools.size // 8
    for k in range(whole):
        byte = packed[k]
        for j in range(8):
            bools[8 * k + j] = U8(U8(byte >> U8(7 - j)) & U8(1))
    for i in range(8 * whole, bools.size):
        bools[i] = U8(U8(packed[whole] >> U8(7 - i % 8)) & U8(1))


@_loop(None, [KIND], [U8], [KIND], COUNT)
def masked(at: Any, mask: Any, to: Any, count: Any) -> None:
    """Numbers where their bit is set, 0 elsewhere."""
    numbers, packed, result = carray(at, count), carray(mask, (count + 7) // 8), carray(to, count)
    whole = numbers.size // 8
    for k in range(whole):
        byte = packed[k]
        for j in range(8):
            keep = numbers.dtype.type(U8(byte >> U8(7 - j)) & U8(1))
            result[8 * k + j] = numbers.dtype.type(numbers[8 * k + j] * keep)
    for i in range(8 * whole, numbers.size):
        keep = numbers.dtype.type(U8(packed[whole] >> U8(7 - i % 8)) & U8(1))
        result[i] = numbers.dtype.type(numbers[i] * keep)
