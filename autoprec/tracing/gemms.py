"""Products with a parameter, in whatever spelling: `F.linear`, convolutions, `x @ W`, `torch.addmm`, `torch.einsum`,
batches with a weight for each, grouped products (the experts of a mixture).

All of them are one thing to the planner, the observer and the rewriter: an input, a weight, perhaps a bias.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autoprec.numerics.contractions import Contraction, Layout, einsum_contraction
from autoprec.numerics.convolutions import ConvOptions
from autoprec.numerics.specs import conv_options
from autoprec.tracing.kinds import CONVS, GROUPED, kind_of, returns_float32

__all__ = ["GemmCall", "gemm_arguments", "gemm_call"]

_SIGNATURE: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(CONVS[:3], ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    **dict.fromkeys(
        CONVS[3:], ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    ),
    **dict.fromkeys(("matmul", "mm"), ("input", "weight")),
    "addmm": ("bias", "input", "weight"),
    **dict.fromkeys(GROUPED, ("input", "weight", "offs")),
    "einsum": ("equation", "input", "weight"),
    "bmm": ("input", "weight"),
    "baddbmm": ("bias", "input", "weight"),
}

#: Names of torch's own signatures that differ from ours.
_NAMES: dict[str, dict[str, str]] = {
    "matmul": {"other": "weight"},
    **dict.fromkeys(("mm", "bmm"), {"mat2": "weight"}),
    "addmm": {"input": "bias", "mat1": "input", "mat2": "weight"},
    "baddbmm": {"input": "bias", "batch1": "input", "batch2": "weight"},
    "grouped_mm": {"mat_a": "input", "mat_b": "weight"},
    "_grouped_mm": {"mat2": "weight"},
}

#: What the kinds are as an einsum, where both operands have these dimensions.
_EQUATIONS: dict[str, str] = {
    "linear": "...i,oi->...o",
    **dict.fromkeys(("matmul", "mm", "addmm"), "...i,io->...o"),
    **dict.fromkeys(("bmm", "baddbmm"), "ebi,eio->ebo"),
}

#: Views that only order a weight's dimensions anew.
_REORDERING = {"t", "transpose", "mT", "T", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}


@dataclass(frozen=True, eq=False)
class GemmCall:
    """A product with a parameter.

    Attributes:
        input, weight, bias: nodes of the captured graph; the weight is a parameter or a transposed view of one.
        parameter: that parameter.
        how: which dimensions meet, or the options of a convolution; None for a grouped product, whose weight has the
            shape (experts, in, out).
        offs: where the rows of each expert end (int32, (experts,)), for a grouped product.
    """

    input: fx.Node
    weight: fx.Node
    parameter: fx.Node
    how: Layout
    bias: fx.Node | None = None
    offs: fx.Node | None = None

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        """Input, weight, bias, offs, as far as there are such."""
        return tuple(n for n in (self.input, self.weight, self.bias, self.offs) if n is not None)


def gemm_arguments(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a product by our names: input, weight, bias, and the options of a convolution."""
    names = _NAMES.get(kind, {})
    return dict(zip(_SIGNATURE[kind], args, strict=False)) | {names.get(k, k): v for k, v in kwargs.items()}


def gemm_call(kind: str, node: fx.Node, parameters: Collection[fx.Node]) -> GemmCall | None:
    """The product with a parameter that a node is, or None."""
    if kind not in _SIGNATURE or len(node.args) > len(_SIGNATURE[kind]):
        return None
    found = gemm_arguments(kind, node.args, node.kwargs)
    x, weight, bias = found.get("input"), found.get("weight"), found.get("bias")
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    parameter = _parameter_of(weight, parameters)
    tensors = [x, weight] if bias is None else [x, weight, bias]
    fits = all(isinstance(n, fx.Node) and returns_float32(n.meta.get("example_value")) for n in tensors)
    if parameter is None or not fits:
        return None
    if kind in GROUPED:
        offs = found.get("offs")
        fits = set(found) == {"input", "weight", "offs"} and _dims(x) == 2 and _dims(weight) == 3
        return GemmCall(x, weight, parameter, None, offs=offs) if fits and isinstance(offs, fx.Node) else None
    how = _convolution(kind, found) if kind in CONVS else _contraction(kind, found)
    if how is None or (kind in CONVS and weight is not parameter):
        return None
    return GemmCall(x, weight, parameter, how, bias)


def _convolution(kind: str, found: Mapping[str, Any]) -> ConvOptions | None:
    """The options of a convolution of a batch, all of them numbers."""
    options = {k: v for k, v in found.items() if k not in ("input", "weight", "bias")}
    nodes: list[fx.Node] = []
    fx.node.map_arg(options, nodes.append)
    if nodes or isinstance(options.get("padding"), str) or _dims(found["input"]) != int(kind[-2]) + 2:
        return None
    return conv_options(kind, options)


def _contraction(kind: str, found: Mapping[str, Any]) -> Contraction | None:
    """Which dimensions meet, of operands whose shapes are known."""
    if not set(found) <= {"equation", "input", "weight", "bias"}:
        return None  # factors of `addmm`
    x, weight = (found[name].meta["example_value"].shape for name in ("input", "weight"))
    equation = found.get("equation", _EQUATIONS.get(kind))
    if kind == "matmul" and len(x) == len(weight) == 3:
        equation = _EQUATIONS["bmm"]
    how = einsum_contraction(equation, len(x), len(weight))
    bias = found.get("bias")
    if how is None or (len(x) < 2 and kind != "linear"):
        return None
    # Of unequal sizes one is 1, and broadcast.
    if any(x[how.x.index(c)] != weight[how.weight.index(c)] for c in how.batch + how.summed):
        return None
    if bias is not None and kind != "linear":
        columns = weight[how.weight.index(how.columns)]
        shape = tuple(bias.meta["example_value"].shape)
        if shape != ((weight[0], 1, columns) if how.batch else (columns,)):  # one for all rows of a weight
            return None
    return how


def _parameter_of(node: fx.Node, parameters: Collection[fx.Node]) -> fx.Node | None:
    """The parameter that a node is, or orders the dimensions of."""
    while node not in parameters:
        source = node.args[0] if node.args else None
        if node.op == "placeholder" or kind_of(node) not in _REORDERING or not isinstance(source, fx.Node):
            return None
        node = source
    return node


def _dims(node: fx.Node) -> int:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value.dim()
