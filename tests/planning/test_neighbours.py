"""Neighbours say what the evaluator says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoprec.planning import neighbours
from autoprec.planning.evaluator import evaluate
from autoprec.planning.neighbours import Neighbours
from autoprec.planning.solutions import Choice, Evaluation
from autoprec.planning.values import Problem
from tests.planning.planning_cases import random_case
from tests.planning.test_solvers import random_choice


def agree(a: Evaluation, b: Evaluation) -> bool:
    exact = (a.saved_bytes, a.peak_bytes, a.peak_phase, a.bytes_at) == (
        b.saved_bytes, b.peak_bytes, b.peak_phase, b.bytes_at
    )  # fmt: skip
    # A sum of differences leaves a residue of what was subtracted; what is a root is compared as the sum that it was.
    sums = np.allclose(
        [a.seconds, a.loss_sigma**2, a.gradient_ratio**2, a.noise, a.objective],
        [b.seconds, b.loss_sigma**2, b.gradient_ratio**2, b.noise, b.objective],
        rtol=1e-6, atol=1e-9,
    )  # fmt: skip
    return exact and bool(sums) and [(v.kind, v.what) for v in a.violations] == [(v.kind, v.what) for v in b.violations]


def near(problem: Problem, choice: Choice, rng: np.random.Generator) -> Choice:
    """One to three decisions changed."""
    options = list(choice.options)
    for _ in range(rng.integers(1, 4)):
        if problem.storable and rng.random() < 0.3:
            tensor = int(rng.choice(problem.storable))
            storages = problem.tensors[tensor].storages
            k = int(rng.integers(len(storages) + 1))
            choice = choice.keeping(tensor, storages[k] if k < len(storages) else None)
        elif options:
            unit = int(rng.integers(len(options)))
            options[unit] = int(rng.integers(len(problem.units[unit].options)))
    return replace(choice, options=tuple(options))


def disagreements(seeds: range) -> int:
    wrong = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        problem = random_case(seed).problem()
        budget = None if seed % 2 else int(evaluate(problem, random_choice(problem, rng)).peak_bytes)
        problem = random_case(seed).problem(budget)
        centre = random_choice(problem, rng)
        quick = Neighbours(problem, centre)
        for _ in range(8):
            changed = near(problem, centre, rng)
            wrong += not agree(quick.evaluate(changed), evaluate(problem, changed))
        quick.move(changed)
        other = near(problem, changed, rng)
        wrong += not agree(quick.evaluate(other), evaluate(problem, other))
    return wrong


def test_neighbours_agree_with_the_evaluator() -> None:
    assert disagreements(range(120)) == 0


def forget_births(monkeypatch: pytest.MonkeyPatch) -> None:
    found = neighbours._readers

    def without(problem: Problem) -> object:
        by_unit, by_tensor = found(problem)
        for t, tensor in enumerate(problem.tensors):
            if tensor.born is not None:
                by_unit[tensor.born].discard(("tensor", t))
        return by_unit, by_tensor

    monkeypatch.setattr(neighbours, "_readers", without)


def forget_what_comes_from_above(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = neighbours._gains

    def without(problem: Problem) -> object:
        by_node, by_saver = gains(problem)
        return 0.0 * by_node, by_saver

    monkeypatch.setattr(neighbours, "_gains", without)


def forget_what_other_savers_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = neighbours._readers

    def without(problem: Problem) -> object:
        by_unit, by_tensor = found(problem)
        return by_unit, [{key for key in keys if key[0] != "savers"} for keys in by_tensor]

    monkeypatch.setattr(neighbours, "_readers", without)


@pytest.mark.parametrize("plant", [forget_births, forget_what_comes_from_above, forget_what_other_savers_pass_on])
def test_a_planted_bug_is_noticed(plant, monkeypatch) -> None:
    plant(monkeypatch)
    assert any(disagreements(range(seed, seed + 1)) for seed in range(60))
