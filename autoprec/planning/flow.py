"""What every part of the noise model reads, in one value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoprec.graphs import Op, OpGraph, Role
from autoprec.planning.gains import Gains
from autoprec.planning.pricing import Prices
from autoprec.planning.roots import Roots

__all__ = ["Flow"]


@dataclass(frozen=True)
class Flow:
    """A graph, its prices, and the numbers of the units in which its ops run.

    Relative variances are numbered on their own: those of gradients first, those of activations after them.
    """

    graph: OpGraph
    roots: Roots
    prices: Prices
    unit_of: dict[tuple[str, Role], int]

    @cached_property
    def gains(self) -> Gains:
        """What its ops do to noise."""
        return Gains(self.graph, self.prices)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Tensor id → number of its relative gradient variance; views share their input's, in-place results do not."""
        owner: dict[str, str] = {}
        for op in self.graph.ops:
            for t in op.outputs:
                owner[t] = t
                if self.roots.is_view(op) and t not in self.roots.copied_from:
                    same = [u for u in op.inputs if self.roots.root_of[u] == self.roots.root_of[t]]
                    if same:
                        owner[t] = owner.get(same[0], self.roots.root_of[t])
        names = [owner.get(t.id, self.roots.root_of[t.id]) for t in self.graph.tensors]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return {t.id: numbers[name] for t, name in zip(self.graph.tensors, names, strict=True)}

    @cached_property
    def gradients(self) -> int:
        """How many variances of gradients there are, and as many of activations."""
        return len(set(self.numbers.values()))

    def output_unit(self, op: Op) -> int | None:
        """The unit of what an op makes; None where it has no format of its own."""
        return self.unit_of.get((op.id, Role.OUTPUT))
