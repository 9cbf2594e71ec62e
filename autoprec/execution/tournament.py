"""Contestants run on a replayed step with their real lowering: seconds, peak bytes, change of the loss and gradients.

`.grad`, buffers and random state stay bitwise as they were (`execution.replay`). A weight's gradient is dropped as soon
as it is complete, so that a contestant's peak counts it as what is added to the gradients that are there.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from autoprec.execution.freezing import rounded_as
from autoprec.execution.lowering import Lowering, Runner
from autoprec.execution.measuring import peak_bytes
from autoprec.execution.replay import CallRecord, shadow, shadow_arguments
from autoprec.plans import Plan
from autoprec.rewriting.rewrite import rewrite

__all__ = ["Outcome", "Tournament", "last_batch", "margin_of", "told_peak"]

#: Rounds of timing: at least the first number, and more, up to the second, while they take less than the seconds. Steps
#: of milliseconds need the most rounds: 12 of them left medians 2 % apart for plans that are equally fast.
_MIN_ROUNDS, _MAX_ROUNDS, _BUDGET_SECONDS = 4, 64, 4.0

#: Elements of a weight's gradient that are compared.
_SAMPLE = 1 << 14

#: Elements of an output that are multiplied in float64 at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one contestant measured.

    Attributes:
        seconds: median of the replayed forward and backward passes.
        ratio: median over rounds to the first contestant's seconds of the same round.
        ratio_margin: what the rounds leave open of it (`margin_of`).
        peak_bytes: above what was held before.
        predicted_bytes: the same as the compiler's code tells it, before it runs; None in eager mode, and where it does
            not tell.
        output: Σ output · its gradient, over the outputs of the step.
        gradients: FQN → a sample of the weight's gradient, in FP32.
        failure: why it cannot run, or "".
    """

    seconds: float = 0.0
    ratio: float = 1.0
    ratio_margin: float = 0.0
    peak_bytes: int = 0
    predicted_bytes: int | None = None
    output: float = 0.0
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    failure: str = ""


class Tournament:
    """A recorded step, to be run again as often as there are contestants."""

    def __init__(
        self,
        calls: Iterable[CallRecord],
        buffers: Mapping[int, Tensor],
        device_type: str,
        lowering: Lowering,
        loss_bytes: int = 0,
        *,
        compiled: bool = True,
    ) -> None:
        """`loss_bytes`: what a loss outside of the graphs holds at most when their forward passes are over. `compiled`:
        whether contestants run so, where plans are compiled."""
        self._calls = last_batch(calls)
        self._buffers, self._device, self._lowering = buffers, torch.device(device_type), lowering
        self._loss_bytes, self._compiled = loss_bytes, compiled
        self._peaks: dict[str, int | None] = {}

    @property
    def empty(self) -> bool:
        """Whether there is no step to replay."""
        return not self._calls

    def run(self, plans: Mapping[str, Plan]) -> dict[str, Outcome]:
        """Every plan: once to compare, once for its peak, and in turn with the others for its seconds."""
        modules: dict[str, _Contestant] = {}
        outcomes: dict[str, Outcome] = {}
        for name, plan in plans.items():
            try:
                modules[name] = self._contestant(plan)
                outcomes[name] = self._compared(modules[name])
            # No kernel, no memory, what a compiler refuses or makes wrong, and what cannot be written: whatever it is,
            # it is not to be adopted, and the run goes on.
            except Exception as error:
                outcomes[name] = Outcome(failure=f"it failed: {str(error).partition(chr(10))[0][:200]}")
            if outcomes[name].failure:
                modules.pop(name, None)
        seconds = self._timed(modules)
        first = next(iter(seconds.values()), [])
        for name, taken in seconds.items():
            found = outcomes[name]
            ratios = [a / b for a, b in zip(taken, first, strict=True)]
            outcomes[name] = Outcome(
                seconds=statistics.median(taken),
                ratio=statistics.median(ratios),
                ratio_margin=margin_of(ratios),
                peak_bytes=self._peak(modules[name]),
                predicted_bytes=self._predicted(modules[name]),
                output=found.output,
                gradients=found.gradients,
            )
        return outcomes

    def as_written(self) -> Outcome:
        """The step in FP32 throughout, whatever the policy allows: loss and gradients, neither timed nor compiled."""
        try:
            return self._compared(self.uncompiled._contestant(Plan(assignments=())))
        except Exception as error:  # as in `run`
            return Outcome(failure=f"it failed: {str(error).partition(chr(10))[0][:200]}")

    @cached_property
    def uncompiled(self) -> Tournament:
        """The same, of plans as they are."""
        buffers, device = self._buffers, self._device.type
        return Tournament(self._calls, buffers, device, self._lowering, self._loss_bytes, compiled=False)

    def peak_of(self, plan: Plan) -> int | None:
        """Bytes that the step takes under a plan at most, above what was held before, at the allocator; a compiled
        step's where its code tells it. Measured once. None without a step to replay, and where it cannot run: no memory
        for it, or the compiler refuses."""
        if plan.fingerprint not in self._peaks:
            self._peaks[plan.fingerprint] = self._measured_peak(plan)
        return self._peaks[plan.fingerprint]

    def _measured_peak(self, plan: Plan) -> int | None:
        if self.empty:
            return None
        try:
            contestant = self._contestant(plan)
            _Replay(self._calls, contestant, self._buffers).run()  # compiled, and checked against the plan, before
            return max(self._peak(contestant), self._predicted(contestant) or 0)
        except Exception:  # as in `run`
            return None

    def told_peak_of(self, plan: Plan) -> int | None:
        """The same as the compiler's code tells it, without a run; None also where it does not tell."""
        if self.empty:
            return None
        try:
            contestant = self._contestant(plan)
            with torch.enable_grad():
                for runner in contestant.lowered:
                    runner.prepare()
            return self._predicted(contestant)
        except Exception:  # as in `run`
            return None

    def _contestant(self, plan: Plan) -> _Contestant:
        return _Contestant([self._lowered(call, plan) for call in self._calls], self._rounded(plan))

    def _lowered(self, call: CallRecord, plan: Plan) -> Runner:
        rewritten = None if plan.is_identity else rewrite(call.binding, plan, self._device.type)
        return self._lowering.runs(call.binding, plan, rewritten, compiled=self._compiled)

    def _rounded(self, plan: Plan) -> dict[int, Tensor]:
        """By their identities, frozen parameters as the plan has them."""
        frozen = [
            (argument, fmt)
            for call in self._calls
            for node, argument in zip(call.binding.template.placeholders, call.arguments, strict=True)
            if (fmt := plan.living.get(f"param:{call.binding.parameters.get(node, '')}")) is not None
        ]
        return {id(p): rounded_as(p, fmt) for p, fmt in frozen}

    def _timed(self, modules: Mapping[str, _Contestant]) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in modules}
        order, shuffle = list(modules), random.Random(0).shuffle
        rounds, begin = 0, time.perf_counter()
        while modules and (
            rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.perf_counter() - begin < _BUDGET_SECONDS)
        ):
            shuffle(order)  # who comes after one that fills caches and memory pays for it: everyone in turn
            for name in order:
                step = _Replay(self._calls, modules[name], self._buffers)
                self._synchronize()
                start = time.perf_counter()
                step.run()
                self._synchronize()
                taken[name].append(time.perf_counter() - start)
            rounds += 1
        return taken

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peak(self, lowered: _Contestant) -> int:
        step = _Replay(self._calls, lowered, self._buffers)
        return peak_bytes(lambda: step.run(self._turn), self._device)

    def _predicted(self, lowered: _Contestant) -> int | None:
        return told_peak(self._calls, lowered.lowered, self._loss_bytes)

    def _turn(self) -> None:
        """The bytes of the loss, for a moment."""
        torch.empty(self._loss_bytes, dtype=torch.uint8, device=self._device)

    def _compared(self, lowered: _Contestant) -> Outcome:
        step = _Replay(self._calls, lowered, self._buffers, look=True)
        step.run()
        if step.nonfinite:
            return Outcome(failure=f"the gradient of {step.nonfinite[0]} is not finite")
        return Outcome(output=step.output, gradients=step.gradients)


def told_peak(calls: Sequence[CallRecord], runners: Sequence[Runner], loss_bytes: int) -> int | None:
    """Bytes that a step of compiled graphs takes at most, above what was held before, as their code tells it; None in
    eager mode, where one does not tell, and where one was compiled for several sizes.

    Each pass counts beside what the graphs that are between their passes hold, and beside what the step does: the
    arguments of graphs that are outputs of others, and gradients that have entered. `loss_bytes`: what a loss outside
    of the graphs holds at most when their forward passes are over.
    """
    held = most = 0
    turned = False
    for i, forward in _order(calls):
        made = runners[i].compiled
        if len(made) != 1 or (passes := made[0].told(frozenset(calls[i].output_gradients))) is None:
            return None
        if forward:
            most = max(most, held + passes.forward)
            held += passes.held
            continue
        if not turned:
            most, turned = max(most, held + loss_bytes), True
        held -= passes.held
        if _is_held(i, calls):
            held += passes.outputs
            most = max(most, held + passes.backward_beside_outputs)
        else:
            most = max(most, held + passes.backward)
        held += passes.entering
    return most if calls else None


def margin_of(values: Sequence[float]) -> float:
    """Half of the interval between two order statistics that holds the true median with at least 95 %, whatever the
    distribution (the sign test's: Conover, Practical Nonparametric Statistics, 3.2). Of fewer than nine values that
    would be all of them, and one slow round would decide: the lowest and the highest are left out then, which is less
    sure."""
    n = len(values)
    left = math.floor(0.025 * 2**n)  # of 2^n equally likely sides of the median
    k, chances = 0, 1
    while chances <= left:
        k += 1
        chances += math.comb(n, k)
    ordered = sorted(values)
    low = max(1, k - 1)
    return max(0.0, ordered[n - 1 - low] - ordered[low]) / 2.0 if n > 2 else 0.0


def last_batch(calls: Iterable[CallRecord]) -> list[CallRecord]:
    """The calls with a backward pass; of several micro-batches those of the last: nothing before them waits for its
    backward pass any more."""
    batch: list[CallRecord] = []
    for call in (c for c in calls if c.output_gradients):
        if batch and call.started > max(c.returned for c in batch):
            batch = []
        batch.append(call)
    return batch


def _order(calls: Sequence[CallRecord]) -> list[tuple[int, bool]]:
    """(call, whether it runs forward), as they ran."""
    order = [(call.started, i, True) for i, call in enumerate(calls)]
    order += [(call.returned, i, False) for i, call in enumerate(calls)]
    return [(i, forward) for _, i, forward in sorted(order)]


def _is_held(i: int, calls: Sequence[CallRecord]) -> bool:
    """Whether the outputs of a call are there until the step is over: it keeps the arguments of its calls, and those of
    the next are these outputs."""
    return i + 1 < len(calls)


@dataclass(frozen=True)
class _Contestant:
    """What runs for each call, and what it reads in place of some parameters, by their identities."""

    lowered: Sequence[Runner]
    rounded: Mapping[int, Tensor]


class _Replay:
    """One run of the recorded calls, forward and backward passes in the order in which they ran."""

    def __init__(
        self,
        calls: Sequence[CallRecord],
        contestant: _Contestant,
        buffers: Mapping[int, Tensor],
        *,
        look: bool = False,
    ) -> None:
        self._calls, self._lowered, self._look = calls, contestant.lowered, look
        self._arguments = [shadow_arguments(call, buffers, contestant.rounded) for call in calls]
        self._outputs: dict[int, Sequence[Any]] = {}
        self._held: list[Tensor] = []
        self.output = 0.0
        self.gradients: dict[str, Tensor] = {}
        self.nonfinite: list[str] = []

    def _hooked(self) -> Iterator[RemovableHandle]:
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            for node, x in zip(call.binding.template.placeholders, arguments, strict=True):
                if isinstance(x, Tensor) and x.requires_grad:
                    fqn = call.binding.parameters.get(node, "")
                    yield x.register_post_accumulate_grad_hook(self._sink(fqn))

    def _sink(self, fqn: str) -> Any:
        def take(leaf: Tensor) -> None:
            g, leaf.grad = leaf.grad, None
            if not self._look or not fqn or g is None:
                return
            g = g.detach() if g.layout is torch.strided else g.detach().to_dense()
            if not bool(g.isfinite().all()):
                self.nonfinite.append(fqn)
            flat = g.reshape(-1)[:: max(1, -(-g.numel() // _SAMPLE))].float()
            self.gradients[fqn] = self.gradients[fqn] + flat if fqn in self.gradients else flat.clone()

        return take

    def run(self, turn: Callable[[], object] = lambda: None) -> None:
        """Forward and backward; `turn` is called before the first backward pass."""
        turned = False
        hooks = list(self._hooked())
        try:
            for i, forward in _order(self._calls):
                if forward:
                    self._forward(i)
                    continue
                if not turned:
                    turn()
                turned = True
                self._backward(i)
        finally:  # torch's collector does not see hooks: a tensor whose hook leads back to it would never be let go of
            for hook in hooks:
                hook.remove()

    def _forward(self, i: int) -> None:
        with shadow(self._calls[i]), torch.enable_grad():
            outputs = self._lowered[i](*self._arguments[i])
        self._outputs[i] = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        if _is_held(i, self._calls):
            self._held += [y.detach() for y in self._outputs[i] if isinstance(y, Tensor)]

    def _backward(self, i: int) -> None:
        outputs = self._outputs.pop(i)
        pairs = [(outputs[k], g) for k, g in self._calls[i].output_gradients.items() if outputs[k].requires_grad]
        if self._look:
            self.output += sum(_product(y.detach(), g) for y, g in pairs)
        if not pairs:
            return
        # Copies, because in a step the gradients are made in it, and kept until it is over.
        entered = [g.to(y.dtype, copy=True) for y, g in pairs]
        self._held += entered
        # And no outputs: in a step nobody but autograd holds them by now.
        edges = [get_gradient_edge(y) for y, _ in pairs]
        del outputs, pairs
        with shadow(self._calls[i]):
            torch.autograd.backward(edges, entered)


def _product(y: Tensor, g: Tensor) -> float:
    """Σ y · g in float64."""
    a, b = y.reshape(-1), g.reshape(-1)
    return sum(
        float(torch.dot(a[k : k + _CHUNK].double(), b[k : k + _CHUNK].double())) for k in range(0, a.numel(), _CHUNK)
    )
