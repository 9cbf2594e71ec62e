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


def test_a_plan_is_found_where_the_solvers_presolve_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, statuses = read_case(CASE).problem, list[str]()
    search = highs._search

    def watched(*arguments: Any, **options: Any) -> Any:
        end = search(*arguments, **options)
        statuses.append(end.status)
        return end

    monkeypatch.setattr(highs, "_search", watched)
    found = highs.solve(problem)
    assert found is not None and evaluate(problem, found.choice).feasible
    if "Infeasible" not in statuses:
        pytest.skip("this HiGHS needs no second opinion here")


def test_none_is_found_below_the_smallest_peak() -> None:
    problem = read_case(CASE).problem
    smallest = highs.smallest_peak(problem)
    assert smallest is not None and problem.budget_bytes is not None
    least = smallest.evaluation.peak_bytes
    assert least <= problem.budget_bytes
    for budget, is_kept in ((least, True), (least - 1, False)):
        found = highs.solve(replace(problem, budget_bytes=budget))
        assert (found is not None) == is_kept
