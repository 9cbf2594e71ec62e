"""Where a training step ends: torch's own optimizer hooks, and GradScaler updates that skipped a step.

Installed once in the process while any session lives. An optimizer may step the parameters of several models: its step
is good only if it is good for all of them.
"""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoprec.execution.guard import OptimizerSnapshot, PutAside, calls_closure_once, is_torchs_own

__all__ = ["StepListener", "listen", "scaler_of", "unlisten"]


class StepListener(Protocol):
    """What is told about optimizer steps."""

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps a parameter of this model."""

    def leave_to_device(self, optimizer: Optimizer) -> Tensor | None:
        """Called when gradients are complete, before the update: what the optimizer takes as `found_inf`, where it can
        leave the update out on the device, or None. May raise."""

    def settle(self) -> None:
        """Read the verdict on a step that is over, if the device has it still. May raise."""

    def gradients_are_good(self, optimizer: Optimizer) -> bool:
        """Called when gradients are complete, before the update. May raise."""

    def veto(self, *, own: bool) -> None:
        """The update will not happen; `own` tells whether this model's gradients are to blame. May raise."""

    def abort(self) -> None:
        """A listener raised: the step is over, with everything as it was before it."""

    def put_back(self) -> None:
        """The update did not happen, and hooks of others are about to look."""

    def end(self) -> None:
        """The step is over."""

    def skipped(self) -> None:
        """A GradScaler skipped the step of an optimizer that this listener owns."""


@dataclass
class _Step:
    """An optimizer's step in progress. `flag`: what it was given as `found_inf`. `inner`: whether a class has called
    the step of its base class within its own, and torch has wrapped both: each runs the hooks, and they are one step.
    """

    optimizer: weakref.ref[Optimizer]
    owners: Sequence[weakref.ref[StepListener]]
    snapshot: OptimizerSnapshot | None = None
    aside: list[PutAside] = field(default_factory=list)
    flag: Tensor | None = None
    inner: bool = False
    guards_closure: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)

    def put_aside(self, optimizer: Optimizer, *, behind_hooks: bool) -> None:
        """The gradients, while the optimizer itself runs: what the user has hooked to it sees them before and after.
        `behind_hooks`: those that come before have not run yet."""
        if not self.handles:  # a closure may be called more than once
            self.come_first(optimizer)
        if behind_hooks:
            last = optimizer.register_step_pre_hook(lambda *_: self.aside.append(PutAside(optimizer)))
            self.handles.append(last)
        else:
            self.aside.append(PutAside(optimizer))

    def come_first(self, optimizer: Optimizer) -> None:
        """Before all that others have hooked behind the optimizer."""
        first = optimizer.register_step_post_hook(lambda *_: self.put_back())
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
        self.handles.append(first)

    def put_back(self) -> None:
        """What was put aside, and all else that hooks of others may see."""
        for aside in reversed(self.aside):
            aside.restore()
        if (optimizer := self.optimizer()) is not None and self.snapshot is not None:
            self.snapshot.restore(optimizer)
        for known in self.owners:
            if (owner := known()) is not None:
                owner.put_back()

    def goes_on(self, optimizer: Optimizer) -> None:
        """Hooks have looked, and the update that did not happen has more to it."""
        if self.aside:
            self.aside.append(PutAside(optimizer))
            if self.snapshot is not None:
                self.snapshot = OptimizerSnapshot(optimizer)

    def forget_hooks(self) -> None:
        """After the step, or when there will be no end of it."""
        while self.handles:
            self.handles.pop().remove()

    def take_flag_back(self) -> None:
        """What the optimizer was given; one that raised has it still."""
        optimizer = self.optimizer()
        if optimizer is not None and self.flag is not None and getattr(optimizer, "found_inf", None) is self.flag:
            del optimizer.found_inf
        self.flag = None


_steps: dict[int, _Step] = {}
_listeners: list[weakref.ref[StepListener]] = []
_handles: list[RemovableHandle] = []
_scaler_methods: dict[str, Any] = {}
_stepped: set[int] = set()
_scaled: dict[int, Any] = {}
_skipped: list[Optimizer] = []


def listen(listener: StepListener) -> None:
    """Tell `listener` about every optimizer step from now on."""
    if not _listeners:
        _install()
    _listeners.append(weakref.ref(listener, _unlisten))


def unlisten(listener: StepListener) -> None:
    """Stop; the hooks are removed with the last listener."""
    for known in [known for known in tuple(_listeners) if known() is listener]:
        _unlisten(known)


def _unlisten(known: weakref.ref[StepListener]) -> None:
    if known in _listeners:
        _listeners.remove(known)
    listening = [listener() for listener in _listeners]
    for step in _steps.values():  # of an optimizer that raised
        if not any(owner() is not None and owner() in listening for owner in step.owners):
            step.take_flag_back()
    if not _listeners:
        _remove()


def scaler_of(optimizer: Optimizer) -> Any:
    """The GradScaler that takes the step in progress, or None."""
    return _scaled.get(id(optimizer))


def _install() -> None:
    _remove()
    # Where a step is compiled, what the hooks do is not traced.
    _handles.append(register_optimizer_step_pre_hook(torch.compiler.disable(_before)))
    _handles.append(register_optimizer_step_post_hook(torch.compiler.disable(_after)))
    # A step that a GradScaler skips calls no optimizer, and GradScaler has no hooks of its own.
    step, update = torch.amp.GradScaler.step, torch.amp.GradScaler.update
    _scaler_methods.update(step=step, update=update)

    def watched_step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _stepped.discard(id(optimizer))
        _scaled[id(optimizer)] = self
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            _scaled.pop(id(optimizer), None)
        if id(optimizer) not in _stepped:
            _skipped.append(optimizer)
        return result

    def watched_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        skipped = _skipped[:]
        _skipped.clear()
        for optimizer in skipped:
            for owner in _owners(optimizer):
                owner.skipped()
        return result

    torch.amp.GradScaler.step = watched_step  # type: ignore[method-assign]
    torch.amp.GradScaler.update = watched_update  # type: ignore[method-assign]


@atexit.register
def _settle_all() -> None:
    """The last step of a run may have been a bad one, and is told in the file of events."""
    errors = list[BaseException]()
    for listener in [listener for known in tuple(_listeners) if (listener := known()) is not None]:
        try:
            listener.settle()
        except Exception as error:  # each is told, whatever came of the others
            errors.append(error)
    if errors:
        raise errors[0]


def _remove() -> None:
    while _handles:
        _handles.pop().remove()
    for name, method in _scaler_methods.items():
        setattr(torch.amp.GradScaler, name, method)
    _scaler_methods.clear()


def _owners(optimizer: Optimizer) -> list[StepListener]:
    there = [listener for known in tuple(_listeners) if (listener := known()) is not None]
    return [listener for listener in there if listener.owns(optimizer)]


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owners = _owners(optimizer)
    step = _steps.get(id(optimizer))
    if step is not None and _steps_under_way(optimizer) > 1:
        step.inner = True
        if step.aside or step.guards_closure:
            return None
        # Nothing was bad when the step began. Gradients may have been made since.
    else:
        if step is not None:  # it raised
            del _steps[id(optimizer)]
            step.take_flag_back()
            step.forget_hooks()
        if not owners:
            return None
        step = _steps[id(optimizer)] = _Step(weakref.ref(optimizer), [weakref.ref(owner) for owner in owners])
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _judge(optimizer, owners, step, behind_hooks=True)
        return None
    step.guards_closure = True
    if not calls_closure_once(optimizer):
        step.snapshot = OptimizerSnapshot(optimizer)

    def guarded() -> Any:
        # The backward pass is inside the closure, so the verdict can only come after it.
        with torch.enable_grad():
            loss = closure()
        _judge(optimizer, owners, step, behind_hooks=False)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": guarded}
    return (args[0], guarded, *args[2:]), kwargs


def _judge(optimizer: Optimizer, owners: Sequence[StepListener], step: _Step, *, behind_hooks: bool) -> None:
    """Ask every owner; one bad verdict vetoes the step for all."""
    for owner in owners:
        owner.settle()  # of a step before; if that raises, this one is not aborted, and changes nothing either
    try:
        alone = len(owners) == 1 and step.snapshot is None
        if alone and (flag := owners[0].leave_to_device(optimizer)) is not None:
            optimizer.found_inf = step.flag = flag  # type: ignore[attr-defined]
            if optimizer._optimizer_step_post_hooks:  # type: ignore[attr-defined]
                step.come_first(optimizer)
            return
        bad = [owner for owner in owners if not owner.gradients_are_good(optimizer)]
        if not bad:
            return
        for owner in owners:
            owner.veto(own=owner in bad)
    except BaseException:
        _steps.pop(id(optimizer), None)
        for owner in owners:
            owner.abort()
        raise
    if step.snapshot is None and not is_torchs_own(optimizer):
        step.snapshot = OptimizerSnapshot(optimizer)  # who knows what it does with gradients that are None
    step.put_aside(optimizer, behind_hooks=behind_hooks)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    step = _steps.get(id(optimizer))
    _stepped.add(id(optimizer))
    if step is None:
        return
    if step.inner and _steps_under_way(optimizer) > 1:
        step.goes_on(optimizer)
        return
    del _steps[id(optimizer)]
    step.take_flag_back()
    step.forget_hooks()
    for known in step.owners:
        if (owner := known()) is not None:
            owner.end()


#: What torch makes of the steps of optimizers, so that they run hooks.
_WRAPPED = Optimizer.profile_hook_step(lambda _: None).__code__  # type: ignore[attr-defined]


def _steps_under_way(optimizer: Optimizer) -> int:
    """Calls of `step` that have begun and not ended. More than one where a class calls that of its base class, and
    torch has wrapped both: it does once somebody has made an optimizer of the base class."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        if frame.f_code is _WRAPPED and frame.f_locals["self"] is optimizer:
            count += 1
        frame = frame.f_back
    return count
