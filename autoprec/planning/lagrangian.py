"""The solver for many decisions: prices for the limits, small tables for the rest, and a proven bound.

The best prices (`bundle`) give a lower bound of the objective, and assignments near the optimum that break limits by a
little. Dearer prices for what is broken lead to a feasible one, and recombining the assignments seen on the way
(`recombining`) to a good one. Everything is counted, nothing is timed: the same problem has the same answer anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoprec.errors import SolverError
from autoprec.planning.branching import Tree
from autoprec.planning.bundle import Ascent, Cut, ascend, priced
from autoprec.planning.evaluator import TERTIARY, evaluate
from autoprec.planning.recombining import Items, flips, islands, joined, take
from autoprec.planning.relaxation import Limit, Prices, Relaxation, Totals
from autoprec.planning.solutions import Solution
from autoprec.planning.values import Problem

__all__ = ["solve"]

_Ints = npt.NDArray[np.int64]

#: Evaluations of the bound, and dearer prices tried for a feasible choice, each at most so often.
_STEPS, _REPAIRS = 80, 60
#: Rounds of recombination; items weighed at once; nodes of the program that weighs them.
_ROUNDS, _ITEMS, _NODES = 8, 400, 50
#: Assignments that are recombined: the last ones seen, and new ones at prices that differ by about a tenth.
_POOL, _NEW, _SPREAD = 30, 5, 0.1
#: How often a program is asked again with the limits that its answer broke.
_TRIES = 4
#: A round brings something if it brings this share of the gap that is asked for.
_WORTH = 0.02
#: Branch and bound up to so many decisions, in so many ways; of each way, the assignments that are recombined, and the
#: dearer prices tried.
#: `_SMALL` more of them, shared by the decisions: small problems are searched to the end where tables are exact.
_SMALL = 10_000
_BRANCHING, _BRANCHES, _FROM_BRANCH, _REPAIRS_IN_BRANCH = 4000, 12, 3, 8
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
    ascent = ascend(relaxation, steps=_STEPS, enough=relative_gap / 50, ceiling=ceiling)
    if ascent.best.bound > ceiling:
        return None
    return _Search(relaxation, ascent, relative_gap, ceiling).run()


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

    def __init__(self, relaxation: Relaxation, ascent: Ascent, gap: float, ceiling: float) -> None:
        self.relaxation, self.ascent = relaxation, ascent
        self.prices, cuts = ascent.best.prices, ascent.cuts
        self.bound = ascent.best.bound - _ROUNDING * abs(ascent.best.bound)
        self.gap, self.ceiling = gap, ceiling
        self.best: _Best | None = None
        self.seen = [c.values for c in cuts[-_POOL:]]
        #: What the evaluator found over a limit where the tables are only a lower bound.
        self.margins: dict[Limit, float] = {}
        for cut in cuts:
            self.offer(cut.values, cut.totals)

    def run(self) -> Solution | None:
        """The best choice found, as the evaluator sees it; None if there is provably none."""
        for _ in range(_ROUNDS):
            prices = self.repair(self.prices)
            self.improve(prices)
            self.branch()
            if self.best is None:
                if self.bound > self.ceiling:
                    return None
                raise SolverError(
                    f"no feasible choice in {_REPAIRS} rounds of dearer prices, and no proof that there is none:"
                    " the limits may be too tight for this solver; loosen the budget or a noise limit"
                )
            solution = self.judged(self.best)
            if solution is not None:
                return solution
            self.best = None
        raise SolverError(f"no choice that the evaluator finds feasible in {_ROUNDS} rounds")

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
                for phase, (held, known) in enumerate(zip(found.bytes_at, best.totals.bytes_at, strict=True)):
                    if held > v.limit:
                        over, unknown = ((held - x) / self.relaxation.room for x in (v.limit, known))
                        self._keep_away(Limit("phase", phase), over, unknown + _MARGIN)
            elif v.kind == "loss":
                self._keep_away(Limit("loss", 0), over)
            else:
                row = next(r for r, row in enumerate(problem.rows) if row.weight == v.what)
                self._keep_away(Limit("row", row), over)
        return None

    def _keep_away(self, limit: Limit, over: float, unknown: float = 0.0) -> None:
        """Count from now on what the evaluator found over a limit, and at least what the tables did not know."""
        margin = self.margins.get(limit, 0.0)
        within_reach = (1.0 - margin) / 2.0  # nothing is less than all of a limit below it
        self.margins[limit] = max(margin + min(1.5 * over + _MARGIN, within_reach), unknown)

    def broken(self, totals: Totals) -> list[Limit]:
        """Limits that an assignment breaks, or comes too near to."""
        over = self.relaxation.over
        found = [limit for limit, margin in self.margins.items() if over(totals, limit) + margin > 0.0]
        return list(dict.fromkeys([*found, *self.relaxation.broken(totals)]))

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

    def repair(self, start: Prices, rounds: int = _REPAIRS) -> Prices:
        """Dearer prices for what is broken until nothing is; the prices that it took."""
        prices, steps = dict(start), dict[Limit, float]()
        for _ in range(rounds):
            cut = priced(self.relaxation, prices)
            self.seen.append(cut.values)
            self.offer(cut.values, cut.totals)
            broken = self.broken(cut.totals)
            if not broken:
                break
            for limit in broken:
                least = (abs(self.bound) or 1.0) * (1e-4 if limit.kind == "row" else 1e-3)
                steps[limit] = 1.5 * steps[limit] if limit in steps else max(0.01 * prices.get(limit, 0.0), least)
                prices[limit] = prices.get(limit, 0.0) + steps[limit]
        return prices

    def improve(self, prices: Prices) -> None:
        """Recombine what was seen, and try single changes, until the gap is reached or a round brings nothing."""
        rng = np.random.default_rng(0)
        limits = dict.fromkeys([*self.prices, *prices, *self.margins], 0.0)
        idle = 0
        for turn in range(2 * _ROUNDS):
            if self.best is None or self.near_enough() or idle == 2:
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
                self.weigh(self.mixed(), limits)
            idle = 0 if before - self.best.totals.objective > _WORTH * self.gap * abs(before) else idle + 1

    def branch(self) -> None:
        """Take decisions both ways where the mixture of assignments that gives the bound does not agree on them: the
        bound rises, and what is near the best prices of each way is recombined, too."""
        if self.near_enough() or not 0 < len(self.relaxation.decisions.domains) <= _BRANCHING:
            return
        tree = Tree(self.relaxation, self.ascent)

        def visit(ascent: Ascent, new: Sequence[Cut]) -> None:
            for cut in new:
                self.offer(cut.values, cut.totals)
            self.seen += [cut.values for cut in new[-_FROM_BRANCH:]]
            self.repair(ascent.best.prices, _REPAIRS_IN_BRANCH)
            self.seen = self.seen[-_POOL:]

        more_of_small = _SMALL // len(self.relaxation.decisions.domains) if self.relaxation.exact else 0
        for _ in range(_BRANCHES + more_of_small):
            ceiling = self.ceiling
            if self.best is not None:
                ceiling = self.best.totals.objective - self.gap * abs(self.best.totals.objective)
            more = tree.grow(ceiling, visit)
            self.bound = max(self.bound, tree.bound - _ROUNDING * abs(tree.bound))
            if self.near_enough() or not more:
                return
            if self.best is not None:
                self.weigh(self.mixed(), dict.fromkeys(self.ascent.widths, 0.0))

    def mixed(self) -> Items:
        """The islands between the best assignment and each of those seen last."""
        assert self.best is not None
        here = self.best.values
        return joined([islands(self.relaxation, here, other) for other in self.seen])

    def weigh(self, items: Items, margins: dict[Limit, float]) -> None:
        """Take the best of the items together; limits that this breaks join the program, or get some distance."""
        assert self.best is not None
        here = self.best.values
        for _ in range(_TRIES):
            weighed = {limit: margin + self.margins.get(limit, 0.0) for limit, margin in margins.items()}
            values = take(
                self.relaxation, here, items, self.prices, weighed, most=_ITEMS, nodes=_NODES, enough=self.gap / 20
            )
            totals = self.relaxation.totals(values)
            broken = self.broken(totals)
            if not broken:
                self.offer(values, totals)
                return
            for limit in broken:
                margins[limit] = margins[limit] + _MARGIN if limit in margins else 0.0
