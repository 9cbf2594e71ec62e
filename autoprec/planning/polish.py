"""Single changes for the better, where a solver stopped within its gap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autoprec.planning.evaluator import evaluate
from autoprec.planning.neighbours import Neighbours
from autoprec.planning.solutions import Choice, Solution
from autoprec.planning.values import Problem

__all__ = ["flips", "polish", "storage_flips", "tied_groups"]


def tied_groups(problem: Problem) -> list[list[int]]:
    """For each unit, the units that must have its format, itself included."""
    group = list(range(len(problem.units)))
    for a, b in problem.ties:
        old, new = group[a], group[b]
        group = [new if g == old else g for g in group]
    members: dict[int, list[int]] = {}
    for unit, g in enumerate(group):
        members.setdefault(g, []).append(unit)
    return [members[g] for g in group]


def flips(problem: Problem, choice: Choice, groups: list[list[int]], unit: int) -> Iterator[tuple[str, Choice]]:
    """(format, choice) for every other format of a unit; units tied to it follow."""
    for k, name in enumerate(problem.units[unit].options):
        if k != choice.options[unit]:
            options = list(choice.options)
            for member in groups[unit]:
                options[member] = k
            yield name, replace(choice, options=tuple(options))


def storage_flips(problem: Problem, choice: Choice, tensor: int) -> Iterator[tuple[str | None, Choice]]:
    """(storage, choice) for every other way to keep a tensor; None is as it is."""
    mine = dict(choice.stored).get(tensor)
    for storage in (None, *problem.tensors[tensor].storages):
        if storage != mine:
            yield storage, choice.keeping(tensor, storage)


def polish(problem: Problem, solution: Solution, *, passes: int = 3) -> Solution:
    """The solution after every single change that improves it, in a fixed order."""
    groups = tied_groups(problem)
    choice, best = solution.choice, solution.evaluation
    near = Neighbours(problem, choice)

    def take_if_better(changed: Choice) -> None:
        """The evaluator has the last word."""
        nonlocal choice, best
        for judge in (near.evaluate, partial(evaluate, problem)):
            found = judge(changed)
            if not (found.feasible and found.objective < best.objective):
                return
        choice, best = changed, found
        near.move(changed)

    for _ in range(passes):
        before = best
        for unit in range(len(problem.units)):
            for _, changed in flips(problem, choice, groups, unit):
                take_if_better(changed)
        for tensor in problem.storable:
            for _, changed in storage_flips(problem, choice, tensor):
                take_if_better(changed)
        if best is before:
            break
    return Solution(choice=choice, evaluation=best, bound=solution.bound)
