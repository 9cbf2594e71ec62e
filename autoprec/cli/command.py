"""The application, and what makes a function one of its commands.

Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 not supported here, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from autoprec.cli.interrupts import heard_interrupts

__all__ = ["BudgetText", "Compiled", "DeviceFile", "Json", "PolicyName", "RunFile", "app", "command"]

INTERRUPTED, PIPE_CLOSED = 130, 141

app = typer.Typer(
    name="autoprec",
    help="An adaptive per-layer precision scheduler for PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # with it, help alone imports rich
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
RunFile = Annotated[Path, typer.Argument(metavar="RUN", help="A run's file of events, or the folder that it is in.")]
PolicyName = Annotated[str, typer.Option("--policy", help="A policy's name (memory, balanced, …) or its file.")]
BudgetText = Annotated[
    str | None,
    typer.Option("--budget", help='Peak of one step: "6GiB", or "60%" of the part that precision can change.'),
]
DeviceFile = Annotated[
    Path | None,
    typer.Option(
        "--device",
        help="The device to plan for: measured timings, a datasheet, or a100, h100, h200, cpu-generic"
        " [default: PROFILE.device.json].",
    ),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compiled/--eager",
        help="Plan for a step that runs through torch's compiler, or for one that does not [default: as calibrated].",
        show_default=False,
    ),
]


def _prepare_stdout() -> None:
    """There may be none (`>&-`), and what its encoding does not have is written as an escape."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Register a command that returns its exit code; errors become a message and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        from autoprec.errors import AutoprecError, InputError

        _prepare_stdout()
        try:
            with heard_interrupts():
                code = function(*args, **kwargs)
            sys.stdout.flush()
        except AutoprecError as error:
            print(f"autoprec: error: {error}", file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            # Python flushes stdout again at exit, which must find something that can be written to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = PIPE_CLOSED
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"autoprec: error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
            code = InputError.exit_code
        raise typer.Exit(code)

    app.command()(run)
    return run
