"""Narrow storages of saved tensors: BF16, scaled E4M3, and one bit per element for ReLU.

E4M3 is kept as bytes with a power-of-two scale 2^a, the largest with amax·2^a ≤ 448 (current scaling). Decoding moves
the bits into place: `s eeee mmm` becomes the BF16 pattern `s 0000eeee mmm0000`, which is 2^-120 times the value,
subnormals included. Exact for all finite patterns; NaN travels in the scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoprec.numerics.dtypes import dtype_of

__all__ = ["Packed", "amax_of", "decode", "decode_e4m3", "encode", "encode_e4m3", "pack_bits", "unpack_bits"]

#: Elements that are packed at a time. On a CPU what is made on the way then fits the caches
#: (docs/measurements/pieces.md); larger pieces keep a GPU busy.
_CPU_PIECE, _PIECE = 1 << 18, 1 << 24

_E4M3_MAX = 448.0
_BITS = -0x7810  # 0x87F0 as int16: sign, then eeeemmm four places up


class Packed(NamedTuple):
    """A tensor kept in a narrow format. In E4M3: bytes of the tensor's shape, and the inverse scale 2^-a (0-dim,
    float32); in BF16: the rounded tensor, and None."""

    payload: Tensor
    inverse_scale: Tensor | None


def amax_of(x: Tensor) -> Tensor:
    """Largest magnitude, 0-dim float32; NaN if there is one. aminmax is 25 times faster here than an infinity norm."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def encode_e4m3(x: Tensor) -> Packed:
    """Pack `x` (float32, bfloat16 or float16). A tensor with inf or NaN in it decodes to NaN everywhere."""
    with torch.no_grad():
        amax = amax_of(x)
        _, exponent = torch.frexp(_E4M3_MAX / amax)
        one = torch.ones((), dtype=torch.float32, device=x.device)
        scale = torch.where(amax > 0, torch.ldexp(one, (exponent - 1).clamp(-126, 126)), one)
        payload = torch.empty_like(x, dtype=torch.float8_e4m3fn, requires_grad=False)
        for source, target in _pieces(x.detach(), payload):
            # FP32 for FP16: a scale, a tensor on the device, would be rounded to FP16, where 2^16 is inf.
            wide = source.float() if x.dtype is torch.float16 else source
            target.copy_((wide * scale).clamp_(-_E4M3_MAX, _E4M3_MAX))
        inverse = torch.where(amax.isfinite(), 1.0 / scale, torch.full_like(one, float("nan")))
        return Packed(payload.view(torch.uint8), inverse)


def _pieces(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one layout, piece by piece, so that what is made on the way stays small."""
    most = _CPU_PIECE if x.device.type == "cpu" else _PIECE
    if x.numel() <= most or not x.is_contiguous() or not y.is_contiguous():
        yield x, y
        return
    yield from zip(x.view(-1).split(most), y.view(-1).split(most), strict=True)


def encode(x: Tensor, storage: str) -> Packed:
    """`x` (float32, bfloat16 or float16) in a narrow storage; in BF16, `x` itself if it is that already."""
    return encode_e4m3(x) if storage == "fp8_e4m3" else Packed(x.detach().to(dtype_of(storage)), None)


def decode(packed: Packed, dtype: torch.dtype) -> Tensor:
    """What was kept, in `dtype`."""
    return packed.payload.to(dtype) if packed.inverse_scale is None else decode_e4m3(packed, dtype)


def decode_e4m3(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The packed tensor in `dtype`; exact in BF16, FP16 (in its range) and FP32."""
    assert packed.inverse_scale is not None
    if dtype is torch.bfloat16:
        return _moved(packed.payload).mul_(packed.inverse_scale)
    out = torch.empty_like(packed.payload, dtype=dtype)
    for source, target in _pieces(packed.payload, out):
        if dtype is torch.float16:  # 2^-a can be below FP16's smallest number
            target.copy_(_moved(source).float().mul_(packed.inverse_scale))
        else:
            target.copy_(_moved(source)).mul_(packed.inverse_scale)
    return out


def _moved(payload: Tensor) -> Tensor:
    """The values as BF16, without their scale. Two factors in all, because 2^120·2^-a can leave float32."""
    bits = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(_BITS)
    return bits.view(torch.bfloat16).mul_(2.0**120)


def pack_bits(mask: Tensor) -> Tensor:
    """A boolean tensor as bytes, eight elements each, big end first; shape (ceil(n/8),)."""
    flat = mask.reshape(-1)
    if flat.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy()))
    padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=flat.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The boolean tensor of `shape` that `pack_bits` was given."""
    count = shape.numel()
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).view(torch.bool).view(shape)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).reshape(-1)[:count].to(torch.bool).view(shape)
