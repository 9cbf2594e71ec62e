"""Tensors in narrow formats: what is kept for backward, and the operands of products.

A format of a byte or less carries a power-of-two scale 2^a, the largest with amax·2^a ≤ the format's largest value
(current scaling): one for the tensor, or one for each row. Powers of two leave the mantissa alone, so that decoding is
exact in every wider format. What is not finite is counted before the cast, not after it: NaN travels in the scale.

Decoding moves bits into place. E4M3's `s eeee mmm` becomes the BF16 pattern `s 0000eeee mmm0000`, which is 2^-120 times
the value, subnormals included; E5M2 is the upper byte of an FP16 number. Exact for all finite patterns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoprec.devices import PIECE_NUMEL
from autoprec.formats import Format, format_named
from autoprec.numerics import elements
from autoprec.numerics.compilers import is_traced, made_in_backward
from autoprec.numerics.dtypes import dtype_of, has_dtype
from autoprec.numerics.rounding import from_codes, rounded, to_codes

__all__ = ["Packed", "amax_of", "decode", "encode", "largest_of", "pack_bits", "piece_numel", "pieces", "unpack_bits"]

_CPU_PIECE, _PIECE = PIECE_NUMEL["cpu"], PIECE_NUMEL["cuda"]

_E4M3_BITS = -0x7810  # 0x87F0 as int16: sign, then eeeemmm four places up


def piece_numel(x: Tensor) -> int:
    """How many elements of `x` are made into something else at a time; a multiple of 8."""
    return _CPU_PIECE if x.device.type == "cpu" else _PIECE


class Packed(NamedTuple):
    """A tensor in a narrow format.

    Attributes:
        payload: bytes of the tensor's shape; in BF16 and FP16 the rounded tensor. While a compiler traces, in torch's
            dtype for the format, if it has one.
        inverse_scale: 2^-a, float32; 0-dim, or (…, 1) for a scale per row. None for formats without a scale.
        format: its name.
    """

    payload: Tensor
    inverse_scale: Tensor | None
    format: str


def amax_of(x: Tensor, *, rowwise: bool = False) -> Tensor:
    """Largest magnitude, 0-dim float32, or (…, 1) for each row; NaN if there is one. aminmax is 25 times faster here
    than an infinity norm."""
    x = x.detach()
    if x.numel() == 0:
        return torch.zeros((*x.shape[:-1], 1) if rowwise else (), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x, dim=-1, keepdim=True) if rowwise else torch.aminmax(x)
    return torch.maximum(-low, high).float()


def largest_of(x: Tensor) -> float:
    """`amax_of` the whole of a tensor on the host."""
    x = x.detach()
    if x.is_floating_point() and elements.serve(x):
        return elements.largest_magnitude(x)
    return float(amax_of(x))


def _scales_of(amax: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """2^a with the largest a such that amax·2^a ≤ max_value, within ±126, 1 for amax 0; and 2^-a, or NaN for an amax
    that is not finite."""
    mantissa, exponent = torch.frexp(amax)
    most, most_log2 = math.frexp(max_value)
    a = most_log2 - exponent - (mantissa > most).to(torch.int32)
    # Its bits; a compiler's powers of two need not be exact.
    scale = ((a.clamp(-126, 126) + 127) << 23).view(torch.float32)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(amax))
    return scale, torch.where(amax.isfinite(), 1.0 / scale, torch.full_like(amax, float("nan")))


def _scale_of(value: float, max_value: float) -> tuple[float, Tensor]:
    """The same of one number that can be looked at: what `_scales_of` takes a dozen calls of torch for."""
    if not math.isfinite(value):
        return 1.0, _scalar(math.nan)
    mantissa, exponent = math.frexp(value)
    most, most_log2 = math.frexp(max_value)
    a = min(max(most_log2 - exponent - (mantissa > most), -126), 126) if value else 0
    return 2.0**a, _scalar(2.0**-a)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)  # whatever the default is


def encode(x: Tensor, format_name: str, *, rowwise: bool = False) -> Packed:
    """`x` (float32, bfloat16 or float16) in a narrow format; in its own, `x` itself.

    A tensor (a row, where each has its scale) with inf or NaN in it decodes to NaN everywhere, if the format carries a
    scale; in FP16, values beyond the format become inf.
    """
    fmt = format_named(format_name)
    with torch.no_grad():
        x = x.detach()
        if not fmt.scaled:
            return Packed(x.to(dtype_of(fmt.name)), None, fmt.name)
        if fmt.name == "fp8_e4m3" and not rowwise and elements.serve(x):
            factor, inverse = _scale_of(elements.largest_magnitude(x), fmt.max_value)
            return Packed(elements.to_e4m3(x, factor), inverse, fmt.name)
        amax = amax_of(x, rowwise=rowwise)
        scale, inverse = _scaling(x, amax, fmt.max_value)
        if is_traced(x):
            return Packed(_narrow(x, scale, fmt), inverse, fmt.name)
        held = dtype_of(fmt.name) if has_dtype(fmt.name) else torch.uint8
        payload = torch.empty_like(x, dtype=held, requires_grad=False)
        for source, target in pieces(x, payload, whole=rowwise):
            target.copy_(_inside(source, scale, fmt))
        return Packed(payload.view(torch.uint8), inverse, fmt.name)


def _scaling(x: Tensor, amax: Tensor, max_value: float) -> tuple[Tensor | float, Tensor]:
    """The scale and its inverse, by whatever is fastest where `x` is."""
    if x.device.type != "cpu":
        return _scales_of(amax, max_value)
    if is_traced(x):
        scale, inverse = _traced_scales(amax, max_value)
        return scale, inverse
    return _scales_of(amax, max_value) if amax.dim() else _scale_of(float(amax), max_value)


def _inside(x: Tensor, scale: Tensor | float, fmt: Format) -> Tensor:
    """What is rounded to a torch dtype, or the codes of a format that is none. The scale is such that nothing leaves
    the format but what is not finite. A function of its own: nothing of one piece is there beside the next."""
    # FP32 for FP16: a scale, a tensor on the device, would be rounded to FP16, where 2^16 is inf. And for compilers:
    # what they make of a BF16 product takes a CPU seven times as long, and the product is exact either way.
    inside = (x.float() if x.dtype is torch.float16 or is_traced(x) else x) * scale
    return inside if has_dtype(fmt.name) else to_codes(rounded(inside.float().nan_to_num_(), fmt), fmt)


def _narrow(x: Tensor, scale: Tensor | float, fmt: Format) -> Tensor:
    """The whole tensor's payload, for a compiler, which makes pieces itself. In torch's dtype, because compilers take
    what is only looked at in another way for nothing, and the marks on it with it."""
    inside = _inside(x, scale, fmt)
    if not has_dtype(fmt.name):
        return inside
    # What is not finite becomes NaN by the scale, whatever a compiler's cast makes of it.
    return inside.to(dtype_of(fmt.name))


def pieces(x: Tensor, y: Tensor, *, whole: bool = False, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one layout, piece by piece (of `most` elements at most, where said), so that what is made on the
    way stays small."""
    most = piece_numel(x) if most is None else most
    if whole or x.numel() <= most or not x.is_contiguous() or not y.is_contiguous():
        yield x, y
        return
    yield from zip(x.view(-1).split(most), y.view(-1).split(most), strict=True)


def decode(packed: Packed, dtype: torch.dtype) -> Tensor:
    """What was packed, in `dtype` (float32, bfloat16 or float16): exact where that has the numbers, else rounded."""
    fmt = format_named(packed.format)
    if is_traced(packed.payload):
        with made_in_backward(packed.payload):
            return _decoded(packed, fmt, dtype)
    if packed.inverse_scale is None:
        return packed.payload.to(dtype)
    if fmt.name == "fp8_e4m3" and not packed.inverse_scale.dim() and elements.serve(packed.payload):
        made = elements.from_e4m3(packed.payload, float(packed.inverse_scale), dtype)
        if made is not None:
            return made
    if dtype is torch.bfloat16:
        return _in_bfloat16(packed.payload, fmt, packed.inverse_scale)
    out = torch.empty_like(packed.payload, dtype=dtype)
    for source, target in pieces(packed.payload, out, whole=packed.inverse_scale.dim() > 0):
        if dtype is torch.float32:
            target.copy_(_unscaled(source, fmt)).mul_(packed.inverse_scale)
        else:  # 2^-a can be below FP16's smallest number
            target.copy_(_unscaled(source, fmt).float().mul_(packed.inverse_scale))
    return out


def _decoded(packed: Packed, fmt: Format, dtype: torch.dtype) -> Tensor:
    """`decode` for a compiler, which has casts from all of torch's dtypes that are as fast as any."""
    if packed.inverse_scale is None:
        return packed.payload.to(dtype)
    if not has_dtype(fmt.name):
        return (from_codes(packed.payload, fmt) * packed.inverse_scale).to(dtype)
    # A frozen parameter's are bytes, as it was encoded before.
    values = packed.payload.view(dtype_of(fmt.name)).float()
    return (values * packed.inverse_scale).to(dtype)


def _in_bfloat16(payload: Tensor, fmt: Format, inverse_scale: Tensor) -> Tensor:
    """The values. Where it costs nothing to look at the scale, both factors are one, if that is in the format."""
    if fmt.name == "fp8_e4m3" and payload.device.type == "cpu" and not inverse_scale.dim():
        factor = float(inverse_scale) * 2.0**120
        if factor < 2.0**128:
            return _e4m3_bits(payload).mul_(factor)
    return _unscaled(payload, fmt).mul_(inverse_scale)


def _e4m3_bits(payload: Tensor) -> Tensor:
    """2^-120 times the values, as BF16."""
    bits = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(_E4M3_BITS)
    return bits.view(torch.bfloat16)


def _unscaled(payload: Tensor, fmt: Format) -> Tensor:
    """The values as BF16, without their scale."""
    if fmt.name == "fp8_e4m3":  # two factors in all, because 2^120·2^-a can leave float32
        return _e4m3_bits(payload).mul_(2.0**120)
    if fmt.name == "fp8_e5m2":
        return (payload.to(torch.int16) << 8).view(torch.float16).to(torch.bfloat16)
    return from_codes(payload, fmt).to(torch.bfloat16)


def pack_bits(mask: Tensor) -> Tensor:
    """Booleans, or bytes that are 0 or 1, eight to a byte, big end first; shape (ceil(n/8),)."""
    flat = mask.reshape(-1)
    if flat.device.type == "cpu":
        return _pack_on_cpu(flat)
    padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    return (padded << _shifts(flat)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """What `pack_bits` was given, as bytes that are 0 or 1, of `shape`."""
    count = math.prod(shape)  # `numel` would fix a size that a compiler holds for a symbol
    if packed.device.type == "cpu":
        return _unpack_on_cpu(packed, count).view(shape)
    return ((packed[:, None] >> _shifts(packed)) & 1).reshape(-1)[:count].view(shape)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=like.device)


def _pack_on_cpu(flat: Tensor) -> Tensor:
    if is_traced(flat):
        return _traced_pack(flat)
    if elements.serve(flat):
        return elements.nonzero_bits(flat)
    return torch.from_numpy(np.packbits(flat.numpy())).clone()  # what is kept is to be the allocator's


def _unpack_on_cpu(packed: Tensor, count: int) -> Tensor:
    if is_traced(packed):
        return _traced_unpack(packed, count)
    if elements.serve(packed):
        return elements.unpacked(packed, count)
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count))


@torch.library.custom_op("autoprec::scales_of", mutates_args=(), device_types="cpu")
def _traced_scales(amax: Tensor, max_value: float) -> tuple[Tensor, Tensor]:
    """The same as one op of a compiled graph, which otherwise finds the scale anew for every few elements."""
    if amax.dim():
        return _scales_of(amax, max_value)
    factor, inverse = _scale_of(float(amax), max_value)
    return _scalar(factor), inverse


@torch.library.custom_op("autoprec::pack_bits", mutates_args=(), device_types="cpu")
def _traced_pack(flat: Tensor) -> Tensor:
    """The same as one op of a compiled graph: numpy is faster than what compilers make of shifts and sums."""
    return _pack_on_cpu(flat)


@torch.library.custom_op("autoprec::unpack_bits", mutates_args=(), device_types="cpu")
def _traced_unpack(packed: Tensor, count: int) -> Tensor:
    return _unpack_on_cpu(packed, count)


_traced_scales.register_fake(lambda amax, max_value: (torch.empty_like(amax), torch.empty_like(amax)))
_traced_pack.register_fake(lambda flat: flat.new_empty((flat.numel() + 7) // 8, dtype=torch.uint8))
_traced_unpack.register_fake(lambda packed, count: packed.new_empty(count))
