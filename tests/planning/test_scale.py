"""Laws of the solver for many decisions: its bound is a bound, its tables say what the evaluator says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autoprec.errors import SolverError
from autoprec.planning import brute_force, highs, lagrangian, relaxation, solvers, tabulate
from autoprec.planning.cases import Case
from autoprec.planning.decisions import Decisions
from autoprec.planning.elimination import Elimination, Tables
from autoprec.planning.evaluator import evaluate
from autoprec.planning.propagation import Propagation
from autoprec.planning.recombining import Items, effects, flips, islands, joined
from autoprec.planning.relaxation import Limit, Relaxation
from autoprec.planning.solutions import Solution
from autoprec.planning.uses import Use
from autoprec.planning.values import Problem
from tests.planning.planning_cases import random_case
from tests.planning.test_solvers import prices_say
from tests.planning.transformers import transformer_problem


def random_values(sizes: list[int], rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.integers(size) for size in sizes], np.int64)


def domain_sizes(found: Relaxation) -> list[int]:
    return [len(d) for d in found.decisions.domains]


def disagreement(problem: Problem, rng: np.random.Generator) -> str:
    """What the tables say that the evaluator does not, or ""."""
    found = Relaxation(problem)
    if not found.possible:
        return ""
    for _ in range(5):
        values = random_values(domain_sizes(found), rng)
        choice = found.choice(values)
        said, totals = evaluate(problem, choice), found.totals(values)
        if abs(said.objective - totals.objective) > 1e-9 * abs(said.objective) + 1e-15:
            return f"objective: {said.objective}, tables {totals.objective}"
        if said.bytes_at != tuple(totals.bytes_at.tolist()):
            return f"bytes: {said.bytes_at}, tables {totals.bytes_at}"
        if not np.isclose(said.loss_sigma**2, totals.loss * problem.loss_scale, rtol=1e-9, atol=1e-300):
            return "loss"
        rows = [value / row.limit for value, row in zip(said.rows, problem.rows, strict=True)]
        if not np.allclose(rows, totals.rows, rtol=1e-9, atol=1e-15):
            return f"rows: {rows}, tables {totals.rows}"
        budgeted = Relaxation(replace(problem, budget_bytes=problem.fixed_bytes + 1000))
        for moment in rng.integers(problem.phases, size=3).tolist():
            shares = sum(
                float(budgeted.share(g, np.arange(len(g.scopes)), g.entry(values), moment).sum())
                for g in budgeted.groups
            )
            if abs(shares * budgeted.room + budgeted.tables.steady[moment] - said.bytes_at[moment]) > 1e-3:
                return f"bytes at {moment}"
    return ""


def disagreements(seeds: range) -> list[int]:
    return [seed for seed in seeds if disagreement(random_case(seed).problem(), np.random.default_rng(seed))]


def test_tables_say_what_the_evaluator_says() -> None:
    assert disagreements(range(60)) == []


tabulate_span = tabulate.Span


def end_copies_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tabulate, "Span", lambda copy, f, begin, end: tabulate_span(copy, f, begin, np.maximum(begin, end - 1))
    )


def forget_what_comes_from_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Propagation, "rows", lambda self, entering: np.zeros(len(self._problem.rows)))


def forget_one_storage_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Propagation, "saver", lambda self, tensor, index: 0)


def forget_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decisions, "of", lambda self, unit: -1 if unit is None else self.unit[max(unit - 1, 0)])


@pytest.mark.parametrize(
    "plant", [end_copies_early, forget_what_comes_from_above, forget_one_storage_rounding, forget_ties]
)
def test_a_planted_bug_is_noticed(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def is_noticed(seed: int) -> bool:
        try:
            return bool(disagreement(random_case(seed).problem(), np.random.default_rng(seed)))
        except (IndexError, ValueError):
            return True

    assert any(map(is_noticed, range(60)))


# Elimination


def random_tables(rng: np.random.Generator) -> tuple[list[int], list[Tables], list[np.ndarray]]:
    sizes = [int(rng.integers(2, 4)) for _ in range(int(rng.integers(2, 8)))]
    groups, values, start = [], [], 0
    for _ in range(int(rng.integers(1, 12))):
        scope = rng.permutation(len(sizes))[: int(rng.integers(0, min(4, len(sizes) + 1)))]
        shape = tuple(sizes[v] for v in scope)
        groups.append(Tables(scope[None, :].astype(np.int64), shape, start))
        values.append(rng.normal(size=shape))
        start += int(np.prod(shape))
    return sizes, groups, values


def least_sum(sizes: list[int], groups: list[Tables], tables: list[np.ndarray]) -> tuple[float, float]:
    """By elimination: the minimum, and the sum that its assignment has."""
    found = Elimination(sizes, groups)
    found.buffer[: sum(t.size for t in tables)] = np.concatenate([t.reshape(-1) for t in tables])
    least = found.minimum()
    values = found.assignment()
    return least, sum(float(t[tuple(values[g.scopes[0]])]) for g, t in zip(groups, tables, strict=True))


def every_sum(sizes: list[int], groups: list[Tables], tables: list[np.ndarray]) -> list[float]:
    return [
        sum(float(t[tuple(np.array(values)[g.scopes[0]])]) for g, t in zip(groups, tables, strict=True))
        for values in np.ndindex(*sizes)
    ]


def test_elimination_finds_the_least_sum() -> None:
    for seed in range(100):
        problem = random_tables(np.random.default_rng(seed))
        least, reached = least_sum(*problem)
        assert least == pytest.approx(min(every_sum(*problem)), abs=1e-12)
        assert reached == pytest.approx(least, abs=1e-12)


def test_split_buckets_give_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.planning.elimination.LARGEST", 27)
    split = 0
    for seed in range(100):
        problem = random_tables(np.random.default_rng(seed))
        least, reached = least_sum(*problem)
        right = min(every_sum(*problem))
        split += least < right - 1e-9
        assert least <= right + 1e-12 <= reached + 2e-12
    assert split > 0


# Bounds


def test_the_bound_is_one_at_any_prices() -> None:
    for seed in range(60):
        rng = np.random.default_rng([seed, 2])
        case = random_case(seed, most=64)
        free = case.problem()
        peak = evaluate(free, brute_force.solve(free).choice).peak_bytes if brute_force.solve(free) else 0
        problem = case.problem(peak or None)
        best = brute_force.solve(problem)
        found = Relaxation(problem)
        if best is None or not found.possible:
            continue
        scale = best.evaluation.objective
        for _ in range(5):
            prices = {Limit("row", r): scale * float(rng.exponential()) for r in range(len(problem.rows))}
            prices |= {Limit("loss", 0): scale * float(rng.exponential())} if problem.loss_limit else {}
            if problem.budget_bytes is not None:
                prices[Limit("phase", int(rng.integers(problem.phases)))] = scale * float(rng.exponential())
            assert found.bound(prices) <= best.evaluation.objective * (1.0 + 1e-9), seed


def forbid_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxation, "_TOLERANCE", -0.3)


def overprice_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = tabulate.Tabulated._cast
    monkeypatch.setattr(tabulate.Tabulated, "_cast", lambda self, *of: 1.5 * cast(self, *of))


@pytest.mark.parametrize("plant", [forbid_what_fits, overprice_casts])
def test_a_wrong_bound_is_noticed(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(
        prices_say(problem, brute_force.solve(problem))
        for problem in (random_case(seed, most=64).problem() for seed in range(300))
    )


# Wide tensors


def widened(problem: Problem, readers: int) -> Problem:
    """Every op but the first ones reads the first tensor that has a born format, too."""
    tensors = list(problem.tensors)
    index = next(i for i, t in enumerate(tensors) if t.born is not None and len(t.readers) > 1)
    t = tensors[index]
    outputs = [k for k, u in enumerate(problem.units) if u.role == "output" and t.birth < u.moment < len(problem.ops)]
    more = tuple(Use(moment=problem.units[k].moment, unit=k) for k in outputs[:readers])
    tensors[index] = replace(t, readers=tuple(sorted({*t.readers, *more}, key=lambda u: u.moment)))
    return replace(problem, tensors=tuple(tensors))


def test_a_tensor_with_many_readers_is_bounded_from_below() -> None:
    problem = widened(transformer_problem(50), 40)
    found = Relaxation(problem)
    assert not found.exact
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = random_values(domain_sizes(found), rng)
        said, totals = evaluate(problem, found.choice(values)), found.totals(values)
        assert totals.objective <= said.objective * (1.0 + 1e-12)
        assert (totals.bytes_at <= np.array(said.bytes_at) + 1).all()
    solution = lagrangian.solve(problem)
    assert solution is not None and evaluate(problem, solution.choice).feasible
    exact = highs.solve(problem, relative_gap=1e-2)
    assert exact is not None
    assert solution.bound <= exact.evaluation.objective and exact.bound <= solution.evaluation.objective


# Items


def test_effects_of_items_are_differences() -> None:
    problem = transformer_problem(100)
    found = Relaxation(problem)
    rng = np.random.default_rng(1)
    a, b = (random_values(domain_sizes(found), rng) for _ in range(2))
    b = np.where(rng.random(len(a)) < 0.1, b, a)
    limits = [Limit("loss", 0), Limit("row", 3), Limit("phase", 61), Limit("phase", 2 * len(problem.ops) + 10)]
    for items in (islands(found, a, b), flips(found, a)):
        objective, uses = effects(found, a, items, limits)
        before = found.totals(a)
        for item in rng.integers(items.count, size=20).tolist():
            taken = np.arange(items.count) == item
            after = found.totals(items.applied(a, taken))
            assert after.objective - before.objective == pytest.approx(objective[item], abs=1e-12)
            change = [found.over(after, limit) - found.over(before, limit) for limit in limits]
            assert change == pytest.approx(uses[:, item].tolist(), abs=1e-9)


def test_islands_together_are_the_other_assignment() -> None:
    problem = transformer_problem(100)
    found = Relaxation(problem)
    rng = np.random.default_rng(2)
    a, b = (random_values(domain_sizes(found), rng) for _ in range(2))
    b = np.where(rng.random(len(a)) < 0.05, b, a)
    items = islands(found, a, b)
    assert items.count > 1
    assert (items.applied(a, np.ones(items.count, np.bool_)) == b).all()
    objective, _ = effects(found, a, items, [])
    assert found.totals(a).objective + objective.sum() == pytest.approx(found.totals(b).objective, abs=1e-12)


def test_joined_items_are_each_there_once() -> None:
    problem = transformer_problem(100)
    found = Relaxation(problem)
    rng = np.random.default_rng(3)
    a, b = (random_values(domain_sizes(found), rng) for _ in range(2))
    b = np.where(rng.random(len(a)) < 0.05, b, a)
    c = np.where(rng.random(len(a)) < 0.5, b, a)  # shares some of its islands with b
    both = [islands(found, a, b), islands(found, a, c)]

    def changes(items: Items) -> list[frozenset[tuple[int, int]]]:
        listed: dict[int, set[tuple[int, int]]] = {}
        for item, variable, value in zip(*(part.tolist() for part in items.changes), strict=True):
            listed.setdefault(item, set()).add((variable, value))
        return [frozenset(listed[item]) for item in range(items.count)]

    separate = changes(both[0]) + changes(both[1])
    together = changes(joined(both))
    assert len(together) == len(set(together)) < len(separate)
    assert set(together) == set(separate)
    one = joined(both)
    objective, _ = effects(found, a, one, [])
    for item in range(one.count):
        after = found.totals(one.applied(a, np.arange(one.count) == item))
        assert after.objective - found.totals(a).objective == pytest.approx(objective[item], abs=1e-12)


# The solver


@pytest.mark.parametrize(("ops", "seed"), [(300, 0), (300, 1), (1_000, 0)])
def test_a_transformer_is_solved_within_a_thousandth(ops: int, seed: int) -> None:
    problem = transformer_problem(ops, seed=seed)
    found = lagrangian.solve(problem)
    assert found is not None and found.gap <= 1e-3
    assert evaluate(problem, found.choice) == found.evaluation and found.evaluation.feasible
    formats = {u.options[k] for u, k in zip(problem.units, found.choice.options, strict=True)}
    formats |= {f for _, f in found.choice.stored}
    assert formats == {"fp32", "bf16", "fp16", "fp8_e4m3", "recomputed"}
    free = lagrangian.solve(replace(problem, budget_bytes=None))
    assert free is not None and free.evaluation.peak_bytes > (problem.budget_bytes or 0)
    assert free.evaluation.objective < found.bound  # the budget binds


def test_the_loss_of_a_long_transformer_keeps_its_own_logits() -> None:
    problem = transformer_problem(300)
    Case(problem=problem)  # is checked
    assert [ours.moment for ours in problem.replacements] == [len(problem.ops) - 1]


def test_highs_and_prices_do_not_contradict_each_other() -> None:
    problem = transformer_problem(50)
    mine, exact = lagrangian.solve(problem), highs.solve(problem, relative_gap=1e-3)
    assert mine is not None and exact is not None
    assert mine.bound <= exact.evaluation.objective and exact.bound <= mine.evaluation.objective


def test_the_answer_does_not_depend_on_hash_seed_or_threads() -> None:
    code = (
        "from autoprec.planning import lagrangian\n"
        "from tests.planning.transformers import transformer_problem\n"
        "s = lagrangian.solve(transformer_problem(50))\n"
        "print(s.choice.options, sorted(s.choice.stored), s.bound.hex(), s.evaluation.objective.hex())\n"
    )
    answers = set()
    for seed, threads in (("0", "1"), ("1", "2")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        answers.add(done.stdout)
    assert len(answers) == 1


def test_what_cannot_be_is_none() -> None:
    problem = transformer_problem(100)
    assert lagrangian.solve(replace(problem, budget_bytes=problem.fixed_bytes - 1)) is None
    assert lagrangian.solve(replace(problem, budget_bytes=problem.fixed_bytes + 1000)) is None


def test_no_choice_and_no_proof_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer_problem(100)
    monkeypatch.setattr(lagrangian._Search, "offer", lambda self, values, totals: False)
    monkeypatch.setattr(lagrangian, "_BRANCHING", 0)
    with pytest.raises(SolverError, match="no feasible choice"):
        lagrangian.solve(problem)


# Which solver


def test_few_decisions_go_to_highs_and_many_to_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def asking(name: str, answer: Solution | None) -> Callable[..., Solution | None]:
        def solve(problem: Problem, *, relative_gap: float) -> Solution | None:
            asked.append(name)
            return answer

        return solve

    problem = transformer_problem(50)
    good = highs.solve(problem, relative_gap=1e-2)
    assert good is not None
    loose = replace(good, bound=0.5 * good.bound)
    monkeypatch.setattr(highs, "solve", asking("highs", good))
    monkeypatch.setattr(lagrangian, "solve", asking("prices", loose))
    assert solvers.solve(problem, relative_gap=0.1) is good and asked == ["highs"]
    monkeypatch.setattr(solvers, "PRICED", 10)
    assert solvers.solve(problem, relative_gap=0.0) is good and asked == ["highs", "highs"]
    assert solvers.solve(problem, relative_gap=0.9) is loose and asked[2:] == ["prices"]
    found = solvers.solve(problem, relative_gap=0.1)
    assert found is not None and found.bound == good.bound and asked[3:] == ["prices", "highs"]
    monkeypatch.setattr(solvers, "LARGE", 20)
    assert solvers.solve(problem, relative_gap=0.1) is loose and asked[5:] == ["prices"]


def test_highs_is_asked_where_prices_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem, *, relative_gap: float) -> Solution | None:
        raise SolverError("who knows")

    problem = transformer_problem(50)
    monkeypatch.setattr(lagrangian, "solve", fail)
    monkeypatch.setattr(solvers, "PRICED", 10)
    found = solvers.solve(problem, relative_gap=1e-2)
    assert found is not None and found.gap <= 1e-2
    monkeypatch.setattr(solvers, "LARGE", 20)
    with pytest.raises(SolverError, match="who knows"):
        solvers.solve(problem, relative_gap=1e-2)
