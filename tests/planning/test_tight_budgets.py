"""A budget that a plan keeps by next to nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.planning import highs
from autoprec.planning.evaluator import evaluate
from autoprec.serial import read_case

#: Of a network of three convolutions under `memory`, with timings by chance. HiGHS 1.15.1 takes it for infeasible.
CASE = Path(__file__).with_name("tight_budget.json")


@pytest.mark.parametrize("always", [False, True])
def test_a_plan_is_found_where_the_solvers_presolve_says_that_there_is_none(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`always`: of every problem, as another HiGHS may of this one."""
    problem, search = read_case(CASE).problem, highs._search

    def mistaken(*arguments: Any, presolves: bool = True) -> Any:
        wrong = always and presolves
        return highs._End("Infeasible") if wrong else search(*arguments, presolves=presolves)

    monkeypatch.setattr(highs, "_search", mistaken)
    found = highs.solve(problem)
    assert found is not None and evaluate(problem, found.choice).feasible


def test_none_is_found_below_the_smallest_peak() -> None:
    problem = read_case(CASE).problem
    smallest = highs.smallest_peak(problem)
    assert smallest is not None and problem.budget_bytes is not None
    least = smallest.evaluation.peak_bytes
    assert least <= problem.budget_bytes
    for budget, is_kept in ((least, True), (least - 1, False)):
        found = highs.solve(replace(problem, budget_bytes=budget))
        assert (found is not None) == is_kept
