"""The whole demo: every task under every precision with every seed, then the layer that grows."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import __version__ as torch_version

from autoprec.demo.contest import Contest
from autoprec.demo.growth import grow_a_layer
from autoprec.demo.results import CONTESTANTS, Demo, TaskResult
from autoprec.demo.tasks import Task, digits_task, language_task
from autoprec.numerics.dtypes import native_formats

__all__ = ["parts", "run_demo"]


def parts(seeds: int) -> int:
    """How often `run_demo` says what begins."""
    return 2 * seeds * len(CONTESTANTS) + 1


def run_demo(seeds: int, progress: Callable[[str], None]) -> Demo:
    """Run it on the CPU; `progress` is told what begins."""
    begin, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # ops this small gain nothing from a second, and wait for it when the machine is busy
    try:
        contest = Contest()
        digits = digits_task()
        tasks = tuple(_run_task(contest, task, seeds, progress) for task in (language_task(), digits))
        progress("a layer that grows")
        growth = grow_a_layer(digits, contest.device)
    finally:
        torch.set_num_threads(threads)
    return Demo(
        tasks=tasks,
        growth=growth,
        seconds=time.perf_counter() - begin,
        torch_version=torch_version,
        device=contest.device.name if contest.device is not None else "cpu",
        has_bf16="bf16" in native_formats("cpu"),
        threads=1,
    )


def _run_task(contest: Contest, task: Task, seeds: int, progress: Callable[[str], None]) -> TaskResult:
    """Seed by seed, so that a busy moment of the machine meets every contestant alike."""
    runs = []
    for seed in range(seeds):
        for contestant in CONTESTANTS:
            progress(f"{task.name}, {contestant}, seed {seed}")
            runs.append(contest.run(task, contestant, seed))
    return TaskResult(name=task.name, metric=task.metric, steps=task.steps, runs=tuple(runs))
