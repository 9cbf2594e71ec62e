"""From a plan's words to the arguments of our GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprec.graphs import Role
from autoprec.numerics.dtypes import dtype_of, native_formats
from autoprec.numerics.gemm import ConvOptions, GemmSpec

__all__ = ["conv_options", "gemm_spec"]


def gemm_spec(formats: Mapping[Role, str], device_type: str, scale_log2: int = 0) -> GemmSpec:
    """The arithmetic of an op from its format per role (missing gradient roles follow `output`)."""
    output = formats[Role.OUTPUT]
    return GemmSpec(
        output=dtype_of(output),
        grad_input=dtype_of(formats.get(Role.GRAD_INPUT, output)),
        grad_weight=dtype_of(formats.get(Role.GRAD_WEIGHT, output)),
        native=tuple(dtype_of(f) for f in native_formats(device_type)),
        scale_log2=scale_log2,
    )


def conv_options(kind: str, args: dict[str, Any]) -> ConvOptions:
    """Options of F.conv1d … F.conv3d, one entry per spatial dimension."""
    dims = int(kind[4])

    def per_dimension(name: str, default: int) -> tuple[int, ...]:
        value = args.get(name, default)
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(tuple(value)) == 1 else 1)

    return ConvOptions(
        stride=per_dimension("stride", 1),
        padding=per_dimension("padding", 0),
        dilation=per_dimension("dilation", 1),
        groups=args.get("groups", 1),
    )
