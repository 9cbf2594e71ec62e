"""Ctrl-C that is not lost.

Where torch's C++ asks Python for an attribute (while Dynamo captures a model, for one), an exception that is raised
there is dropped, and a `KeyboardInterrupt` with it: the command would run on as if nobody had asked it to stop.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupts"]


class Interrupts:
    """While it is entered, remembers that there was one. Does nothing where somebody else handles SIGINT."""

    def __init__(self) -> None:
        self._seen = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if there was one."""
        if self._seen:
            raise KeyboardInterrupt

    def between(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, with a check before each and after the last."""
        for item in items:
            self.check()
            yield item
        self.check()
