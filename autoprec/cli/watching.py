"""`autoprec watch`: the file of a run that goes on, read as it grows, and a table of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autoprec.cli.output import console, progress_console, show
from autoprec.errors import InputError
from autoprec.plans import Event
from autoprec.reporting.runs import WatchedRun, follow, run_data
from autoprec.reporting.watching import run_view
from autoprec.serial.events import EventsFile

__all__ = ["check_interval", "opened", "watch_run"]

#: What a run's file of events is called unless compile(…, events=) says otherwise.
EVENTS_NAME = "autoprec_events.jsonl"

SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 3600.0

T = TypeVar("T")


def watch_run(run: Path, interval_seconds: float, *, once: bool, as_json: bool) -> int:
    """Show the run until Ctrl-C; or once, where that was asked for and where nobody looks."""
    check_interval(interval_seconds)
    file = opened(run, WatchedRun, follow)
    out = console()
    if once or as_json or not (out.file.isatty() and out.is_interactive):
        view = run_view(file.run, str(file.path), width=out.width)
        show({"run": str(file.path), **run_data(file.run)}, view, as_json=as_json)
    else:
        _watch(file, out, interval_seconds)
    return 0


def check_interval(seconds: float) -> None:
    """`InputError` where nobody could mean it."""
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        allowed = f"between {SHORTEST_SECONDS:g} and {LONGEST_SECONDS:g}"
        raise InputError(f"--interval must be {allowed} seconds, not {seconds:g}")


def opened(run: Path, nothing: Callable[[], T], fold: Callable[[T, Sequence[Event]], T]) -> EventsFile[T]:
    """The file of events of a run, or in its folder, read for the first time. `InputError` if there is none."""
    file = EventsFile(run / EVENTS_NAME if os.path.isdir(run) else run, nothing, fold)
    try:
        with progress_console().status(Text(f"reading {file.path}")):  # a str would be markup
            file.read()
    except FileNotFoundError:
        where = f"no {EVENTS_NAME} is in this folder" if file.path != run else "there is no such file"
        how = "a run writes it in the folder that it runs in, or where compile(…, events=) says, from its first plan on"
        raise InputError(f"{run}: {where}; {how}") from None
    return file


def _watch(file: EventsFile[WatchedRun], out: Console, interval_seconds: float) -> None:
    """Until Ctrl-C. What was seen last then stays in the terminal, which a screen of its own would take with it."""
    note = ""
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                view = run_view(file.run, str(file.path), width=out.width, height=out.height, note=note)
                live.update(view, refresh=True)
                time.sleep(interval_seconds)
                try:
                    file.read()
                    note = ""
                except FileNotFoundError:
                    note = "gone; waiting for a new one"
    except KeyboardInterrupt:
        out.print(run_view(file.run, str(file.path), width=out.width, height=out.height, note=note))
        raise
