"""Linear expressions over numbered variables, and programs of them as growing lists."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.sparse import csr_array

__all__ = ["Linear", "Rows"]


class Linear:
    """Σ coefficient·variable + constant."""

    def __init__(self, constant: float = 0.0) -> None:
        self.terms: dict[int, float] = {}
        self.constant = constant

    def add(self, other: Linear | int, factor: float = 1.0) -> Linear:
        """Add a variable (by number) or another expression, times `factor`."""
        if isinstance(other, int):
            self.terms[other] = self.terms.get(other, 0.0) + factor
        else:
            for k, v in other.terms.items():
                self.terms[k] = self.terms.get(k, 0.0) + factor * v
            self.constant += factor * other.constant
        return self


class Rows:
    """Minimise Σ cost·variable + offset, subject to rows Σ terms ≥ floor and 0 ≤ variable ≤ upper, some whole."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.floors: list[float] = []
        self.offset = 0.0

    def variable(self, cost: float, *, upper: float = 1.0, binary: bool = False) -> int:
        """A new variable ≥ 0; its number."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(int(binary))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], floor: float) -> None:
        """Σ terms ≥ floor."""
        self.rows.append(terms)
        self.floors.append(floor)

    def at_least(self, variable: int, expression: Linear) -> None:
        """variable ≥ expression (nothing to say if it is a constant ≤ 0)."""
        if expression.terms or expression.constant > 0.0:
            negative = Linear().add(expression, -1.0).add(variable)
            self.row(negative.terms, expression.constant)

    def at_most(self, expression: Linear, limit: float) -> None:
        """expression ≤ limit."""
        if expression.terms or expression.constant > limit:
            self.row({k: -v for k, v in expression.terms.items()}, expression.constant - limit)

    def all_of(self, cases: Iterable[Linear]) -> Linear:
        """The least of expressions that are 0 or 1, as a new variable."""
        found, cases = self.variable(0.0), list(cases)
        all_at_once = Linear(1.0 - len(cases))
        for case in cases:
            self.at_most(Linear().add(found).add(case, -1.0), 0.0)
            all_at_once.add(case)
        self.at_least(found, all_at_once)
        return Linear().add(found)

    def any_of(self, cases: list[Linear], cost: float = 0.0) -> Linear:
        """The largest of expressions that are at most 1 (and of 0): one of them, or a new variable."""
        distinct = list({(tuple(c.terms.items()), c.constant): c for c in cases}.values())
        distinct = [c for c in distinct if c.constant + sum(v for v in c.terms.values() if v > 0.0) > 0.0]
        sure = [c for c in distinct if not c.terms]
        if not distinct or sure:
            return self.charged(sure[0] if sure else Linear(), cost)
        if len(distinct) == 1 and len(distinct[0].terms) == 1 and distinct[0].constant >= 0.0:
            return self.charged(distinct[0], cost)  # of several terms it may be below 0, and with a constant below 0
        new = self.variable(cost)
        for c in distinct:
            self.at_least(new, c)
        return Linear().add(new)

    def charged(self, expression: Linear, cost: float) -> Linear:
        """The expression, with a cost in the objective."""
        for k, factor in expression.terms.items():
            self.cost[k] += cost * factor
        self.offset += cost * expression.constant
        return expression

    def matrix(self) -> csr_array:
        """Rows as a sparse matrix."""
        starts = np.cumsum([0, *(len(r) for r in self.rows)])
        columns = np.fromiter((k for r in self.rows for k in r), np.int64, int(starts[-1]))
        values = np.fromiter((v for r in self.rows for v in r.values()), np.float64, int(starts[-1]))
        return csr_array((values, columns, starts), shape=(len(self.rows), len(self.cost)))
