"""Where a plan's storages go in a rewritten graph: cells of narrow copies, recipes of what is made again, and what ops
keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autoprec.numerics.keeping import keep_in, keeping, open_cell
from autoprec.numerics.remaking import hold, open_recipe
from autoprec.planning.remaking import is_repeatable
from autoprec.plans import AS_IS, Plan
from autoprec.rewriting.calls import Method, With
from autoprec.rewriting.recipes import Shown, UnmadeError, Written, recipe_of
from autoprec.tracing.bindings import OpNode
from autoprec.tracing.checkpoints import CheckpointPath

__all__ = ["Storing"]


class Storing:
    """The part of the rewriter that knows how each tensor is kept."""

    plan: Plan
    graph: fx.Graph
    path: CheckpointPath
    memory_of: Mapping[str, str]
    value: dict[fx.Node, fx.Node]
    casts: dict[fx.Node, dict[tuple[str, CheckpointPath], fx.Node]]
    call: Callable[..., fx.Node]

    def __init__(self, produced: set[str]) -> None:
        """`produced`: ids of the tensors that ops make."""
        self.cells: dict[tuple[str, CheckpointPath], fx.Node] = {}
        self.packed: dict[tuple[fx.Node, str, CheckpointPath], fx.Node] = {}
        self.held: dict[tuple[fx.Node, CheckpointPath], fx.Node] = {}
        self.written: dict[str, Written] = {}
        self.shown: dict[fx.Node, Shown] = {}
        self.node_of: dict[str, fx.Node] = {}
        self.produced = produced
        #: By tensor that the plan has made again, and that is kept as it is, why this graph does not make it again.
        self.unmade: dict[str, str] = {}

    def _stored(self, tensor_id: str) -> str | None:
        """The tensor itself, or the nearest one that it is a view of, if the plan keeps that in a narrow format."""
        current: str | None = tensor_id
        while current is not None:
            if current in self.plan.storage_of:
                is_kept = self.plan.storage_of[current] == AS_IS or current in self.unmade
                return None if is_kept else current
            current = self.memory_of.get(current)
        return None

    def cell_of(self, stored: str, node: fx.Node) -> fx.Node:
        """The cell of a tensor that is kept narrow; `node` is it or a view of it."""
        key = (stored, self.path)
        if key not in self.cells:
            again = stored in self.plan.made_from_of
            self.cells[key] = self._open_recipe(stored) if again else self._open(stored, self.value[node])
        return self.cells[key]

    def open_recipe(self, stored: str, node: fx.Node) -> None:
        """Of what was just made, before anybody reads it. A model may have graphs that are not those of the plan, in
        which another op makes what a recipe would start from: there the tensor is kept as it is. A plan that somebody
        wrote, which is of no graph, is refused."""
        try:
            self.cell_of(stored, node)
        except UnmadeError as error:
            if not self.plan.graph_fingerprint:
                raise
            self.unmade[stored] = error.why

    def _open_recipe(self, stored: str) -> fx.Node:
        """The recipe of a tensor that the plan has made again."""
        made_from = self.plan.made_from_of[stored]
        steps, values = recipe_of(stored, made_from, self.written, self.shown, self.produced, self._bases_of)
        held = [self._held(v) for v in values]
        return self.call(With(open_recipe, steps), (held, self.value[self.node_of[stored]]))

    def hold_for_recipes(self, op: OpNode, read: Sequence[fx.Node]) -> None:
        """What this op reads, and keeps, of what the plan has something made again of, as soon as it has run: until a
        recipe is opened, what it is opened with lives."""
        sources = {source for made_from in self.plan.made_from_of.values() for source in made_from}
        for value in read if is_repeatable(op.kind) and sources else ():
            if value in self.shown and not sources.isdisjoint(self._bases_of(tensor := self.shown[value].tensor)):
                if self._stored(tensor) not in self.plan.made_from_of:
                    self._held(value)

    def _held(self, value: fx.Node) -> fx.Node:
        """What a recipe is opened with: the value, or its narrow copy."""
        cell = self._cell_behind(value)
        if cell is None:
            return value
        if (value, self.path) not in self.held:
            self.held[value, self.path] = self.call(hold, (cell, value))
        return self.held[value, self.path]

    def _cell_behind(self, value: fx.Node) -> fx.Node | None:
        """The cell that keeps what a value shows; None where that is kept as it is."""
        tensor = self.shown[value].tensor if value in self.shown else None
        stored = None if tensor is None else self._stored(tensor)
        if stored is None or tensor is None:
            return None
        if stored in self.plan.made_from_of:
            raise UnmadeError(f"the plan has a tensor recomputed from {stored}, which is recomputed itself")
        return self.cell_of(stored, self.node_of[tensor])

    def _bases_of(self, tensor_id: str) -> list[str]:
        """The tensor, and all whose memory it is in."""
        found = [tensor_id]
        while (base := self.memory_of.get(found[-1])) is not None:
            found.append(base)
        return found

    def _open(self, stored: str, value: fx.Node | None) -> fx.Node:
        return self.call(With(open_cell, self.plan.storage_of[stored], stored), (value,))

    def keep_narrow(self, op: OpNode, main: fx.Node, made: str | None) -> None:
        """Let the op, written as `main`, keep in cells what the plan keeps narrow, its own result among it, and of what
        is made again a recipe."""
        cells, reads = [], []
        with self.graph.inserting_before(main):
            own = None if made is None else self._open(made, None)
            for node, tensor_id in op.inputs:
                stored = self._stored(tensor_id)
                if stored is not None:
                    found = {self.value[node], *self.casts[node].values()}.intersection(main.all_input_nodes)
                    reads += sorted(found)
                    cells += [self.cell_of(stored, node)] * len(found)
        if made is not None and own is not None:
            self.cells[made, self.path] = own
        if not cells and own is None:
            return
        function = main.target if callable(main.target) else Method(str(main.target))
        main.op, main.args, main.kwargs, main.target = (
            "call_function",
            (own, tuple(cells), tuple(reads), main.args, main.kwargs),
            {},
            With(keeping, function),
        )

    def _kept(self, narrow: str, x: fx.Node, value: fx.Node) -> fx.Node:
        """The narrow copy of a tensor, of which `x` is all or a view, that an op keeps; `value` is what it reads."""
        storage = self.plan.storage_of[narrow]
        return self._shared(x, f"kept {storage}", With(keep_in, storage), (self.cell_of(narrow, x), value))

    def _shared(self, x: fx.Node, what: str, make: Callable[..., Any], arguments: tuple[fx.Node, ...]) -> fx.Node:
        """A narrow copy of a tensor, made once for all who read it here, until the tensor changes in place."""
        key = (x, what, self.path)
        if key not in self.packed:
            self.packed[key] = self.call(make, arguments)
        return self.packed[key]
