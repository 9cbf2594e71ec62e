"""One training step from its first forward to its end: coverage, the verdict, the veto.

`StepGuard` knows gradients and buffers; what a bad step means (attribution, events, plans) is its keeper's business.

Where the optimizer can leave an update out on the device, the host does not wait for the verdict before it: the device
has it, and the host reads it (`settle`) before the next call of the model, or when somebody asks how the step went.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from autoprec.execution import boundaries
from autoprec.execution.buffers import BufferSnapshot
from autoprec.execution.coming import Coming
from autoprec.execution.guard import GradientsLeft, GradientWatch, leaves_out, squares_gradients
from autoprec.execution.ranks import Ranks

__all__ = ["StepGuard", "StepKeeper"]

#: Devices that work behind the host, and whose fused optimizers leave an update out.
LEAVES_OUT = {"cuda"}


class StepKeeper(Protocol):
    """What a `StepGuard` reports to."""

    def before_first_update(self, missed: list[str], *, scaled: bool | None) -> None:
        """Gradients are complete. `missed` names parameters whose gradients came from outside the captured graphs;
        `scaled` tells whether a GradScaler takes the optimizer's step, None where there is no optimizer."""

    def verdict_can_wait(self) -> bool:
        """Whether a bad step may be told after its update was left out, and not before it."""

    def left_to_device(self) -> None:
        """The step is over, and its verdict is read later."""

    def vetoes_losses(self) -> bool:
        """Whether a loss can make a step bad."""

    def loss_is_off(self) -> bool:
        """Gradients are finite; whether the loss says that the step is bad all the same."""

    def on_begin(self) -> None:
        """A step has begun in which no graph ran."""

    def on_bad_gradients(self, *, own: bool) -> None:
        """The step is bad; nothing was changed yet. `own` is False where another model's gradients, stepped by the
        same optimizer, are to blame. May raise."""

    def on_end(self, *, bad: bool) -> None:
        """The step is over; parameters, buffers and optimizer state are final."""

    def on_abort(self) -> None:
        """Nothing of the step counts: an error is on its way to the user, or the loop has given it up."""


class StepGuard:
    """Mutable state of the step in progress. `remove()` takes every hook off.

    Attributes:
        owes: whether the device has the verdict on a step that is over, for `settle`.
        in_step: True from the first training forward to the end of the step.
        bad: True once the step was found bad.
        another_rank: True if the step is bad for what another rank alone has seen.
        covered: FQNs of the parameters of each captured graph that was called, or that a gradient reached through its
            outputs, since the last step.
        optimizers: the state that they hold is asked for when planning.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], keeper: StepKeeper) -> None:
        self._keeper = keeper
        self._ids = {id(p) for p in parameters.values()}
        self._device = next(iter(parameters.values())).device
        self.ranks = Ranks()
        self.watch = GradientWatch(parameters, self.ranks, self._tell_ranks)
        self.buffers = BufferSnapshot(model)
        self._told: Coming | None = None
        self.another_rank = False
        self.in_step = False
        self.bad = False
        self._flag: Tensor | None = None
        self._left: _Left | None = None
        self.owes = False
        self._vetoed_after = False  # whether gradients were found bad after the step was over
        self._taken = False  # whether buffers were copied before the call that is running
        self._lock = threading.RLock()
        self.covered: set[frozenset[str]] = set()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._scaler: Callable[[], Any] = lambda: None
        boundaries.listen(self)

    def remove(self) -> None:
        """Take every hook off."""
        boundaries.unlisten(self)
        self.watch.remove()

    def begin(self) -> bool:
        """A training forward runs. True if it is the first of a step, or of one that begins again because the loop gave
        up what it had."""
        self.ranks.look()
        self.watch.look_for_new()
        if self.in_step:
            if not self.watch.discarded():
                return False
            self.watch.clear()  # that backward pass was given up: the step begins again
            self.bad = False
            self._keeper.on_abort()
            return True
        self.in_step, self.bad, self.another_rank = True, False, False
        self._flag = self._told = None
        self.watch.next()
        if not self._taken:
            self.buffers.take()
        self._taken = False
        return True

    def enter(self, *, trains: bool) -> None:
        """The model is called; `trains`: to be trained, or in training mode. Whatever changes a buffer comes later,
        graphs without parameters that train among it. A step that the loop has given up because it was bad, its
        gradients reset, leaves no buffer behind."""
        if self.in_step:
            if self.watch.discarded() and not self.watch.verdict():
                self.buffers.restore()
        elif trains and not (self._taken and self._has_gradients):
            self.buffers.take(again=self._taken)
            self._taken = True

    @property
    def _has_gradients(self) -> bool:
        """Whether there are some that the loop has not reset."""
        return bool(self.watch.fresh) and not self.watch.discarded()

    def _begin_unseen(self) -> None:
        """A step is one also where no graph ran: the model was called, and its parameters have gradients."""
        if self.in_step or not self._taken or not self.watch.fresh:
            return
        if not self.bad or self.watch.bad_gradients_are_gone():
            self.in_step, self.bad, self.another_rank, self._taken = True, False, False, False
            self._keeper.on_begin()

    def missed(self) -> list[str]:
        """Parameters with a fresh gradient that went through no captured graph since the last step."""
        return sorted(self.watch.fresh.difference(*self.covered))

    @property
    def optimizer_bytes(self) -> int:
        """What the optimizers hold that were seen so far."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))

    @property
    def loss_scale(self) -> float | None:
        """Of the GradScaler that takes the steps; None without one. Waits for the device."""
        scaler = self._scaler()
        return None if scaler is None else float(scaler.get_scale())

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps a parameter of this model."""
        for group in optimizer.param_groups:  # twice in a step, and no generator: the code is out of the caches
            for p in group["params"]:
                if id(p) in self._ids:
                    return True
        return False

    def leave_to_device(self, optimizer: Optimizer) -> Tensor | None:
        """1.0 if the step is bad, 0.0 if not, on the device, for `optimizer.found_inf`; the host reads the verdict in
        `settle`. None where it has to be asked for now, by `gradients_are_good`."""
        self._flag = None
        self._begin_unseen()
        if not self.in_step or self.bad or not self._keeper.verdict_can_wait():
            return None
        if not leaves_out(optimizer):  # a GradScaler has set a flag of its own
            return None
        self.watch.look_before_update()
        self.watch.look_at_rest(optimizer)
        flag = self.watch.flag()
        if flag is None or flag.device.type not in LEAVES_OUT or (flag := self.buffers.leave(flag)) is None:
            return None
        self.optimizers.add(optimizer)
        self._keeper.before_first_update(self.missed(), scaled=False)
        self._flag = flag if self._told is None else flag.maximum(self._told.values[0])
        return self._flag

    def settle(self) -> None:
        """Read the verdict on the step that is over, if the device has it still; waits for its backward pass. All that
        a bad step means happens here: nothing was changed by it, the device has seen to that. May raise."""
        if self._left is None:
            return
        # Whoever asks may be another thread, or validate in inference mode, in which no step can be replayed.
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            if (left := self._left) is None:
                return
            norms, (turned, told) = left.gradients.read(), (c.raised() if c else [] for c in (left.buffers, left.ranks))
            self._left, self.owes = None, False  # not before: what waits can be interrupted
            if norms or turned or told:
                self.bad, self.another_rank = True, not (norms or turned)
                self.watch.take_back(left.gradients, norms)
                self.watch.bad.update(turned)
                try:
                    self._keeper.on_bad_gradients(own=True)
                except BaseException:
                    self.bad = False
                    self.watch.clear()
                    raise
            self._keeper.on_end(bad=self.bad)

    def gradients_are_good(self, optimizer: Optimizer) -> bool:
        """The verdict, formed once a step; coverage is checked first (called before each update)."""
        self._flag = None
        self.optimizers.add(optimizer)
        scaler = boundaries.scaler_of(optimizer)
        if scaler is not None:
            self._scaler = weakref.ref(scaler)
        self._begin_unseen()
        if not self.in_step and self.bad and self.watch.bad_gradients_are_gone():
            self.bad = False  # that step is over for every optimizer
        self._keeper.before_first_update(self.missed(), scaled=scaler is not None)
        self.watch.look_before_update()
        self.watch.look_at_rest(optimizer)
        self.buffers.ask()
        finite = self.watch.verdict()  # waits for the device
        if finite and self.watch.large and squares_gradients(optimizer):
            self.watch.bad |= self.watch.large
            finite = False
        return finite and not self.bad and self._rest_is_good()

    def _rest_is_good(self) -> bool:
        """Buffers and loss. Of several ranks it is as they told each other when they had the average."""
        if self._told is not None and not self._told.raised():
            return True
        good = not (self._bad_buffers() or self._keeper.loss_is_off())
        self.another_rank = good and self._told is not None
        return good and self._told is None

    def _tell_ranks(self) -> None:
        """What a rank alone can see, so that all of them veto a step or none. Each is here after the same backward
        passes; there is nothing to tell where no buffer holds numbers and losses veto nothing, which is so for all."""
        if not (self.buffers.hold_numbers or self._keeper.vetoes_losses()):
            return
        good = torch.zeros((), device=self._device)
        if (flag := self.buffers.leave(good)) is None:
            self.buffers.ask()
            flag = good + bool(self.buffers.turned_nonfinite())
        if self._keeper.loss_is_off():
            flag = good + 1.0
        self._told = Coming(["told"], self.ranks.spread(flag.clone()).reshape(1), self._device)

    def _bad_buffers(self) -> bool:
        found = self.buffers.turned_nonfinite()
        self.watch.bad.update(found)
        return bool(found)

    def veto(self, *, own: bool) -> None:
        """The update will not happen."""
        if not self.bad and (own or self.in_step):
            self.bad = True
            self._vetoed_after = not self.in_step
            self.watch.note_gradients()
            self._keeper.on_bad_gradients(own=own)

    def abort(self) -> None:
        """The keeper of this or of another model raised: the step is over, with everything as it was before it."""
        self.buffers.restore()
        self.in_step = self.bad = False
        self._flag = None
        self.watch.clear()
        self.covered.clear()
        self._keeper.on_abort()

    @property
    def waits(self) -> bool:
        """Whether a gradient of the step in progress waits for its update."""
        return self.in_step and self._has_gradients

    def give_up(self) -> bool:
        """The step in progress, if no gradient waits for its update. False if one does."""
        if self.waits:
            return False
        self.in_step = self.bad = False
        self.watch.clear()
        self.covered.clear()
        self._keeper.on_abort()
        return True

    def put_back(self) -> None:
        """The update did not happen, and others are about to look: buffers are as before the step."""
        if self.in_step and self._flag is not None:
            self.buffers.restore_where(self._flag)
        elif self.in_step and self.bad:
            self.buffers.restore()

    def skipped(self) -> None:
        """A GradScaler skipped the step of an optimizer, which was not called: the boundary is here. Gradients of this
        model were not finite, or others that it steps."""
        self.settle()
        self._flag = None
        self._begin_unseen()
        if self.in_step:
            self._veto_alone(own=not self.watch.verdict())
            self.end()

    def found_bad(self) -> bool:
        """Whether a gradient of the step in progress is not finite."""
        return self.in_step and not self.watch.verdict()

    def _veto_alone(self, *, own: bool = True) -> None:
        try:
            self.veto(own=own)
        except BaseException:
            self.abort()
            raise

    def end_by_hand(self) -> None:
        """A boundary of a loop without a torch optimizer: the same questions are asked, nothing can be vetoed."""
        self.settle()
        self._flag = None
        self._begin_unseen()
        if self.in_step or self.watch.fresh:
            self._keeper.before_first_update(self.missed(), scaled=None)
            self.watch.look_before_update()
            self.buffers.ask()
            if not self.bad and not (self.watch.verdict() and self._rest_is_good()):
                self._veto_alone()
            self.end()

    def end(self) -> None:
        """The step is over. A second optimizer of the same step finds nothing to end, but for a veto of its own."""
        if not self.in_step:
            if self._vetoed_after:
                self._vetoed_after = False
                self._keeper.on_end(bad=True)
            return
        self.in_step = False
        flag, self._flag = self._flag, None
        if flag is not None:
            self.buffers.restore_where(flag)
            self._left, self.owes = _Left(self.watch.leave(), self.buffers.left(), self._told), True
            self._keeper.left_to_device()
        elif self.bad:
            self.buffers.restore()
        self.watch.over()
        self.covered.clear()
        if flag is None:
            self._keeper.on_end(bad=self.bad)


@dataclass(frozen=True)
class _Left:
    """What the device knows of a step that is over: norms, buffers that are not finite, and what ranks told."""

    gradients: GradientsLeft
    buffers: Coming | None
    ranks: Coming | None
