"""What is done to each element of a CPU tensor in one pass, where numba is installed (`loops`).

torch runs its passes on all threads, and one thread of ours is as fast as three to seven of those
(docs/measurements/pieces.md): with more threads than `MOST_THREADS` torch's passes serve.
"""

from __future__ import annotations

import importlib
import importlib.util
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
    "largest_magnitude",
    "nonzero_bits",
    "serve",
    "to_e4m3",
    "unpacked",
    "where_set",
]

MOST_THREADS = 4

#: By bytes of an element, torch's integers for its bits, and those of a float without its sign; of booleans, all.
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_MAGNITUDE = {1: np.uint8(0xFF), 2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}

#: Down to this scale, what E4M3 has, multiples of 2^-9 with four significant bits, are numbers of BF16 times it:
#: multiples of 2^-133.
_LEAST_SCALE = 2.0**-124


@cache
def is_installed() -> bool:
    """Whether numba is."""
    return importlib.util.find_spec("numba") is not None


@cache
def _loops() -> Any:
    return importlib.import_module("autoprec.numerics.loops")  # takes half a second, and a CPU


def serve(x: Tensor) -> bool:
    """Whether the functions below take `x`, of BF16, FP32, bytes or booleans."""
    return (
        is_installed()
        and x.device.type == "cpu"
        and not is_traced(x)
        and x.is_contiguous()
        and x.dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.bool)
        and torch.get_num_threads() <= MOST_THREADS
    )


def _array(x: Tensor) -> Any:
    """Its memory as a flat array of bits, to be read. Not by `numpy()`, after which torch no longer resizes what may be
    the user's."""
    return np.from_dlpack(x.detach().view(-1).view(_BITS[x.element_size()]))


def _made(x: Tensor) -> Any:
    """The same of a tensor that was made here, to be written to."""
    return x.view(-1).view(_BITS[x.element_size()]).numpy()


def largest_magnitude(x: Tensor) -> float:
    """Of BF16 or FP32 numbers; NaN if there is one, 0 of none."""
    size = x.element_size()
    bits = int(_loops().largest(_array(x), _MAGNITUDE[size]))
    return float(np.uint32(bits << 16 if size == 2 else bits).view(np.float32))


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """x · scale (BF16 or FP32, within E4M3's range) as E4M3 bytes of x's shape, to nearest, ties to even."""
    payload = torch.empty_like(x, dtype=torch.uint8, requires_grad=False)
    loop = _loops().encode_e4m3_bf16 if x.dtype is torch.bfloat16 else _loops().encode_e4m3_fp32
    loop(_array(x), _made(payload), np.float32(scale))
    return payload


def from_e4m3(payload: Tensor, scale: float, dtype: torch.dtype) -> Tensor | None:
    """E4M3 bytes times a power of two (or NaN), exactly, as BF16 or FP32; None where that needs rounding."""
    if dtype not in (torch.bfloat16, torch.float32) or scale < _LEAST_SCALE:
        return None
    made = torch.empty_like(payload, dtype=dtype)
    loop = _loops().decode_e4m3_bf16 if dtype is torch.bfloat16 else _loops().decode_e4m3_fp32
    loop(_array(payload), _made(made), np.float32(scale))
    return made


def nonzero_bits(x: Tensor) -> Tensor:
    """One bit per BF16 or FP32 number or boolean, eight to a byte, big end first: whether it is neither 0 nor −0."""
    packed = torch.zeros(-(-x.numel() // 8), dtype=torch.uint8)
    _loops().pack(_array(x), _MAGNITUDE[x.element_size()], _made(packed))
    return packed


def unpacked(packed: Tensor, count: int) -> Tensor:
    """The first so many of packed bits, as bytes that are 0 or 1."""
    made = torch.empty(count, dtype=torch.uint8)
    _loops().unpack(_array(packed), made.numpy())
    return made


def where_set(x: Tensor, packed: Tensor) -> Tensor:
    """BF16 or FP32 numbers where their bit is set, 0 elsewhere, whatever is there."""
    made = torch.empty_like(x, requires_grad=False)
    _loops().masked(_array(x), _array(packed), _made(made))
    return made
