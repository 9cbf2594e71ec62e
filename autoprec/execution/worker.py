"""A process that compiles graphs beside this one, where this one cannot be copied. What stays of it is what it leaves
on the disk: the compiler's cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from autoprec.execution.compiling import switches_here
from autoprec.execution.written import write_graph

if TYPE_CHECKING:
    from autoprec.execution.inductor import Order

__all__ = ["Worker"]

#: What the new process runs: its first line of input is what it is to do. Nothing comes from the current folder.
_BEGIN = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    " import json; order = json.loads(sys.stdin.buffer.readline()); sys.path[:] = order['path'];"
    " from autoprec.execution.compiling import main; main(order)"
)

#: What must be left on a GPU, where a process takes some hundred megabytes before it has a tensor. Not measured.
_CONTEXT_BYTES = 1 << 30


class Worker:
    """A new process with as many threads and the same switches, that compiles graphs and ends; when this process ends,
    however that does, so does it.

    `OSError` if there is no room for one, also on the GPU; `UnsupportedError` for graphs that cannot be written down.

    Attributes:
        failure: why it did not compile them, or "".
    """

    def __init__(self, orders: Sequence[Order], device_type: str) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("there is no Python to start")
        text = json.dumps(
            {
                "parent": os.getpid(),
                "path": [str(place) for place in sys.path],
                "graphs": [{**write_graph(o.module, o.examples), "is_lean": o.is_lean} for o in orders],
                "switches": switches_here(),
            }
        )
        if device_type == "cuda" and torch.cuda.mem_get_info()[0] < _CONTEXT_BYTES:
            raise OSError(f"the GPU has less than {_CONTEXT_BYTES >> 20} MiB left")
        self.failure = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            self.end()
            raise OSError(f"it ended at once: {self._last_error()}") from error

    def wait(self, limit_seconds: float) -> bool:
        """Whether it has ended, and its work went well. One that is not done by then is ended."""
        try:
            status = self._process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        self.end()
        if status:
            self.failure = f"the process that should have compiled the plan did not: {self._last_error()}"
        return status == 0

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it says nothing")

    def end(self) -> None:
        """End it, and whatever it has started. A second call changes nothing."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):  # it has ended by now, in macOS's words the second
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
