"""Work in a copy of this process, beside it. What stays of it is what it leaves on the disk."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
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
    process's threads, only the one that made it. What was open is not: files, sockets, locks; it writes to no stream or
    log, no handler of a signal runs in it, and what it no longer needs is not finalized.

    `OSError` if there is no room for one.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        owner = os.getpid()
        # Nothing may be raised, in either process, before each is known to be what it is.
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # other threads may hold locks: see `wait`
                self._pid = os.fork()
            if self._pid == 0:
                _run(work, owner, heard)
            with suppress(OSError):  # whoever comes first; it may have ended by now
                os.setpgid(self._pid, self._pid)
            self._end = weakref.finalize(self, _end, self._pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)

    def wait(self, limit_seconds: float) -> bool:
        """Whether it has ended, and its work went well. A copy that does not end by itself is ended: it may wait for a
        lock that a thread held which was not copied."""
        last = time.monotonic() + limit_seconds
        while time.monotonic() < last:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody waits for every child, and was told in our place
                self._end.detach()
                return True
            if pid:
                self._end.detach()
                _end_group(pid)
                return status == 0
            time.sleep(_LOOK_SECONDS)
        self.end()
        return False

    def end(self) -> None:
        """End it, and whatever it has started. A second call changes nothing."""
        self._end()


def _end(pid: int) -> None:
    # Not a child where somebody waits for every child, whose number may be another process's by now; nor in other
    # processes that were copied from this one, which have this object too.
    with suppress(ChildProcessError):
        has_ended, _ = os.waitpid(pid, os.WNOHANG)
        _end_group(pid)
        if not has_ended:
            os.waitpid(pid, 0)


def _end_group(pid: int) -> None:
    """The copy, if it is there, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _run(work: Callable[[], object], owner: int, heard: Iterable[int]) -> NoReturn:
    status = 1
    try:
        gc.disable()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:  # it was gone before that
            return
        os.setpgid(0, 0)
        os.nice(10)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):  # not closed: its number would be another file's
            with suppress(OSError):  # that of the folder itself
                os.dup2(nowhere, int(name))
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until it ends
        work()
        status = 0
    finally:  # nothing of what this process has to do at its end is the copy's
        os._exit(status)
