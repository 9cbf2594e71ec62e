"""`python -m tests.planning.scale [OPS ...]`: problems of transformers of growing size, solved by the solver for many
decisions; exit code 1 if a proven gap is wider than its bar."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoprec.planning import lagrangian
from autoprec.planning.evaluator import evaluate
from tests.planning.transformers import transformer_problem

#: (ops, largest proven gap): up to so many ops.
BARS = ((1_000, 1e-3), (20_000, 5e-3), (100_000, 1e-2))
SIZES = (1_000, 20_000, 100_000)


def clocked(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, wall seconds, and seconds of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def main(sizes: Sequence[int]) -> int:
    missed = False
    print("    ops  seed  decisions  objective      bound      gap      bar  solve wall/cpu s  generate s  peak/budget  loss/limit  formats")  # noqa: E501
    for size in sizes:
        for seed in (0, 1, 2) if size <= 1_000 else (0,):
            problem, made, _ = clocked(lambda: transformer_problem(size, seed=seed))  # noqa: B023
            found, wall, cpu = clocked(lambda: lagrangian.solve(problem))  # noqa: B023
            bar = next((gap for ops, gap in BARS if size <= ops), BARS[-1][1])
            if found is None:
                print(f"{size:7} {seed:5}  no plan")
                missed = True
                continue
            said = evaluate(problem, found.choice)
            limit = problem.loss_limit or float("inf")
            assert said.feasible and problem.budget_bytes is not None
            gap = 1.0 - found.bound / said.objective
            missed |= gap > bar
            formats = Counter(u.options[k] for u, k in zip(problem.units, found.choice.options, strict=True))
            formats += Counter(f"{f} kept" for _, f in found.choice.stored)
            decisions = sum(len(u.options) > 1 for u in problem.units) + len(problem.storable)
            print(
                f"{len(problem.ops):7} {seed:5}  {decisions:9}  {said.objective:.6f}  {found.bound:.6f}  {gap:7.4%}"
                f"  {bar:7.2%}  {wall:8.1f} {cpu:7.1f}  {made:10.1f}  {said.peak_bytes / problem.budget_bytes:11.5f}"
                f"  {said.loss_sigma**2 / limit:10.4f}  {dict(formats.most_common())}",
                flush=True,
            )
    return int(missed)


def budget_binds(ops: int) -> tuple[float, float]:
    """The objectives with and without the budget."""
    problem = transformer_problem(ops)
    found, free = lagrangian.solve(problem), lagrangian.solve(replace(problem, budget_bytes=None))
    assert found is not None and free is not None
    return found.evaluation.objective, free.evaluation.objective


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]] or SIZES))
