"""`autoprec replay`: every solver on a recorded problem, and what happens when one lies."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.errors import SolverError
from autoprec.planning import brute_force, highs
from autoprec.planning.cases import Case
from autoprec.planning.replays import count_text, replay
from autoprec.planning.solutions import Choice, Solution
from autoprec.planning.solvers import SOLVERS, Solver
from autoprec.planning.values import Problem
from autoprec.serial import read_case, write_case
from tests.planning.planning_cases import random_case

Run = Callable[..., tuple[int, str, str]]


def solvable(most: int = 256) -> Problem:
    """Of several choices, not all of them equal."""
    for seed in range(99):
        problem = random_case(seed, most=most).problem()
        found = brute_force.solve(problem)
        if found is not None and found.choice.options != (0,) * len(problem.units):
            return problem
    raise AssertionError("no such problem")


def test_all_solvers_agree_on_cases_of_all_kinds() -> None:
    statuses = set()
    for seed in range(40):
        case = random_case(seed, most=64)
        free = case.problem()
        least = brute_force.smallest_peak(free)
        budget = None if least is None or seed % 3 == 0 else least.evaluation.peak_bytes - (seed % 3 == 1)
        found = replay(Case(problem=case.problem(budget)))
        assert found.complaints == (), (seed, found.complaints)
        statuses |= {(a.solver, a.status) for a in found.attempts}
    assert statuses == {(s.name, status) for s in SOLVERS for status in ("optimal", "infeasible")}


def test_plan_saves_a_case_that_replays(profile: str, run: Run) -> None:
    code, out, _ = run("plan", profile, "--policy", "memory", "--save-case", "case.json")
    assert code == 0 and "case     case.json" in out and Path("plan.yaml").exists()
    assert read_case("case.json").objective is not None
    code, out, err = run("replay", "case.json", "--json")
    said = json.loads(out)
    assert (code, said["agree"], said["complaints"]) == (0, True, [])
    attempts = {a["solver"]: a for a in said["attempts"]}
    assert attempts["brute force"]["status"] == attempts["HiGHS"]["status"] == "optimal"
    assert attempts["HiGHS"]["objective"] == pytest.approx(said["recorded"]["objective"], rel=1e-8)
    _, planned, _ = run("plan", profile, "--policy", "memory", "--dry-run", "--json")
    assert attempts["HiGHS"]["predicted_peak_bytes"] == json.loads(planned)["predicted"]["peak_bytes"]


def test_a_replay_is_told_in_words(run: Run) -> None:
    best = brute_force.solve(problem := solvable())
    assert best is not None
    write_case("case.json", Case(problem=problem, objective=best.evaluation.objective))
    code, text, _ = run("replay", "case.json")
    for words in ("HiGHS", "optimal", "recorded", "all agree", "dual bound", "(measured)", "budget"):
        assert words in text


def test_brute_force_is_not_asked_about_too_much() -> None:
    few = Solver(name="few", solve=brute_force.solve, most_choices=1)
    found = replay(Case(problem=solvable()), (few, SOLVERS[1]))
    assert found.complaints == () and found.attempts[0].status == "skipped"
    assert re.fullmatch(r"there are \d+ choices, more than 1", found.attempts[0].why)
    assert SOLVERS[0].most_choices == 2_000_000
    assert (count_text(1234567), count_text(3**200)) == ("1,234,567", "about 10^95")


def test_a_case_without_a_plan_is_saved_too(profile: str, run: Run) -> None:
    code, _, err = run("plan", profile, "--policy", "safe", "--budget", "1KiB", "--save-case", "case.json")
    assert code == 1 and "smallest feasible budget" in err and not Path("plan.yaml").exists()
    code, text, _ = run("replay", "case.json")
    assert code == 0 and "infeasible" in text and "all agree" in text and "budget 1 KiB" in text


def test_another_objective_in_the_file_is_noticed(run: Run) -> None:
    problem = solvable()
    best = brute_force.solve(problem)
    assert best is not None
    objective = best.evaluation.objective
    for recorded, gap, expected in (
        (objective, 0.0, 0),
        (objective * 1.01, 0.0, 1),
        (objective * 0.99, 0.0, 1),
        (objective * 1.01, 0.02, 0),  # the optimum may be that much below what was found
        (objective * 0.99, 0.02, 1),
    ):
        write_case("case.json", Case(problem=problem, objective=recorded, gap=gap))
        code, out, _ = run("replay", "case.json")
        assert code == expected, (recorded, gap, out)
        assert ("all agree" in out) == (expected == 0) and ("disagree: " in out) == (expected == 1)
        assert expected == 0 or "the file" in out


def lying(change: Callable[[Problem, Solution], Solution | None]) -> Solver:
    def solve(problem: Problem) -> Solution | None:
        found = brute_force.solve(problem)
        return None if found is None else change(problem, found)

    return Solver(name="liar", solve=solve)


def worst(problem: Problem, found: Solution) -> Solution:
    """An allowed choice that is far from the best, said to be the best."""
    evaluations = ((c, brute_force.evaluate(problem, c)) for c in brute_force.all_choices(problem))
    choice, e = max(((c, e) for c, e in evaluations if e.feasible), key=lambda ce: ce[1].objective)
    return Solution(choice=choice, evaluation=e, bound=e.objective)


def forbidden(problem: Problem, found: Solution) -> Solution:
    evaluations = ((c, brute_force.evaluate(problem, c)) for c in brute_force.all_choices(problem))
    choice, e = next((c, e) for c, e in evaluations if not e.feasible)
    return Solution(choice=choice, evaluation=e, bound=e.objective)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, s: None, "liar finds no choice that keeps the limits, HiGHS has one"),
        (worst, "liar: no choice is below"),
        (forbidden, "liar: its choice is not allowed: "),
        (lambda p, s: dataclasses.replace(s, bound=s.bound * 1.1), "liar: its bound"),
        (
            lambda p, s: dataclasses.replace(s, evaluation=dataclasses.replace(s.evaluation, objective=s.bound / 2)),
            "liar: claims the objective",
        ),
    ],
)  # fmt: skip
def test_a_solver_that_is_wrong_is_caught(change: Callable[[Problem, Solution], Solution | None], words: str) -> None:
    problem = solvable()
    tight = next(
        p
        for p in (dataclasses.replace(problem, budget_bytes=b) for b in range(problem.fixed_bytes, 10**9, 64))
        if brute_force.solve(p) is not None
    )
    found = replay(Case(problem=tight), (*SOLVERS, lying(change)))
    assert any(c.startswith(words) for c in found.complaints), found.complaints


def test_a_heuristic_with_an_honest_gap_agrees() -> None:
    def loose(problem: Problem, found: Solution) -> Solution:
        return dataclasses.replace(worst(problem, found), bound=found.bound * 0.5)

    found = replay(Case(problem=solvable()), (*SOLVERS, lying(loose)))
    assert found.complaints == () and found.attempts[-1].status in ("feasible", "optimal")


def test_a_solver_that_gives_up_is_told() -> None:
    def gives_up(problem: Problem) -> Solution | None:
        raise SolverError("I do not know")

    found = replay(Case(problem=solvable()), (Solver(name="shy", solve=gives_up),))
    assert found.complaints == ("shy failed: I do not know", "no solver answered")


def test_seconds_are_of_the_solver_alone() -> None:
    ticks = iter([10.0, 12.5])
    found = replay(Case(problem=solvable()), (Solver(name="HiGHS", solve=highs.solve),), clock=lambda: next(ticks))
    assert found.attempts[0].seconds == 2.5


def test_bad_files_and_options(profile: str, run: Run) -> None:
    for arguments, words in (
        (("replay", "gone.json"), "gone.json: does not exist"),
        (("plan", profile, "--save-case", "case.yaml"), "case.yaml: a case is JSON"),
        (("plan", profile, "--save-case", "no/such/folder/case.json"), "its directory does not exist"),
        (("plan", profile, "--dry-run", "--save-case", "case.json"), "give one of the two"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and words in err
    assert not Path("plan.yaml").exists()
    Path("x.json").write_text('{"autoprec": "case", "version": 1,\n "problem": [1]}')
    code, _, err = run("replay", "x.json")
    assert code == 2 and "x.json:2:13: problem: must be a mapping, not a list" in err


def test_every_choice_is_one_of_its_own() -> None:
    assert len({*brute_force.all_choices(solvable())}) == brute_force.choices_count(solvable())
    assert Choice(options=(0,)) != Choice(options=(1,))
