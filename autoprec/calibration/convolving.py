"""What is measured of convolutions on a CPU alone: they go a few images at a time there, and all at once in compiled
graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.devices import Device
from autoprec.execution.measuring import workspace_bytes
from autoprec.formats import is_scaled
from autoprec.graphs import Role
from autoprec.numerics.convolutions import ConvOptions, compiled_kernels, piece_fracs
from autoprec.numerics.dtypes import dtype_of

__all__ = ["compiled_workspace", "pieces"]


def pieces(how: ConvOptions, fmt: str, on: Device, x: Tensor, weight: Tensor, y: Tensor) -> dict[Role, float]:
    """`OpTiming.piece_frac` by role. What has a scale is copied whole: all images have the same."""
    if is_scaled(fmt) or x.dim() != weight.dim():
        return {}
    dtype = dtype_of(fmt) if fmt in on.native else torch.float32
    fracs = zip((Role.GRAD_INPUT, Role.GRAD_WEIGHT), piece_fracs(how, x, y, weight, dtype), strict=True)
    return {role: frac for role, frac in fracs if frac < 1.0}


def compiled_workspace(how: ConvOptions, fmt: str, on: Device, x: Tensor, weight: Tensor, y: Tensor) -> dict[Role, int]:
    """`OpTiming.compiled_workspace_bytes` by role, of two dimensions, in formats that the CPU has."""
    if fmt not in on.native or x.dim() != 4 or weight.dim() != 4 or not x.numel():
        return {}
    operands = (t.detach().to(dtype_of(fmt)) for t in (x, weight, y))
    with torch.no_grad():
        kernels = zip((Role.OUTPUT, Role.GRAD_INPUT, Role.GRAD_WEIGHT), compiled_kernels(how, *operands), strict=True)
        return {role: workspace_bytes(run, torch.device("cpu")) for role, run in kernels}
