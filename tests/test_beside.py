"""A copy of the process, which works beside it."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import pytest

from autoprec.execution.beside import Copy

STEPS = 6


def test_a_copy_leaves_what_it_writes_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / f"finalized by {os.getpid()}").touch()

    reads, writes = os.pipe()
    log = open(tmp_path / "log", "w", buffering=1)  # noqa: SIM115

    def work() -> None:
        print("on the terminal")
        os.write(1, b"on its stream")
        log.write("in a log")
        log.flush()
        gc_rounds = [[k] for k in range(10**5)]
        (tmp_path / "left").write_text(f"done {len(gc_rounds)}")
        time.sleep(600)

    Finalized()  # a cycle, which a collector would find
    copy = Copy(work)
    os.close(writes)
    assert select.select([reads], [], [], 60.0)[0] and os.read(reads, 1) == b""  # nobody holds the other end open
    os.close(reads)
    while not (tmp_path / "left").exists() or not (tmp_path / "left").read_text():
        time.sleep(0.01)
    copy.end()
    gc.collect()
    assert (tmp_path / "left").read_text() == "done 100000"
    assert capfd.readouterr().out == "" and (tmp_path / "log").read_text() == ""
    assert [p.name for p in tmp_path.glob("finalized*")] == [f"finalized by {os.getpid()}"]


def test_a_copy_tells_whether_it_went_well() -> None:
    def fail() -> NoReturn:
        raise RuntimeError("no")

    assert not Copy(fail).wait(60.0)


def ended(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(1000):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_copy_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """And a handler of signals that this process has is not the copy's."""

    def work() -> None:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGUSR1)  # by default this ends a process
        time.sleep(600)

    kept = signal.signal(signal.SIGUSR1, lambda *_: (tmp_path / "handled").touch())
    try:
        assert not Copy(work).wait(60.0)
    finally:
        signal.signal(signal.SIGUSR1, kept)
    assert not (tmp_path / "handled").exists()
    assert ended(int((tmp_path / "child").read_text())), "what the copy started is still there"

    def wait() -> None:
        (tmp_path / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)

    (tmp_path / "child").unlink()
    copy = Copy(wait)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    copy.end()
    copy.end()
    child = int((tmp_path / "child").read_text())
    assert ended(child), "what the copy started is still there"


def test_a_copy_ends_with_its_process(tmp_path: Path) -> None:
    """Also if that is killed, in the midst of a copy that waits for ever."""

    def wait() -> None:
        (tmp_path / "copy").write_text(str(os.getpid()))
        time.sleep(600)

    def run() -> None:
        copy = Copy(wait)
        time.sleep(600 if copy else 0)

    outer = Copy(run)
    while not (tmp_path / "copy").exists() or not (tmp_path / "copy").read_text():
        time.sleep(0.01)
    os.kill(outer._pid, signal.SIGKILL)
    assert not outer.wait(60.0)
    assert ended(int((tmp_path / "copy").read_text()))


def test_somebody_else_may_wait_for_every_child() -> None:
    copy = Copy(lambda: None)
    os.waitpid(copy._pid, 0)
    assert copy.wait(60.0) and not copy._end.alive  # its number may be another child's
    other = Copy(lambda: None)
    os.waitpid(other._pid, 0)
    other.end()


def test_in_another_copied_process_a_copy_is_not_ended() -> None:
    copy = Copy(lambda: time.sleep(600))
    assert Copy(copy.end).wait(60.0)
    assert os.waitpid(copy._pid, os.WNOHANG) == (0, 0)  # it runs
    copy.end()
