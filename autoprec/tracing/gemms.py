"""Products with a parameter, in whatever spelling: `F.linear`, convolutions, `x @ W`, `torch.addmm`, an einsum that is
one of them, grouped products (the experts of a mixture), batches with a weight for each.

All of them are one thing to the planner, the observer and the rewriter: an input, a weight, perhaps a bias.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autoprec.tracing.kinds import CONVS, GROUPED, kind_of, returns_float32

__all__ = ["GemmCall", "gemm_arguments", "gemm_call", "linear_layout"]

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
}

#: Names of torch's own signatures that differ from ours.
_NAMES: dict[str, dict[str, str]] = {
    "matmul": {"other": "weight"},
    **dict.fromkeys(("mm", "bmm"), {"mat2": "weight"}),
    "addmm": {"input": "bias", "mat1": "input", "mat2": "weight"},
    "grouped_mm": {"mat_a": "input", "mat_b": "weight"},
    "_grouped_mm": {"mat2": "weight"},
}

#: "ebi,eio->ebo".
_BATCHED = re.compile(r"(\w)(\w)(\w),\1\3(\w)->\1\2\4")

#: Views that only order a weight's dimensions anew.
_REORDERING = {"t", "transpose", "mT", "T", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}


@dataclass(frozen=True, eq=False)
class GemmCall:
    """A product with a parameter.

    Attributes:
        input, weight, bias: nodes of the captured graph; the weight is a parameter or a transposed view of one.
        parameter: that parameter.
        transposed: whether the weight is (in, out) as in `x @ W`, not (out, in) as in `F.linear`.
        offs: where the rows of each expert end (int32, (experts,)), for a grouped product with a weight of shape
            (experts, in, out).
        inner: dimensions of the input, its last ones, that are summed over, and so many of the weight, its first or
            last: 1 but for an einsum.
        batched: whether input (batch, rows, in) and weight (batch, in, out) are multiplied matrix by matrix.
    """

    input: fx.Node
    weight: fx.Node
    parameter: fx.Node
    bias: fx.Node | None = None
    transposed: bool = False
    offs: fx.Node | None = None
    inner: int = 1
    batched: bool = False

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
    dims = _dims(x)
    if _is_batched(kind, found, x, weight):
        return GemmCall(x, weight, parameter, batched=True)
    if kind == "einsum":
        layout = linear_layout(found["equation"])
        return None if layout is None else GemmCall(x, weight, parameter, transposed=layout[1], inner=layout[0])
    if kind in CONVS:
        fits = dims == int(kind[-2]) + 2 and not isinstance(found.get("padding", 0), str) and weight is parameter
        return GemmCall(x, weight, parameter, bias) if fits else None
    if kind == "linear":
        return GemmCall(x, weight, parameter, bias)
    if kind in GROUPED:
        offs = found.get("offs")
        fits = set(found) == {"input", "weight", "offs"} and dims == 2 and _dims(weight) == 3
        return GemmCall(x, weight, parameter, offs=offs) if fits and isinstance(offs, fx.Node) else None
    plain = set(found) <= {"input", "weight", "bias"} and dims >= 2 and _dims(weight) == 2
    if not plain or (bias is not None and _dims(bias) != 1):
        return None
    return GemmCall(x, weight, parameter, bias, transposed=True)


def _is_batched(kind: str, found: Mapping[str, Any], x: fx.Node, weight: fx.Node) -> bool:
    """Whether a weight for each of a batch is in the place of the second operand."""
    if kind not in ("bmm", "matmul", "einsum") or not set(found) <= {"equation", "input", "weight"}:
        return False
    if _dims(x) != 3 or _dims(weight) != 3 or x.meta["example_value"].shape[0] != weight.meta["example_value"].shape[0]:
        return False
    if kind != "einsum":
        return True
    letters = _BATCHED.fullmatch(str(found["equation"]).replace(" ", ""))
    return letters is not None and len(set(letters.groups())) == 4


def linear_layout(equation: object) -> tuple[int, bool] | None:
    """(`inner`, `transposed`) of an einsum that is a linear up to views, as "bsd,dhk->bshk" is: the input's last
    dimensions are summed over, the weight has them in this order before or behind the output's last ones. Else None."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, made = equation.replace(" ", "").split("->")
    if given.count(",") != 1:
        return None
    x, w = given.split(",")
    inner = sum(letter not in made for letter in x)
    rows, summed = x[: len(x) - inner], x[len(x) - inner :]
    columns = made[len(rows) :]
    distinct = all(len(set(part)) == len(part) for part in (x, w, made))
    if not (distinct and rows and summed and columns and made == rows + columns) or set(columns) & set(x):
        return None
    return (inner, True) if w == summed + columns else (inner, False) if w == columns + summed else None


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
