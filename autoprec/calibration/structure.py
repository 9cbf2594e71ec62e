"""What an observed step tells about structure: shapes, saved tensors, FLOPs. Gives the `OpGraph`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoprec.graphs import Op, OpClass, OpGraph, TensorKind, TensorSpec
from autoprec.tracing.bindings import Binding, OpNode
from autoprec.tracing.kinds import GROUPED

__all__ = ["StructureRecorder", "TensorMeta", "TimingCase", "flops_of"]


@dataclass(frozen=True)
class TensorMeta:
    """Enough of a tensor to make another like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class TimingCase(NamedTuple):
    """One call of an op, tensors replaced by their metadata: what timing needs."""

    op: OpNode
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Kept:
    op: OpNode
    saves: list[str] = field(default_factory=list)
    private_bytes: int = 0
    calls: int = 0
    timing_key: str = ""
    flops: int = 0


_NO_HOOKS = (Tensor.detach, lambda x: x)


class StructureRecorder:
    """Mutable record of one training step; `graph()` at its end."""

    def __init__(self) -> None:
        self._ops: dict[str, _Kept] = {}
        self._tensors: dict[str, TensorSpec] = {}
        self._owner_of_storage: dict[int, str] = {}
        self._same_as: dict[str, str | None] = {}
        self._parameters: set[int] = set()
        #: Inputs of integers or booleans, and "" for what nobody owns.
        self._integers = {""}
        self._pending: list[Tensor] = []
        #: Fake tensors, whose storages are told apart by address: another must not get it.
        self.alive: list[Any] = []
        self.cases: dict[str, TimingCase] = {}
        self._inputs: dict[str, int] = {}
        self._bases: dict[str, str | None] = {}
        self._crossing: dict[tuple[Any, ...], str] = {}

    def placeholder(self, binding: Binding, node: fx.Node, x: Tensor) -> None:
        """An input, parameter or buffer of a graph."""
        tensor_id = binding.tensor_id.get(node)
        if tensor_id is None:
            return
        if node in binding.parameters:
            kind = TensorKind.PARAMETER
            self._parameters.add(_pointer(x))
        elif node in binding.buffers:
            kind = TensorKind.BUFFER
            self._parameters.add(_pointer(x))
        else:
            kind = TensorKind.INPUT
            self._inputs.setdefault(tensor_id, x.numel() * x.element_size())
            if _counts(x):
                self._integers.add(tensor_id)
        self._tensor(tensor_id, x, kind)
        owner = self._owner_of_storage.get(_pointer(x))
        if owner != tensor_id and any(binding.tensor_id.get(n) == owner for n in binding.template.placeholders):
            self._same_as.setdefault(tensor_id, owner)  # two inputs are views of one tensor
        else:
            self._owner_of_storage[_pointer(x)] = tensor_id

    def called(self, binding: Binding, arguments: Sequence[Any], outputs: Any) -> None:
        """A call of a graph, as it ran: which inputs are what another graph returned, or was given."""
        given = [
            (binding.tensor_id.get(n, ""), x) for n, x in zip(binding.template.placeholders, arguments, strict=True)
        ]
        returned = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        for tensor_id, x in [*given, *((t, returned[i]) for i, t in binding.outputs)]:
            if type(x) is not Tensor or x.layout is not torch.strided:
                continue
            # Nothing else gets an address that a weak reference is held to. The same view, or any of that memory.
            storage = StorageWeakRef(x.untyped_storage())
            shared = self._crossing.setdefault((storage,), tensor_id)
            same = self._crossing.setdefault((storage, x.storage_offset(), x.shape, x.stride()), tensor_id)
            known = shared if same == tensor_id else same
            if tensor_id in self._inputs:
                self._bases.setdefault(tensor_id, None if known == tensor_id else known)

    def _tensor(self, tensor_id: str, x: Tensor, kind: TensorKind, base: str | None = None) -> None:
        if tensor_id not in self._tensors:
            self._tensors[tensor_id] = TensorSpec(
                id=tensor_id,
                shape=tuple(x.shape),
                dtype=str(x.dtype).removeprefix("torch."),
                kind=kind,
                requires_grad=x.requires_grad,
                base=base,
            )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While an op runs, note what autograd keeps for its backward; hooks that are in force (a checkpoint's, the
        user's own) go on doing their work."""
        kept: list[Tensor] = []
        mode = detect_fake_mode()
        outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or _NO_HOOKS

        def pack(x: Tensor) -> Any:
            # torch.cond traces its branches with fake tensors when it runs; those of a foreseen call have its mode.
            if type(x) in (Tensor, nn.Parameter) or getattr(x, "fake_mode", None) is mode is not None:
                kept.append(x.detach())
            return outer_pack(x)

        with torch.autograd.graph.saved_tensors_hooks(pack, outer_unpack):
            yield
        self._pending = kept

    def op(self, op: OpNode, arguments: tuple[tuple[Any, ...], dict[str, Any]], result: Any) -> None:
        """An op that has just run."""
        args, kwargs = arguments
        record = self._ops.get(op.id)
        if record is None:
            record = self._ops[op.id] = _Kept(op=op)
            record.timing_key = timing_key(op, args, kwargs)
            record.flops = flops_of(op.kind, args, kwargs, result)
            self.cases.setdefault(record.timing_key, TimingCase(op, _metadata(args), _metadata(kwargs)))
        record.calls += 1
        values = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(v, Tensor)]
        base = op.inputs[0][1] if op.inputs and (op.op_class is OpClass.VIEW or op.inplace is not None) else None
        for tensor_id, y in zip(op.outputs, values, strict=False):
            given = any(_pointer(y) == _pointer(x) for x in tensors_of(arguments))
            if given and _counts(y) and self._owner_of_storage.get(_pointer(y), "") in self._integers:
                continue  # a view of integers that no op of the graph makes: an index, shown as it is needed
            shares = base is not None and given
            self._tensor(tensor_id, y, TensorKind.ACTIVATION, base if shares else None)
            if given and base is None:  # a cast that casts nothing gives its argument back
                self._same_as.setdefault(tensor_id, self._owner_of_storage.get(_pointer(y)))
            elif not shares:
                self._owner_of_storage[_pointer(y)] = tensor_id
        if record.calls == 1:
            self._saved(record)
        self._pending = []

    def unseen(self, op: OpNode) -> None:
        """An op inside a torch.func transform: it is listed, but its tensors have no bytes of their own."""
        self._ops.setdefault(op.id, _Kept(op=op)).calls += 1

    def _saved(self, record: _Kept) -> None:
        op = record.op
        given, made = [i for _, i in op.inputs], list(op.outputs)
        # What ran in place here, and will not, keeps its result, if it keeps what has that place.
        own = dict.fromkeys(made + given if op.functional else given + made)
        seen: set[tuple[int, ...]] = set()
        for x in self._pending:
            pointer = _pointer(x)
            owner = self._owner_of_storage.get(pointer)
            if owner in self._integers and owner not in own:
                continue  # an input counts as one
            sharing = [t for t in own if t == owner or self._shares(t, owner)]
            # Of one memory, parts (queries, keys and values) are kept one by one.
            key = (pointer, x.storage_offset(), x.numel()) if sharing else (pointer,)
            if key in seen or pointer in self._parameters or x.numel() == 0:
                continue
            seen.add(key)
            if not sharing and owner is None and (copied := self._copied_by(op, x)) is not None:
                sharing = [copied]
            alike = [t for t in sharing if t not in record.saves and self._tensors[t].numel == x.numel()]
            if sharing:
                match = (alike or sharing)[0]
                record.saves += [match] if match not in record.saves else []
            else:
                record.private_bytes += x.untyped_storage().nbytes()

    def _copied_by(self, op: OpNode, kept: Tensor) -> str | None:
        """What ran in place here, and will not, kept a copy of what it was given before that was gone: then it will
        keep what it is given."""
        if not op.functional or not op.inputs or (spec := self._tensors.get(op.inputs[0][1])) is None:
            return None
        alike = spec.shape == tuple(kept.shape) and spec.dtype == str(kept.dtype).removeprefix("torch.")
        return spec.id if alike else None

    def _shares(self, tensor_id: str, owner: str | None) -> bool:
        current: str | None = tensor_id
        passed: set[str] = set()
        while current is not None and current not in passed:
            if current == owner:
                return True
            passed.add(current)
            spec = self._tensors.get(current)
            current = spec.base if spec is not None and spec.base is not None else self._same_as.get(current)
        return False

    def graph(
        self,
        model: str,
        parameter_bytes: int,
        gradient_bytes: int,
        optimizer_bytes: int,
        outputs: Mapping[str, bool],
        bindings: Iterable[Binding],
        *,
        compiled: bool,
    ) -> OpGraph:
        """Everything seen, as a value. `outputs`: what graphs return, and whether a gradient came back to it."""
        first = [next((op.id for op in binding.ops if op.id in self._ops), "") for binding in bindings]
        ops = tuple(
            Op(
                id=k.op.id,
                kind=k.op.kind,
                op_class=k.op.op_class,
                fqn=k.op.fqn,
                # Results of ops on integers alone, and those inside transforms, are not recorded.
                inputs=tuple(i for _, i in k.op.inputs if i in self._tensors),
                outputs=tuple(i for i in k.op.outputs if i in self._tensors),
                weights=k.op.weights,
                flops=k.flops,
                saves=tuple(k.saves),
                private_saved_bytes=k.private_bytes,
                pinned=k.op.pinned,
                timing_key=k.timing_key,
                calls=k.calls,
                checkpoints=k.op.checkpoints,
            )
            for k in self._ops.values()
        )
        used = {t for op in ops for t in (*op.inputs, *op.outputs, *op.saves)}
        known = {t: s for t, s in self._tensors.items() if t in used}
        bases = {t: s.base for t, s in known.items()} | {t: b for t, b in self._bases.items() if b in used}
        # What is made inside of a transform is no tensor of the graph, though a view of it may be one.
        tensors = tuple(_marked(s, outputs.get(t), bases[t] if bases[t] in known else None) for t, s in known.items())
        return OpGraph(
            model=model,
            ops=ops,
            tensors=tensors,
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            input_bytes=sum(size for t, size in self._inputs.items() if self._bases.get(t) is None),
            first_ops=tuple(dict.fromkeys(op for op in first if op)),
            compiled=compiled,
        )


def _marked(t: TensorSpec, used: bool | None, base: str | None) -> TensorSpec:
    return TensorSpec(
        id=t.id,
        shape=t.shape,
        dtype=t.dtype,
        kind=t.kind,
        requires_grad=t.requires_grad,
        base=base,
        is_output=used is not None,
        is_unused=used is False,
    )


def _counts(x: Tensor) -> bool:
    """Whether it holds integers or booleans."""
    return not (x.is_floating_point() or x.is_complex())


def _pointer(x: Tensor) -> int:
    """Whose memory it is; of a fake tensor, which storage."""
    if not x.numel():
        return -id(x)
    return x.untyped_storage()._cdata if isinstance(x, FakeTensor) else x.untyped_storage().data_ptr()


def _metadata(value: Any) -> Any:
    def meta(v: Any) -> Any:
        if isinstance(v, Tensor):
            return TensorMeta(tuple(v.shape), tuple(v.stride()), v.dtype, v.device, v.requires_grad)
        return v

    return fx.node.map_aggregate(value, meta)


def timing_key(op: OpNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Equal for calls that cost the same: kind, shapes, strides' order, dtypes and plain options."""

    def describe(v: Any) -> str:
        if isinstance(v, Tensor):
            dense = "" if v.is_contiguous() else "~"
            return f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}{dense}{'' if v.requires_grad else '!'}"
        if isinstance(v, (tuple, list)):
            return "(" + ",".join(describe(e) for e in v) + ")"
        return v.code if isinstance(v, fx.GraphModule) else repr(v)

    parts = [describe(a) for a in args] + [f"{k}={describe(v)}" for k, v in sorted(kwargs.items())]
    how = "".join(("", " in place")[op.inplace is not None] + ("", " pinned")[op.pinned])
    how += f" recomputed {len(op.checkpoints)}" if op.checkpoints else ""
    return f"{op.kind}({', '.join(parts)}) {op.op_class.value}{how}"


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor in nested arguments."""
    found: list[Tensor] = []
    fx.node.map_aggregate(tree, lambda a: found.append(a) if isinstance(a, Tensor) else None)
    return found


def flops_of(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Multiplications and additions of the forward pass of the ops that matter; 0 for the rest."""
    tensors = tensors_of((args, kwargs))
    if kind in ("linear", "matmul", "bmm", "mm", "addmm", *GROUPED) and isinstance(result, Tensor):
        return 2 * result.numel() * tensors[kind == "addmm"].shape[-1]
    if kind.startswith("conv") and isinstance(result, Tensor):
        places = tensors[0] if "transpose" in kind else result
        return 2 * places.numel() * math.prod(tensors[1].shape[1:])
    if kind in ("baddbmm", "addbmm") and isinstance(result, Tensor):
        batch = tensors[1].shape[0] if kind == "addbmm" else 1
        return 2 * batch * result.numel() * tensors[1].shape[-1]
    if kind == "einsum" and isinstance(result, Tensor) and isinstance(args[0], str):
        return _flops_of_einsum(args[0], tensors, result)
    if kind == "scaled_dot_product_attention":
        q, k, v = tensors[:3]
        return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        steps = math.prod(tensors[0].shape[:-1])
        return 2 * steps * sum(t.numel() for t in tensors[1:] if t.dim() == 2)
    if kind == "multi_head_attention_forward":
        query, key, _, in_proj = tensors[:4]
        length, batch, width = query.shape
        projections = 2 * length * batch * width * (in_proj.shape[0] + width)
        return projections + 4 * batch * length * key.shape[0] * width
    return 0


def _flops_of_einsum(equation: str, operands: list[Tensor], result: Tensor) -> int:
    """Two for each element of the result and each combination of the indices that are summed over; of two operands."""
    left, _, right = equation.replace(" ", "").partition("->")
    size = {}
    for names, operand in zip(left.split(","), operands, strict=False):
        first, _, last = names.partition("...")
        size |= dict(zip(first, operand.shape, strict=False))
        size |= dict(zip(reversed(last), reversed(operand.shape), strict=False))
    letters = [c for c in left if c.isalpha()]
    kept = right if "->" in equation else [c for c in letters if letters.count(c) == 1]
    return 2 * result.numel() * math.prod(n for c, n in size.items() if c not in kept)
