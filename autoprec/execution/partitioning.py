"""What a compiled graph keeps for its backward pass: torch's own partitioner under the marks of a plan, read back.

What the plan keeps narrow is marked as must-save, what it makes again as must-recompute (`numerics.compilers`); of what
it keeps as it is, the compiler makes again in the backward pass what costs it nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from autoprec.execution.dry_run import size_hint
from autoprec.execution.lowering import KeptTensor
from autoprec.numerics.compilers import OF_TENSOR

__all__ = ["Narrow", "Partitioner", "results_of"]


class Narrow(NamedTuple):
    """A tensor that the plan does not keep as it is: how many elements it has, torch's name for what it is kept in ("",
    if it is made again), and which tensors that are kept as they are its op reads."""

    numel: int
    dtype: str
    made_of: tuple[str, ...]


class Partitioner(CustomPartitionerFn):
    """torch's own partitioner, under the marks that tracing has left, and what it decided. `outputs`: how many of the
    forward pass's results are no tensors kept for the backward pass; None before the call; `is_lean` is the order's."""

    def __init__(self, narrow: Mapping[str, Narrow], is_lean: bool) -> None:
        self._narrow, self._is_lean = narrow, is_lean
        self.kept: tuple[KeptTensor, ...] = ()
        self.outputs: int | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """(forward graph, backward graph)."""
        count = self.outputs = kwargs.pop("num_fwd_outputs")
        _mark_twins(gm.graph)
        gm.graph = fx_graph_cse(gm.graph)
        _recompute_casts_of_inputs(gm.graph)
        # torch's partitioner honours must-save on what the forward pass needs anyway. So storages are results of it
        # while it decides.
        storages = _storages(gm.graph)
        more = len(storages)
        _splice_outputs(gm, count, count, storages)
        forward, backward = min_cut_rematerialization_partition(
            gm, joint_inputs, num_fwd_outputs=count + more, **kwargs
        )
        _splice_outputs(forward, count, count + more, ())
        nodes = [n for n in results_of(forward)[count:] if isinstance(n, fx.Node) and not _is_of_input(n)]
        there = {_tensor(n) for n in nodes}
        self.kept = tuple(self._kept(n, there) for n in nodes if isinstance(n.meta.get("val"), Tensor))
        return forward, backward

    def _kept(self, node: fx.Node, there: Container[str]) -> KeptTensor:
        value, tensor = node.meta["val"], _tensor(node)
        dtype = str(value.dtype).removeprefix("torch.")
        size, storage, made_of = self._narrow.get(tensor, (0, "", ()))
        # What is in the storage's dtype anyway is not marked: nothing was made of it.
        planned = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE or (bool(size) and dtype == storage)
        # A norm's backward pass reads its input normalized: that may be there in place of the input.
        instead = _is_on_the_way(node) and any(t not in there for t in made_of)
        return KeptTensor(
            tensor=tensor,
            dtype=dtype,
            bytes=size_hint(value.numel()) * value.element_size(),
            planned=planned,
            again=bool(size) and not planned and not instead and 2 * size_hint(value.numel()) > size,
        )

    def __reduce__(self) -> tuple[type[Partitioner], tuple[dict[str, Narrow], bool]]:
        """Torch names code by this too: what is only told of it must not be a part, which another process that
        compiles the same graph does not know."""
        return Partitioner, ({}, self._is_lean)

    def uuid(self) -> str:
        """A part of the name under which code is cached, which does not say by itself whether it may write to what
        the forward pass has kept: what others have compiled of the same graph does. Nor whether it is lean."""
        return f"autoprec, kept tensors are not written to, {'lean' if self._is_lean else 'not lean'}"


def _tensor(node: fx.Node) -> str:
    return str(node.meta.get("custom", {}).get(OF_TENSOR, ""))


def _is_on_the_way(node: fx.Node) -> bool:
    """Whether a node is a part of computing its tensor, and not that tensor, a view or a cast of it."""
    cast = torch.ops.prims.convert_element_type.default
    users = [u for u in node.users if u.op == "call_function" and u.target is not cast and not _is_view(u)]
    return any(_tensor(u) == _tensor(node) for u in users if u.meta.get("recompute") is None)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def results_of(module: fx.GraphModule) -> list[Any]:
    """What a graph returns: nodes, and constants."""
    results = module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return list(results)


def _is_of_input(node: fx.Node) -> bool:
    """Whether it is an input, or a view of one: it takes no bytes."""
    while _is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.op == "placeholder"


def _storages(graph: fx.Graph) -> list[fx.Node]:
    """What is marked as must-save and read by what is not: between them is the way there."""

    def marked(node: fx.Node) -> bool:
        return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE

    # Constants are whoever's, once equal ones are merged.
    tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor) and n.all_input_nodes]
    return [n for n in tensors if marked(n) and not all(map(marked, n.users))]


def _mark_twins(graph: fx.Graph) -> None:
    """Equal nodes are about to become one, with the marks of the first: a storage in BF16 may be the cast that a
    product reads, and what is made again of a tensor kept as it is was made of the same before. So all get the mark."""
    twin: dict[fx.Node, fx.Node] = {}
    equal: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: twin.get(n, n))
            same = equal.setdefault(f"{node.target} {arguments}", [])
            same.append(node)
            twin[node] = same[0]
    for nodes in equal.values():
        marks = {n.meta.get("recompute") for n in nodes}
        for mark in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):
            if mark in marks:
                for n in nodes:
                    n.meta["recompute"] = mark
                break


def _recompute_casts_of_inputs(graph: fx.Graph) -> None:
    """Parameters and inputs live anyway: a copy of one beside it, kept for the backward pass, is no gain."""
    for node in graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default and node.args[0].op == "placeholder":
            if node.meta.get("recompute") is None:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _splice_outputs(module: fx.GraphModule, begin: int, end: int, nodes: Sequence[fx.Node]) -> None:
    """Put nodes in the place of some of a graph's results."""
    output, results = module.graph.output_node(), results_of(module)
    output.args = (tuple([*results[:begin], *nodes, *results[end:]]),)
    if (told := output.meta.get("desc")) is not None:  # what each result is, for error messages
        output.meta["desc"] = [*told[:begin], *[None] * len(nodes), *told[end:]]
    module.recompile()
