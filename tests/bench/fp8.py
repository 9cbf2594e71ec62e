"""Products in FP8, role by role: predicted noise and measured. `python -m tests.bench.fp8 [NAME ...]`

Every linear and convolution of a workload in one recipe, all else in FP32 (emulated here: only the arithmetic counts);
first everything in BF16.
Root mean square of the loss change over 32 batches that calibration did not see, beside what the planner predicts, and
the same for the error of each weight's gradient: quartiles over the weights of predicted / measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Generator

from autoprec.devices import Datasheet
from autoprec.planning.evaluator import evaluate
from autoprec.planning.planner import ask, propose
from autoprec.planning.roofline import modelled_device
from autoprec.planning.solutions import Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.policies import Policy
from autoprec.serial import load_device
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.recurrent import BATCHES, runs
from tests.bench.workloads import chosen

KINDS = ["linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d"]

ALL_BF16 = ("bf16", "bf16", "bf16")
#: Formats of output, grad_input and grad_weight.
RECIPES = (
    ALL_BF16,
    ("fp8_e4m3", "fp32", "fp32"),
    ("fp8_e5m2", "fp32", "fp32"),
    ("fp32", "fp8_e5m2", "fp32"),
    ("fp32", "fp8_e4m3", "fp32"),
    ("fp32", "fp32", "fp8_e5m2"),
    ("fp32", "fp32", "fp8_e4m3"),
    ("fp8_e4m3", "fp8_e5m2", "bf16"),
    ("fp8_e4m3", "fp8_e5m2", "fp8_e5m2"),
    ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
)


@dataclass(frozen=True, kw_only=True)
class InFP8:
    """A recipe on a workload: root mean squares of the loss change; by weight, those of the gradient's relative error,
    predicted and measured."""

    recipe: tuple[str, str, str]
    loss_predicted: float
    loss_measured: float
    gradients: tuple[tuple[float, float], ...]


def policy_of(recipe: tuple[str, str, str]) -> Policy:
    rules: list[dict[str, Any]] = [
        {"kinds": KINDS, "roles": [role], "pin": fmt, "optional": True}
        for role, fmt in zip(("output", "grad_input", "grad_weight"), recipe, strict=True)
        if recipe != ALL_BF16
    ]
    return Policy(name="recipe", formats=tuple(dict.fromkeys(("fp32", *recipe))), rules=rules, storage={"formats": ()},
                  noise={"gradient": 1e6, "loss": 1e6})  # fmt: skip


def recipes(found: Calibrated, batches: int = BATCHES) -> Iterator[InFP8]:
    sheet = load_device("h100")
    assert isinstance(sheet, Datasheet)
    device = modelled_device(sheet, found.session.graph)
    generator = Generator().manual_seed(1)
    data = [found.workload.batch(generator) for _ in range(batches)]
    exact = runs(found, None, data)
    energy = {n: statistics.fmean(float(g[n].square().sum()) for _, g in exact) for n in exact[0][1]}
    for recipe in RECIPES:
        proposals = propose(ask(found.session.graph, found.session.profile, device, policy_of(recipe)), advise=False)
        problem = proposals.problem
        choice = uniform_choice(problem, "bf16" if recipe == ALL_BF16 else "fp32")
        said = evaluate(problem, choice)
        seen = runs(found, proposals.decisions(Solution(choice=choice, evaluation=said, bound=0.0)), data)
        pairs = []
        for row, value in zip(problem.rows, said.rows, strict=True):
            errors = [float((a[row.weight] - b[row.weight]).square().sum())
                      for (_, a), (_, b) in zip(seen, exact, strict=True)]  # fmt: skip
            measured = statistics.fmean(errors) / energy[row.weight]
            pairs.append((math.sqrt(value / energy[row.weight]), math.sqrt(measured)))
        yield InFP8(
            recipe=recipe,
            loss_predicted=said.loss_sigma,
            loss_measured=math.sqrt(statistics.fmean((a - b) ** 2 for (a, _), (b, _) in zip(seen, exact, strict=True))),
            gradients=tuple(pairs),
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fp8")
    workloads, _ = chosen(parser)
    print("workload     output    grad_input grad_weight   loss change: predicted  measured  ratio"
          "   weight gradients: median error  predicted / measured: quartiles")  # fmt: skip
    with one_thread():
        for workload in workloads:
            for r in recipes(calibrate(workload)):
                ratios = [p / m for p, m in r.gradients if m > 0.0]
                low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)) if ratios else (math.nan,) * 3
                error = statistics.median(m for _, m in r.gradients) if r.gradients else math.nan
                loss = r.loss_predicted / r.loss_measured if r.loss_measured else math.nan
                print(f"{workload.name:12} {r.recipe[0]:9} {r.recipe[1]:10} {r.recipe[2]:11} {r.loss_predicted:24.2e}"
                      f" {r.loss_measured:9.2e} {loss:6.2f} {error:31.4f} {low:20.2f} {middle:6.2f} {high:6.2f}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
