"""Tensors that cross a graph break: one captured graph returns them, and another is given them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.graphs import OpGraph, TensorKind
from autoprec.planning.roots import Roots

__all__ = ["Crossing", "crossings"]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """How a tensor crosses. The step keeps the arguments of its calls, and the gradients that enter at outputs, until
    it is over, to replay it: so does it this one, from when it is returned, and its gradient.

    Attributes:
        returned: the forward moment at which its graph is over.
        entered: by id of an input that it, or a view of it, is, the last forward moment before that graph.
        sent: the backward moment from which on its gradient is there: the first graph that sends some is over.
    """

    returned: int
    entered: Mapping[str, int]
    sent: int

    def is_added(self, given: str) -> bool:
        """Whether what comes back of an input is added, at once, to what a later graph has sent."""
        return self.entered[given] < max(self.entered.values())


def crossings(graph: OpGraph, roots: Roots, end: int) -> dict[str, Crossing]:
    """Id of an output → how it crosses, of those that do. `end` is the last backward moment."""
    if len(graph.first_ops) < 2:
        return {}
    given: dict[str, list[str]] = {}
    for spec in graph.tensors:
        if spec.kind is TensorKind.INPUT and (made := _made(spec.id, graph)) is not None:
            given.setdefault(made, []).append(spec.id)
    moment = {op.id: i for i, op in enumerate(graph.ops)}
    starts = sorted(moment[op] for op in graph.first_ops)
    first_read: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for t in op.inputs:
            first_read.setdefault(roots.root_of[t], i)
    found = {}
    for made in given:
        if not graph.tensor_by_id[made].is_output or made not in graph.producer:
            continue
        k = bisect_right(starts, moment[graph.producer[made]])
        over = starts[k] - 1 if k < len(starts) else len(graph.ops) - 1
        later = {x: i for x in given[made] if (i := first_read.get(x, -1)) > over}
        if later:
            entered = {x: starts[bisect_right(starts, i) - 1] - 1 for x, i in later.items()}
            found[made] = Crossing(returned=over, entered=entered, sent=end - max(entered.values()) + 1)
    return found


def _made(tensor: str, graph: OpGraph) -> str | None:
    """The result of an op that an input is, or shares the memory of."""
    spec = graph.tensor_by_id[tensor]
    while spec.kind is TensorKind.INPUT:
        if spec.base is None:
            return None
        spec = graph.tensor_by_id[spec.base]
    return spec.id if spec.kind is TensorKind.ACTIVATION else None
