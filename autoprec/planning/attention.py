"""Attention without one kernel for both passes (with dropout on a CPU, or with a trained mask)."""

from __future__ import annotations

from dataclasses import replace

from autoprec.graphs import ATTENTION, Op, OpGraph
from autoprec.planning.roots import Roots

__all__ = ["is_unfused", "with_what_attention_keeps"]


def is_unfused(op: Op) -> bool:
    """Whether it is attention that runs op by op: a kernel for both passes keeps its result."""
    keeps = op.private_saved_bytes > 0 or bool(op.saves)  # all counts as what it is given, once that is told
    return op.kind == ATTENTION and keeps and not set(op.outputs) & set(op.saves)


def with_what_attention_keeps(graph: OpGraph, roots: Roots) -> OpGraph:
    """The graph where unfused attention keeps all that it is given, which is what ours does in a narrow format
    (`numerics.lean`). As written it keeps copies of queries, keys and values, and the sum of scores and a mask, all as
    large as these: they count as these, and no longer among what it keeps besides."""
    specs, kept = graph.tensor_by_id, {roots.root_of[t] for op in graph.ops for t in op.saves}
    ops = []
    for op in graph.ops:
        if is_unfused(op):
            copies = [t for t in op.inputs if roots.root_of[t] not in kept and specs[t].is_float32]
            kept |= {roots.root_of[t] for t in op.inputs}
            private = max(0, op.private_saved_bytes - sum(4 * specs[t].numel for t in copies))
            op = replace(op, saves=tuple(dict.fromkeys((*op.saves, *op.inputs))), private_saved_bytes=private)
        ops.append(op)
    return replace(graph, ops=tuple(ops))
