"""The decisions of a `Problem` as numbered variables: one per group of tied units, and one per kept tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoprec.formats import other_operand, result_format
from autoprec.planning.codes import of_format
from autoprec.planning.solutions import Choice
from autoprec.planning.values import Problem

__all__ = ["Decisions"]


class Decisions:
    """Variables with two values or more. A unit without a choice has a constant format instead.

    Attributes:
        formats: names of all formats; numbers of formats are places in it.
        domains: by variable, the formats (numbers) of its values; of a storage, −1 for "as it is" comes first.
        unit: by unit, its variable, or −1 − format.
        storage: by tensor whose storage is decided, its variable.
        possible: False if units that must agree have no format in common.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        names = dict.fromkeys(["fp32", *(f for u in problem.units for f in u.options)])
        names |= dict.fromkeys(f for t in problem.tensors for f in t.storages)
        for goes_with in (other_operand, result_format):
            names |= dict.fromkeys(of_format(goes_with, f) for f in tuple(names))
        self.formats = tuple(names)
        self.number = {f: k for k, f in enumerate(self.formats)}
        self.domains: list[tuple[int, ...]] = []
        self.unit: list[int] = [0] * len(problem.units)
        self.possible = True
        for group in _groups(problem):
            common = [f for f in problem.units[group[0]].options
                      if all(f in problem.units[u].options for u in group[1:])]  # fmt: skip
            self.possible &= bool(common)
            if len(common) > 1:
                place = len(self.domains)
                self.domains.append(tuple(self.number[f] for f in common))
            else:
                place = -1 - self.number[common[0] if common else "fp32"]
            for u in group:
                self.unit[u] = place
        self.storage: dict[int, int] = {}
        for t in problem.storable:
            self.storage[t] = len(self.domains)
            self.domains.append((-1, *(self.number[f] for f in problem.tensors[t].storages)))

    def of(self, unit: int | None) -> int:
        """The variable of a unit, or −1 − format; FP32 where nothing is decided."""
        return -1 if unit is None else self.unit[unit]

    def choice(self, values: npt.NDArray[np.int64]) -> Choice:
        """What values of the variables stand for."""
        picked = [self.domains[v][k] for v, k in enumerate(values.tolist())]
        options = []
        for unit, place in zip(self._problem.units, self.unit, strict=True):
            options.append(unit.options.index(self.formats[picked[place] if place >= 0 else -1 - place]))
        stored = frozenset((t, self.formats[picked[v]]) for t, v in self.storage.items() if picked[v] >= 0)
        return Choice(options=tuple(options), stored=stored)


def _groups(problem: Problem) -> Sequence[list[int]]:
    """Units that must agree, in the order of their first ones."""
    parent = list(range(len(problem.units)))

    def root(u: int) -> int:
        while parent[u] != u:
            parent[u] = parent[parent[u]]
            u = parent[u]
        return u

    for a, b in problem.ties:
        first, second = sorted((root(a), root(b)))
        parent[second] = first
    found: dict[int, list[int]] = {}
    for u in range(len(problem.units)):
        found.setdefault(root(u), []).append(u)
    return list(found.values())
