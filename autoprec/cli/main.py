"""The `autoprec` command: its arguments, its exit codes, and nothing else.

Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 not supported here, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app", "main"]

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
PolicyName = Annotated[str, typer.Option("--policy", help="A policy's name (memory, balanced, …) or its file.")]


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Register a command that returns its exit code; errors become a message and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        from autoprec.errors import AutoprecError

        try:
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
        raise typer.Exit(code)

    app.command()(run)
    return run


@app.callback(invoke_without_command=True)
def autoprec(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """An adaptive per-layer precision scheduler for PyTorch training."""
    if version:
        from autoprec import __version__

        print(f"autoprec {__version__}")
        raise typer.Exit()


@command
def demo(json: Json = False) -> int:
    """Compare FP32, autocast and autoprec on two small models.

    A transformer on real text and a CNN on real digits, three seeds, about a minute, no downloads. Exit code 1 if
    something does not hold that autoprec promises.
    """
    from autoprec.cli.demo import show_demo

    return show_demo(as_json=json)


@command
def calibrate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:function or module:function; the function returns (model, batches, loss_fn).",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Profile file to write.")] = Path("profile.safetensors"),
    policy: PolicyName = "balanced",
    device_out: Annotated[
        Path | None, typer.Option("--device-out", help="Timings file to write [default: OUT.device.json].")
    ] = None,
    json: Json = False,
) -> int:
    """Observe a model over a few batches and time its ops."""
    from autoprec.cli.calibrating import write_calibration

    return write_calibration(target, out, policy, device_out, as_json=json)


@command
def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What calibrate wrote.")],
    policy: PolicyName = "balanced",
    budget: Annotated[
        str | None,
        typer.Option(help='Peak of one step: "6GiB", or "60%" of the part that precision can change.'),
    ] = None,
    device: Annotated[
        Path | None,
        typer.Option(
            help="The device to plan for: measured timings, a datasheet, or a100, h100, h200, cpu-generic"
            " [default: PROFILE.device.json]."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Plan file to write.")] = Path("plan.yaml"),
    json: Json = False,
) -> int:
    """Decide the format of every op, from files alone.

    Needs neither the model nor torch nor the device.
    """
    from autoprec.cli.planning import write_offline_plan

    return write_offline_plan(profile, policy, budget, device, out, as_json=json)


@command
def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    op: Annotated[str | None, typer.Argument(metavar="[OP]", help="An op or module, or a glob: 'blocks.0.*'.")] = None,
    json: Json = False,
) -> int:
    """Say what each op of a plan got, and why."""
    from autoprec.cli.planning import show_plan

    return show_plan(plan, op, as_json=json)


@command
def doctor(json: Json = False) -> int:
    """Say what this device does natively, emulated, not at all."""
    from autoprec.cli.doctor import show_doctor

    return show_doctor(as_json=json)


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="autoprec")
