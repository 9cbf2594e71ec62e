"""The Lagrangian relaxation of a `Problem`: limits become prices, and what is left is a sum of small tables.

Priced are bytes at the moments that were asked for, the loss row, and every weight row that could break. For any prices
≥ 0 the least priced sum is a lower bound of the objective. A weight's row has two parts: what its own roundings add is
known in one table, what comes from above is linear in roundings everywhere. So an entry of that table is worth what it
leaves for the variance from above, but not more than the most that can come, and an entry that leaves less than the
least that must come is forbidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoprec.planning.decisions import Decisions
from autoprec.planning.elimination import Elimination, Tables
from autoprec.planning.evaluator import TERTIARY
from autoprec.planning.propagation import Propagation
from autoprec.planning.tables import Group
from autoprec.planning.tabulate import Tabulated
from autoprec.planning.values import Choice, Problem

__all__ = ["Prices", "Relaxation", "Totals"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

#: The evaluator lets limits be exceeded by 1e-9 of them; the relaxation by twice that, so that it forbids nothing that
#: is feasible.
_TOLERANCE = 2e-9


@dataclass(frozen=True)
class Prices:
    """Prices ≥ 0 of the limits: `moments` by moment (of a share of the room for bytes), `loss`, `rows` (shares)."""

    moments: dict[int, float]
    loss: float
    rows: _Floats


@dataclass(frozen=True)
class Totals:
    """What an assignment costs and uses: objective; loss variance as a share of `loss_scale`, rows as shares of their
    limits; bytes at all moments. `short` is by how much each row is missed where entries are worth what they leave: the
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
        priced_rows: rows that some choice could break.
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
        self._buffer = np.empty(self.elimination.length)
        self._base = np.concatenate([g.base.reshape(-1) for g in self.groups] or [np.zeros(0)])
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
        own, largest, tables = np.zeros(count), np.zeros(count), np.zeros(count, np.int64)
        for g in self.groups:
            if g.noise is not None:
                np.add.at(own, g.noise.place, g.noise.amount.min(axis=1))
                np.add.at(largest, g.noise.place, g.noise.amount.max(axis=1))
                np.add.at(tables, g.noise.place, 1)
        self.priced_rows = largest + most > self._limit
        cap = np.where(tables == 1, np.minimum(most, self._limit - own), np.inf)
        self._credits: list[tuple[Group, _Floats]] = []
        for g in self.groups:
            if g.noise is not None:
                row, amount = g.noise.place, g.noise.amount
                slack = self._limit - least[row] - own[row] + amount.min(axis=1)
                self._forbid(g, amount > slack[:, None])
                credit = np.minimum(self._limit / tables[row][:, None] - amount, cap[row][:, None])
                self._credits.append((g, credit))
            if g.loss is not None:
                self._forbid(g, g.loss > self.loss_limit)

    def _forbid(self, group: Group, where: npt.NDArray[np.bool_]) -> None:
        self._base[group.start : group.end][where.reshape(-1)] = np.inf

    # Bounds

    def _moment(self, moment: int) -> tuple[_Ints, _Floats, float]:
        """Entries that hold bytes at a moment, how much of the room, and what is left of the room without them."""
        if moment not in self._at:
            places, shares = [np.zeros(0, np.int64)], [np.zeros(0)]
            for g in self.groups:
                count = g.base.shape[1]
                for rows, sizes in g.at(moment):
                    used, column = np.nonzero(sizes)
                    places.append(g.start + rows[used] * count + column)
                    shares.append(sizes[used, column] / self.room)
            place, index = np.unique(np.concatenate(places), return_inverse=True)
            share = np.bincount(index.reshape(-1), np.concatenate(shares), len(place))
            left = ((self.problem.budget_bytes or 0) - float(self.tables.steady[moment])) / self.room
            self._at[moment] = place, share, left
        return self._at[moment]

    def bound(self, prices: Prices) -> float:
        """A lower bound of every feasible choice's objective; infinite if there is none."""
        buffer, length = self._buffer, self.tables.length
        buffer[:length] = self._base
        entering = self.propagation.prices(prices.rows + TERTIARY)
        for g in self.groups:
            mine = buffer[g.start : g.end].reshape(g.base.shape)
            if g.rounding is not None:
                mine += entering[g.rounding.place][:, None] * g.rounding.amount
            if g.loss is not None and prices.loss:
                mine += prices.loss * g.loss
        for g, credit in self._credits:
            buffer[g.start : g.end].reshape(g.base.shape)[:] -= prices.rows[g.noise.place][:, None] * credit
        constant = self.tables.constant - (prices.loss * self.loss_limit if prices.loss else 0.0)
        for moment, price in prices.moments.items():
            place, share, left = self._moment(moment)
            buffer[place] += price * share
            constant -= price * left
        return constant + self.elimination.minimum(buffer)

    def assignment(self) -> _Ints:
        """Values of the decisions that reach the last bound."""
        return self.elimination.assignment(self._buffer)

    def totals(self, values: _Ints) -> Totals:
        """What an assignment costs and uses."""
        objective, loss = self.tables.constant, 0.0
        entering, own = np.zeros(self.propagation.places), np.zeros(len(self.problem.rows))
        change = np.zeros(2 * len(self.problem.ops) + 1)
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
            for size, first, last in g.spans(entry):
                change += np.bincount(first, size, len(change)) - np.bincount(last + 1, size, len(change))
        above = self.propagation.rows(entering)
        objective += TERTIARY * float(above.sum())
        bytes_at = self.tables.steady + np.rint(np.cumsum(change[:-1])).astype(np.int64)
        short = above.copy()
        for g, credit in self._credits:
            left = credit[np.arange(len(credit)), g.entry(values)]
            short -= np.bincount(g.noise.place, left, len(short))  # type: ignore[union-attr]
        return Totals(objective, loss, own + above, bytes_at, short)

    def choice(self, values: _Ints) -> Choice:
        """The choice of an assignment."""
        return self.decisions.choice(values)
