"""Measured bytes and seconds of a training step, the same function for every contestant."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

__all__ = [
    "Seconds",
    "at_the_turn",
    "backward_workspace_bytes",
    "held_bytes",
    "mark_gradient",
    "mark_outputs",
    "peak_bytes",
    "releasing_workspace_bytes",
    "saved_bytes",
    "step_seconds",
    "workspace_bytes",
]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects no garbage: what earlier steps left in cycles would be let go of during the one that is measured,
    whose peak would look lower."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def saved_bytes(forward: Callable[[], Tensor], exclude: Iterable[Tensor]) -> int:
    """Bytes that autograd holds between forward and backward: distinct storages, without those of `exclude`.

    `forward` runs the model and returns a tensor with a graph; `exclude` are parameters, buffers and inputs. Casts of
    weights count. Seen through torch's saved-tensor hooks.
    """
    kept: dict[int, int] = {}
    holding: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        holding.append(x.detach())
        return x.detach()

    skip = {t.untyped_storage().data_ptr() for t in exclude}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = forward()
    del result
    return sum(n for pointer, n in kept.items() if pointer not in skip)


@_no_collection()
def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that `step` holds above what was allocated when it began, at the allocator.

    On a CPU from the profiler's memory events, which do not know what was allocated before: letting go of it does not
    count there. On CUDA from the caching allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _highest(_allocations(step)[1])


def held_bytes(forward: Callable[[], object]) -> int:
    """Bytes that are held after `forward`, while its result lives, above what was allocated before, at the allocator.

    What activation checkpoints keep is among them, which no saved-tensor hook sees. CPU only.
    """
    _, sizes = _allocations(forward)
    return sum(sizes)


def workspace_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` holds for a moment at its peak, beside what its result and what belongs to it go on holding."""
    highest, left = _highest_and_left(run, device)
    return max(0, highest - max(0, left))


def releasing_workspace_bytes(
    make: Callable[[], T], use: Callable[[T, bool], Sequence[Tensor | None]], device: torch.device
) -> int:
    """The same of `use(make(), True)`, which lets go of what was made, as a backward pass of several nodes does one by
    one. `use(…, False)` lets go of nothing: what it leaves is what its results hold."""
    made, results = make(), list[Tensor]()

    def gives() -> object:
        results[:] = [t for t in use(made, False) if t is not None]
        return results

    _, left = _highest_and_left(gives, device)
    if all(t.layout is torch.strided for t in results):
        # Of results in more memory than they take the rest counts here.
        left = min(left, sum(t.nbytes for t in results))
    results.clear()
    if device.type == "cuda":
        highest, _ = _highest_and_left(partial(use, made, True), device)
        return max(0, highest - max(0, left))

    def both() -> object:
        again = make()  # while somebody looks on: what was allocated before is let go of unseen
        _mark_on_cpu(_MADE)
        return use(again, True)

    _, events = _profiled(both)
    begin = max(k for k, (name, _) in enumerate(events) if name == _MADE)
    return max(0, _highest(size for _, size in events[begin:]) - max(0, left))


class _Arrives(torch.autograd.Function):
    """Of some tensors a result without elements, whose gradient sends these: gradients that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, arriving: Sequence[Tensor], *ends: Tensor) -> Tensor:
        ctx.arriving = arriving
        return ends[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g.clone() for g in ctx.arriving)


def backward_workspace_bytes(
    make: Callable[[], Sequence[Tensor]], leaves: Iterable[Tensor], arriving: Sequence[Tensor], device: torch.device
) -> int:
    """Of the backward pass from what `make` makes to the leaves, into which copies of `arriving` come that nobody else
    holds, as in a step: an op that is several of torch's lets go of them, and of what it kept, before its peak."""
    live = [t for t in leaves if t.requires_grad]
    if not live:
        return 0

    @torch.enable_grad()
    def run(made: Sequence[Tensor], release: bool) -> Sequence[Tensor | None]:
        end = _Arrives.apply(arriving, *made)
        return torch.autograd.grad(end, live, end.detach(), retain_graph=not release, allow_unused=True)

    return max(0, releasing_workspace_bytes(make, run, device) - sum(g.nbytes for g in arriving))


@_no_collection()
def _highest_and_left(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes above what was allocated before: at the peak of `run`, and after it, while its result lives."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        left = torch.cuda.memory_allocated(device) - before
        del result
        return torch.cuda.max_memory_allocated(device) - before, left
    _, sizes = _allocations(run)
    return _highest(sizes), sum(sizes)


#: What marks the places in a step that `at_the_turn` looks between; None while nobody does.
_marking: Callable[[str], None] | None = None
_OUTPUTS, _GRADIENT, _MADE = "autoprec: outputs", "autoprec: gradient", "autoprec: made"


def mark_outputs() -> None:
    """A captured graph has given its outputs."""
    if _marking is not None:
        _marking(_OUTPUTS)


def mark_gradient() -> None:
    """The first gradient has come back to them."""
    if _marking is not None:
        _marking(_GRADIENT)


@_no_collection()
def at_the_turn(step: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What a step returns, and the most bytes that it holds between the outputs of the last graph and the first
    gradient that comes back, above what it held when these were there: what a loss outside of the graphs takes, that
    gradient included. 0 where somebody profiles the step already: torch has one profiler at a time."""
    global _marking
    if torch.autograd._profiler_enabled():
        return step(), 0
    if device.type == "cuda":
        turn = _CudaTurn(device)
        _marking = turn.mark
        try:
            return step(), turn.most
        finally:
            _marking = None
    _marking = _mark_on_cpu
    try:
        result, events = _profiled(step)
    finally:
        _marking = None
    return result, _between_marks(events)


def _mark_on_cpu(name: str) -> None:
    with torch.autograd.profiler.record_function(name):
        pass


def _between_marks(events: Sequence[tuple[str, int]]) -> int:
    """The most that is held between the last outputs and the gradient after them."""
    most = now = found = 0
    looking = False
    for name, size in events:
        now += size
        most = max(most, now)
        if name == _OUTPUTS:
            looking, now, most = True, 0, 0
        elif name == _GRADIENT and looking:
            looking, found = False, most
    return found


class _CudaTurn:
    """The same by the caching allocator's counters."""

    def __init__(self, device: torch.device) -> None:
        self.most = 0
        self._device, self._before = device, -1

    def mark(self, name: str) -> None:
        torch.cuda.synchronize(self._device)
        if name == _OUTPUTS:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif self._before >= 0:
            self.most = torch.cuda.max_memory_allocated(self._device) - self._before
            self._before = -1


def _highest(sizes: Iterable[int]) -> int:
    """The largest of the running sums, at least 0."""
    return max(itertools.accumulate(sizes, initial=0))


def _allocations(run: Callable[[], object]) -> tuple[object, list[int]]:
    """What `run` returns, and its CPU allocations (negative: releases) in the order of time."""
    result, events = _profiled(run)
    return result, [size for name, size in events if not name]


@_no_collection()
def _profiled(run: Callable[[], T]) -> tuple[T, list[tuple[str, int]]]:
    """What `run` returns, and ("", bytes) of its CPU allocations (negative: releases) and (name, 0) of the marks among
    them, in the order of time.

    Through torch's first profiler: the newer one writes to stderr, and gives allocations only in a tree of events.
    Of what was allocated before, neither knows the size. Where a block of an earlier profile was at that address and
    was let go of while nobody looked, the size of that one is told, any number of bytes too many; so a release counts
    only where something of its size was allocated in this run and is still there.
    """
    state, plain = torch.autograd.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()
    torch._C._autograd._enable_profiler_legacy(
        torch.autograd.ProfilerConfig(state, False, True, False, False, False, plain)
    )
    try:
        result = run()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    found, held = list[tuple[str, int]](), Counter[int]()
    for e in (e for events in threads for e in events):
        if e.kind() == "memory_alloc":
            size = e.cpu_memory_usage()
            if size < 0 and not held[-size]:
                continue  # not of this run, and its size is not known either: see above
            held[abs(size)] += 1 if size > 0 else -1
            found.append(("", size))
        elif e.kind() == "push" and e.name() in (_OUTPUTS, _GRADIENT, _MADE):
            found.append((e.name(), 0))
    return result, found


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Median and spread of repeated timings."""

    median: float
    lowest: float
    highest: float


def step_seconds(step: Callable[[], object], *, warmup: int, repeats: int) -> Seconds:
    """Wall-clock seconds of one step."""
    for _ in range(warmup):
        step()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return Seconds(median=statistics.median(taken), lowest=min(taken), highest=max(taken))
