"""The Lagrangian relaxation of a `Problem`: limits become prices, and what is left is a sum of small tables.

Priced are bytes in the phases that were asked for, the loss row, and every weight row that could break. For any prices
≥ 0 the least priced sum is a lower bound of the objective. A weight's row has two parts: what its own roundings add is
known in one table, what comes from above is linear in roundings everywhere. So an entry of that table is worth what it
leaves for the variance from above, but not more than the most that can come, and an entry that leaves less than the
least that must come is forbidden. A row without such a table leaves its whole limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autoprec.planning.decisions import Decisions
from autoprec.planning.elimination import Elimination, Tables
from autoprec.planning.evaluator import TERTIARY
from autoprec.planning.propagation import Propagation
from autoprec.planning.solutions import Choice
from autoprec.planning.tables import Group
from autoprec.planning.tabulate import Tabulated
from autoprec.planning.values import Problem

__all__ = ["Limit", "Prices", "Relaxation", "Totals"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

#: The evaluator lets limits be exceeded by 1e-9 of them; the relaxation by twice that, so that it forbids nothing that
#: is feasible.
_TOLERANCE = 2e-9


class Limit(NamedTuple):
    """What may be priced: bytes in a phase (a share of the room for them), the loss, or a row (shares of limits)."""

    kind: Literal["phase", "loss", "row"]
    place: int


#: Prices ≥ 0; a limit that is not there has none.
Prices = dict[Limit, float]


@dataclass(frozen=True)
class Totals:
    """What an assignment costs and uses: objective; loss variance as a share of `loss_scale`, rows as shares of their
    limits; bytes in all phases. `short` is by how much each row is missed where entries are worth what they leave: the
    slope of the bound in the row's price."""

    objective: float
    loss: float
    rows: _Floats
    bytes_at: _Ints
    short: _Floats


class Relaxation:
    """The tables of a problem, priced.

    Attributes:
        possible: False if units that must agree cannot.
        exact: whether `totals` is what the evaluator says, and not a lower bound of it.
        closed: entries that are not allowed now (see `without`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.decisions = Decisions(problem)
        self.possible = self.decisions.possible
        self.propagation = Propagation(problem)
        self.tables = Tabulated(problem, self.decisions, self.propagation)
        self.groups = self.tables.groups
        self.exact = self.tables.exact
        sizes = [len(d) for d in self.decisions.domains]
        self.elimination = Elimination(sizes, [Tables(g.scopes, g.shape, g.start) for g in self.groups])
        self._base = np.concatenate([g.base.reshape(-1) for g in self.groups] or [np.zeros(0)])
        self.closed = np.zeros(0, np.int64)
        self.loss_limit = np.inf
        if problem.loss_limit is not None:
            self.loss_limit = problem.loss_limit / problem.loss_scale * (1.0 + _TOLERANCE)
        self.room = float(max((problem.budget_bytes or 0) - problem.fixed_bytes, 1))
        self._limit = 1.0 + _TOLERANCE
        self._rows()
        self._at: dict[int, tuple[_Ints, _Floats, float]] = {}

    def _rows(self) -> None:
        """Bounds of what comes from above, forbidden entries, and what entries leave for it."""
        count = len(self.problem.rows)
        low, high = np.zeros(self.propagation.places), np.zeros(self.propagation.places)
        for g in self.groups:
            if g.rounding is not None:
                np.add.at(low, g.rounding.place, g.rounding.amount.min(axis=1))
                np.add.at(high, g.rounding.place, g.rounding.amount.max(axis=1))
        least, most = self.propagation.rows(low), self.propagation.rows(high)
        own, tables = np.zeros(count), np.zeros(count, np.int64)
        for g in self.groups:
            if g.noise is not None:
                np.add.at(own, g.noise.place, g.noise.amount.min(axis=1))
                np.add.at(tables, g.noise.place, 1)
        cap = np.where(tables == 1, np.minimum(most, self._limit - own), np.inf)
        self._untouched = np.where(tables == 0, self._limit, 0.0)
        self._credits: dict[int, _Floats] = {}
        for g in self.groups:
            if g.noise is not None:
                row, amount = g.noise.place, g.noise.amount
                slack = self._limit - least[row] - own[row] + amount.min(axis=1)
                self._forbid(g, amount > slack[:, None])
                credit = np.minimum(self._limit / tables[row][:, None] - amount, cap[row][:, None])
                self._credits[g.start] = credit
            if g.loss is not None:
                self._forbid(g, g.loss > self.loss_limit)

    def _forbid(self, group: Group, where: npt.NDArray[np.bool_]) -> None:
        self._base[group.start : group.end][where.reshape(-1)] = np.inf

    # Bounds

    def _phase(self, phase: int) -> tuple[_Ints, _Floats, float]:
        """Entries that hold bytes in a phase, how much of the room, and what is left of the room without them."""
        if phase not in self._at:
            places, shares = [np.zeros(0, np.int64)], [np.zeros(0)]
            for g in self.groups:
                count = g.base.shape[1]
                for rows, sizes in g.at(phase):
                    used, column = np.nonzero(sizes)
                    places.append(g.start + rows[used] * count + column)
                    shares.append(sizes[used, column] / self.room)
            place, index = np.unique(np.concatenate(places), return_inverse=True)
            share = np.bincount(index.reshape(-1), np.concatenate(shares), len(place)).astype(np.float64)
            left = ((self.problem.budget_bytes or 0) - float(self.tables.steady[phase])) / self.room
            self._at[phase] = place, share, left
        return self._at[phase]

    def bound(self, prices: Prices) -> float:
        """A lower bound of every feasible choice's objective; infinite if there is none."""
        buffer, length = self.elimination.buffer, self.tables.length
        buffer[:length] = self._base
        buffer[self.closed] = np.inf
        rows = np.zeros(len(self.problem.rows))
        loss, constant = 0.0, self.tables.constant
        for limit, price in prices.items():
            if limit.kind == "row":
                rows[limit.place] = price
            elif limit.kind == "loss":
                loss, constant = price, constant - price * self.loss_limit
            else:
                constant -= price * self._phase(limit.place)[2]
        constant -= float(rows @ self._untouched)
        entering = self.propagation.prices(rows + TERTIARY)
        for g in self.groups:
            mine = buffer[g.start : g.end].reshape(g.base.shape)
            if g.rounding is not None:
                mine += entering[g.rounding.place][:, None] * g.rounding.amount
            if g.loss is not None and loss:
                mine += loss * g.loss
            if g.noise is not None:
                mine -= rows[g.noise.place][:, None] * self._credits[g.start]
        for limit, price in prices.items():
            if limit.kind == "phase":
                place, share, _ = self._phase(limit.place)
                buffer[place] += price * share
        return constant + self.elimination.minimum()

    def assignment(self) -> _Ints:
        """Values of the decisions that reach the last bound."""
        return self.elimination.assignment()

    def totals(self, values: _Ints) -> Totals:
        """What an assignment costs and uses."""
        objective, loss = self.tables.constant, 0.0
        entering = np.zeros(self.propagation.places)
        own, left = np.zeros((2, len(self.problem.rows)))
        change = np.zeros(self.problem.phases + 1)
        for g in self.groups:
            entry = g.entry(values)
            rows = np.arange(len(entry))
            objective += float(g.base[rows, entry].sum())
            if g.loss is not None:
                loss += float(g.loss[rows, entry].sum())
            if g.rounding is not None:
                entering += np.bincount(g.rounding.place, g.rounding.amount[rows, entry], len(entering))
            if g.noise is not None:
                own += np.bincount(g.noise.place, g.noise.amount[rows, entry], len(own))
                left += np.bincount(g.noise.place, self._credits[g.start][rows, entry], len(own))
            for size, first, last in g.spans(entry):
                change += np.bincount(first, size, len(change)) - np.bincount(last + 1, size, len(change))
        above = self.propagation.rows(entering)
        objective += TERTIARY * float(above.sum())
        bytes_at = self.tables.steady + np.rint(np.cumsum(change[:-1])).astype(np.int64)
        return Totals(objective, loss, own + above, bytes_at, above - left - self._untouched)

    def over(self, totals: Totals, limit: Limit) -> float:
        """By how much an assignment exceeds a limit, as a share of it (of the room, for bytes); negative below it."""
        if limit.kind == "phase":
            return float(totals.bytes_at[limit.place] - (self.problem.budget_bytes or 0)) / self.room
        return totals.loss - self.loss_limit if limit.kind == "loss" else float(totals.rows[limit.place]) - self._limit

    def broken(self, totals: Totals) -> list[Limit]:
        """Limits that an assignment breaks: the highest phase, the loss, and rows."""
        found = []
        budget = self.problem.budget_bytes
        if budget is not None and len(totals.bytes_at):
            peak = int(totals.bytes_at.argmax())
            if totals.bytes_at[peak] > budget:
                found.append(Limit("phase", peak))
        if self.over(totals, Limit("loss", 0)) > 0.0:
            found.append(Limit("loss", 0))
        return found + [Limit("row", int(r)) for r in np.flatnonzero(totals.rows > self._limit)]

    def slopes(self, totals: Totals, limits: Sequence[Limit]) -> list[float]:
        """How the bound changes with each limit's price where the assignment was found."""
        return [float(totals.short[limit.place]) if limit.kind == "row" else self.over(totals, limit)
                for limit in limits]  # fmt: skip

    # Branches

    def without(self, variable: int, value: int) -> _Ints:
        """Entries of one table that have the value: nothing has it where they are closed."""
        group, row, axis = self._table[variable]
        found = np.arange(group.base.shape[1])
        stride = math.prod(group.shape[axis + 1 :])
        mine = found // stride % group.shape[axis] == value
        return np.asarray(group.start + row * len(found) + found[mine])

    @cached_property
    def _table(self) -> dict[int, tuple[Group, int, int]]:
        """By variable, one of its tables, and its axis there."""
        found: dict[int, tuple[Group, int, int]] = {}
        for g in self.groups:
            for axis in range(len(g.shape)):
                for row, variable in enumerate(g.scopes[:, axis].tolist()):
                    found.setdefault(variable, (g, row, axis))
        return found

    # What changes of an assignment do

    def row_prices(self, row: int | None) -> _Floats:
        """What a unit of variance adds to a row's share of its limit, by the place where it enters; None: to all."""
        rows = np.ones(len(self.problem.rows)) if row is None else np.zeros(len(self.problem.rows))
        if row is not None:
            rows[row] = 1.0
        return self.propagation.prices(rows)

    def share(self, group: Group, tables: _Ints, entries: _Ints, phase: int) -> _Floats:
        """The share of the room that entries hold in a phase."""
        place, share, _ = self._phase(phase)
        index = group.start + tables * group.base.shape[1] + entries
        if not len(place):
            return np.zeros(len(index))
        found = np.minimum(np.searchsorted(place, index), len(place) - 1)
        return np.where(place[found] == index, share[found], 0.0)

    def forbidden(self, group: Group, tables: _Ints, entries: _Ints) -> npt.NDArray[np.bool_]:
        """Entries that no feasible choice has."""
        return np.asarray(np.isinf(self._base[group.start + tables * group.base.shape[1] + entries]))

    def choice(self, values: _Ints) -> Choice:
        """The choice of an assignment."""
        return self.decisions.choice(values)
