"""Does planning earn its keep? `python -m tests.bench.earns [NAME ...] [--random N]`

At equal bytes kept for backward, half-way between all FP32 and all BF16: the planner's choice of what is BF16 against
the choice by size alone (the largest tensors first, until the bytes are reached) and against random orders. Nothing is
kept narrower than it is computed, because storages alone do not change the loss. Measured: root mean square over eight
batches of (loss under the choice − loss in FP32), and bytes that autograd holds. And the other way round: the bytes
that the planner needs for the noise of the choice by size. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.planning.evaluator import evaluate
from autoprec.planning.neighbours import Neighbours
from autoprec.planning.polish import flips, tied_groups
from autoprec.planning.proposals import Proposals
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Choice, Evaluation, Problem, Solution
from autoprec.plans import Plan
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import WORKLOADS

#: Bars, from the issue.
SIZE_FRAC, RANDOM_FRAC, BYTES_FRAC = 0.5, 0.5, 0.85

#: Noise limits that bind nothing.
LOOSE = {"gradient": 1e6, "loss": 1e6}


class Runner:
    """Runs plans on one compiled model: loss change and bytes kept."""

    def __init__(self, found: Calibrated) -> None:
        self.found, self.model = found, copy.deepcopy(found.model)
        plan = Plan(assignments=())
        autoprec.compile(self.model, plan=plan, events=None)
        self.session = autoprec.session(self.model)
        self.exact = self.losses()

    def losses(self) -> list[float]:
        """Of every batch, with the same random state."""
        return [self.forward(batch).item() for batch in self.found.batches]

    def forward(self, batch: object) -> torch.Tensor:
        torch.manual_seed(0)
        return self.found.workload.loss(self.model, batch)

    def adopt(self, plan: Plan) -> None:
        self.session._adopt(plan)
        self.forward(self.found.batches[0])

    def change(self, plan: Plan) -> float:
        """Root mean square of the loss change."""
        self.adopt(plan)
        return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(self.losses(), self.exact, strict=True)))

    def kept(self, plan: Plan) -> int:
        """Bytes that autograd holds."""
        self.adopt(plan)
        batch = self.found.batches[0]
        tensors = [t for t in (batch if isinstance(batch, tuple) else (batch,)) if isinstance(t, torch.Tensor)]
        own: Iterable[torch.Tensor] = [*self.model.parameters(), *self.model.buffers(), *tensors]
        return saved_bytes(lambda: self.forward(batch), own)


def narrowed(problem: Problem, order: Iterable[int], enough: Callable[[Evaluation], bool]) -> Choice:
    """All FP32, then unit after unit in BF16 in the given order, until it is enough."""
    groups = tied_groups(problem)
    choice = uniform_choice(problem, "fp32")
    near = Neighbours(problem, choice)
    for unit in order:
        if enough(near.evaluate(choice)):
            break
        for name, changed in flips(problem, choice, groups, unit):
            if name == "bf16":
                choice = changed
                near.move(choice)
    return choice


def sizes(problem: Problem) -> list[int]:
    """Elements of what each unit's op makes and reads, or 0 for gradients, which keep nothing."""
    made = [0] * len(problem.units)
    for t in problem.tensors:
        if t.born is not None and t.savers:
            made[t.born] += t.numel
    return made


def least_noise(found: Calibrated, target: int) -> Solution:
    """The smallest limit of the loss noise under which the planner keeps no more than the target, by bisection."""
    low, high, best = 1e-12, 1e3, None
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        solution = by_bytes(found, middle).best.solution
        if solution.evaluation.saved_bytes <= target:
            high, best = middle, solution
        else:
            low = middle
    assert best is not None
    return best


def by_bytes(found: Calibrated, limit: float) -> Proposals:
    """The fewest bytes within a limit of the loss noise, as a share of the batches' spread."""
    return found.proposals(
        "memory", formats=("fp32", "bf16"), storage={"formats": ()}, rules=(), noise=LOOSE | {"loss": limit}
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """Root mean square loss changes and bytes kept, measured."""

    workload: str
    planned: float
    by_size: float
    by_chance: tuple[float, ...]
    planned_bytes: int
    by_size_bytes: int
    wide_bytes: int
    narrow_bytes: int
    at_equal_noise: float
    at_equal_noise_bytes: int

    @property
    def misses(self) -> list[str]:
        """The bars that are missed."""
        found = []
        if self.planned > SIZE_FRAC * self.by_size:
            found.append(f"{self.workload}: {self.planned / self.by_size:.2f} of the loss change by size")
        median = statistics.median(self.by_chance)
        if self.planned > RANDOM_FRAC * median:
            found.append(f"{self.workload}: {self.planned / median:.2f} of the median loss change by chance")
        if self.at_equal_noise_bytes > BYTES_FRAC * self.by_size_bytes:
            found.append(f"{self.workload}: {self.at_equal_noise_bytes / self.by_size_bytes:.2f} of the bytes by size")
        return found


def study(name: str, orders: int) -> Result:
    """One workload."""
    found = calibrate(WORKLOADS[name])
    proposals = by_bytes(found, 1e6)
    problem = proposals.problem
    wide, narrow = (evaluate(problem, uniform_choice(problem, f)).saved_bytes for f in ("fp32", "bf16"))
    target = (wide + narrow) // 2

    def enough(e: Evaluation) -> bool:
        return e.saved_bytes <= target

    runner = Runner(found)

    def plan_of(choice: Choice) -> Plan:
        return proposals.decisions(Solution(choice=choice, evaluation=evaluate(problem, choice), bound=0.0))

    made = sizes(problem)
    units = range(len(problem.units))
    by_size = narrowed(problem, sorted(units, key=lambda u: -made[u]), enough)
    chance = random.Random(0)
    by_chance = [narrowed(problem, chance.sample(units, len(units)), enough) for _ in range(orders)]
    # At the bytes that the choice by size came to: its last step may have gone further than half-way.
    planned = plan_of(least_noise(found, evaluate(problem, by_size).saved_bytes).choice)
    size_plan = plan_of(by_size)
    size_change = runner.change(size_plan)
    equal, equal_change = at_noise(found, runner, plan_of, evaluate(problem, by_size), size_change)
    return Result(
        workload=name,
        planned=runner.change(planned),
        by_size=size_change,
        by_chance=tuple(runner.change(plan_of(c)) for c in by_chance),
        planned_bytes=runner.kept(planned),
        by_size_bytes=runner.kept(size_plan),
        wide_bytes=runner.kept(plan_of(uniform_choice(problem, "fp32"))),
        narrow_bytes=runner.kept(plan_of(uniform_choice(problem, "bf16"))),
        at_equal_noise=equal_change,
        at_equal_noise_bytes=runner.kept(equal),
    )


def at_noise(
    found: Calibrated, runner: Runner, plan_of: Callable[[Choice], Plan], by_size: Evaluation, measured: float
) -> tuple[Plan, float]:
    """The fewest bytes whose measured loss change is that of the choice by size: from its predicted one downwards."""
    spread = found.session.profile.loss.spread
    limit = by_size.loss_sigma / spread
    while True:
        plan = plan_of(by_bytes(found, limit).best.solution.choice)
        change = runner.change(plan)
        if change <= measured:
            return plan, change
        limit *= 0.8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.earns")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--random", type=int, default=50)
    given = parser.parse_args()
    missed: list[str] = []
    print("workload     kept MB: fp32  half  bf16   loss change: planned  by size  by chance (median)   /size  /chance"
          "   bytes at equal noise / by size", flush=True)  # fmt: skip
    with one_thread():
        for name in given.names or WORKLOADS:
            r = study(name, given.random)
            median = statistics.median(r.by_chance)
            print(
                f"{name:12} {r.wide_bytes / 1e6:12.2f} {r.planned_bytes / 1e6:6.2f} ({r.by_size_bytes / 1e6:.2f})"
                f" {r.narrow_bytes / 1e6:6.2f} {r.planned:14.2e} {r.by_size:9.2e} {median:12.2e}"
                f" {r.planned / r.by_size:18.2f} {r.planned / median:8.2f}"
                f" {r.at_equal_noise_bytes / r.by_size_bytes:12.2f} (change {r.at_equal_noise:.2e})",
                flush=True,
            )
            missed += r.misses
    print("\n".join(["", *(f"missed: {m}" for m in missed)]) if missed else "\nevery bar is met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
