"""The solver for many decisions: prices for the limits, small tables for the rest, and a proven bound.

The best prices (`bundle`) give a lower bound of the objective, and assignments near the optimum that break limits by a
little. Dearer prices for what is broken lead to a feasible one, and recombining the assignments seen on the way
(`recombining`) to a good one. Everything is counted, nothing is timed: the same problem has the same answer anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoprec.errors import SolverError
from autoprec.planning.bundle import Cut, ascend, priced
from autoprec.planning.evaluator import TERTIARY, evaluate
from autoprec.planning.recombining import Items, flips, islands, joined, take
from autoprec.planning.relaxation import Limit, Prices, Relaxation, Totals
from autoprec.planning.values import Problem, Solution

__all__ = ["solve"]

_Ints = npt.NDArray[np.int64]

#: Evaluations of the bound, and dearer prices tried for a feasible choice, each at most so often.
_STEPS, _REPAIRS = 80, 60
#: Rounds of recombination; items weighed at once; nodes of the program that weighs them.
_ROUNDS, _ITEMS, _NODES = 8, 300, 20
#: Assignments that are recombined: the last ones seen, and new ones at prices that differ by about a tenth.
_POOL, _NEW, _SPREAD = 30, 5, 0.1
#: How often a program is asked again with the limits that its answer broke.
_TRIES = 4
#: Programs tell 0 from a millionth less surely than the evaluator does.
_MARGIN = 2e-6
#: The part of a bound that sums in another order may differ by.
_ROUNDING = 1e-10


def solve(problem: Problem, *, relative_gap: float = 1e-3) -> Solution | None:
    """A feasible choice and a proven bound, or None if there is provably no such choice.

    The search ends within `relative_gap` of the bound, or when it has nothing left to try: the solution's `gap` says
    where. `SolverError` if it finds neither a choice nor a proof that there is none.
    """
    relaxation = Relaxation(problem)
    budget = problem.budget_bytes
    if not relaxation.possible or (budget is not None and int(relaxation.tables.steady.max(initial=0)) > budget):
        return None
    ceiling = _ceiling(relaxation)
    cuts = ascend(relaxation, steps=_STEPS, enough=relative_gap / 50, ceiling=ceiling)
    if cuts[-1].bound > ceiling:
        return None
    search = _Search(relaxation, cuts, relative_gap)
    found = search.run()
    if found is None:
        raise SolverError(
            f"no feasible choice in {_REPAIRS} rounds of dearer prices, and no proof that there is none:"
            " the limits may be too tight for this solver; loosen the budget or a noise limit"
        )
    return found


def _ceiling(relaxation: Relaxation) -> float:
    """More than any choice costs: a bound above it proves that there is none."""
    most = relaxation.tables.constant + sum(float(g.base.max(axis=1).sum()) for g in relaxation.groups)
    worst = np.zeros(relaxation.propagation.places)
    for g in relaxation.groups:
        if g.rounding is not None:
            np.add.at(worst, g.rounding.place, g.rounding.amount.max(axis=1))
    most += TERTIARY * float(relaxation.propagation.rows(worst).sum())
    return most + 1e-6 * abs(most) + 1e-300


@dataclass
class _Best:
    """An assignment that breaks nothing."""

    values: _Ints
    totals: Totals


class _Search:
    """From the best prices to a feasible choice."""

    def __init__(self, relaxation: Relaxation, cuts: list[Cut], gap: float) -> None:
        self.relaxation = relaxation
        self.bound, self.prices = cuts[-1].bound, cuts[-1].prices
        self.bound -= _ROUNDING * abs(self.bound)
        self.gap = gap
        self.best: _Best | None = None
        self.seen = [c.values for c in cuts[-_POOL:]]
        #: What the evaluator found over a limit where the tables are only a lower bound.
        self.margins: dict[Limit, float] = {}
        for cut in cuts:
            self.offer(cut.values, cut.totals)

    def run(self) -> Solution | None:
        """The best choice found, as the evaluator sees it."""
        for _ in range(_ROUNDS):
            prices = self.repair()
            if self.best is None:
                return None
            self.improve(prices)
            solution = self.judged(self.best)
            if solution is not None:
                return solution
            self.best = None
        return None

    def judged(self, best: _Best) -> Solution | None:
        """The evaluator's verdict. What it finds broken counts from now on."""
        problem = self.relaxation.problem
        choice = self.relaxation.choice(best.values)
        found = evaluate(problem, choice)
        if found.feasible:
            return Solution(choice=choice, evaluation=found, bound=min(self.bound, found.objective))
        for v in found.violations:
            over = v.value / v.limit - 1.0 if v.limit else 1.0
            if v.kind == "peak":
                limit, over = Limit("moment", found.peak_moment), (v.value - v.limit) / self.relaxation.room
            elif v.kind == "loss":
                limit = Limit("loss", 0)
            else:
                limit = Limit("row", next(r for r, row in enumerate(problem.rows) if row.weight == v.what))
            self.margins[limit] = self.margins.get(limit, 0.0) + 1.5 * over + _MARGIN
        return None

    def broken(self, totals: Totals) -> list[Limit]:
        """Limits that an assignment breaks: the highest moment, the loss, and rows."""
        relaxation = self.relaxation
        found = [limit for limit, margin in self.margins.items() if relaxation.over(totals, limit) + margin > 0.0]
        budget = relaxation.problem.budget_bytes
        if budget is not None and len(totals.bytes_at):
            peak = int(totals.bytes_at.argmax())
            if totals.bytes_at[peak] > budget:
                found.append(Limit("moment", peak))
        if relaxation.over(totals, Limit("loss", 0)) > 0.0:
            found.append(Limit("loss", 0))
        found += [Limit("row", int(r)) for r in np.flatnonzero(totals.rows > 1.0)]
        return list(dict.fromkeys(found))

    def offer(self, values: _Ints, totals: Totals) -> bool:
        """Take an assignment if it is feasible and better."""
        if self.best is not None and totals.objective >= self.best.totals.objective:
            return False
        if self.broken(totals):
            return False
        self.best = _Best(values, totals)
        return True

    def near_enough(self) -> bool:
        """Whether the best choice is within the gap of the bound."""
        if self.best is None:
            return False
        objective = self.best.totals.objective
        return objective - self.bound <= self.gap * abs(objective)

    def repair(self) -> Prices:
        """Dearer prices for what is broken until nothing is; the prices that it took."""
        prices, steps = dict(self.prices), dict[Limit, float]()
        for _ in range(_REPAIRS):
            cut = priced(self.relaxation, prices)
            self.seen.append(cut.values)
            self.offer(cut.values, cut.totals)
            broken = self.broken(cut.totals)
            if not broken:
                break
            for limit in broken:
                least = abs(self.bound) * (1e-4 if limit.kind == "row" else 1e-3)
                steps[limit] = 1.5 * steps[limit] if limit in steps else max(0.01 * prices.get(limit, 0.0), least)
                prices[limit] = prices.get(limit, 0.0) + steps[limit]
        return prices

    def improve(self, prices: Prices) -> None:
        """Recombine what was seen, and try single changes, until the gap is reached or a round brings nothing."""
        rng = np.random.default_rng(0)
        limits = dict.fromkeys([*self.prices, *prices, *self.margins], 0.0)
        idle = 0
        for turn in range(2 * _ROUNDS):
            if self.best is None or self.near_enough() or idle == 4:
                return
            before = self.best.totals.objective
            if turn % 2:
                self.weigh(flips(self.relaxation, self.best.values), limits)
            else:
                for _ in range(_NEW):
                    other = {limit: price * float(np.exp(_SPREAD * rng.standard_normal()))
                             for limit, price in prices.items()}  # fmt: skip
                    cut = priced(self.relaxation, other)
                    self.seen.append(cut.values)
                    self.offer(cut.values, cut.totals)
                self.seen = self.seen[-_POOL:]
                here = self.best.values
                self.weigh(joined([islands(self.relaxation, here, other) for other in self.seen]), limits)
            idle = 0 if before - self.best.totals.objective > 1e-9 * abs(before) else idle + 1

    def weigh(self, items: Items, margins: dict[Limit, float]) -> None:
        """Take the best of the items together; limits that this breaks join the program, or get some distance."""
        assert self.best is not None
        here = self.best.values
        for _ in range(_TRIES):
            weighed = {limit: margin + self.margins.get(limit, 0.0) for limit, margin in margins.items()}
            values = take(self.relaxation, here, items, self.prices, weighed, most=_ITEMS, nodes=_NODES)
            totals = self.relaxation.totals(values)
            broken = self.broken(totals)
            if not broken:
                self.offer(values, totals)
                return
            for limit in broken:
                margins[limit] = margins[limit] + _MARGIN if limit in margins else 0.0
