"""The model's operations as plain data: `OpGraph`, `Op`, `TensorSpec`.

Ids. An op is `fqn:kind#k`, where `fqn` is the module that owns the call, `kind` the operation, and `k` its place
among the call sites of that kind in that module. A tensor is `op_id` (its first output) or `op_id.k` (output k);
a parameter or buffer is `param:fqn` / `buffer:fqn`; a graph input is `input:name`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TypeVar

from autoprec.checks import check_amount, check_unique
from autoprec.errors import InputError

__all__ = [
    "ATTENTION",
    "KERNEL_PRODUCTS",
    "Decided",
    "Op",
    "OpClass",
    "OpGraph",
    "Role",
    "TensorKind",
    "TensorSpec",
    "shared_path",
]

T = TypeVar("T")


ATTENTION = "scaled_dot_product_attention"

#: Products inside kernels of torch: they run as written, in one format for all that they read and make. Their gradients
#: have another one at the price of running them once more.
KERNEL_PRODUCTS = (ATTENTION, "einsum", "baddbmm", "addbmm")


class Role(StrEnum):
    """The unit of decision is (op, role). Products have `grad_input` on its own (of two activations: both gradients),
    and products with a weight `grad_weight`; what other ops compute backward has the format of `output`."""

    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


class TensorKind(StrEnum):
    """Where a tensor comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ACTIVATION = "activation"


class OpClass(StrEnum):
    """How the rewriter may treat an op.

    GEMM: own formats per role, may keep its input in a narrow storage. POINTWISE and NORM: one format for what goes
    in and comes out (norms compute their statistics in FP32 inside). VIEW: carries the format of its input.
    RECURRENT: one format for what goes in, parameters among it, and for what comes out; FP32 between the products.
    LOOKUP: one format for what comes out; the table stays FP32, and its gradient is added up in FP32.
    WIDE: always in the dtype that the user wrote. UNKNOWN: not in the table; treated as WIDE and reported.
    """

    GEMM = "gemm"
    POINTWISE = "pointwise"
    NORM = "norm"
    RECURRENT = "recurrent"
    LOOKUP = "lookup"
    VIEW = "view"
    WIDE = "wide"
    UNKNOWN = "unknown"


#: Classes with one format for an op's results and for what it computes backward.
_ONE_FORMAT = (OpClass.POINTWISE, OpClass.NORM, OpClass.RECURRENT, OpClass.LOOKUP)


class Decided:
    """What its kind says of the decisions for an op; of ops of graphs and of the nodes that they stand for alike."""

    kind: str
    op_class: OpClass
    weights: tuple[str, ...]

    @property
    def is_plain_product(self) -> bool:
        """Whether it is a product that we multiply ourselves, operand by operand; an einsum with a parameter is."""
        return self.op_class is OpClass.GEMM and (self.kind not in KERNEL_PRODUCTS or bool(self.weights))

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that are decided for it (none for views, wide and unknown ops)."""
        if self.op_class is OpClass.GEMM:
            of_weight = (Role.GRAD_WEIGHT,) if self.weights else ()
            return (Role.OUTPUT, Role.GRAD_INPUT, *of_weight)
        return (Role.OUTPUT,) if self.op_class in _ONE_FORMAT else ()


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor value of the graph.

    Attributes:
        id: see the module docstring.
        shape: sizes at calibration time.
        dtype: name of the torch dtype as captured ("float32", "int64", ...).
        kind: where it comes from.
        requires_grad: whether a gradient arrives at it in the backward pass.
        base: id of the tensor whose memory it shares (a view, an in-place result, or an input that another graph
            returned or was given), or None.
        is_output: whether the graph returns it.
        is_unused: whether no gradient comes back to it from there (a cache, or states that nobody differentiates).
    """

    id: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    requires_grad: bool
    base: str | None = None
    is_output: bool = False
    is_unused: bool = False

    def __post_init__(self) -> None:
        for i, size in enumerate(self.shape):
            check_amount(size, "size", InputError, "shape", i)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def gets_gradient(self) -> bool:
        """Whether a gradient enters the graph here."""
        return self.is_output and self.is_float32 and self.requires_grad and not self.is_unused

    @property
    def is_float32(self) -> bool:
        """Only float32 tensors are ever given another format."""
        return self.dtype == "float32"


@dataclass(frozen=True, kw_only=True)
class Op(Decided):
    """One operation.

    Attributes:
        id: `fqn:kind#k`.
        kind: "linear", "conv2d", "gelu", ...
        op_class: how the rewriter may treat it.
        fqn: the owning module.
        inputs: ids of the tensors that it reads, in argument order.
        outputs: ids of the tensors that it makes.
        weights: FQNs of the parameters that it reads.
        flops: floating-point operations of the forward pass.
        saves: ids of the tensors (inputs or outputs) that autograd keeps for its backward, as measured.
        private_saved_bytes: bytes that it keeps besides `saves` and parameters (statistics, indices), as measured.
        pinned: True if the user's own casts promise FP32 here.
        timing_key: equal for ops that cost the same (kind, shapes, options); seconds are looked up under it.
        calls: how often it runs in one step, recomputation not counted.
        checkpoints: ids of the activation checkpoints around it, outermost first: it runs once more in the backward
            pass for each of them.
    """

    id: str
    kind: str
    op_class: OpClass
    fqn: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    flops: int = 0
    saves: tuple[str, ...] = ()
    private_saved_bytes: int = 0
    pinned: bool = False
    timing_key: str = ""
    calls: int = 1
    checkpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_amount(self.flops, "flops", InputError, "flops")
        check_amount(self.private_saved_bytes, "private_saved_bytes", InputError, "private_saved_bytes")
        check_amount(self.calls, "calls", InputError, "calls", least=1)


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """All captured ops of one training step in execution order, and the tensors between them.

    Attributes:
        model: class name of the model, for people.
        ops: in execution order.
        tensors: every tensor that an op reads or makes, each id once.
        parameter_bytes, gradient_bytes, optimizer_bytes, input_bytes: what a step holds whatever the plan.
        loss_bytes: most that is held between the end of the forward pass and the beginning of the backward pass beside
            what the graph holds, by a loss outside of it; 0 where nobody has measured that.
        first_ops: ids of the first op of each captured graph.
        compiled: whether these run through a compiler: each then gives the gradients of its weights all at once.
    """

    model: str
    ops: tuple[Op, ...]
    tensors: tuple[TensorSpec, ...]
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    input_bytes: int = 0
    loss_bytes: int = 0
    first_ops: tuple[str, ...] = ()
    compiled: bool = False

    def __post_init__(self) -> None:
        check_unique([op.id for op in self.ops], "the op", InputError, "ops")
        check_unique([t.id for t in self.tensors], "the tensor", InputError, "tensors")
        known = {t.id for t in self.tensors}
        for i, op in enumerate(self.ops):
            for part in ("inputs", "outputs", "saves"):
                for k, t in enumerate(getattr(op, part)):
                    if t not in known:
                        what = f"op {op.id}: tensor {t!r} is not among the graph's tensors"
                        raise InputError(what, at=("ops", i, part, k))
        for i, tensor in enumerate(self.tensors):
            if tensor.base is not None and tensor.base not in known:
                what = f"tensor {tensor.id}: its base {tensor.base!r} is not among the graph's tensors"
                raise InputError(what, at=("tensors", i, "base"))
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "input_bytes", "loss_bytes"):
            check_amount(getattr(self, name), name, InputError, name)
        made = {op.id for op in self.ops}
        for i, first in enumerate(self.first_ops):
            if first not in made:
                raise InputError(f"op {first!r} is not among the graph's ops", at=("first_ops", i))

    @cached_property
    def op_by_id(self) -> dict[str, Op]:
        """Ops by id."""
        return {op.id: op for op in self.ops}

    @cached_property
    def tensor_by_id(self) -> dict[str, TensorSpec]:
        """Tensors by id."""
        return {t.id: t for t in self.tensors}

    def seen_as(self, tensor: str, seen: Container[str]) -> str:
        """The tensor, or the nearest of those that it is a view of that is among the seen ones."""
        while tensor not in seen and (spec := self.tensor_by_id.get(tensor)) is not None and spec.base is not None:
            tensor = spec.base
        return tensor

    @cached_property
    def producer(self) -> dict[str, str]:
        """Tensor id → id of the op that makes it."""
        return {t: op.id for op in self.ops for t in op.outputs}

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Tensor id → ids of the ops that read it, in execution order."""
        found: dict[str, list[str]] = {}
        for op in self.ops:
            for t in dict.fromkeys(op.inputs):
                found.setdefault(t, []).append(op.id)
        return {t: tuple(ops) for t, ops in found.items()}

    def extended(self, other: OpGraph) -> OpGraph:
        """With the ops and tensors of another step's graph that this one lacks. Each op comes after the one that ran
        before it there, and after those that make what it reads. What both have stays as it is here."""
        order = list(self.ops)
        here = {op.id: op for op in self.ops}
        makers = {t: op for op in self.ops for t in op.outputs}
        before: Op | None = None
        for op in other.ops:
            if op.id not in here:
                earlier = [makers[t] for t in op.inputs if t in makers] + ([] if before is None else [before])
                order.insert(max((order.index(e) for e in earlier), default=-1) + 1, op)
                makers |= dict.fromkeys(op.outputs, op)
            before = here.get(op.id, op)
        if len(order) == len(self.ops):
            return self
        new = tuple(t for t in other.tensors if t.id not in self.tensor_by_id)
        first = tuple(dict.fromkeys((*self.first_ops, *other.first_ops)))
        return replace(self, ops=tuple(order), tensors=self.tensors + new, first_ops=first)

    @cached_property
    def fingerprint(self) -> str:
        """Structure only (ids, kinds, edges, parameter shapes): equal across batch sizes and processes."""
        digest = hashlib.sha256()
        for op in self.ops:
            digest.update(repr((op.id, op.kind, op.inputs, op.outputs)).encode())
        for t in self.tensors:
            if t.kind is TensorKind.PARAMETER:
                digest.update(repr((t.id, t.shape)).encode())
        return digest.hexdigest()[:16]


def shared_path(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    """What two paths of activation checkpoints, outermost first, have in common: the checkpoints around both ops."""
    return tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
