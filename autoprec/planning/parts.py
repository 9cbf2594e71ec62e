"""Parts: views that show less than what they are views of (a slice, a chunk, one of the queries, keys and values that a
product made at once). A part shares the memory of the whole until it is cast: then it alone is copied. Its gradient is
one of its own, from its last reader until the view runs backward, which makes a gradient of the whole beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.graphs import Op, OpGraph, Role, TensorKind, TensorSpec
from autoprec.planning.breaks import Crossing
from autoprec.planning.phases import NEVER
from autoprec.planning.roots import Roots
from autoprec.planning.uses import Use

__all__ = ["Parts", "resolve_parts", "senders", "sent_in"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a graph's activations.

    Attributes:
        copied_of: tensor → the part whose copies are its own, too; its root if it is none.
        gradient_of: tensor → the root or part whose gradient is its own, too. What was expanded counts as a part here.
        root_of: part → its root.
    """

    copied_of: Mapping[str, str]
    gradient_of: Mapping[str, str]
    root_of: Mapping[str, str]


def _shown(op: Op, graph: OpGraph, roots: Roots) -> list[str]:
    """Outputs that share the memory of what a view is given."""
    if not roots.is_view(op):
        return []
    return [t for t in op.outputs if t not in roots.copied_from]


def resolve_parts(graph: OpGraph, roots: Roots) -> Parts:
    """The parts of a graph."""
    specs, root_of = graph.tensor_by_id, dict[str, str]()
    copied, gradient = ({t.id: roots.root_of[t.id] for t in graph.tensors} for _ in range(2))
    for op in graph.ops:
        for t in _shown(op, graph, roots):
            root = roots.root_of[t]
            given = next((i for i in op.inputs if roots.root_of[i] == root), root)
            same = specs[t].numel == specs[given].numel or specs[root].kind is not TensorKind.ACTIVATION
            copied[t] = t if specs[t].numel < specs[given].numel and not same else copied[given]
            gradient[t] = gradient[given] if same else t
            if not same:
                root_of[t] = root
    return Parts(copied_of=copied, gradient_of=gradient, root_of=root_of)


def senders(
    graph: OpGraph,
    roots: Roots,
    parts: Parts,
    crossing: Mapping[str, Crossing],
    unit_of: Mapping[tuple[str, Role], int],
    born: Callable[[str], int | None],
) -> dict[str, tuple[Use, ...]]:
    """Activation, of this or of another graph, or part → the readers that send its gradient, in forward order; nothing
    for those that have none. `crossing`: outputs that cross graph breaks; `unit_of`: the unit of an op's role; `born`:
    that in whose format a root is born."""
    return _Senders(graph, roots, parts, crossing, unit_of, born).found()


def sent_in(readers: Sequence[Use], born: int | None) -> int | None:
    """In which unit's format the gradient of what was expanded is: that of the readers, which had what it is made of
    cast, if it is one; or that in which the root is born."""
    units = {use.unit for use in readers}
    return units.pop() if len(units) == 1 else born


def _added(uses: tuple[Use, ...]) -> tuple[Use, ...]:
    """Of those whose gradients are added to one that is there whatever the choice (`Problem.standing`)."""
    there = Use(moment=uses[-1].moment, unit=None, shared_until=NEVER)
    return (*(replace(use, shared_until=NEVER, instead=(None, use.moment)) for use in uses), there)


#: Kinds that send the gradient that arrives, or views of it. All others make one for each place in which they read a
#: tensor, also where that is one tensor.
_PASSING_ON = {"add", "sub", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"}


class _Senders:
    def __init__(
        self,
        graph: OpGraph,
        roots: Roots,
        parts: Parts,
        crossing: Mapping[str, Crossing],
        unit_of: Mapping[tuple[str, Role], int],
        born: Callable[[str], int | None],
    ) -> None:
        self.graph, self.roots, self.parts, self.crossing = graph, roots, parts, crossing
        self.unit_of, self.born = unit_of, born
        self.moment = {op.id: i for i, op in enumerate(graph.ops)}
        self.last = len(graph.ops) - (0 if graph.loss_bytes else 1)
        self.readers: dict[str, tuple[Use, ...]] = {}

    def found(self) -> dict[str, tuple[Use, ...]]:
        """`senders`."""
        members: dict[str, list[TensorSpec]] = {}
        for t in self.graph.tensors:
            if t.requires_grad:
                members.setdefault(self.parts.gradient_of[t.id], []).append(t)
        for op in reversed(self.graph.ops):  # parts of parts come first
            own = [t for t in _shown(op, self.graph, self.roots) if t in self.parts.root_of and t in members]
            sent = {t: self._sent(members[t]) for t in own}
            if any(sent.values()):  # what none sends, a view of several fills up with zeros
                zeros = (Use(moment=self.moment[op.id], unit=self.born(self.roots.root_of[op.outputs[0]])),)
                self.readers |= {t: uses or zeros for t, uses in sent.items()}
        entered = {t: crosses for crosses in self.crossing.values() for t in crosses.entered}
        for owner, tensors in members.items():
            made = self.graph.tensor_by_id[owner].kind is TensorKind.ACTIVATION or owner in entered
            if made and owner not in self.parts.root_of and (uses := self._sent(tensors)):
                added = owner in entered and entered[owner].is_added(owner)
                self.readers[owner] = _added(uses) if added else uses
        return self.readers

    def _sent(self, members: list[TensorSpec]) -> tuple[Use, ...]:
        graph, specs, found, times = self.graph, self.graph.tensor_by_id, dict[Use, None](), dict[Use, int]()
        for t in members:
            if t.gets_gradient:
                entered = self.crossing[t.id].returned if t.id in self.crossing else self.last
                found[Use(moment=entered, unit=None, shared_until=NEVER)] = None
            for reader in graph.readers.get(t.id, ()):
                op = graph.op_by_id[reader]
                if not any(graph.tensor_by_id[o].requires_grad for o in op.outputs):
                    continue
                unit = self.unit_of.get((op.id, Role.OUTPUT))
                if self.roots.is_view(op):
                    unit = self.born(self.roots.root_of[t.id])
                    shares = _shown(op, graph, self.roots)
                    parts = [o for o in shares if o in self.parts.root_of and o in self.readers]
                    if shares and not parts:
                        continue  # the gradient of a view is one of the tensor, sent by the readers of the view
                    if parts and specs[parts[0]].numel > t.numel:
                        unit = sent_in(self.readers[parts[0]], unit)
                use = Use(moment=self.moment[op.id], unit=unit)
                found[use] = None
                if op.kind not in _PASSING_ON:
                    times[use] = times.get(use, 0) + op.inputs.count(t.id)
        uses = [use for use in sorted(found, key=lambda use: use.moment) for _ in range(times.get(use, 1))]
        if uses and uses[-1].shared_until is None and graph.ops[uses[-1].moment].kind == "sum":
            until = uses[-2].moment if len(uses) > 1 else NEVER  # it sends a view, until another is added to that
            uses[-1] = replace(uses[-1], shared_until=until)
            uses[-2:-1] = [replace(use, to_a_view=True) for use in uses[-2:-1]]
        return tuple(uses)
