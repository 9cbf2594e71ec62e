"""The `autoprec` command: its groups of commands in the order of the help."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from autoprec.cli.command import app
from autoprec.cli.groups import cases, models, plans, policies, runs  # importing a group registers its commands

__all__ = ["app", "main"]

GROUPS = (models, plans, runs, policies, cases)


@app.callback(invoke_without_command=True)
def autoprec(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """An adaptive per-layer precision scheduler for PyTorch training."""
    if version:
        from autoprec import __version__

        print(f"autoprec {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command line and exit."""
    # torch's profiler, which counts peaks, writes lines on stderr for each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    app(prog_name="autoprec")
