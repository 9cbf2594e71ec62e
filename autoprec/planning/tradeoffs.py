"""What a budget costs: plans for a series of budgets, those that no other one beats, and where the bend is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.devices import Device
from autoprec.errors import InfeasibleError
from autoprec.graphs import OpGraph
from autoprec.planning.highs import smallest_peak
from autoprec.planning.planner import ask, by_prediction, propose, resolve_budget
from autoprec.planning.solvers import gap_for
from autoprec.plans import Plan, Totals
from autoprec.policies import Policy, parse_budget
from autoprec.profiles import Profile

__all__ = ["Point", "Tradeoffs", "knee", "tradeoffs", "undominated"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The plan for one budget; None is none."""

    budget_bytes: int | None
    plan: Plan
    predicted: Totals


@dataclass(frozen=True, kw_only=True)
class Tradeoffs:
    """Plans that no other one beats in both predicted peak and what the policy minimises, smallest peak first.

    Attributes:
        points: at least one.
        chosen: index of the point of the budget that the policy names, or of the knee; None where there is neither.
        why: what `chosen` is.
        smallest_peak_bytes: of all plans that keep the noise limits.
        fp32: totals of the model as it was written.
        objective: what is minimised under each budget.
        budgets: how many were planned for.
    """

    points: tuple[Point, ...]
    chosen: int | None
    why: Literal["budget", "knee", ""]
    smallest_peak_bytes: int
    fp32: Totals
    objective: Literal["time", "bytes"]
    budgets: int


def tradeoffs(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    points: int,
    done: Callable[[int, int], None] = lambda done, of: None,
) -> Tradeoffs:
    """Plan for `points` budgets (at least 2), from the smallest feasible peak to the peak without a budget, and for the
    budget that the policy names.

    `done(k, n)` is called after each of n plans. `InfeasibleError` where no plan keeps the noise limits, or none the
    policy's own budget.
    """
    objective: Literal["time", "bytes"] = "bytes" if policy.objective == "bytes" else "time"
    question = ask(graph, profile, device, policy.replaced(budget=None, objective=objective))

    def point(limit: int | None) -> Point:
        """Without reasons: only its totals are looked at."""
        return _point(by_prediction(propose(question.under(limit)), explained=False), limit)

    best = point(None)
    smallest = smallest_peak(question.problem, relative_gap=gap_for(question.problem))
    if smallest is None:  # the plan above keeps the limits, so this is a solver's
        raise InfeasibleError("no plan keeps the noise limits, but one was made; raise noise.gradient a little")
    low, high = smallest.evaluation.peak_bytes, best.predicted.peak_bytes
    between = {low + (high - low) * k // (points - 1) for k in range(points - 1)} if low < high else set()
    budget = parse_budget(policy.budget)
    named = None if budget is None else resolve_budget(budget, graph, question.fp32)
    budgets = sorted(between | ({named} if named is not None else set()))
    found = []
    for k, limit in enumerate(budgets):
        done(k, len(budgets))
        found.append(point(limit))
    kept = undominated([*found, best], objective, always=named)
    why: Literal["budget", "knee", ""] = "budget"
    chosen = next((i for i, p in enumerate(kept) if named is not None and p.budget_bytes == named), None)
    if chosen is None:
        chosen = knee([_place(p, objective) for p in kept])
        why = "knee" if chosen is not None else ""
    return Tradeoffs(
        points=kept,
        chosen=chosen,
        why=why,
        smallest_peak_bytes=low,
        fp32=question.fp32,
        objective=objective,
        budgets=len(found) + 1,
    )


def _point(plan: Plan, budget: int | None) -> Point:
    assert plan.predicted is not None
    return Point(budget_bytes=budget, plan=plan, predicted=plan.predicted)


def _place(point: Point, objective: str) -> tuple[float, float]:
    """Peak bytes, and what the policy minimises."""
    totals = point.predicted
    return totals.peak_bytes, totals.seconds if objective == "time" else totals.saved_bytes


def undominated(points: Sequence[Point], objective: str, *, always: int | None = None) -> tuple[Point, ...]:
    """Points that no other one equals or beats in both respects, smallest peak first; of equal ones that with the
    smallest budget. The point of the budget `always` stays whatever the others do, and those that equal it go."""
    order = sorted(
        points,
        key=lambda p: (
            *_place(p, objective),
            p.budget_bytes is None or p.budget_bytes != always,
            math.inf if p.budget_bytes is None else p.budget_bytes,
        ),
    )
    kept: list[Point] = []
    least = math.inf
    for p in order:
        _, minimised = _place(p, objective)
        if minimised < least or (always is not None and p.budget_bytes == always):
            kept.append(p)
        least = min(least, minimised)
    return tuple(kept)


def knee(places: Sequence[tuple[float, float]]) -> int | None:
    """The bend of a falling curve: the place farthest below the straight line between its ends, both axes scaled to
    that line's box (Satopää et al., "Finding a kneedle in a haystack", 2011). None if no place is below it."""
    if len(places) < 3:
        return None
    (x0, y0), (x1, y1) = places[0], places[-1]
    if x1 <= x0 or y0 <= y1:
        return None
    below = [1.0 - (x - x0) / (x1 - x0) - (y - y1) / (y0 - y1) for x, y in places]
    best = max(range(len(places)), key=below.__getitem__)
    return best if below[best] > 1e-9 else None
