"""Seconds that a device takes for something short.

On a CPU by the host's clock. A GPU works behind the host, which takes longer to ask for a small kernel than the kernel
itself: what is timed is asked for while the GPU waits, and the seconds are between two events on the GPU. In a training
step it is as busy; what the host takes is the same in every format, but for the number of kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVar

import torch

__all__ = ["rounds", "seconds_of"]

K = TypeVar("K")

#: A timing stops after this many repeats or seconds, whichever comes first, and at least `_MIN_REPEATS`. While a median
#: is this far above the fastest repeat, as where other work took the core, seconds do not stop it.
_MAX_REPEATS, _MIN_REPEATS, _BUDGET_SECONDS, _UNSETTLED = 7, 3, 0.02, 1.2

#: How long a GPU waits for what is timed: so many times what the host took to ask for it, at most the seconds (where
#: the host waits for the GPU in between, no time is enough).
_AHEAD, _LONGEST_SECONDS = 2.0, 0.02

#: Cycles of which one wait consists that tells how long they are.
_SOME_CYCLES = 1_000_000


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds."""
    return rounds({0: run}, device)[0]


def rounds(runs: Mapping[K, Callable[[], object]], device: torch.device) -> dict[K, float]:
    """Median seconds of each, timed in turn."""
    timers = {k: _timer(run, device) for k, run in runs.items()}
    taken: dict[K, list[float]] = {k: [] for k in runs}
    count, begin = 0, time.perf_counter()
    while count < _MIN_REPEATS or (
        count < _MAX_REPEATS and (time.perf_counter() - begin < _BUDGET_SECONDS * len(runs) or _unsettled(taken))
    ):
        for k, timed in timers.items():
            taken[k].append(timed())
        count += 1
    return {k: statistics.median(v) for k, v in taken.items()}


def _unsettled(taken: Mapping[K, list[float]]) -> bool:
    return any(statistics.median(v) > _UNSETTLED * min(v) for v in taken.values())


def _timer(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """What times it once; it has run before."""
    run()
    if device.type != "cuda":
        return lambda: _on_host(run)
    asked = _on_host(run)  # without what the first run loads
    torch.cuda.synchronize(device)
    cycles = int(min(_AHEAD * asked, _LONGEST_SECONDS) / _seconds_of_a_cycle(torch.cuda.current_device()))

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return timed


def _on_host(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@cache
def _seconds_of_a_cycle(index: int) -> float:
    """Of the clock by which the GPU with this number waits; the second time, when it is not asleep any more."""
    found = 0.0
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(_SOME_CYCLES)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        found = begin.elapsed_time(end) / 1e3 / _SOME_CYCLES
    return found
