"""The losses of a run's steps as they come, which the host waits for once a window."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from autoprec.errors import InputError
from autoprec.execution.replay import CallRecord
from autoprec.losses import Losses, Spike
from autoprec.policies import Guard

__all__ = ["LossWatch"]

#: Losses that are left on a device at most.
_WAITING = 1024


class LossWatch:
    """Mutable; owned by the session.

    Attributes:
        off: why the step in progress is vetoed, "" while it is not.
    """

    def __init__(self, limits: Guard) -> None:
        self._limits, self._known = limits, Losses()
        self._waiting: list[Tensor | float] = []
        self._seen: list[tuple[set[int], int, Tensor]] = []
        self._told: list[Tensor] = []
        self._first = 0
        self.off = ""

    def look(self, record: CallRecord, outputs: Any) -> None:
        """A scalar that a graph returns is taken to be a loss, if a backward pass begins or goes on there: one that the
        loop gives up is none. The call itself is not held: it has its batch."""
        for i, y in enumerate(outputs if isinstance(outputs, (tuple, list)) else (outputs,)):
            if isinstance(y, Tensor) and y.numel() == 1 and y.requires_grad and y.is_floating_point():
                self._seen.append((record.entered, i, y.detach().reshape(())))

    def note(self, loss: Tensor | float) -> None:
        """The user tells it; then that counts, and not what graphs return. Raises `InputError` if it is no number."""
        self._told.append(_number(loss))

    def is_off(self) -> bool:
        """Whether the step is vetoed; waits for the device where that may be."""
        if self._limits.loss_spike != "skip" or (loss := self._of_step()) is None:
            return False
        if float(loss) <= (limit := self._known.limit(self._limits.spike_sigmas)) or self._known.median is None:
            return False
        self.off = (
            f"the loss is {float(loss):.4g}, above {limit:.4g}, {self._limits.spike_sigmas:g} spreads above the median"
            f" {self._known.median:.4g} of the window before"
        )
        return True

    def drop(self) -> None:
        """The step was bad."""
        self._seen, self._told, self.off = [], [], ""

    def keep(self, step: int) -> None:
        """The step, which was the one with this number, was good."""
        if (loss := self._of_step()) is not None:
            if not self._waiting:
                self._first = step
            self._waiting.append(float(loss) if loss.device.type == "cpu" else loss)
        self.drop()
        if len(self._waiting) >= _WAITING:
            self._known = self.known

    def window_over(self) -> Spike | None:
        """The spike of the window that is over, if there was one."""
        self.known, spike = self.known.window_over(self._limits.spike_sigmas)
        return spike

    @property
    def known(self) -> Losses:
        """All so far; waits for the device."""
        if self._waiting:
            values = torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in self._waiting]).tolist()
            self._known = self._known.extended(values, self._first)
            self._waiting = []
        return self._known

    @known.setter
    def known(self, losses: Losses) -> None:
        self._known, self._waiting = losses, []

    def _of_step(self) -> Tensor | None:
        values = self._told or [y for entered, i, y in self._seen if i in entered]
        if not values:
            return None
        return values[0] if len(values) == 1 else torch.stack([v.float() for v in values]).mean()


def _number(loss: Any) -> Tensor:
    """A loss as a tensor of no dimensions; of several numbers the mean."""
    if isinstance(loss, Tensor) and loss.numel() and not loss.is_complex():
        return loss.detach().reshape(-1).float().mean()
    if isinstance(loss, Real):
        return torch.tensor(float(loss))
    told = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
    raise InputError(f"a loss is a number, or a tensor of numbers, and not {told}")
