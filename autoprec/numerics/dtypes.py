"""Between format names and torch dtypes, and what this device computes natively."""

from __future__ import annotations

from functools import cache

import torch

from autoprec.errors import UnsupportedError

__all__ = ["dtype_of", "format_of", "has_dtype", "native_formats"]

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def dtype_of(format_name: str) -> torch.dtype:
    """The torch dtype of a format; TF32 is a way to multiply FP32 tensors."""
    return _DTYPES[format_name]


def has_dtype(format_name: str) -> bool:
    """Whether torch has the format; others are held as codes (`numerics.rounding`)."""
    return format_name in _DTYPES


def format_of(dtype: torch.dtype) -> str:
    """The name of the format that a torch dtype holds."""
    return next(name for name, d in _DTYPES.items() if d is dtype)


#: Compute capability of the first CUDA devices with products in TF32 (Ampere) and FP8 (Ada; CUDA C programming guide,
#: table of features).
_FIRST_WITH_TF32, _FIRST_WITH_FP8 = (8, 0), (8, 9)


@cache
def native_formats(device_type: str) -> tuple[str, ...]:
    """Formats whose GEMMs the device computes itself; in the others we upcast and accumulate in FP32.

    A CPU without BF16 (FP16) instructions takes 6 to 60 times FP32's time in torch's own BF16 (FP16) GEMMs, so there
    the operands are upcast exactly to FP32, multiplied, and the result rounded once.
    """
    if device_type == "cpu":
        # Private, because torch has no public question for it; both return a bool on every CPU build.
        mkldnn = torch.ops.mkldnn
        names = ["fp32"]
        if mkldnn._is_mkldnn_bf16_supported():
            names.append("bf16")
        if mkldnn._is_mkldnn_fp16_supported():
            names.append("fp16")
        return tuple(names)
    if device_type == "cuda":
        names = ["fp32", "fp16"]
        if torch.cuda.is_bf16_supported(including_emulation=False):
            names.append("bf16")
        if torch.cuda.get_device_capability() >= _FIRST_WITH_TF32:
            names.append("tf32")
        if torch.cuda.get_device_capability() >= _FIRST_WITH_FP8:
            names += ["fp8_e5m2", "fp8_e4m3"]
        return tuple(names)
    raise UnsupportedError(f"device type {device_type!r} is not supported; supported: cpu, cuda")
