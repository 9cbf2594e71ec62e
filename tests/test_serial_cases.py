"""Planning cases as files: exact round trips, and whatever is read can be evaluated."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autoprec.errors import InputError
from autoprec.planning.cases import Case
from autoprec.planning.evaluator import evaluate
from autoprec.planning.solutions import Choice
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Problem
from autoprec.serial import read_case, write_case
from tests.planning.planning_cases import random_case


def problem_of(seed: int, budget: int | None = None) -> Problem:
    return random_case(seed).problem(budget)


def narrowest(problem: Problem) -> Choice:
    """The last option of all, and every tensor in its last storage."""
    choice = Choice(options=tuple(len(u.options) - 1 for u in problem.units))
    for t in problem.storable:
        choice = choice.keeping(t, problem.tensors[t].storages[-1])
    return choice


def test_a_case_comes_back_as_it_was() -> None:
    for seed in range(60):
        problem = problem_of(seed, None if seed % 2 else 10**6)
        case = Case(problem=problem, objective=1 / 3 if seed % 3 else None, gap=1e-4)
        write_case("case.json", case)
        assert read_case("case.json") == case
        # A sum of nothing is written as 0, and read as the number 0.0.
        write_case("case.json", read_case("case.json"))
        again = Path("case.json").read_bytes()
        write_case("case.json", read_case("case.json"))
        assert Path("case.json").read_bytes() == again


def test_energies_without_bound_come_back_though_json_has_no_number_for_them() -> None:
    problem = next(p for p in map(problem_of, range(99)) if p.gemms)
    gemm = dataclasses.replace(problem.gemms[0], gradient_noise=(("bf16", 0.5), ("fp16", math.inf)))
    case = Case(problem=dataclasses.replace(problem, gemms=(gemm, *problem.gemms[1:])))
    write_case("case.json", case)
    assert read_case("case.json") == case and '["fp16", "inf"]' in Path("case.json").read_text()


def test_a_case_is_json(tmp_path: Path) -> None:
    case = Case(problem=problem_of(0))
    with pytest.raises(InputError, match="a case is JSON"):
        write_case("case.yaml", case)
    write_case("case.json", case)
    tree = json.loads(Path("case.json").read_text())
    assert (tree["autoprec"], tree["version"]) == ("case", 1) and "objective" not in tree
    # A person can find a tensor: every part has a line of its own.
    text = Path("case.json").read_text()
    assert all(f'   {{"id": "{t.id}"' in text for t in case.problem.tensors)


def refusal(tree: Any) -> str:
    Path("case.json").write_text(json.dumps(tree, indent=1))
    with pytest.raises(InputError) as caught:
        read_case("case.json")
    return str(caught.value)


def with_value(tree: Any, value: Any, *at: str | int) -> Any:
    made = holder = copy.deepcopy(tree)
    for part in at[:-1]:
        holder = holder[part]
    holder[at[-1]] = value
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a problem with GEMMs, storages, savers and ties."""
    for seed in range(200):
        p = problem_of(seed)
        if p.gemms and p.ties and p.rows and any(t.others for t in p.tensors) and any(t.gemms for t in p.tensors):
            path = tmp_path_factory.mktemp("case") / "case.json"
            write_case(path, Case(problem=p))
            return json.loads(path.read_text())
    raise AssertionError("no such problem")


@pytest.mark.parametrize(
    ("value", "at", "words"),
    [
        (2, ("version",), "expected `version: 1`, not 2; it was written by a newer autoprec"),
        ("plan", ("autoprec",), "expected `autoprec: case`"),
        (-1.0, ("objective",), "objective: objective must be finite and at least 0"),
        ("fast", ("problem", "objective"), "problem.objective: text 'fast' is not valid. Valid: bytes, time."),
        (999, ("problem", "units", 0, "moment"), "problem.units[0].moment: moment 999 is not there: within 0 and "),
        (999, ("problem", "tensors", 1, "born"), "problem.tensors[1].born: unit 999 is not there"),
        ([0.1] * 9, ("problem", "units", 0, "seconds"), "problem.units[0].seconds: "),
        ([], ("problem", "units", 0, "options"), "a unit needs at least one option"),
        (["bf61"], ("problem", "units", 0, "options"), "unknown compute format"),
        ("output ", ("problem", "units", 0, "role"), "Did you mean 'output'?"),
        (0.0, ("problem", "seconds_scale"), "problem.seconds_scale: it must be above 0"),
        (0.0, ("problem", "rows", 0, "limit"), "problem.rows[0].limit: it must be above 0"),
        ([[0]], ("problem", "ties"), "problem.ties[0]: must be a list of 2, not of 1"),
        (7, ("problem", "gemms", 0, "number"), "number must be its place, 0, not 7"),
        (2**63, ("problem", "tensors", 0, "numel"), "is more than 2^62"),
        ("inf", ("problem", "constant_seconds"), "must be finite"),
        ("inf", ("problem", "variances"), "must be a whole number, not text 'inf'"),
        (1, ("problem", "solver"), "unknown key 'solver'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(tree: Any, value: Any, at: tuple[str | int, ...], words: str) -> None:
    if words == "unknown compute format":
        words = "unknown format 'bf61'"
    message = refusal(with_value(tree, value, *at))
    assert re.match(r"case\.json:\d+:\d+: ", message) and words in message, message


def leaves(tree: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [at] if at else []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        found += leaves(value, (*at, key))
    return found


#: Keys whose whole numbers are places or moments, and of which element of pairs.
PLACES = {
    **dict.fromkeys(("moment", "unit", "birth", "born", "kept_from", "stored_by", "gemms", "masks"), (0, 1)),
    **dict.fromkeys(("copied", "part_of", "tensors"), (0, 1)),
    **dict.fromkeys(("x", "output", "grad_input", "grad_weight", "variance", "units", "ties"), (0, 1)),
    **dict.fromkeys(("reached", "inputs", "outputs", "workspace"), (0,)),
    "private": (0, 1),
}


def test_no_place_is_beyond_what_is_there() -> None:
    """In several problems, so that each kind of place occurs."""
    met = Counter[str]()
    problems = [problem_of(seed) for seed in range(60)]
    stored = next(p for p in problems if any(t.gemms for t in p.tensors))
    masked = next(p for p in problems if any(t.masks for t in p.tensors))
    saved = next(p for p in problems if any(s.reached for t in p.tensors for s in t.others))
    parted = next(p for p in problems if any(u.copied is not None for t in p.tensors for u in t.savers))
    replaced = next(p for p in problems if p.replacements)
    for problem in (problems[0], stored, masked, saved, parted, replaced):
        write_case("whole.json", Case(problem=problem))
        tree = json.loads(Path("whole.json").read_text())
        for at in [p for p in leaves(tree) if len(p) > 2]:
            value: Any = tree
            for part in at:
                value = value[part]
            name = next(str(part) for part in reversed(at) if isinstance(part, str))
            last = at[-1] if isinstance(at[-2], int) and isinstance(at[-1], int) else 0
            of_a_role = at[1] in ("units", "replacements")
            sizes = of_a_role and name in ("workspace", "kept", "seconds", "backward_workspace")
            if type(value) is int and name in PLACES and last in PLACES[name] and not sizes:
                kind = ".".join([str(at[1]), *(part for part in at[2:] if isinstance(part, str))])
                met[kind] += 1
                if met[kind] > 12:  # they are alike
                    continue
                assert re.match(r"case\.json:\d+:\d+: ", refusal(with_value(tree, 10**6, *at))), at
    wanted = {
        "tensors.reached",
        "tensors.gemms",
        "tensors.masks",
        "tensors.born",
        "tensors.part_of",
        "tensors.copied",
        "nodes.inputs",
        "gemms.x",
        "ties.ties",
        "replacements.moment",
        "replacements.tensors",
    }
    assert wanted <= {f"{kind.split('.')[0]}.{kind.split('.')[-1]}" for kind in met}, met


def test_whatever_is_read_can_be_evaluated(tree: Any) -> None:
    """A change of any part is refused with a place, or gives a problem that the evaluator can follow."""
    chance, places = Random(0), leaves(tree)
    refused = taken = 0
    for _ in range(450):
        at = chance.choice(places)
        value = chance.choice([None, -1, 0, 1, 5, 10**9, 0.5, -0.5, "fp32", "inf", True, [], [0], [[0, 0.5]], {}])
        made = with_value(tree, value, *at)
        Path("case.json").write_text(json.dumps(made))
        try:
            problem = read_case("case.json").problem
        except InputError as error:
            assert re.match(r"case\.json:\d+:\d+: ", str(error)), error
            refused += 1
            continue
        for choice in (uniform_choice(problem, "fp32"), uniform_choice(problem, "bf16"), narrowest(problem)):
            try:
                found = evaluate(problem, choice)
            except InputError as error:  # a cast whose timing is not there
                assert "no timing for the cast" in str(error)
                continue
            assert math.isfinite(found.seconds) and not math.isnan(found.objective)
        taken += 1
    assert refused > 150 and taken > 50, (refused, taken)


def test_a_case_that_python_makes_is_checked_too() -> None:
    problem = problem_of(3)
    with pytest.raises(InputError, match="unit 999 is not there"):
        Case(problem=dataclasses.replace(problem, ties=((0, 999),)))
