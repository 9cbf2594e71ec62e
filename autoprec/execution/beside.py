"""Work in a copy of this process, beside it. What stays of it is what it leaves on the disk."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

__all__ = ["Copy", "can_copy"]

#: Asks Linux for a signal when the process that this one is a copy of ends, however it does (linux/prctl.h).
_PR_SET_PDEATHSIG = 1

#: Between two looks whether a copy has ended.
_LOOK_SECONDS = 0.01


def can_copy(device_type: str) -> bool:
    """Whether a process can be copied in the middle of a run: elsewhere than on Linux libraries forbid it, and CUDA
    does not work in a copy."""
    return sys.platform == "linux" and device_type == "cpu"


class Copy:
    """A copy of this process, made now, that works and ends. It has its own memory, random states and, of this
    process's threads, only the one that made it; it writes to no stream, and no handler of a signal runs in it.

    `OSError` if there is no room for one.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        owner = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads may hold locks: see `wait`
            self._pid = os.fork()
        if self._pid == 0:
            _run(work, owner)
        with suppress(OSError):  # whoever comes first; it may have ended by now
            os.setpgid(self._pid, self._pid)
        self._end = weakref.finalize(self, _end, self._pid, owner)

    def wait(self, limit_seconds: float) -> bool:
        """Whether it has ended, and its work went well. A copy that does not end by itself is ended: it may wait for a
        lock that a thread held which was not copied."""
        last = time.monotonic() + limit_seconds
        while time.monotonic() < last:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody waits for every child, and was told in our place
                pid, status = self._pid, 0
            if pid:
                self._end.detach()
                return status == 0
            time.sleep(_LOOK_SECONDS)
        self.end()
        return False

    def end(self) -> None:
        """End it, and whatever it has started. A second call changes nothing."""
        self._end()


def _end(pid: int, owner: int) -> None:
    """Of the process that made it: others that are copied from that one have this object too."""
    if os.getpid() == owner:
        with suppress(ProcessLookupError, ChildProcessError):  # somebody waits for every child
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run(work: Callable[[], object], owner: int) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:  # it was gone before that
            return
        os.setpgid(0, 0)
        os.nice(10)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = open(nowhere, "w", encoding="utf-8")  # noqa: SIM115 - until it ends
        work()
        status = 0
    finally:  # nothing of what this process has to do at its end is the copy's
        os._exit(status)
