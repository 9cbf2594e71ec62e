"""`autoprec report`: the events of a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from autoprec.cli.output import show
from autoprec.cli.watching import opened
from autoprec.plans import Event
from autoprec.reporting.pages import write_page
from autoprec.reporting.runs import WatchedRun, follow, run_data
from autoprec.serial import check_apart

__all__ = ["write_report"]


def write_report(run: Path, out: Path, *, as_json: bool) -> int:
    """Write the page, and say where it is."""
    file = opened(run, tuple, _extended)
    check_apart({"the report": out}, {"the events": file.path})
    history = write_page(out, str(file.path), file.run)
    told = sum(history.counts.values())
    data = {"run": str(file.path), "report": str(out), "events": dict(history.counts), **run_data(history.now)}
    show(
        data,
        Text(f"report {out}: to step {history.now.steps}, ops: {len(history.formats)}, events: {told}"),
        as_json=as_json,
    )
    return 0


def _extended(known: tuple[Event, ...], events: Sequence[Event]) -> tuple[Event, ...]:
    follow(WatchedRun(), events)  # here the reader of the file knows the line of what cannot be read
    return (*known, *events)
