"""A template bound to the owner of its parameters: every node gets its op id, every value its tensor id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoprec.graphs import KERNEL_PRODUCTS, Decided, OpClass
from autoprec.tracing.checkpoints import Checkpoint
from autoprec.tracing.gemms import GemmCall, gemm_call
from autoprec.tracing.kinds import (
    FUNCTION,
    casts_nothing,
    changes_mode,
    class_of,
    enters_transform,
    inplace_target,
    is_user_cast,
    kind_of,
    returns_float32,
)
from autoprec.tracing.proportions import is_proportional
from autoprec.tracing.sites import SiteRegister
from autoprec.tracing.templates import Path, Template, module_path, user_frame

__all__ = ["Binding", "OpNode", "bind"]


@dataclass(frozen=True, eq=False)
class OpNode(Decided):
    """One op of a bound template.

    Attributes:
        node: the fx node.
        id, kind, op_class, fqn: as in `graphs.Op`.
        inputs: (argument node, tensor id) for every tensor argument, in order; twice for what is read in two places.
        outputs: ids of what it returns.
        weights: FQNs of the parameters among its arguments.
        inplace: the node whose memory it changes, None if none or if it can run out of place (`functional`).
        functional: True if an in-place spelling may run out of place, because nobody else sees the memory.
        pinned: True if the user's own casts promise FP32 here.
        checkpoints: ids of the checkpoints around it, outermost first.
        transformed: True inside a torch.func transform, whose values cannot be looked at: it runs as written.
        gemm: the product with a parameter that it is, None for every other op; its tensors come first in `inputs`.
    """

    node: fx.Node
    id: str
    kind: str
    op_class: OpClass
    fqn: str
    inputs: tuple[tuple[fx.Node, str], ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    inplace: fx.Node | None
    functional: bool
    pinned: bool
    checkpoints: tuple[str, ...]
    transformed: bool
    gemm: GemmCall | None


@dataclass(frozen=True, eq=False)
class Binding:
    """A template and its owner.

    Attributes:
        template: the shared graph.
        parameters: placeholder → FQN.
        buffers: placeholder → FQN.
        ops: in execution order; nodes that touch no floating-point tensor are not among them.
        tensor_id: node → id of the (single) tensor that it stands for.
        op_of: node → op.
    """

    template: Template
    parameters: Mapping[fx.Node, str]
    buffers: Mapping[fx.Node, str]
    ops: tuple[OpNode, ...]
    tensor_id: Mapping[fx.Node, str]

    @property
    def op_of(self) -> dict[fx.Node, OpNode]:
        """Node → op."""
        return {op.node: op for op in self.ops}

    @cached_property
    def covers(self) -> frozenset[str]:
        """FQNs of the parameters that the graph is called with."""
        return frozenset(self.parameters.values())

    @cached_property
    def outputs(self) -> tuple[tuple[int, str], ...]:
        """What the graph returns: place and tensor id."""
        returned = self.template.flat.graph.output_node().args[0]
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        return tuple((i, self.tensor_id[n]) for i, n in enumerate(results) if n in self.tensor_id)


class _Owner:
    """Maps template module paths to FQNs of the owner."""

    def __init__(self, pairs: Sequence[tuple[Path, Path]]) -> None:
        self._fqn: dict[Path, Path] = {}
        for path, fqn in pairs:
            if not path or not fqn or path[-1] != fqn[-1]:
                continue
            p, f = path[:-1], fqn[:-1]
            self._fqn.setdefault(p, f)
            while p and f and p[-1] == f[-1]:
                p, f = p[:-1], f[:-1]
                self._fqn.setdefault(p, f)
        roots = {p[:1] for p in self._fqn if p}
        self._root = next(iter(roots)) if len(roots) == 1 else ()

    def fqn(self, path: Path) -> str:
        path = path or self._root
        for cut in range(len(path), 0, -1):
            known = self._fqn.get(path[:cut])
            if known is not None:
                return ".".join(known + path[cut:])
        return ".".join(path[1:])


def _closest_name(path: Path, names: Sequence[str]) -> str:
    """Of a tied parameter's FQNs, the one that shares the longest tail with the template path."""

    def shared(name: str) -> int:
        tail = 0
        for a, b in zip(reversed(path), reversed(name.split(".")), strict=False):
            if a != b:
                break
            tail += 1
        return tail

    return max(names, key=shared)


def bind(
    template: Template,
    arguments: Sequence[Any],
    names: Mapping[int, Sequence[str]],
    buffer_names: Mapping[int, str],
    sites: SiteRegister,
) -> Binding:
    """Bind a template to whoever calls it with `arguments`.

    names: id(parameter) → its FQNs, the canonical one first. buffer_names: id(buffer) → FQN.
    """
    parameters: dict[fx.Node, str] = {}
    pairs: list[tuple[Path, Path]] = []
    for position, path in zip(template.parameter_positions, template.parameter_paths, strict=True):
        fqns = names.get(id(arguments[position]))
        if not fqns:
            continue
        parameters[template.placeholders[position]] = fqns[0]
        pairs.append((path, tuple(_closest_name(path, fqns).split("."))))
    buffers = {
        node: buffer_names[id(value)]
        for node, value in zip(template.placeholders, arguments, strict=True)
        if id(value) in buffer_names
    }
    walk = _Walk(template, parameters, buffers, _Owner(pairs), sites)
    for node in template.flat.graph.nodes:
        walk.visit(node)
    return Binding(
        template=template,
        parameters=parameters,
        buffers=buffers,
        ops=tuple(walk.ops),
        tensor_id=walk.tensor_id,
    )


class _Walk:
    """One pass over a template's nodes that names everything."""

    def __init__(
        self,
        template: Template,
        parameters: Mapping[fx.Node, str],
        buffers: Mapping[fx.Node, str],
        owner: _Owner,
        sites: SiteRegister,
    ) -> None:
        self.template, self.parameters, self.buffers, self.owner, self.sites = (
            template,
            parameters,
            buffers,
            owner,
            sites,
        )
        self.ops: list[OpNode] = []
        self.tensor_id: dict[fx.Node, str] = {}
        self._parts: dict[fx.Node, tuple[str, ...]] = {}
        self._promised: set[fx.Node] = set()
        self._functional: set[fx.Node] = set()
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._checkpoint_ids: dict[Checkpoint, str] = {}
        self._transforms = 0
        self._label = self._first_site()

    def _first_site(self) -> str:
        """The place of the first op: inputs of graphs are told apart by it, in every process alike."""
        for node in self.template.flat.graph.nodes:
            if node.op in ("call_function", "call_method") and isinstance(node.meta.get("example_value"), torch.Tensor):
                fqn, kind = self.owner.fqn(module_path(node)), kind_of(node)
                return f"{fqn}/{kind}/{self.sites.number(fqn, kind, user_frame(node), 0)}"
        return ""

    def visit(self, node: fx.Node) -> None:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor):
                self.tensor_id[node] = self._input_id(node)
        elif node.op == "get_attr":
            if isinstance(value, torch.Tensor):
                self.tensor_id[node] = f"input:{self._label}.{node.target}"
        elif node.op in ("call_function", "call_method"):
            if not self._is_part(node):
                self._transforms += enters_transform(node)
                self._visit_call(node, value)

    def _input_id(self, node: fx.Node) -> str:
        if node in self.parameters:
            return f"param:{self.parameters[node]}"
        if node in self.buffers:
            return f"buffer:{self.buffers[node]}"
        return f"input:{self._label}.{node.name}"

    def _is_part(self, node: fx.Node) -> bool:
        """`getitem` that only picks one result of an op with several."""
        if kind_of(node) != "getitem" or not node.args:
            return False
        source, index = node.args[0], node.args[1]
        if not isinstance(source, fx.Node) or source not in self._parts or not isinstance(index, int):
            return False
        parts = self._parts[source]
        if isinstance(node.meta.get("example_value"), torch.Tensor) and -len(parts) <= index < len(parts):
            self.tensor_id[node] = parts[index]
            if source in self._promised:
                self._promised.add(node)
        return True

    def _visit_call(self, node: fx.Node, value: Any) -> None:
        results = [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else [value]
        results = [v for v in results if isinstance(v, torch.Tensor)]
        arguments: list[fx.Node] = []  # in each place, also where two have the same
        fx.node.map_arg((node.args, node.kwargs), arguments.append)
        arguments = [n for n in arguments if n in self.tensor_id]
        changed = inplace_target(node)
        floats = [v for v in results if v.is_floating_point() or v.is_complex()]
        read_floats = [n for n in arguments if n.meta["example_value"].is_floating_point()]
        if not results and changed is None:
            return
        kind = kind_of(node)
        fqn = self.owner.fqn(module_path(node))
        op_id = self._site(node, fqn, kind)
        outputs = self._name_results(node, op_id, value, len(results))
        if not floats and not read_floats:
            return
        functional = changed is not None and self._may_run_out_of_place(node, changed)
        if functional:
            self._functional.add(node)
        gemm = gemm_call(kind, node, self.parameters)
        op_class = self._class(node, kind, changed if not functional else None, arguments, gemm)
        pinned = self._promise(node, op_class, arguments)
        if op_class is not OpClass.GEMM:
            gemm = None
        elif gemm is not None:
            arguments = list(gemm.tensors)
        named = arguments
        if op_class is OpClass.GEMM:
            # A product whose parameter is not in the place of a weight is a product of two activations.
            named = [] if gemm is None else [n for n in (gemm.parameter, gemm.bias) if n is not None]
        weights = tuple(self.parameters[n] for n in named if n in self.parameters)
        self.ops.append(
            OpNode(
                node=node,
                id=op_id,
                kind=kind,
                op_class=op_class,
                fqn=fqn,
                inputs=tuple((n, self.tensor_id[n]) for n in arguments),
                outputs=outputs,
                weights=weights,
                inplace=None if functional else changed,
                functional=functional,
                pinned=pinned,
                checkpoints=self._checkpoints(node),
                transformed=self._transforms > 0,
                gemm=gemm,
            )
        )
        if changed is not None and not functional and outputs and changed.op != "placeholder":
            self.tensor_id[changed] = outputs[0]  # later readers see the changed values

    def _site(self, node: fx.Node, fqn: str, kind: str) -> str:
        frame = user_frame(node)
        self._seen[(fqn, kind, frame)] += 1
        number = self.sites.number(fqn, kind, frame, self._seen[(fqn, kind, frame)] - 1)
        return f"{fqn}:{kind}#{number}"

    def _checkpoints(self, node: fx.Node) -> tuple[str, ...]:
        path = self.template.flat.within.get(node, ())
        for checkpoint in path:
            if checkpoint not in self._checkpoint_ids:
                fqn = self.owner.fqn(module_path(checkpoint.node))
                self._checkpoint_ids[checkpoint] = self._site(checkpoint.node, fqn, "checkpoint")
        return tuple(self._checkpoint_ids[checkpoint] for checkpoint in path)

    def _name_results(self, node: fx.Node, op_id: str, value: Any, count: int) -> tuple[str, ...]:
        if isinstance(value, torch.Tensor):
            self.tensor_id[node] = op_id
            return (op_id,)
        if isinstance(value, (tuple, list)):
            self._parts[node] = tuple(op_id if i == 0 else f"{op_id}.{i}" for i in range(len(value)))
            return tuple(name for name, v in zip(self._parts[node], value, strict=True) if isinstance(v, torch.Tensor))
        return ()

    def _class(
        self,
        node: fx.Node,
        kind: str,
        changed: fx.Node | None,
        arguments: Sequence[fx.Node],
        gemm: GemmCall | None,
    ) -> OpClass:
        """The table's class, narrowed by what this call looks like."""
        if self._transforms:
            return OpClass.UNKNOWN
        op_class = class_of(kind)
        if kind == FUNCTION and self._is_pointwise_function(node):
            op_class = OpClass.POINTWISE
        if changed is not None:
            # In-place ops compute in the format of the memory that they change; products have no formats of their own.
            if op_class in (OpClass.POINTWISE, OpClass.NORM, OpClass.VIEW):
                return OpClass.VIEW
            return op_class if op_class is OpClass.UNKNOWN else OpClass.WIDE
        if op_class in (OpClass.GEMM, OpClass.POINTWISE, OpClass.NORM, OpClass.RECURRENT, OpClass.LOOKUP):
            result = node.meta.get("example_value")
            several = kind == FUNCTION or op_class is OpClass.RECURRENT
            results = result if isinstance(result, (tuple, list)) and several else (result,)
            told = any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values()))
            if not all(map(returns_float32, results)) or "out" in node.kwargs or told:
                return OpClass.WIDE
            floats = {d for n in arguments if (d := n.meta["example_value"].dtype).is_floating_point or d.is_complex}
            # Of integers alone (`positions / 8`), and of two kinds of floats, torch's dtype is its own choice.
            if floats != {torch.float32}:
                return OpClass.WIDE
        if op_class is OpClass.GEMM and gemm is None and not _is_product(node, kind):
            return OpClass.WIDE
        if op_class is OpClass.RECURRENT and _is_projected(node):
            return OpClass.WIDE
        if casts_nothing(node):
            return OpClass.VIEW
        result = node.meta.get("example_value")
        if op_class is OpClass.VIEW and isinstance(result, torch.Tensor) and not returns_float32(result):
            return OpClass.WIDE  # view(dtype) shows the bits of the format that the user wrote
        if op_class is OpClass.VIEW and sum(returns_float32(n.meta["example_value"]) for n in arguments) > 1:
            return OpClass.WIDE
        return op_class

    def _is_pointwise_function(self, node: fx.Node) -> bool:
        """Whether both bodies of a user's function consist of pointwise ops, which give the dtype that they take, it
        changes nothing in place, and its gradients may carry a factor."""
        if node.kwargs.get("dirty_idx"):
            return False
        bodies = [self.template.module.get_submodule(str(body.target)) for body in node.args[:2]]  # type: ignore[union-attr]
        for module in bodies:
            calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "output") and not changes_mode(n)]
            if not all(n.op in ("call_function", "call_method") for n in calls):
                return False
            if not all(class_of(kind_of(n)) in (OpClass.POINTWISE, OpClass.VIEW) for n in calls):
                return False
        return is_proportional(*bodies)

    def _promise(self, node: fx.Node, op_class: OpClass, arguments: Sequence[fx.Node]) -> bool:
        """After the user's own cast to FP32 the value stays FP32 until the next GEMM, or until it is cast back.

        `x.to(torch.float32)`, …, `y.to(x.dtype)` both cast to FP32 while the model is FP32; the second is the one that
        finds a value under promise.
        """
        makes_its_own = not any(n.meta["example_value"].is_floating_point() for n in arguments)
        promised = any(n in self._promised for n in arguments)
        if is_user_cast(node) or (node.kwargs.get("dtype") is torch.float32 and not makes_its_own):
            gives_back = promised and kind_of(node) in ("to", "type", "type_as")
            if returns_float32(node.meta.get("example_value")) and not gives_back:
                self._promised.add(node)
            return False
        carried = op_class not in (OpClass.GEMM, OpClass.RECURRENT) and promised
        if carried:
            self._promised.add(node)
        return carried and op_class in (OpClass.POINTWISE, OpClass.NORM)

    def _may_run_out_of_place(self, node: fx.Node, changed: fx.Node) -> bool:
        """True for an in-place pointwise call on a fresh value that nobody else reads."""
        if class_of(kind_of(node)) is not OpClass.POINTWISE or len(changed.users) != 1 or "out" in node.kwargs:
            return False
        if changed.op not in ("call_function", "call_method"):
            return False
        maker = class_of(kind_of(changed))
        if maker not in (OpClass.GEMM, OpClass.NORM, OpClass.POINTWISE, OpClass.LOOKUP):
            return False
        if inplace_target(changed) is not None and changed not in self._functional:
            return False
        tensors = [n.meta["example_value"] for n in node.all_input_nodes if n in self.tensor_id]
        return all(returns_float32(t) or not (t.is_floating_point() or t.is_complex()) for t in tensors)


def _is_projected(node: fx.Node) -> bool:
    """Whether an LSTM's output is smaller than its cell: torch's fused kernels are for those without a projection."""
    state = node.args[1] if len(node.args) > 1 else None
    if not isinstance(state, (tuple, list)) or len(state) != 2 or not all(isinstance(s, fx.Node) for s in state):
        return True  # a packed sequence, or a spelling that is not torch.nn's
    h, c = (s.meta.get("example_value") for s in state if isinstance(s, fx.Node))
    return not (isinstance(h, torch.Tensor) and isinstance(c, torch.Tensor) and h.shape[-1] == c.shape[-1])


def _is_product(node: fx.Node, kind: str) -> bool:
    """A product inside a kernel of torch's, or one of two float32 tensors of at least two dimensions each."""
    if kind in KERNEL_PRODUCTS:
        return True
    operands = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
    if kind not in ("matmul", "mm", "bmm") or len(operands) != 2:
        return False
    values = [n.meta.get("example_value") for n in operands]
    return all(returns_float32(v) and v.dim() >= 2 for v in values)
