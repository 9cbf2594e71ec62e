"""What is measured on a workload: plans made from eight batches, run side by side as a user runs them.

A step is forward, loss and backward on one batch, without the optimizer, into gradients that are there already.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, nn

import autoprec
from autoprec.devices import Device
from autoprec.errors import InfeasibleError
from autoprec.execution.measuring import peak_bytes
from autoprec.planning.problem import fixed_bytes
from autoprec.planning.proposals import Proposals
from autoprec.plans import Plan
from autoprec.serial import load_policy
from tests.bench.workloads import Workload

__all__ = ["Calibrated", "Live", "calibrate", "in_turn", "live_peak", "one_thread", "run_live"]

BATCHES = 8


@contextmanager
def one_thread() -> Iterator[None]:
    """Short ops are timed on one thread: two busy ones show multiples of the scheduler's slice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def warm(workload: Workload, count: int = BATCHES, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    """The model after its warm steps in FP32, and the batches that follow."""
    torch.manual_seed(seed)
    generator = Generator().manual_seed(seed)
    model = workload.build()
    optimizer = workload.optimizer(model.parameters())
    for _ in range(workload.warm_steps):
        optimizer.zero_grad()
        workload.loss(model, workload.batch(generator)).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, [workload.batch(generator) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A warm model, its batches, what calibration saw, and what it took beside as many plain steps."""

    workload: Workload
    model: nn.Module
    batches: Sequence[Any]
    session: Any
    device: Device
    plain_seconds: float
    calibration_seconds: float
    timing_seconds: float
    plain_peak_bytes: int
    observed_peak_bytes: int

    def planned(self, policy: str, budget: str | None = None, **changes: Any) -> Plan | None:
        """The plan that `compile` adopts, tournament and all; None where none fits."""
        torch._dynamo.reset()
        model = copy.deepcopy(self.model)
        chosen = load_policy(policy).replaced(**changes) if changes else policy
        try:
            autoprec.compile(
                model, policy=chosen, budget=budget, batches=self.batches, loss_fn=self.workload.loss,
                device=self.device, events=None,
            )  # fmt: skip
        except InfeasibleError:
            return None
        plan = autoprec.session(model).plan
        autoprec.unwrap(model)
        return plan

    def proposals(self, policy: str, *, compiled: bool = False, **changes: Any) -> Proposals:
        """What the planner proposes from the calibration, nothing run."""
        from autoprec.planning.planner import ask, propose

        chosen = load_policy(policy).replaced(**changes)
        graph = replace(self.session.graph, compiled=compiled)
        return propose(ask(graph, self.session.profile, self.device, chosen))

    def tight_percent(self) -> int:
        """60 where a plan fits 60 % of what precision can change, else the next twentieth where one does: CPUs that
        compute BF16 in FP32 hold copies."""
        for percent in range(60, 100, 5):
            with suppress(InfeasibleError):
                self.proposals("balanced", budget=f"{percent}%")
                return percent
        return 100

    @property
    def fixed_bytes(self) -> int:
        """Parameters, gradients, optimizer state and inputs."""
        return fixed_bytes(self.session.graph)


def calibrate(workload: Workload, count: int = BATCHES) -> Calibrated:
    """Warm the model, calibrate it on so many batches, and time its ops in every format."""
    torch._dynamo.reset()
    model, batches = warm(workload, count)
    plain = copy.deepcopy(model)
    workload.loss(plain, batches[0]).backward()
    begin = time.perf_counter()
    for batch in batches:
        workload.loss(plain, batch).backward()
    plain_seconds = time.perf_counter() - begin
    plain_peak = peak_bytes(lambda: workload.loss(plain, batches[0]).backward(), torch.device("cpu"))
    observed = copy.deepcopy(model)
    policy = load_policy("balanced").replaced(calibration={"steps": count})
    autoprec.compile(observed, policy=policy, events=None)
    session = autoprec.session(observed)
    workload.loss(observed, batches[0]).backward()  # what Dynamo takes to capture is its own
    session.step()
    begin = time.perf_counter()
    session.calibrate(batches, workload.loss)
    calibrated = time.perf_counter()
    observed_peak = peak_bytes(lambda: workload.loss(observed, batches[0]).backward(), torch.device("cpu"))
    again = time.perf_counter()
    device = session.measure_device()
    timed = time.perf_counter()
    return Calibrated(
        workload=workload,
        model=model,
        batches=batches,
        session=session,
        device=device,
        plain_seconds=plain_seconds,
        calibration_seconds=calibrated - begin,
        timing_seconds=timed - again,
        plain_peak_bytes=plain_peak,
        observed_peak_bytes=observed_peak,
    )


@dataclass(frozen=True, kw_only=True)
class Live:
    """A contestant's step: median seconds, median ratio to the first contestant of the same round, the ratio's
    quartiles, and peak bytes beyond what was held before."""

    seconds: float
    ratio: float
    spread: tuple[float, float]
    peak_bytes: int


def train_on(workload: Workload, model: nn.Module, batch: Any) -> None:
    """A step of a compiled model."""
    workload.loss(model, batch).backward()
    autoprec.session(model).step()


def live_peak(found: Calibrated, plan: Plan) -> int:
    """Peak bytes of a plan's step, beyond what was held before."""
    torch._dynamo.reset()
    model = copy.deepcopy(found.model)
    autoprec.compile(model, plan=plan, events=None)
    for _ in range(2):
        train_on(found.workload, model, found.batches[0])
    peak = peak_bytes(lambda: train_on(found.workload, model, found.batches[0]), torch.device("cpu"))
    autoprec.unwrap(model)
    return peak


#: Contestants that are torch's own.
PLAIN, AUTOCAST = "torch fp32", "torch autocast bf16"


#: Rounds, at least the first number, and more, up to the second, while they take less than the seconds.
MIN_ROUNDS, MAX_ROUNDS, ROUND_SECONDS = 7, 41, 15.0


def in_turn(
    names: Sequence[str], step: Callable[[str, Any], object], batches: Sequence[Any], seconds: float = ROUND_SECONDS
) -> dict[str, list[float]]:
    """Seconds of every contestant's steps, one a round, for so long."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    order, shuffle = list(names), random.Random(0).shuffle
    k, started = 0, time.perf_counter()
    while k < MIN_ROUNDS or (k < MAX_ROUNDS and time.perf_counter() - started < seconds):
        shuffle(order)  # who comes after one that fills caches and memory pays for it: everyone in turn
        for name in order:
            begin = time.perf_counter()
            step(name, batches[k % len(batches)])
            taken[name].append(time.perf_counter() - begin)
        k += 1
    return taken


def run_live(found: Calibrated, plans: Mapping[str, Plan | None], seconds: float = ROUND_SECONDS) -> dict[str, Live]:
    """Every contestant's step, in turn, for so long. None as a plan is torch without us: `PLAIN` or `AUTOCAST`. Plans
    that decide the same are one contestant with two names."""
    torch._dynamo.reset()
    models: dict[str, nn.Module] = {}
    first_of: dict[str, str] = {}
    runs_as = {n: first_of.setdefault(n if p is None else p.fingerprint, n) for n, p in plans.items()}
    for name in first_of.values():
        plan = plans[name]
        models[name] = copy.deepcopy(found.model)
        if plan is not None:
            autoprec.compile(models[name], plan=plan, events=None)

    def step(name: str, batch: Any) -> None:
        if plans[name] is not None:
            train_on(found.workload, models[name], batch)
            return
        with torch.autocast("cpu", torch.bfloat16) if name == AUTOCAST else nullcontext():
            loss = found.workload.loss(models[name], batch)
        loss.backward()

    for name in models:
        step(name, found.batches[0])
        step(name, found.batches[0])
    taken = in_turn(list(models), step, found.batches, seconds)
    peaks = {n: peak_bytes(lambda n=n: step(n, found.batches[0]), torch.device("cpu")) for n in models}
    first = next(iter(taken.values()))
    results = {}
    for name, own in taken.items():
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        results[name] = Live(
            seconds=statistics.median(own),
            ratio=statistics.median(ratios),
            spread=(low, high),
            peak_bytes=peaks[name],
        )
    return {name: results[run] for name, run in runs_as.items()}
