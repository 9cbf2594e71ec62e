"""Every choice, one after the other: the judge of the other solvers on small cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from autoprec.errors import SolverError
from autoprec.planning.evaluator import evaluate
from autoprec.planning.solutions import Choice, Solution
from autoprec.planning.values import Problem

__all__ = ["MOST_CHOICES", "all_choices", "choices_count", "smallest_peak", "solve"]

#: More would take longer than anyone waits.
MOST_CHOICES = 2_000_000


def choices_count(problem: Problem) -> int:
    """How many choices there are."""
    return math.prod(len(u.options) for u in problem.units) * math.prod(len(s) for s in _storages(problem))


def all_choices(problem: Problem) -> Iterator[Choice]:
    """Every choice, in a fixed order; `SolverError` beyond two million."""
    if choices_count(problem) > MOST_CHOICES:
        raise SolverError(
            f"brute force: {choices_count(problem)} choices are more than {MOST_CHOICES}; use the exact solver"
        )
    storages = [frozenset(kept for kept in s if kept is not None) for s in itertools.product(*_storages(problem))]
    for options in itertools.product(*(range(len(u.options)) for u in problem.units)):
        for stored in storages:
            yield Choice(options=options, stored=stored)


def _storages(problem: Problem) -> list[list[tuple[int, str] | None]]:
    """For each tensor whose storage is decided, the ways to keep it; None is as it is."""
    return [[None, *((t, f) for f in problem.tensors[t].storages)] for t in problem.storable]


def solve(problem: Problem) -> Solution | None:
    """The feasible choice with the smallest objective, the first of equals; None if none is feasible."""
    best: Solution | None = None
    for choice in all_choices(problem):
        found = evaluate(problem, choice)
        if found.feasible and (best is None or found.objective < best.evaluation.objective):
            best = Solution(choice=choice, evaluation=found, bound=found.objective)
    return best


def smallest_peak(problem: Problem) -> Solution | None:
    """The choice with the smallest peak among those that keep everything but the budget; None if there is none."""
    best: Solution | None = None
    for choice in all_choices(problem):
        found = evaluate(problem, choice)
        kept = all(v.kind == "peak" for v in found.violations)
        if kept and (best is None or found.peak_bytes < best.evaluation.peak_bytes):
            best = Solution(choice=choice, evaluation=found, bound=float(found.peak_bytes))
    return best
