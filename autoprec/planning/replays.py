"""A case solved again by every solver that can, and what they do not agree on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.errors import SolverError
from autoprec.planning.brute_force import choices_count
from autoprec.planning.cases import Case
from autoprec.planning.evaluator import evaluate
from autoprec.planning.reasons import violation_text
from autoprec.planning.solutions import Solution
from autoprec.planning.solvers import SOLVERS, Solver
from autoprec.planning.values import Problem

__all__ = ["Attempt", "Replay", "count_text", "replay"]

#: Objectives that differ by less, relatively, are equal; as in `Solution.gap`.
_EQUAL = 1e-8


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One solver and one problem.

    Attributes:
        solver: its name.
        status: how it ended; "skipped" and "failed" say why.
        why: the reason, or "".
        seconds: measured; 0.0 if it was skipped.
        solution: None unless the status is "optimal" or "feasible".
    """

    solver: str
    status: Literal["optimal", "feasible", "infeasible", "skipped", "failed"]
    why: str = ""
    seconds: float = 0.0
    solution: Solution | None = None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """All attempts, and a sentence for each disagreement."""

    attempts: tuple[Attempt, ...]
    complaints: tuple[str, ...]


def replay(
    case: Case,
    solvers: Sequence[Solver] = SOLVERS,
    *,
    clock: Callable[[], float] = time.perf_counter,
    begin: Callable[[str], None] = lambda name: None,
) -> Replay:
    """Solve the case by each solver. `begin` is called with a solver's name before it starts."""
    attempts = tuple(_attempt(case.problem, solver, clock, begin) for solver in solvers)
    return Replay(attempts=attempts, complaints=tuple(_complaints(case, attempts)))


def _attempt(problem: Problem, solver: Solver, clock: Callable[[], float], begin: Callable[[str], None]) -> Attempt:
    if solver.most_choices is not None and (count := choices_count(problem)) > solver.most_choices:
        why = f"there are {count_text(count)} choices, more than {count_text(solver.most_choices)}"
        return Attempt(solver=solver.name, status="skipped", why=why)
    begin(solver.name)
    start = clock()
    try:
        found = solver.solve(problem)
    except SolverError as error:
        return Attempt(solver=solver.name, status="failed", why=str(error), seconds=clock() - start)
    taken = clock() - start
    if found is None:
        return Attempt(solver=solver.name, status="infeasible", seconds=taken)
    status: Literal["optimal", "feasible"] = "optimal" if found.gap == 0.0 else "feasible"
    return Attempt(solver=solver.name, status=status, seconds=taken, solution=found)


def count_text(count: int) -> str:
    """A number of choices for people."""
    return f"{count:,}" if count < 10**12 else f"about 10^{math.log10(count):.0f}"


def _complaints(case: Case, attempts: Sequence[Attempt]) -> Iterator[str]:
    for a in attempts:
        if a.status == "failed":
            yield f"{a.solver} failed: {a.why}"
        if a.solution is not None:
            yield from _against_the_evaluator(case.problem, a.solver, a.solution)
    answers = [a for a in attempts if a.status in ("optimal", "feasible", "infeasible")]
    if not answers:
        yield "no solver answered"
    claims = {a.solver: _claim(a.solution) for a in answers}
    if case.objective is not None:
        claims["the file"] = (case.objective * (1.0 - case.gap), case.objective)
    names = list(claims)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            yield from _between(first, claims[first], second, claims[second])


def _against_the_evaluator(problem: Problem, name: str, solution: Solution) -> Iterator[str]:
    """What the evaluator says of the choice, beside what the solver says."""
    again, claimed = evaluate(problem, solution.choice), solution.evaluation.objective
    if again.violations:
        yield f"{name}: its choice is not allowed: {'; '.join(violation_text(v) for v in again.violations)}"
    if not _equal(again.objective, claimed):
        yield f"{name}: claims the objective {claimed:.12g}, the evaluator finds {again.objective:.12g}"
    if solution.bound > again.objective and not _equal(solution.bound, again.objective):
        yield f"{name}: its bound {solution.bound:.12g} is above the objective {again.objective:.12g} of its own choice"


Claim = tuple[float, float] | None


def _claim(solution: Solution | None) -> Claim:
    return None if solution is None else (solution.bound, solution.evaluation.objective)


def _between(first: str, a: Claim, second: str, b: Claim) -> Iterator[str]:
    """Each claims that the optimum is between a bound and an objective, or that there is none."""
    if a is None or b is None:
        if a is not b:
            none, some = (first, second) if a is None else (second, first)
            yield f"{none} finds no choice that keeps the limits, {some} has one"
        return
    for (low, low_of), (high, high_of) in (((a[0], first), (b[1], second)), ((b[0], second), (a[1], first))):
        if low > high and not _equal(low, high):
            yield f"{low_of}: no choice is below {low:.12g}; {high_of} has one of {high:.12g}"


def _equal(a: float, b: float) -> bool:
    return abs(a - b) <= _EQUAL * max(abs(a), abs(b))
