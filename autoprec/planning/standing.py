"""Gradients that stay after the op whose backward pass made them, whatever the plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

from autoprec.graphs import Op, OpGraph, TensorKind
from autoprec.planning.breaks import Crossing
from autoprec.planning.roots import Roots
from autoprec.planning.values import Standing

__all__ = ["passing_bytes", "readers_of_parameters", "standing"]


def passing_bytes(op: Op, graph: OpGraph) -> int:
    """Bytes of the FP32 gradients of an op's parameters: made beside those that are there, added to them, and gone. A
    compiled graph holds its own until its end (`standing`)."""
    return 0 if graph.compiled else _bytes(op.weights, graph)


def _bytes(weights: Iterable[str], graph: OpGraph) -> int:
    specs = [graph.tensor_by_id.get(f"param:{w}") for w in weights]
    return sum(4 * spec.numel for spec in specs if spec is not None and spec.requires_grad)


def standing(graph: OpGraph, roots: Roots, crossing: Mapping[str, Crossing], end: int) -> Iterator[Standing]:
    """The gradients that enter at the outputs, kept until the step is over, to replay it: from the turn, or from when
    another graph sends them; those of parameters that several ops read; and those of the weights of a compiled graph,
    which it gives all at once. `end` is the last moment."""
    moment = {op.id: i for i, op in enumerate(graph.ops)}
    if not graph.compiled:
        yield from _of_several(graph, roots, end)
    for t in graph.tensors:
        if t.gets_gradient:
            first = crossing[t.id].sent if t.id in crossing else (end + 1) // 2
            if first <= end:  # after the backward pass of a first graph of one op there is nothing more
                yield Standing(what="gradients of the outputs", first=first, last=end, bytes=4 * t.numel)
    starts = sorted(moment[op] for op in graph.first_ops if op in moment)
    known: set[str] = set()
    for op in reversed(graph.ops if graph.compiled else ()):
        new = set(op.weights) - known  # what several ops read has one gradient
        known |= new
        if size := _bytes(new, graph):
            first = moment[op.id]
            begin = starts[k - 1] if (k := bisect_right(starts, first)) else 0
            what = f"gradients of the weights of {op.id}"
            yield Standing(what=what, first=end - first, last=end - begin, bytes=size)


def readers_of_parameters(graph: OpGraph, roots: Roots) -> dict[str, list[int]]:
    """Parameter that several ops read → their forward moments."""
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        if not roots.is_view(op):
            for t in dict.fromkeys(roots.root_of[t] for t in op.inputs):
                readers.setdefault(t, []).append(i)
    specs = graph.tensor_by_id
    return {t: found for t, found in readers.items() if len(found) > 1 and specs[t].kind is TensorKind.PARAMETER}


def _of_several(graph: OpGraph, roots: Roots, end: int) -> Iterator[Standing]:
    """What the readers of a parameter send is added up before it is added to the gradient that is there."""
    for t, (first, *_, last) in readers_of_parameters(graph, roots).items():
        spec = graph.tensor_by_id[t]
        if spec.requires_grad:
            yield Standing(what=f"gradient of {t}", first=end - last + 1, last=end - first, bytes=4 * spec.numel)
