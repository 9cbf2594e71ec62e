"""When to look at gradients: `python -m tests.bench.looks [NAME ...] [--steps 120]`.

One model trains, bare but for hooks that say that a gradient has arrived. Every step looks at all gradients in one of
several ways, in an order by chance; its time is held against that of the step that did not look. Whole steps with the
optimizer's: what was looked at last is in the caches when the optimizer reads it.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor, nn

from tests.bench.measure import calibrate, one_thread
from tests.bench.overhead import Training
from tests.bench.workloads import chosen

#: Elements of gradients that are looked at together, in one of the ways.
TOGETHER = 1 << 19

WARM_UP = 5


class Looking:
    """Looks at gradients as they arrive (`at_once` elements of them together), or in `at_end`. Counts its seconds."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.at_once = 0
        self.at_end: Callable[[list[Tensor]], object] = list
        self.seconds = 0.0
        self._waiting, self._numel = list[Tensor](), 0
        for i, p in enumerate(parameters):
            p.register_post_accumulate_grad_hook(partial(self._arrived, i))

    def _arrived(self, _: int, p: Tensor) -> None:
        assert p.grad is not None
        self._waiting.append(p.grad)
        self._numel += p.grad.numel()
        if self.at_once and self._numel >= self.at_once:
            self._look(look_at)

    def end(self) -> None:
        """The backward pass is over."""
        self._look(self.at_end)

    def _look(self, how: Callable[[list[Tensor]], object]) -> None:
        begin = time.perf_counter()
        how(self._waiting)
        self.seconds += time.perf_counter() - begin
        self._waiting, self._numel = [], 0


def look_at(gradients: list[Tensor]) -> None:
    """In this order, as the guard does."""
    assert all([math.isfinite(torch.linalg.vector_norm(g).item()) for g in gradients])


def latest_first(gradients: list[Tensor]) -> None:
    look_at(gradients[::-1])


def by_one_call(gradients: list[Tensor]) -> None:
    norms = torch._foreach_norm(gradients[::-1])
    assert torch.stack(list(norms)).sum().isfinite()


#: Name → (elements that are looked at together while they arrive, what is done at the end).
WAYS: dict[str, tuple[int, Callable[[list[Tensor]], object]]] = {
    "not at all": (0, list),
    "each when it arrives": (1, look_at),
    "some together": (TOGETHER, look_at),
    "at the end, earliest first": (0, look_at),
    "at the end, latest first": (0, latest_first),
    "at the end, by one call": (0, by_one_call),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.looks")
    parser.add_argument("--steps", type=int, default=120)
    workloads, given = chosen(parser)
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            plan = found.planned("balanced")
            assert plan is not None
            run = Training(found, plan)
            run.step(found.batches[0])  # bound
            looking = Looking(list(run.model.parameters()))
            run.optimizer.register_step_pre_hook(lambda *_, looking=looking: looking.end())
            chance, generator = random.Random(0), Generator().manual_seed(0)
            taken = {name: list[tuple[float, float]]() for name in WAYS}
            for _ in range(given.steps + WARM_UP):
                for name in chance.sample(list(WAYS), len(WAYS)):
                    looking.at_once, looking.at_end = WAYS[name]
                    batch, looking.seconds = workload.batch(generator), 0.0
                    taken[name].append((run.bare_step(batch), looking.seconds))
            plain = [step for step, _ in taken["not at all"]][WARM_UP:]
            print(
                f"{workload.name}: {statistics.median(plain) * 1e3:.1f} ms a step that does not look, of {given.steps}"
            )
            for name, steps in taken.items():
                ratios = [step / other for (step, _), other in zip(steps[WARM_UP:], plain, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                inside = statistics.median(seconds for _, seconds in steps) * 1e3
                print(
                    f"  {name:27} {middle:.4f} ({low:.4f}–{high:.4f}) of it, {inside:.2f} ms inside of the look",
                    flush=True,
                )


if __name__ == "__main__":
    main()
