"""Every solver of planning problems, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoprec.planning import brute_force, highs
from autoprec.planning.planner import gap_for
from autoprec.planning.values import Problem, Solution

__all__ = ["SOLVERS", "Solver"]


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
)
