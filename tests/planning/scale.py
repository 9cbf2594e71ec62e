"""`python -m tests.planning.scale [OPS ...]`: problems of transformers of growing size, solved by the solver for many
decisions; exit code 1 if a proven gap is wider than its bar. Five problems of 1,000 ops and less; five more whose
weights' limits are spread over two and a half decades instead of one and a half have no bar."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from autoprec.planning import lagrangian
from autoprec.planning.evaluator import evaluate
from autoprec.planning.solvers import decisions_count
from tests.planning.transformers import transformer_problem

#: (ops, largest proven gap): up to so many ops.
BARS = ((1_000, 1e-3), (20_000, 5e-3), (100_000, 1e-2))
SIZES = (1_000, 20_000, 100_000)


def clocked(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, wall seconds, and seconds of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def bar_for(ops: int) -> float:
    """The largest gap for so many ops."""
    return next((gap for most, gap in BARS if ops <= most), BARS[-1][1])


def measure(ops: int, seed: int, decades: float) -> tuple[str, float]:
    """A line of the table, and the proven gap."""
    problem, made, _ = clocked(lambda: transformer_problem(ops, seed=seed, decades=decades))
    found, wall, cpu = clocked(lambda: lagrangian.solve(problem))
    if found is None:
        return f"{ops:7} {seed:5} {decades:8}  no plan", float("inf")
    said = evaluate(problem, found.choice)  # the judge; nothing that the solver says of its own choice counts
    assert said.feasible and problem.budget_bytes is not None and problem.loss_limit is not None
    gap = 1.0 - found.bound / said.objective
    formats = Counter(u.options[k] for u, k in zip(problem.units, found.choice.options, strict=True))
    formats += Counter(f"{f} kept" for _, f in found.choice.stored)
    rows = max(value / row.limit for value, row in zip(said.rows, problem.rows, strict=True))
    line = (
        f"{len(problem.ops):7} {seed:5} {decades:8} {decisions_count(problem):10} {said.objective:10.6f}"
        f" {found.bound:10.6f} {gap:9.4%} {wall:7.1f} {cpu:6.1f} {made:9.1f}"
        f" {said.peak_bytes / problem.budget_bytes:10.6f} {said.loss_sigma**2 / problem.loss_limit:7.4f} {rows:7.4f}"
        f"  {', '.join(f'{n} {f}' for f, n in formats.most_common())}"
    )
    return line, gap


def main(sizes: Sequence[int]) -> int:
    missed = False
    heads = (
        "seed",
        "decades",
        "decisions",
        "objective",
        "bound",
        "gap",
        "wall",
        "cpu",
        "generate",
        "of budget",
        "of loss",
    )
    print("    ops " + " ".join(heads) + " of rows  formats")
    for ops in sizes:
        for decades in (1.5, 2.5) if ops <= 1_000 else (1.5,):
            for seed in range(5) if ops <= 1_000 else (0,):
                line, gap = measure(ops, seed, decades)
                print(line, flush=True)
                missed |= decades < 2.0 and gap > bar_for(ops)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]] or SIZES))
