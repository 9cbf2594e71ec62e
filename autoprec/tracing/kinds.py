"""The table of op kinds: what the rewriter may do with each operation.

A kind is the operation's name without decoration: `add`, `add_`, `iadd` and `operator.add` are all "add". Kinds that
are not in the table are UNKNOWN: they run in FP32, as the user wrote them, and are listed in the report.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from autoprec.graphs import KERNEL_PRODUCTS, OpClass
from autoprec.numerics.functions import user_function

__all__ = [
    "CONVS",
    "FUNCTION",
    "GROUPED",
    "INPLACE_POSITION",
    "casts_nothing",
    "changes_mode",
    "class_of",
    "enters_transform",
    "inplace_target",
    "is_user_cast",
    "kind_of",
    "only_computes",
    "out_of_place",
    "returns_float32",
]

CONVS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

#: Products of rows, sorted by expert, with the expert's own weight; the last is transformers' own.
GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")

_GEMM = {"linear", *CONVS, *GROUPED, "matmul", "bmm", "mm", "addmm", *KERNEL_PRODUCTS}

#: Layers over time whose kernels compute in FP32 between their products. GRU and plain recurrence round every step.
_RECURRENT = {"lstm"}

_NORM = {"layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm"}

_LOOKUP = {"embedding", "embedding_bag"}

_POINTWISE = set(
    """
    add sub rsub mul div neg abs relu relu6 leaky_relu prelu elu celu selu gelu silu mish sigmoid tanh hardtanh
    hardswish hardsigmoid dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout masked_fill where
    maximum minimum clamp clamp_min clamp_max lerp threshold pow square
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d cat concat concatenate stack softmax
    """.split()
)

_VIEW = set(
    """
    view reshape transpose permute t mT T flatten unflatten squeeze unsqueeze expand expand_as contiguous getitem chunk
    split split_with_sizes tensor_split unbind narrow select detach clone movedim moveaxis swapaxes swapdims view_as
    reshape_as roll flip index_select gather alias diagonal ravel
    """.split()
)

_WIDE = set(
    """
    log_softmax cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div gaussian_nll_loss
    binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity cosine_embedding_loss triplet_margin_loss
    ctc_loss exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sum mean var std var_mean std_mean
    prod cumsum cumprod norm vector_norm linalg_vector_norm normalize logsumexp erf erfc softplus logsigmoid
    gru rnn_tanh rnn_relu lstm_cell gru_cell sin cos tan atan2 sign floor ceil round
    topk sort argsort argmax argmin amax amin max min addmv mv dot outer
    tril triu scatter scatter_add index_add index_put masked_select
    masked_scatter one_hot zeros ones full empty arange linspace eye zeros_like ones_like full_like empty_like rand
    randn rand_like randn_like bernoulli multinomial tensor as_tensor new_zeros new_ones new_full new_empty eq ne lt le
    gt ge isnan isinf isfinite logical_and logical_or logical_not to float double half bfloat16 type type_as copy
    requires_grad item pad interpolate upsample pixel_shuffle unfold fold cdist bilinear glu softmin softsign
    local_response_norm repeat repeat_interleave tile multi_head_attention_forward addcmul addcdiv
    fill zero setitem long int short bool byte char histc bincount slice
    """.split()
)

#: A user's own `autograd.Function`, captured with both of its bodies: what it computes it means to compute so.
FUNCTION = "hop.autograd_function_apply"

_CLASS: dict[str, OpClass] = (
    dict.fromkeys((*_WIDE, FUNCTION), OpClass.WIDE)
    | dict.fromkeys(_VIEW, OpClass.VIEW)
    | dict.fromkeys(_POINTWISE, OpClass.POINTWISE)
    | dict.fromkeys(_NORM, OpClass.NORM)
    | dict.fromkeys(_LOOKUP, OpClass.LOOKUP)
    | dict.fromkeys(_RECURRENT, OpClass.RECURRENT)
    | dict.fromkeys(_GEMM, OpClass.GEMM)
)

_ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "radd": "add",
    "rmul": "mul",
    "pow_scalar": "pow",
    "concat": "cat",
    "concatenate": "cat",
    "special_expit": "sigmoid",
}

_INPLACE_OPERATORS = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "and", "or", "xor")}

_USER_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as"}

_MODE_SETTERS = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode"}


def _raw_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if node.target is getattr and len(node.args) > 1:
        return str(node.args[1])
    if node.target is user_function:
        return FUNCTION
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"hop.{node.target.name()}"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.overloadpacket.__name__
    return str(getattr(node.target, "__name__", node.target))


def kind_of(node: fx.Node) -> str:
    """The kind of a call node."""
    name = _raw_name(node)
    if name in _INPLACE_OPERATORS:
        name = name[1:]
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return _ALIASES.get(name, name)


def class_of(kind: str) -> OpClass:
    """How the rewriter may treat a kind."""
    return _CLASS.get(kind, OpClass.UNKNOWN)


def inplace_target(node: fx.Node) -> fx.Node | None:
    """The node whose memory a call changes, or None."""
    name = _raw_name(node)
    named_so = name in _INPLACE_OPERATORS or name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    if named_so or node.kwargs.get("inplace") is True or _positional_inplace(node, name):
        first = node.args[0] if node.args else node.kwargs.get("input")
        return first if isinstance(first, fx.Node) else None
    out = node.kwargs.get("out")
    return out if isinstance(out, fx.Node) else None


#: Position of `inplace` in the signatures of torch.nn.functional.
INPLACE_POSITION = {
    "relu": 1,
    "relu6": 1,
    "silu": 1,
    "mish": 1,
    "hardswish": 1,
    "hardsigmoid": 1,
    "selu": 1,
    "leaky_relu": 2,
    "elu": 2,
    "celu": 2,
    "hardtanh": 3,
    "threshold": 3,
    "dropout": 3,
    "dropout1d": 3,
    "dropout2d": 3,
    "dropout3d": 3,
    "alpha_dropout": 3,
    "feature_dropout": 3,
}


def _positional_inplace(node: fx.Node, name: str) -> bool:
    position = INPLACE_POSITION.get(name)
    module = getattr(node.target, "__module__", "") or ""
    return (
        position is not None
        and module.startswith("torch.nn.functional")
        and len(node.args) > position
        and node.args[position] is True
    )


def is_user_cast(node: fx.Node) -> bool:
    """True for `.float()`, `.to(dtype)`, `.type(...)`: a promise that the value has that dtype."""
    if kind_of(node) not in _USER_CASTS:
        return False
    if kind_of(node) != "to":
        return True
    values: list[Any] = [*node.args[1:], *node.kwargs.values()]
    return any(isinstance(v, (torch.dtype, fx.Node)) for v in values)


#: What gives a real number back.
_OF_COMPLEX = {"real", "conj", "conj_physical", "resolve_conj", "resolve_neg", "positive"}


def casts_nothing(node: fx.Node) -> bool:
    """Whether a cast of the user's, or a part of a complex number, is of one float32 tensor, which is given back."""
    if not is_user_cast(node) and not (kind_of(node) in _OF_COMPLEX and only_computes(node)):
        return False
    made, given = node.meta.get("example_value"), [n.meta.get("example_value") for n in node.all_input_nodes]
    copies = {"copy", "memory_format"} & set(node.kwargs) or any(a is True for a in node.args)
    if copies or len(given) != 1 or not all(map(returns_float32, (made, *given))):
        return False
    return bool(made.device == given[0].device)


_TORCHS = ("torch", "_operator", "builtins")
_NOT_OF_TENSORS = ("torch.distributed", "torch._dynamo", "torch._ops")


def only_computes(node: fx.Node) -> bool:
    """Whether a call is of torch's own functions of tensors, which only compute: one that a user made may count its
    calls, or wait for another process. A user's `autograd.Function` is what its bodies are."""
    if node.target is user_function:
        bodies = [b for b in node.args[:2] if isinstance(b, fx.Node)]
        graphs = [node.graph.owning_module.get_submodule(str(b.target)).graph for b in bodies]
        calls = [n for graph in graphs for n in graph.nodes if n.op not in ("placeholder", "output")]
        return all(changes_mode(n) or only_computes(n) for n in calls)
    if isinstance(node.target, torch._ops.HigherOrderOperator):  # of a user's functions
        return False
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == "aten"
    module = str(getattr(node.target, "__module__", ""))
    if module == "torch._ops.aten":
        return True
    return module.partition(".")[0] in _TORCHS and not module.startswith(_NOT_OF_TENSORS)


def returns_float32(value: Any) -> bool:
    """True for a float32 tensor (real or fake)."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def changes_mode(node: fx.Node) -> bool:
    """True for calls that switch gradient recording or autocast: no cast may be shared across them."""
    return node.op == "call_function" and _raw_name(node) in _MODE_SETTERS


def enters_transform(node: fx.Node) -> int:
    """1 for the call that begins a level of a torch.func transform (vmap, grad, jvp), −1 for the one that ends it."""
    name = _raw_name(node)
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


_OUT_OF_PLACE_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def out_of_place(kind: str, target: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """The out-of-place spelling of an in-place call: target, args, kwargs."""
    if isinstance(target, str):
        return target.rstrip("_"), args, kwargs
    if target in _OUT_OF_PLACE_OPERATORS:
        return _OUT_OF_PLACE_OPERATORS[target], args, kwargs
    name = getattr(target, "__name__", "")
    if name.endswith("_"):
        name = name.rstrip("_")
        return getattr(torch, name, None) or getattr(F, name), args, kwargs
    position = INPLACE_POSITION.get(kind, len(args))
    args = tuple(False if i == position else a for i, a in enumerate(args))
    return target, args, {k: v for k, v in kwargs.items() if k != "inplace"}
