"""Ctrl-C that is not lost.

Where torch's C++ asks Python for an attribute (while Dynamo captures a model, for one), an exception that is raised
there is dropped, and a `KeyboardInterrupt` with it: the command would run on as if nobody had asked it to stop.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["AGAIN_SECONDS", "heard_interrupts"]

#: How long after a `KeyboardInterrupt` it is raised again: long enough to clean up, short for who waits.
AGAIN_SECONDS = 1.0


@contextmanager
def heard_interrupts() -> Iterator[None]:
    """While this lasts, Ctrl-C raises `KeyboardInterrupt` until it is heard, that is, until the block is left.

    Changes nothing where somebody else handles the signals, and where there is no timer (not POSIX).
    """
    if not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    alarm = signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarm)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    raise KeyboardInterrupt
