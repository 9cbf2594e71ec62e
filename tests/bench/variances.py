"""Relative noise of activations and gradients, product by product: predicted and measured.
`python -m tests.bench.variances [NAME ...]`

Every linear and convolution of a workload reads x and its weight in E4M3 and gives BF16, by casts written here and not
by this package's; gradients pass in FP32. The relative error of what each product reads, and of the gradient that
arrives at it, beside what the planner predicts of such a plan. And the gains that it reads off the profile for that:
what a product multiplies the relative variance of what it reads, and of the gradient that arrives, by.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from autoprec.devices import Datasheet
from autoprec.planning.evaluator import Step
from autoprec.planning.gains import Gains
from autoprec.planning.planner import ask, propose
from autoprec.planning.pricing import Prices
from autoprec.planning.roofline import modelled_device
from autoprec.planning.roots import resolve_roots
from autoprec.planning.uniform import uniform_choice
from autoprec.serial import load_device
from tests.bench.fp8 import policy_of
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import chosen

BATCHES = 8


def e4m3(x: Tensor) -> Tensor:
    """With the power-of-two scale that brings the largest magnitude next to 448."""
    amax = float(x.detach().abs().amax())
    scale = 2.0 ** math.floor(math.log2(448.0 / amax)) if amax > 0.0 else 1.0
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@contextmanager
def watched(model: nn.Module, narrow: bool) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """(what it reads, what it gives) of every linear and convolution, by name, call by call."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    names = {id(m): name for name, m in model.named_modules()}

    def watch(product: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            y = product(self, x, self.weight)
            if narrow:  # the value of rounded operands, and the gradients of exact ones
                y = y + (product(self, e4m3(x), e4m3(self.weight)).bfloat16().float() - y).detach()
            y.retain_grad()
            found.setdefault(names[id(self)], []).append((x, y))
            return y

        return forward

    linear = watch(lambda module, x, w: F.linear(x, w, module.bias))
    conv = watch(lambda module, x, w: module._conv_forward(x, w, module.bias))
    with mock.patch.object(nn.Linear, "forward", linear), mock.patch.object(nn.Conv2d, "forward", conv):
        yield found


def seen(found: Calibrated, batches: list[Any], narrow: bool) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """(what it reads, the gradient that arrives) of every product, by name, batch by batch."""
    with watched(found.model, narrow) as calls:
        for batch in batches:
            found.model.zero_grad()
            found.workload.loss(found.model, batch).backward()
    return {name: [(x.detach(), y.grad) for x, y in pairs if y.grad is not None] for name, pairs in calls.items()}


def error(exact: list[Tensor], rounded: list[Tensor]) -> float:
    """Relative, over all batches."""
    energy = sum(float(a.square().sum()) for a in exact)
    wrong = sum(float((a - b).square().sum()) for a, b in zip(exact, rounded, strict=True))
    return math.sqrt(wrong / energy) if energy > 0.0 else 0.0


def predicted(found: Calibrated) -> dict[str, tuple[float, float]]:
    """By weight: the relative error of what its product reads, and of the gradient that arrives."""
    sheet = load_device("h100")
    assert isinstance(sheet, Datasheet)
    graph = found.session.graph
    policy = policy_of(("fp8_e4m3", "fp32", "fp32"))
    problem = propose(ask(graph, found.session.profile, modelled_device(sheet, graph), policy), advise=False).problem
    variance = Step(problem, uniform_choice(problem, "fp32")).whole().variances()
    return {
        row.weight: (math.sqrt(variance[row.passing[0][0]]), math.sqrt(variance[problem.gemms[row.gemms[0]].variance]))
        for row in problem.rows
        if len(row.gemms) == 1 and len(row.passing) == 1
    }


def gains(found: Calibrated) -> tuple[list[float], list[float]]:
    """Forward and backward, of products with a weight."""
    session = found.session
    graph = session.graph
    known = Gains(graph, Prices(graph, resolve_roots(graph), session.profile, session.policy))
    products = [op for op in graph.ops if op.is_plain_product and op.weights]
    backward = [known.backward(op, op.inputs[0]) for op in products]
    return [known.forward(op) for op in products], [gain for gain in backward if gain is not None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.variances")
    workloads, _ = chosen(parser)
    print("workload     what                     relative error: median   predicted / measured: quartiles")
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            said = predicted(found)
            generator = Generator().manual_seed(1)
            batches = [workload.batch(generator) for _ in range(BATCHES)]
            exact, rounded = seen(found, batches, False), seen(found, batches, True)
            for place, what in enumerate(("read", "gradient that arrives")):
                pairs = []
                for name, calls in exact.items():
                    if f"{name}.weight" in said:
                        measured = error([c[place] for c in calls], [c[place] for c in rounded[name]])
                        pairs.append((said[f"{name}.weight"][place], measured))
                low, middle, high = np.quantile([p / m for p, m in pairs if m > 0.0], (0.25, 0.5, 0.75))
                median = float(np.median([m for _, m in pairs]))
                print(f"{workload.name:12} {what:24} {median:22.4f} {low:25.2f} {middle:6.2f} {high:6.2f}", flush=True)
            for what, own in zip(("forward", "backward"), gains(found), strict=True):
                low, middle, high = np.quantile(own, (0.25, 0.5, 0.75))
                print(f"{workload.name:12} gains {what}: quartiles {low:.2f}, {middle:.2f}, {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
