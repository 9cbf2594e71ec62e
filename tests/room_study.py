"""How much room do gradients need below FP16's largest number? `python -m tests.room_study` prints the tables.

A gradient scale leaves the largest gradient of the calibration some octaves, and is chosen anew where an observed
gradient has come too near to FP16's largest number. What arrives between two observed steps may be larger. Here small
models are trained in FP32 on real data (those of `tests.campaigns.clean`), without our code, and the largest magnitude
of every module's gradient is written down at every step. Then every scale is played through, by how many octaves it
leaves, and fewer than how many are a reason for another one: how often would a gradient have been inf, and how often
was a scale chosen anew?

Room costs small gradients their last bits. So every gradient is also rounded under scales that leave more and more
room, by torch's cast, and the error is compared with that of FP16's significand alone; and so are normal numbers under
a scale that is for a tensor with larger ones.

A module alone is what a plan has whose regions are small; all of them together, one region for the whole model.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tests.bench.measure import one_thread
from tests.campaigns.clean_tasks import TASKS, Task, learning_rate

STEPS, SEEDS = 4000, 3

#: Steps of the first plan's calibration: the policy's default.
CALIBRATION = 8

#: Steps of a window, and from one observed step to the next: of the campaign of clean runs, of a middle, and the
#: policy's defaults.
WINDOWS = ((20, 2), (100, 10), (500, 50))

#: Octaves that are left when a scale is chosen, and fewer than which are a reason for another one.
ROOMS = ((3, 1), (3, 2), (5, 2), (5, 3), (6, 3), (8, 4), (8, 6), (10, 4))

#: Octaves that are left where gradients are rounded, once in so many steps.
LEFT, ROUNDED_EVERY = (3, 5, 8, 12, 16, 20), 100

#: Octaves by which another tensor under the same scale is larger.
APART = (0, 8, 10, 12, 14, 16, 18, 20, 24)

#: log2 of what stands for no gradient at all.
_NONE = -140.0

Trace = NDArray[np.float64]


# Training ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a training saw.

    Attributes:
        traces: module → log2 of the largest magnitude of the gradient of what it makes, (steps).
        kept: the gradients themselves, by module, at some steps.
    """

    traces: dict[str, Trace]
    kept: list[dict[str, Tensor]]


def trained(task: Task, steps: int, seed: int) -> Run:
    """A training in FP32."""
    torch.manual_seed(seed)
    model, generator = task.build(), Generator().manual_seed(seed)
    optimizer = task.optimizer(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    arrived: dict[str, Tensor] = {}
    found: dict[str, list[float]] = {}
    kept = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(keeping(name, arrived))
    for step in range(steps):
        inputs, wanted = task.batch(generator)
        optimizer.zero_grad()
        task.loss(model(inputs), wanted).backward()
        optimizer.step()
        schedule.step()
        for name, gradient in arrived.items():
            found.setdefault(name, []).append(float(gradient.abs().max()))
        if step % ROUNDED_EVERY == CALIBRATION:
            kept.append(dict(arrived))
    return Run({name: np.log2(np.maximum(seen, 2.0**_NONE)) for name, seen in found.items()}, kept)


def keeping(name: str, arrived: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """A hook that keeps the gradient of what the module makes."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], made: Tensor) -> None:
        made.register_hook(lambda gradient: arrived.__setitem__(name, gradient.detach().clone()))

    return hook


# What room prevents --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """What became of a scale: steps in which something was inf, and how often it was chosen anew."""

    bad_steps: int
    rescaled: int


def played(trace: Trace, window: int, interval: int, leaves: float, least: float) -> Played:
    """One scale through a run. `trace`: log2 of the largest gradient, by step; so is the limit, of the gradient that
    the scale takes to FP16's largest number. A bad step is looked at as an observed one is."""
    limit = float(trace[:CALIBRATION].max()) + leaves
    recent = deque[float](maxlen=max(window // interval, 1))
    bad_steps = rescaled = 0
    for step, now in enumerate(trace[CALIBRATION:].tolist()):
        bad_steps += now > limit
        if step % interval == 0 or now > limit:
            recent.append(now)
            if limit - max(recent) < least:
                limit, rescaled = max(recent) + leaves, rescaled + 1
    return Played(bad_steps, rescaled)


def jumps(trace: Trace, window: int, interval: int) -> Trace:
    """By how many octaves the largest gradient between two observed steps is above those of the window before."""
    starts = range(CALIBRATION, len(trace) - interval, interval)
    known = (trace[s % interval : s + 1 : interval][-(window // interval) :].max() for s in starts)
    between = (trace[s + 1 : s + interval].max(initial=-math.inf) for s in starts)
    return np.array([most - k for most, k in zip(between, known, strict=True)])


def together(run: Run) -> Trace:
    """One region for the whole model: the largest of all gradients."""
    return np.max(list(run.traces.values()), axis=0)


def fates(task: Task, runs: Sequence[Run]) -> Iterator[str]:
    regions = {"alone": [t for run in runs for t in run.traces.values()], "together": [together(run) for run in runs]}
    for (how, series), (window, interval) in product(regions.items(), WINDOWS):
        seen = np.concatenate([jumps(t, window, interval) for t in series])
        parts = " ".join(f"{np.quantile(seen, q):6.2f}" for q in (0.5, 0.99, 0.999, 1.0))
        ends = [[played(t, window, interval, *room) for t in series] for room in ROOMS]
        told = "  ".join(f"{sum(p.bad_steps for p in e):3}/{sum(p.rescaled for p in e):3}" for e in ends)
        yield f"{task.name:7} {how:9} {len(series):4} {window:5} {interval:5} {parts}   {told}"


# What room costs -----------------------------------------------------------------------------------------------------


def rounding_error(gradient: Tensor, amax: float, left: int) -> float:
    """RMS error relative to the gradient's RMS, under a scale that takes `amax` to `left` octaves below 2^16. A power
    of two, so that multiplying and dividing round nothing."""
    scale = 2.0 ** (16 - left - math.ceil(math.log2(amax)))
    wide = gradient.double()
    error = (wide * scale).float().half().double() / scale - wide
    return float((error.square().mean() / wide.square().mean()).sqrt())


def costs(task: Task, runs: Sequence[Run]) -> Iterator[str]:
    moments = [m for run in runs for m in run.kept]
    for how in ("alone", "together"):
        errors: dict[int, list[float]] = {left: [] for left in LEFT}
        for moment in moments:
            alive = {name: g for name, g in moment.items() if float(g.abs().max()) > 0.0}
            largest = max(float(g.abs().max()) for g in alive.values())
            for g in alive.values():
                amax = float(g.abs().max()) if how == "alone" else largest
                for left in LEFT:
                    errors[left].append(rounding_error(g, amax, left))
        told = "  ".join(f"{np.median(e) * 2**11:5.3f} {max(e) * 2**11:7.3f}" for e in errors.values())
        yield f"{task.name:7} {how:9} {len(errors[LEFT[0]]):5}  {told}"


def distant(apart: int, left: int) -> float:
    """The same of normal numbers, where another tensor under the scale is so many octaves larger."""
    gradient = torch.randn(1 << 18, generator=Generator().manual_seed(0))
    return rounding_error(gradient, float(gradient.abs().max()) * 2.0**apart, left)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.room_study", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", choices=TASKS)
    given = parser.parse_args()
    tasks = [TASKS[given.only]] if given.only else list(TASKS.values())
    with one_thread():
        runs = [[trained(task, given.steps, seed) for seed in range(given.seeds)] for task in tasks]
    print(f"bad steps/scales chosen anew, by octaves left and least octaves; {given.steps} steps, {given.seeds} seeds")
    rooms = "  ".join(f"{f'{leaves}, {least}':>7}" for leaves, least in ROOMS)
    quantiles = f"{'50%':>6} {'99%':>6} {'99.9%':>6} {'all':>6}"
    print(f"{'model':7} {'regions':9} {'runs':>4} {'steps':>5} {'each':>5} {quantiles}   {rooms}")
    for task, seen in zip(tasks, runs, strict=True):
        print("\n".join(fates(task, seen)))
    print("\nrms error of rounding in 2^-11 of the gradient's rms: median and largest, by octaves left")
    print(f"{'model':7} {'scale by':9} {'times':>5}  {'  '.join(f'{left:13}' for left in LEFT)}")
    for task, seen in zip(tasks, runs, strict=True):
        print("\n".join(costs(task, seen)))
    print("\nthe same of normal numbers, by how many octaves another tensor under the scale is larger")
    print(f"{'left':>4}  {'  '.join(f'{apart:8}' for apart in APART)}")
    for left in LEFT[:3]:
        print(f"{left:4}  {'  '.join(f'{distant(apart, left) * 2**11:8.3f}' for apart in APART)}")


if __name__ == "__main__":
    main()
