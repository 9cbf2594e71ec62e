"""Ops of which ours keep what they are given, where torch's keep other tensors: attention without one kernel for both
passes (with dropout on a CPU, or with a trained mask), cross entropy, and products of two activations that are views
in another order (queries and keys of several heads)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoprec.graphs import ATTENTION, Op, OpGraph
from autoprec.planning.parts import Parts
from autoprec.planning.roots import Roots

__all__ = ["KeptInputs", "is_unfused", "keeps_logits", "with_kept_inputs"]

#: What a mean divides by, in FP32; a class, as an integer.
_TOTAL_BYTES, _CLASS_BYTES = 4, 8

#: With label smoothing, for each class whether it counts, and what the mean of the others divides by: nothing (of a
#: sum), in FP32 (with class weights), or as an integer.
_COUNTS_BYTES, _DIVISOR_BYTES = 1, (0, 4, 8)


def is_unfused(op: Op) -> bool:
    """Whether it is attention that runs op by op: a kernel for both passes keeps its result."""
    keeps = op.private_saved_bytes > 0 or bool(op.saves)  # all counts as what it is given, once that is told
    return op.kind == ATTENTION and keeps and not set(op.outputs) & set(op.saves)


def keeps_logits(op: Op, graph: OpGraph) -> bool:
    """Whether it is a cross entropy of classes, which ours can compute (`numerics.losses`).

    torch's keeps the logarithms of the probabilities, what a mean divides by, and the classes, which count here if they
    are no tensor of the graph. Label smoothing keeps more besides; with probabilities as targets there is nothing to
    divide by.
    """
    if op.kind != "cross_entropy" or not op.inputs or op.inputs[0] not in graph.tensor_by_id:
        return False
    logits = graph.tensor_by_id[op.inputs[0]]
    if not logits.is_float32 or not logits.requires_grad or len(logits.shape) < 2:
        return False
    classes = logits.numel // max(1, logits.shape[1])
    smoothed = (_COUNTS_BYTES * classes + divisor for divisor in _DIVISOR_BYTES)
    more = op.private_saved_bytes - 4 * logits.numel - _TOTAL_BYTES
    besides = [other + own for other in (0, *smoothed) for own in (0, _CLASS_BYTES * classes)]
    return more in besides or op.inputs[0] in op.saves


def _copied(op: Op, graph: OpGraph, roots: Roots) -> tuple[str, ...]:
    """What an op is given, and torch's keeps a contiguous copy of: of attention that runs op by op, and of a product of
    two activations."""
    if is_unfused(op):
        return op.inputs
    if op.weights or not op.is_plain_product:
        return ()
    specs, saved = graph.tensor_by_id, {roots.root_of[t] for t in op.saves}
    found = tuple(t for t in dict.fromkeys(op.inputs) if specs[t].is_float32 and roots.root_of[t] not in saved)
    return found if sum(4 * specs[t].numel for t in found) <= op.private_saved_bytes else ()


@dataclass(frozen=True, kw_only=True)
class KeptInputs:
    """A graph whose ops keep what ours keep in a narrow format.

    Attributes:
        graph: as it is then.
        copied_parts: by op, parts of tensors of which torch's own, all in FP32, keeps contiguous copies instead.
        copied_bytes: by op, FP32 bytes of the copies of whole tensors that torch's own keeps: there beside these while
            they are made.
    """

    graph: OpGraph
    copied_parts: Mapping[str, frozenset[str]]
    copied_bytes: Mapping[str, int]


def with_kept_inputs(graph: OpGraph, roots: Roots, parts: Parts) -> KeptInputs:
    """The graph where these ops keep what they are given, which is what ours do in a narrow format (`numerics.lean`,
    `numerics.losses`). As written, attention keeps copies of queries, keys and values, and the sum of scores and a
    mask, all as large as these, and cross entropy a tensor as large as its logits: they count as these, and no longer
    among what the op keeps besides."""
    specs, kept = graph.tensor_by_id, {parts.copied_of[t] for op in graph.ops for t in op.saves}
    ops, copied_parts, copied_bytes = [], dict[str, frozenset[str]](), dict[str, int]()
    for op in graph.ops:
        given = op.inputs[:1] if keeps_logits(op, graph) else _copied(op, graph, roots)
        if given:
            copies = [t for t in given if parts.copied_of[t] not in kept and specs[t].is_float32]
            kept |= {parts.copied_of[t] for t in given}
            moved = min(op.private_saved_bytes, sum(4 * specs[t].numel for t in copies))
            of_parts = {t for t in copies if parts.copied_of[t] != roots.root_of[t] and not keeps_logits(op, graph)}
            copied_parts[op.id] = frozenset(of_parts)
            copied_bytes[op.id] = max(0, moved - sum(4 * specs[t].numel for t in of_parts))
            saves = tuple(dict.fromkeys((*op.saves, *given)))
            op = replace(op, saves=saves, private_saved_bytes=op.private_saved_bytes - moved)
        ops.append(op)
    graph = replace(graph, ops=tuple(ops))
    return KeptInputs(graph=graph, copied_parts=copied_parts, copied_bytes=copied_bytes)
