"""Gradients of sums. A sum passes on the gradient that arrives, and its terms share that one tensor until another
reader's gradient is added to it, or the op that made the term has read it: so it is counted once, for one of them after
the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoprec.graphs import Op, OpGraph
from autoprec.planning.phases import NEVER
from autoprec.planning.roots import Roots
from autoprec.planning.values import PlanTensor

__all__ = ["sharing_gradients"]


def sharing_gradients(tensors: Iterable[PlanTensor], graph: OpGraph, roots: Roots) -> tuple[PlanTensor, ...]:
    """The tensors, with the last gradient readers (which send the first gradients) of terms of a sum marked with the op
    in whose backward pass the gradient is the term's own (`Use.shared_until`).

    A term of which the sum is not the last reader gets a tensor of its own at once; so does what is added to itself, is
    multiplied, or has another shape than the sum. The gradient of a sum that the graph returns, and goes on with in no
    way, is there in FP32 until the step is over, and so is what its terms share of it.
    """
    found = list(tensors)
    index = {t.id: i for i, t in enumerate(found)}
    for moment, op in enumerate(graph.ops):
        terms = [index[root] for root, times in Counter(_terms(op, graph, roots)).items() if times == 1]
        start, instead = moment - 1, None  # at this moment it is the sum's
        made = index.get(roots.root_of[op.outputs[0]]) if op.outputs else None
        stays = made is not None and [use.shared_until for use in found[made].gradient_readers] == [NEVER]
        # Who gives it up first has it first. The other one counts from then on, if it has it for so long.
        for i in sorted((i for i in terms if found[i].gradient_readers), key=lambda i: -_until(found[i])):
            if start >= _until(found[i]):
                *others, last = found[i].gradient_readers
                if stays:
                    last = replace(last, shared_until=NEVER, instead=(None, start))
                else:
                    last = replace(last, shared_until=start, instead=instead)
                found[i] = replace(found[i], gradient_readers=(*others, last))
                instead = instead or (found[i].born, start)
                start = _until(found[i]) - (0 if others else 1)
    return tuple(found)


def _terms(op: Op, graph: OpGraph, roots: Roots) -> Iterator[str]:
    """Roots of what an addition adds up as it is."""
    if op.kind != "add" or "alpha=" in op.timing_key or not op.outputs:
        return
    made = graph.tensor_by_id[op.outputs[0]]
    for t in op.inputs:
        spec, root = graph.tensor_by_id[t], graph.tensor_by_id[roots.root_of[t]]
        one = spec.numel == made.numel == root.numel and spec.dtype == made.dtype == root.dtype
        if one and root.id != roots.root_of[made.id]:
            yield root.id


def _until(t: PlanTensor) -> int:
    """The op at whose backward pass the gradient of a term's last reader is added to another, or read."""
    return t.gradient_readers[-2].moment if len(t.gradient_readers) > 1 else t.birth
