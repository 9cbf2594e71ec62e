"""The solvers by name, and which of them for which problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoprec.errors import SolverError
from autoprec.planning import brute_force, highs, lagrangian
from autoprec.planning.solutions import Solution
from autoprec.planning.values import Problem

__all__ = ["LARGE", "PRICED", "SOLVERS", "Solver", "decisions_count", "gap_for", "solve"]

#: Up to `_EXACT` decisions a plan is proven optimal; beyond, proven within `_GAP`. HiGHS is as fast up to `PRICED`
#: decisions (docs/measurements/solvers.md), and takes hours beyond `LARGE`.
_EXACT, PRICED, LARGE = 60, 250, 2500
_GAP = 1e-3


def decisions_count(problem: Problem) -> int:
    """Units and kept tensors with something to choose."""
    return sum(len(u.options) > 1 for u in problem.units) + len(problem.storable)


def gap_for(problem: Problem) -> float:
    """How far from the optimum a search may stop: 0 for few decisions, and a thousandth for many."""
    return 0.0 if decisions_count(problem) <= _EXACT else _GAP


def solve(problem: Problem, *, relative_gap: float) -> Solution | None:
    """The best feasible choice that is found, with a proven bound, or None if there is provably none.

    `relative_gap` is how far from the optimum the search may stop. Beyond some thousands of decisions it may end wider:
    the solution's `gap` says so. `SolverError` without a choice and without a proof.
    """
    count = decisions_count(problem)
    if relative_gap == 0.0 or count <= PRICED:
        return highs.solve(problem, relative_gap=relative_gap)
    try:
        found = lagrangian.solve(problem, relative_gap=relative_gap)
    except SolverError:
        if count > LARGE:
            raise
        return highs.solve(problem, relative_gap=relative_gap)
    if found is None or found.gap <= relative_gap or count > LARGE:
        return found
    exact = highs.solve(problem, relative_gap=relative_gap)
    if exact is None:
        return found
    best = min(found, exact, key=lambda s: s.evaluation.objective)
    return replace(best, bound=min(max(found.bound, exact.bound), best.evaluation.objective))


@dataclass(frozen=True, kw_only=True)
class Solver:
    """A name, and a function that returns a feasible choice with a proven bound, or None if there is no such choice.

    `most_choices`: it is not asked about problems with more.
    """

    name: str
    solve: Callable[[Problem], Solution | None]
    most_choices: int | None = None


SOLVERS = (
    Solver(name="brute force", solve=brute_force.solve, most_choices=brute_force.MOST_CHOICES),
    Solver(name="HiGHS", solve=lambda problem: highs.solve(problem, relative_gap=gap_for(problem))),
    Solver(name="prices", solve=lambda problem: lagrangian.solve(problem, relative_gap=gap_for(problem))),
)
