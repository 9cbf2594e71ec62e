"""What a budget costs, held against every choice there is, and against the definition of dominance."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import InfeasibleError
from autoprec.planning import brute_force
from autoprec.planning.evaluator import evaluate
from autoprec.planning.tradeoffs import Point, Tradeoffs, knee, tradeoffs, undominated
from autoprec.plans import Plan, Totals
from tests.planning.planning_cases import Case, random_case


def of(case: Case, **more: object) -> Tradeoffs:
    policy = case.policy.replaced(**more)
    return tradeoffs(case.graph, case.profile, case.device, policy, points=5)


def test_points_are_what_brute_force_finds() -> None:
    several = named = 0
    for seed in range(100):
        case = random_case(seed, most=128)
        if case.banned:
            continue  # a policy cannot say those
        case = dataclasses.replace(case, policy=case.policy.replaced(objective="bytes"))
        try:
            found = of(case)
        except InfeasibleError:
            assert brute_force.solve(case.problem()) is None
            continue
        problem = case.problem()
        every = [evaluate(problem, c) for c in brute_force.all_choices(problem)]
        allowed = [e for e in every if e.feasible]
        assert found.smallest_peak_bytes == min(e.peak_bytes for e in allowed)
        for p in found.points:
            budget = found.points[-1].predicted.peak_bytes if p.budget_bytes is None else p.budget_bytes
            assert p.predicted.peak_bytes <= budget
            assert p.predicted.saved_bytes == min(e.saved_bytes for e in allowed if e.peak_bytes <= budget)
        # The ends: the tightest budget, and none at all.
        assert found.points[0].predicted.peak_bytes == found.smallest_peak_bytes
        assert found.points[-1].predicted.saved_bytes == min(e.saved_bytes for e in allowed)
        several += len(found.points) > 1
        # A named budget is a point of its own, and chosen.
        middle = (found.smallest_peak_bytes + found.points[-1].predicted.peak_bytes) // 2
        again = of(case, budget=middle)
        assert again.why == "budget" and again.chosen is not None
        point = again.points[again.chosen]
        assert point.budget_bytes == middle and point.predicted.peak_bytes <= middle
        named += 1
    assert several > 3 and named > 10, (several, named)


def test_a_budget_that_cannot_be_kept_is_an_error() -> None:
    case = next(c for c in map(random_case, range(99)) if not c.banned and brute_force.solve(c.problem()))
    with pytest.raises(InfeasibleError, match="smallest feasible budget"):
        of(case, budget=1)


POINTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.none() | st.integers(1, 6)), min_size=1, max_size=8
)


def point(peak: int, saved: int, budget: int | None) -> Point:
    totals = Totals(seconds=saved / 8, saved_bytes=saved, peak_bytes=peak, loss_sigma=0.0, gradient_ratio=0.0)
    return Point(budget_bytes=budget, plan=Plan(assignments=()), predicted=totals)


@given(POINTS, st.sampled_from(["time", "bytes"]))
def test_what_is_left_out_is_beaten_and_what_stays_is_not(
    given_points: list[tuple[int, int, int | None]], by: str
) -> None:
    points = [point(*p) for p in given_points]
    kept = undominated(points, by)
    at = [(p.predicted.peak_bytes, p.predicted.saved_bytes) for p in kept]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in zip(at, at[1:], strict=False))
    for p in points:
        assert any(x <= p.predicted.peak_bytes and y <= p.predicted.saved_bytes for x, y in at)
    named = points[0].budget_bytes
    assert named is None or any(p.budget_bytes == named for p in undominated(points, by, always=named))


def test_the_knee() -> None:
    assert knee([(0, 10), (1, 2), (10, 0)]) == 1
    assert knee([(0, 10), (1, 9.5), (4, 1), (10, 0)]) == 2
    assert knee([(0, 10), (5, 5), (10, 0)]) is None  # a straight line has none
    assert knee([(0, 10), (5, 9), (10, 0)]) is None  # and one that bends up neither
    assert knee([(0, 1), (1, 0)]) is None and knee([]) is None
    # Units do not matter.
    assert knee([(0, 1e-6), (1 << 30, 2e-7), (10 << 30, 0)]) == 1
