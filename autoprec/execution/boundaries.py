"""Where a training step ends: torch's own optimizer hooks, and GradScaler updates that skipped a step.

Installed once in the process while any session lives; each session is asked whether the optimizer is one of its own.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["StepListener", "listen", "unlisten"]


class StepListener(Protocol):
    """What is told about optimizer steps."""

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before a step; may replace its arguments (the closure)."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step."""

    def after_scaler_update(self) -> None:
        """Called after a `GradScaler.update`."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
_scaler_update: Any = None


def listen(listener: StepListener) -> None:
    """Tell `listener` about every optimizer step from now on."""
    if not _listeners:
        _install()
    _listeners.add(listener)


def unlisten(listener: StepListener) -> None:
    """Stop; the hooks are removed with the last listener."""
    _listeners.discard(listener)
    if not _listeners:
        _remove()


def _install() -> None:
    global _scaler_update
    _remove()
    _handles.append(register_optimizer_step_pre_hook(_before))
    _handles.append(register_optimizer_step_post_hook(_after))
    # A step that a GradScaler skips calls no optimizer, and GradScaler has no hooks of its own.
    original = _scaler_update = torch.amp.GradScaler.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for listener in list(_listeners):
            listener.after_scaler_update()
        return result

    torch.amp.GradScaler.update = update  # type: ignore[method-assign]


def _remove() -> None:
    global _scaler_update
    while _handles:
        _handles.pop().remove()
    if _scaler_update is not None:
        torch.amp.GradScaler.update = _scaler_update  # type: ignore[method-assign]
        _scaler_update = None


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    replaced = None
    for listener in list(_listeners):
        result = listener.before_step(optimizer, args, kwargs)
        if result is not None:
            args, kwargs = replaced = result
    return replaced


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in list(_listeners):
        listener.after_step(optimizer)
