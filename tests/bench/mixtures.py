"""How well are peaks predicted of plans that nobody would make? `python -m tests.bench.mixtures [NAME ...] [--count N]
[--formats F ...]`

Random formats for all ops and roles (FP32 and BF16, unless others are named), and random storages: predicted and
measured peak of a step. Prints the quantiles of predicted / measured for each workload.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import numpy as np

from autoprec.formats import COMPUTE_FORMATS
from autoprec.planning.evaluator import evaluate
from autoprec.planning.polish import flips, tied_groups
from autoprec.planning.solutions import Choice, Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Problem
from tests.bench.measure import Calibrated, calibrate, live_peak, one_thread
from tests.bench.workloads import chosen


def mixture(problem: Problem, chance: random.Random) -> Choice:
    """Random formats, and a random share of the tensors in random storages."""
    groups = tied_groups(problem)
    choice = uniform_choice(problem, "fp32")
    for unit in range(len(problem.units)):
        found = [choice, *(changed for _, changed in flips(problem, choice, groups, unit))]
        choice = chance.choice(found)
    share = chance.random()
    for tensor in problem.storable:
        if chance.random() < share:
            choice = choice.keeping(tensor, chance.choice(problem.tensors[tensor].storages))
    return choice


#: What is mixed where nobody says.
FORMATS = ("fp32", "bf16")


def ratios(found: Calibrated, count: int, formats: Sequence[str] = FORMATS) -> list[float]:
    """Predicted over measured peak, beyond parameters, gradients, optimizer state and inputs."""
    proposals = found.proposals("balanced", formats=tuple(formats), noise={"gradient": 1e6, "loss": 1e6})
    problem, chance = proposals.problem, random.Random(0)
    found_ratios = []
    for _ in range(count):
        choice = mixture(problem, chance)
        evaluation = evaluate(problem, choice)
        plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
        found_ratios.append((evaluation.peak_bytes - found.fixed_bytes) / live_peak(found, plan))
    return found_ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mixtures")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--formats", nargs="+", choices=COMPUTE_FORMATS, default=FORMATS)
    workloads, given = chosen(parser)
    print("workload     plans  predicted / measured peak: lowest  quartile  median  quartile  highest", flush=True)
    with one_thread():
        for workload in workloads:
            spread = np.quantile(ratios(calibrate(workload), given.count, given.formats), (0.0, 0.25, 0.5, 0.75, 1.0))
            print(f"{workload.name:12} {given.count:5} {'':26} " + "  ".join(f"{q:.3f}" for q in spread), flush=True)


if __name__ == "__main__":
    main()
