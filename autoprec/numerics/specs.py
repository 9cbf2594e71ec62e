"""From a plan's words to the arguments of our GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoprec.graphs import Role
from autoprec.numerics.convolutions import ConvOptions
from autoprec.numerics.dtypes import dtype_of, native_formats
from autoprec.numerics.losses import LossOptions
from autoprec.numerics.norms import NormCall
from autoprec.numerics.products import GemmSpec

__all__ = ["NORM_SIGNATURE", "conv_options", "fit_scalars", "gemm_spec", "loss_call", "norm_call"]

NORM_SIGNATURE = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
}


def gemm_spec(
    formats: Mapping[Role, str],
    device_type: str,
    scale_log2: int = 0,
    local_scale_log2: int = 0,
    *,
    rowwise: bool = False,
) -> GemmSpec:
    """The arithmetic of an op from its format per role (missing gradient roles follow `output`)."""
    output = formats[Role.OUTPUT]
    return GemmSpec(
        output=output,
        grad_input=formats.get(Role.GRAD_INPUT, output),
        grad_weight=formats.get(Role.GRAD_WEIGHT, output),
        native=native_formats(device_type),
        scale_log2=scale_log2,
        local_scale_log2=local_scale_log2,
        rowwise=rowwise,
    )


def conv_options(kind: str, args: dict[str, Any]) -> ConvOptions:
    """Options of F.conv1d … F.conv3d and F.conv_transpose1d … 3d, one entry per spatial dimension."""
    dims = int(kind[-2])

    def per_dimension(name: str, default: int) -> tuple[int, ...]:
        value = args.get(name, default)
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(tuple(value)) == 1 else 1)

    return ConvOptions(
        stride=per_dimension("stride", 1),
        padding=per_dimension("padding", 0),
        dilation=per_dimension("dilation", 1),
        groups=args.get("groups", 1),
        transposed="transpose" in kind,
        output_padding=per_dimension("output_padding", 0),
    )


def norm_call(kind: str, arguments: dict[str, Any], scale_log2: int) -> NormCall | None:
    """The options of a norm, None where one of them is not a plain value or the kind is another."""
    if kind not in NORM_SIGNATURE:
        return None
    shape = arguments.get("normalized_shape", arguments.get("num_groups", ()))
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    training, momentum = arguments.get("training", False), arguments.get("momentum", 0.1)
    eps = arguments.get("eps", 1e-5)
    if not all(isinstance(v, (int, float)) for v in (*shape, training, momentum, eps)):
        return None
    return NormCall(kind=kind, shape=shape, training=training, momentum=momentum, eps=eps, scale_log2=scale_log2)


_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def loss_call(node: fx.Node) -> tuple[dict[str, fx.Node | None], LossOptions] | None:
    """Of a cross entropy of classes its tensors (input, target, weight) and its options; None for probabilities as
    targets, or logits without a batch."""
    named = dict(zip(_CROSS_ENTROPY, node.args, strict=False)) | node.kwargs
    tensors = {name: named.get(name) for name in _CROSS_ENTROPY[:3]}
    logits, classes = (n.meta.get("example_value") if isinstance(n := tensors[name], fx.Node) else None
                       for name in ("input", "target"))  # fmt: skip
    if not isinstance(logits, torch.Tensor) or not isinstance(classes, torch.Tensor):
        return None
    smoothing = named.get("label_smoothing", 0.0)
    if logits.dim() < 2 or classes.dtype is not torch.int64 or not isinstance(smoothing, (int, float)):
        return None
    reduction, (average, reduce) = named.get("reduction", "mean"), (named.get(n) for n in ("size_average", "reduce"))
    if average is not None or reduce is not None:  # as torch reads what it has deprecated
        reduction = "none" if reduce is False else "sum" if average is False else "mean"
    ignored = named.get("ignore_index", -100)
    return tensors, LossOptions(reduction=reduction, ignore_index=ignored, label_smoothing=float(smoothing))


#: Kinds whose scalar becomes a value of the result; elsewhere it is a factor or a summand.
_SCALAR_IS_A_VALUE = {"masked_fill", "where", "clamp", "clamp_min", "clamp_max", "threshold", "fill", "hardtanh"}


def fit_scalars(kind: str, arguments: Any, fmt: str) -> Any:
    """Finite numbers beyond the format that would become values (finfo.min of a mask) become its largest value."""
    if fmt == "fp32" or kind not in _SCALAR_IS_A_VALUE:
        return arguments
    limit = torch.finfo(dtype_of(fmt)).max

    def fit(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and limit < abs(value) < float("inf"):
            return limit if value > 0 else -limit
        return value

    return fx.node.map_aggregate(arguments, fit)
