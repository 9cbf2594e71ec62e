"""Commands about a run that goes on: watch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import Json, command

__all__ = ["watch"]


@command
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's file of events, or the folder that it is in.")],
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as where the output is a file.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="How often to look.")] = 2.0,
    json: Json = False,
) -> int:
    """Show a training run while it goes on: formats, figures, events.

    Reads nothing but the file of events (autoprec_events.jsonl) that the run appends to. Ctrl-C ends it.
    """
    from autoprec.cli.watching import watch_run

    return watch_run(run, interval, once=once, as_json=json)
