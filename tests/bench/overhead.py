"""What guard and monitor cost: `python -m tests.bench.overhead [NAME ...] [--cycles 12]`.

The same plan three times: bare (the rewritten graph is called and nothing else: no guard, no records, no boundary),
guarded, and guarded and monitored at default settings. The three take every step in turn, in an order that is drawn
anew, whole steps with the optimizer's; a cycle has as many as lie between two observed ones. Overheads are ratios of
sums over a cycle, medians over cycles, with quartiles; an observed step is held against the bare steps of its cycle.
Then what a step reads on the host, counted. Exit code 1 on the transformer if guard, both, or an observed step are
above 1.005, 1.010 or 1.3.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

import autoprec
from autoprec.plans import Plan
from autoprec.serial import load_policy
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import chosen, conclude

NAMES = ("bare", "guard", "guard and monitor")

#: From the issue.
GUARD, BOTH, OBSERVED = 1.005, 1.010, 1.3

#: Functions that make the host wait for a device.
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what the host reads."""
    count: Counter[str] = Counter()
    kept = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str) -> Any:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return kept[name](self, *args, **kwargs)

        return call

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield count
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


class Training:
    """A compiled copy of the model under the plan, and its optimizer."""

    def __init__(self, found: Calibrated, plan: Plan, name: str) -> None:
        self.workload = found.workload
        self.model = copy.deepcopy(found.model)
        self.optimizer = found.workload.optimizer(self.model.parameters())
        never = {"window_steps": 10**9, "interval_steps": 10**9}
        policy = load_policy("balanced") if name == NAMES[2] else load_policy("balanced").replaced(monitor=never)
        autoprec.compile(self.model, plan=plan, policy=policy, events=None)
        self.session = autoprec.session(self.model)
        if name == NAMES[0]:
            self.step(found.batches[0])  # bound
            self._strip()

    def _strip(self) -> None:
        """Call the graph, and nothing else."""
        session = self.session
        session._guard.remove()

        def run(template: Any, arguments: Sequence[Any]) -> Any:
            key = (template, tuple(id(arguments[p]) for p in template.parameter_positions))
            return session._slots[key].run(arguments)

        session.run = run  # type: ignore[method-assign]

    def step(self, batch: Any) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.workload.loss(self.model, batch).backward()
        self.optimizer.step()
        return time.perf_counter() - start


def cycles(runs: dict[str, Training], count: int, interval: int) -> list[dict[str, list[float]]]:
    """Seconds of each step, by contestant, of so many cycles; the last step of each is the observed one."""
    order, chance = list(runs), random.Random(0)
    generator = Generator().manual_seed(0)
    workload = runs[NAMES[0]].workload
    monitored = runs[NAMES[2]]
    found = []
    while len(found) <= count:
        taken: dict[str, list[float]] = {name: [] for name in runs}
        while True:
            batch, last = workload.batch(generator), monitored.session.steps % interval == interval - 1
            chance.shuffle(order)
            for name in order:
                taken[name].append(runs[name].step(batch))
            if last:
                break
        found.append(taken)
        gc.collect()
    return found[1:]  # the first begins anywhere, and warms up


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4f} ({low:.4f}–{high:.4f})"


def reads(run: Training, batch: Any, *, observed: bool) -> int:
    """What the host reads in a step; on a CPU each gradient is looked at when it is there."""
    interval = run.session.policy.monitor.interval_steps
    while (run.session.steps % interval == interval - 1) != observed:
        run.step(batch)
    with counted() as count:
        run.step(batch)
    return count.total()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead")
    parser.add_argument("--cycles", type=int, default=12)
    workloads, given = chosen(parser)
    missed = []
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            plan = found.planned("balanced")
            assert plan is not None
            runs = {name: Training(found, plan, name) for name in NAMES}
            interval = runs[NAMES[2]].session.policy.monitor.interval_steps
            seen = cycles(runs, given.cycles, interval)
            bare = statistics.median(s for c in seen for s in c[NAMES[0]])
            ratios = {n: [sum(c[n]) / sum(c[NAMES[0]]) for c in seen] for n in NAMES[1:]}
            pairs = [[statistics.median(x / y for x, y in zip(c[n], c[NAMES[0]], strict=True)) for c in seen]
                     for n in NAMES[1:]]  # fmt: skip
            observed = [c[NAMES[2]][-1] / statistics.median(c[NAMES[0]]) for c in seen]
            print(f"{workload.name}: bare step {bare * 1e3:.1f} ms, {len(seen)} cycles of {interval} steps, plan of"
                  f" {', '.join(plan.formats_used())}")  # fmt: skip
            for (name, values), steps in zip(ratios.items(), pairs, strict=True):
                print(
                    f"  {name:18} {quartiles(values)} of the bare steps; medians of pairs of steps {quartiles(steps)}"
                )
            print(f"  an observed step   {quartiles(observed)} of a bare one", flush=True)
            batch = found.batches[0]
            counts = {n: reads(runs[NAMES[2]], batch, observed=n == "observed") for n in ("plain", "observed")}
            print(f"  reads on the host: {counts['plain']} in a plain step, {counts['observed']} in an observed one")
            if workload.name == "transformer":
                bars = zip((*ratios.values(), observed), (GUARD, BOTH, OBSERVED), (*NAMES[1:], "observed"), strict=True)
                missed += [f"transformer: {n} {statistics.median(v):.4f}, not {bar}" for v, bar, n in bars
                           if statistics.median(v) > bar]  # fmt: skip
    conclude(missed, "every bar is met")


if __name__ == "__main__":
    main()
