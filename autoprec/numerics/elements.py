"""What is done to each element of a CPU tensor in one pass, where numba is installed (`loops`).

torch runs its passes on all threads, and one thread of ours is as fast as three to seven of those
(docs/measurements/pieces.md): with more threads than `MOST_THREADS` torch's passes serve.
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoprec.numerics.compilers import is_traced

__all__ = [
    "MOST_THREADS",
    "from_e4m3",
    "is_installed",
    "is_loaded",
    "largest_bits",
    "largest_magnitude",
    "nonzero_bits",
    "serve",
    "to_e4m3",
    "unpacked_bools",
    "where_set",
]

MOST_THREADS = 4

#: By bytes of an element, the bits of a float without its sign; of booleans, all.
_MAGNITUDE = {1: 0xFF, 2: 0x7FFF, 4: 0x7FFFFFFF}

#: By bytes of an element, the kind of its bits.
_KIND = {1: np.uint8, 2: np.uint16, 4: np.uint32}

#: Down to this scale, what E4M3 has, multiples of 2^-9 with four significant bits, are numbers of BF16 times it:
#: multiples of 2^-133.
_LEAST_SCALE = 2.0**-124


#: In a step every name that is looked up is out of the caches. A batched tensor (`is_grads_batched`) has no memory of
#: its own.
_SERVED = frozenset({torch.bfloat16, torch.float32, torch.uint8, torch.bool})
_threads, _is_batched = torch.get_num_threads, torch._C._functorch.is_legacy_batchedtensor


@cache
def is_installed() -> bool:
    """Whether numba is."""
    return importlib.util.find_spec("numba") is not None


_loaded: list[Any] = []


def _loops() -> Any:
    if not _loaded:
        _loaded.append(importlib.import_module("autoprec.numerics.loops"))  # takes half a second, and a CPU
    return _loaded[0]


def is_loaded() -> bool:
    """Whether this process has compiled loops already."""
    return bool(_loaded)


def serve(x: Tensor) -> bool:
    """Whether the functions below take `x`, of BF16, FP32, bytes or booleans."""
    return (
        x.is_cpu
        and x.dtype in _SERVED
        and x.is_contiguous()
        and _threads() <= MOST_THREADS
        and not is_traced(x)
        and not _is_batched(x)
        and is_installed()
    )


def _address(x: Tensor, numel: int) -> int:
    """Of so many elements at least: a loop asks nobody."""
    assert x.is_contiguous() and x.numel() >= numel
    return x.data_ptr()


def largest_bits(x: Tensor) -> int:
    """Of BF16 or FP32 numbers, the bits of the largest magnitude, or of a NaN if there is one."""
    size, count = x.element_size(), x.numel()
    bits: int = _loops().largest.of(_KIND[size])(_address(x, count), _MAGNITUDE[size], count)
    return bits


def largest_magnitude(x: Tensor) -> float:
    """Of BF16 or FP32 numbers; NaN if there is one, 0 of none."""
    bits = largest_bits(x)
    (found,) = struct.unpack("f", struct.pack("I", bits << 16 if x.element_size() == 2 else bits))
    return float(found)


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """x · scale (BF16 or FP32, within E4M3's range) as E4M3 bytes of x's shape, to nearest, ties to even."""
    payload, count = torch.empty_like(x, dtype=torch.uint8, requires_grad=False), x.numel()
    loop = _loops().encode_e4m3_bf16 if x.dtype is torch.bfloat16 else _loops().encode_e4m3_fp32
    loop.of()(_address(x, count), _address(payload, count), scale, count)
    return payload


def from_e4m3(payload: Tensor, scale: float, dtype: torch.dtype) -> Tensor | None:
    """E4M3 bytes times a power of two (or NaN), exactly, as BF16 or FP32; None where that needs rounding."""
    if dtype not in (torch.bfloat16, torch.float32) or scale < _LEAST_SCALE:
        return None
    made, count = torch.empty_like(payload, dtype=dtype), payload.numel()
    loop = _loops().decode_e4m3_bf16 if dtype is torch.bfloat16 else _loops().decode_e4m3_fp32
    loop.of()(_address(payload, count), _address(made, count), scale, count)
    return made


def nonzero_bits(x: Tensor) -> Tensor:
    """One bit per BF16 or FP32 number or boolean, eight to a byte, big end first: whether it is neither 0 nor −0."""
    size, count = x.element_size(), x.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8)
    _loops().pack.of(_KIND[size])(_address(x, count), _MAGNITUDE[size], _address(packed, 0), count)
    return packed


def unpacked_bools(packed: Tensor, count: int) -> Tensor:
    """The first so many booleans of packed ones."""
    mask = torch.empty(count, dtype=torch.bool)
    _loops().unpack.of()(_address(packed, -(-count // 8)), _address(mask, count), count)
    return mask


def where_set(x: Tensor, packed: Tensor) -> Tensor:
    """BF16 or FP32 numbers where their bit is set, 0 elsewhere, whatever is there."""
    made, count = torch.empty_like(x, requires_grad=False), x.numel()
    loop = _loops().masked.of(_KIND[x.element_size()])
    loop(_address(x, count), _address(packed, -(-count // 8)), _address(made, count), count)
    return made
