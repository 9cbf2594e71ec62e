"""One training step from its first forward to its end: coverage, the verdict, the veto.

`StepGuard` knows optimizers and gradients; what a bad step means (attribution, events, plans) is its keeper's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from autoprec.execution import boundaries
from autoprec.execution.guard import (
    BufferSnapshot,
    GradientWatch,
    OptimizerSnapshot,
    PutAside,
    calls_closure_once,
)

__all__ = ["StepGuard", "StepKeeper"]


class StepKeeper(Protocol):
    """What a `StepGuard` reports to."""

    def before_first_update(self, missed: list[str]) -> None:
        """Gradients are complete. `missed` names parameters whose gradients came from outside the captured graphs."""

    def on_bad_gradients(self) -> None:
        """The step is bad; nothing was changed yet. May raise."""

    def on_end(self, *, bad: bool) -> None:
        """The step is over; parameters, buffers and optimizer state are final."""


class StepGuard:
    """Mutable state of the step in progress. `remove()` takes every hook off.

    Attributes:
        in_step: True from the first training forward to the end of the step.
        bad: True once the step was found bad.
        covered: FQNs of the parameters that went through a captured graph since the last step.
        optimizers: the state that they hold is asked for when planning.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], keeper: StepKeeper) -> None:
        self._keeper = keeper
        self._ids = {id(p) for p in parameters.values()}
        self.watch = GradientWatch(parameters)
        self.buffers = BufferSnapshot(model)
        self.in_step = False
        self.bad = False
        self.covered: set[str] = set()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._aside: dict[int, list[PutAside]] = {}
        self._snapshots: dict[int, OptimizerSnapshot] = {}
        boundaries.listen(self)

    def remove(self) -> None:
        """Take every hook off."""
        boundaries.unlisten(self)
        self.watch.remove()

    def begin(self) -> bool:
        """A training forward runs. True if it is the first of a step."""
        self.watch.look_for_new()
        if self.in_step:
            if self.watch.discarded():  # that backward pass was given up: what it found does not count
                self.watch.clear()
            return False
        self.in_step, self.bad = True, False
        self.watch.clear()
        self.buffers.take()
        return True

    def missed(self) -> list[str]:
        """Parameters with a fresh gradient that went through no captured graph since the last step."""
        return sorted(self.watch.fresh - self.covered)

    def _owns(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Veto a step with a non-finite gradient (called by torch's optimizer hooks)."""
        if not self._owns(optimizer):
            return None
        self.optimizers.add(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._judge(optimizer)
            return None
        if not calls_closure_once(optimizer):
            self._snapshots[id(optimizer)] = OptimizerSnapshot(optimizer)

        def guarded() -> Any:
            # The backward pass is inside the closure, so the verdict can only come after it.
            with torch.enable_grad():
                loss = closure()
            self._judge(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    def _judge(self, optimizer: Optimizer) -> None:
        self._keeper.before_first_update(self.missed())
        if not self.bad:
            if self.watch.verdict() and not self._bad_buffers():
                return
            self._turn_bad()
        self._aside.setdefault(id(optimizer), []).append(PutAside(optimizer))

    def _bad_buffers(self) -> bool:
        found = self.buffers.turned_nonfinite()
        self.watch.bad.update(found)
        return bool(found)

    def after_step(self, optimizer: Optimizer) -> None:
        """End of an optimizer's step (called by torch's optimizer hooks)."""
        if not self._owns(optimizer):
            return
        snapshot = self._snapshots.pop(id(optimizer), None)
        if snapshot is not None and self.bad:
            snapshot.restore(optimizer)
        for aside in reversed(self._aside.pop(id(optimizer), [])):
            aside.restore()
        self.end()

    def after_scaler_update(self) -> None:
        """A GradScaler that skipped the step called no optimizer: the boundary is here."""
        if self.in_step and not self.watch.verdict():
            if not self.bad:
                self._turn_bad()
            self.end()

    def _turn_bad(self) -> None:
        """The keeper may raise; the step is over then, with everything as it was before it."""
        self.bad = True
        try:
            self._keeper.on_bad_gradients()
        except BaseException:
            self.buffers.restore()
            self.in_step = self.bad = False
            self.watch.clear()
            self.covered.clear()
            self._snapshots.clear()
            raise

    def end_by_hand(self) -> None:
        """A boundary of a loop without a torch optimizer: the same questions are asked, nothing can be vetoed."""
        if self.in_step or self.watch.fresh:
            self._keeper.before_first_update(self.missed())
            if not self.bad and (not self.watch.verdict() or self._bad_buffers()):
                self._turn_bad()
            self.end()

    def end(self) -> None:
        """The step is over. A second optimizer of the same step finds nothing to end."""
        if not self.in_step:
            return
        self.in_step = False
        if self.bad:
            self.buffers.restore()
        self.watch.fresh.clear()
        self.covered.clear()
        self._keeper.on_end(bad=self.bad)
