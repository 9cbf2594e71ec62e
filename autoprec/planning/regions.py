"""FP16 regions: which ops share a gradient scale, and which one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind
from autoprec.planning.pricing import Prices, fp16_gradient_scale_log2, told_scale
from autoprec.planning.roots import Roots
from autoprec.plans import Region

__all__ = ["fp16_regions", "summed_in_fp16"]


def fp16_regions(
    graph: OpGraph, roots: Roots, prices: Prices, format_of: dict[tuple[str, Role], str]
) -> tuple[Region, ...]:
    """Maximal sets of FP16 ops that are connected through tensors with gradients, in forward order.

    Two ops are connected if both make or read the same root tensor in FP16. An op with FP16 only in its gradient roles
    is a region of its own. The scale is the largest power of two that keeps the largest gradient seen at the region's
    tensors eight octaves below FP16's maximum (three, where others of them are far smaller); parameters are among them
    where the sum over rows that their gradient is comes out in FP16 as well: those that pointwise ops read (a norm's
    gain, written by hand), and weights of products whose gradient FP16 makes.
    """
    narrow = [op for op in graph.ops if any(format_of.get((op.id, r)) == "fp16" for r in op.roles)]
    parent = {op.id: op.id for op in narrow}

    def find(op: str) -> str:
        while parent[op] != op:
            op = parent[op]
        return op

    first: dict[str, str] = {}
    for op in narrow:
        if format_of.get((op.id, Role.OUTPUT)) != "fp16":
            continue
        for t in _flowing(op, graph):
            root = roots.root_of[t]
            while root in roots.copied_from:
                root = roots.copied_from[root]
            a, b = find(first.setdefault(root, op.id)), find(op.id)
            parent[b] = a
    members: dict[str, list[Op]] = {}
    for op in narrow:
        members.setdefault(find(op.id), []).append(op)
    return tuple(_region(ops, graph, prices, format_of) for ops in members.values())


def _flowing(op: Op, graph: OpGraph) -> list[str]:
    """Tensors of an op through which gradients flow inside a region."""
    specs = graph.tensor_by_id
    return [
        t
        for t in dict.fromkeys((*op.inputs, *op.outputs))
        if specs[t].is_float32 and specs[t].requires_grad and specs[t].kind is not TensorKind.PARAMETER
    ]


def summed_in_fp16(op: Op, graph: OpGraph, format_of: Mapping[tuple[str, Role], str]) -> list[str]:
    """Parameters whose gradient an FP16 op sums up in FP16: all that an op without a role for it reads, else the weight
    if that role is FP16 (a bias's gradient is summed up in FP32)."""
    if op.op_class in (OpClass.POINTWISE, OpClass.RECURRENT):
        narrow = any(format_of.get((op.id, r)) == "fp16" for r in op.roles)
        return [t for t in op.inputs if narrow and graph.tensor_by_id[t].kind is TensorKind.PARAMETER]
    in_fp16 = format_of.get((op.id, Role.GRAD_WEIGHT)) == "fp16"
    return [f"param:{weight}" for weight in op.weights[:1] if in_fp16]


def _region(ops: list[Op], graph: OpGraph, prices: Prices, format_of: dict[tuple[str, Role], str]) -> Region:
    concerned = [t for op in ops for t in (*_flowing(op, graph), *summed_in_fp16(op, graph, format_of))]
    found = [(h.amax, t) for t in concerned if (h := prices.gradients(t)) is not None]
    amax, where = max(found, default=(0.0, ""))
    scale = fp16_gradient_scale_log2(amax, min((a for a, _ in found if a > 0.0), default=math.inf))
    nobody = "no gradient was observed here, so none is scaled"
    reason = told_scale(amax, where, scale) if amax > 0.0 else nobody
    return Region(ops=tuple(op.id for op in ops), scale_log2=scale, reason=reason)
