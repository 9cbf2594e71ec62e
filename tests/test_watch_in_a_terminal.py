"""`autoprec watch` in a terminal: it follows the file until somebody ends it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.test_cli import imported_by
from tests.test_cli_watch import NAME, SMALL, UP, append, text_of, window, write


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # if the shell ignores it
        code += "from autoprec.cli.main import main; main()"
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
        command = [sys.executable, "-c", code, "watch", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.text = ""

    def read(self) -> bool:
        """What is printed soon; False if nothing will be any more."""
        if not select.select([self.ours], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self.ours, 1 << 16)
        except OSError:  # how a terminal says that nobody writes to it
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, words: str, since: int = 0) -> int:
        """The length of what was printed until then."""
        end = time.monotonic() + 60.0
        while words not in self.text[since:]:
            assert self.read() and time.monotonic() < end, f"{words!r} is not in {self.text[since:]!r}"
        return len(self.text)

    def ends_with(self) -> int:
        """The exit code, once all was read."""
        end = time.monotonic() + 60.0
        while self.read():
            assert time.monotonic() < end, "it goes on"
        return self.process.wait(timeout=60)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_
    for t in opened:
        t.process.kill()
        t.process.wait()
        os.close(t.ours)


IN, OUT, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def test_it_follows_the_file_until_ctrl_c(terminal: Callable[..., Terminal]) -> None:
    Path(NAME).touch()
    t = terminal(".", "--interval", "0.05")
    t.wait_for(IN)
    seen = t.wait_for("the run calibrates")
    append(Path(NAME), text_of(SMALL)[:-9])
    append(Path(NAME), text_of(SMALL)[-9:])
    seen = t.wait_for("4 at the newest line", seen)
    append(Path(NAME), text_of([window(12)]))
    seen = t.wait_for("12 at the newest line", seen)
    os.rename(NAME, "old")
    seen = t.wait_for("gone; waiting for a new one", seen)
    write(SMALL)
    seen = t.wait_for("4 at the newest line", seen)
    t.process.send_signal(signal.SIGINT)
    assert t.ends_with() == 130 and "Traceback" not in t.text
    # The terminal is as it was, and the last table is in it.
    left = t.text.rpartition(OUT)[2]
    assert CURSOR in t.text[seen:] and "4 at the newest line" in left and UP in left and IN not in t.text[seen:]


def test_a_line_that_is_no_event_ends_it(terminal: Callable[..., Terminal]) -> None:
    write(SMALL)
    t = terminal(NAME, "--interval", "0.05")
    t.wait_for("4 at the newest line")
    append(Path(NAME), "nonsense\n")
    assert t.ends_with() == 2
    assert f"error: {NAME}:{len(SMALL) + 1}:1: is not JSON" in t.text.rpartition(OUT)[2]


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_once_is_once_in_a_terminal_too(terminal: Callable[..., Terminal], option: str) -> None:
    write(SMALL)
    t = terminal(".", option)
    assert t.ends_with() == 0 and IN not in t.text and UP in t.text


def test_help_and_the_command_are_lean(tmp_path: Path) -> None:
    assert imported_by(["watch", "--help"]) & {"torch", "numpy", "scipy", "yaml", "rich"} == set()
    write(SMALL)
    assert not {"torch", "matplotlib"} & imported_by(["watch", "."], cwd=tmp_path)
    code = "import sys, autoprec.reporting.watching; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
