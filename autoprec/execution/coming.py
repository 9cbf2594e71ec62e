"""Numbers of a device on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["Coming"]


class Coming:
    """A number for each name, on a device; the host does not wait for it before it reads.

    Attributes:
        values: the numbers, one dimension, where they were made.
    """

    def __init__(self, names: Sequence[str], values: Tensor, device: torch.device) -> None:
        self._names, self.values = names, values
        self._here = values
        self._there: torch.cuda.Event | None = None
        if device.type == "cuda":
            pinned = torch.empty(len(names), dtype=values.dtype, pin_memory=True)
            with torch.cuda.device(device):  # whose stream copies
                self._here = pinned.copy_(values, non_blocking=True)
                self._there = torch.cuda.Event()
                self._there.record()

    def read(self) -> Iterator[tuple[str, float]]:
        """Names and numbers, as soon as they are there."""
        if self._there is not None:
            self._there.synchronize()
        return zip(self._names, self._here.tolist(), strict=True)

    def raised(self) -> list[str]:
        """Names of the numbers that are not zero, as soon as they are there."""
        return [name for name, number in self.read() if number]
