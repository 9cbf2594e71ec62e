"""Commands about a run: watch, report, tensorboard, and chaos, which proves what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import Json, PolicyName, RunFile, command

__all__ = ["chaos", "report", "tensorboard", "watch"]


@command
def watch(
    run: RunFile,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as where the output is a file.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="How often to look.")] = 2.0,
    json: Json = False,
) -> int:
    """Show a training run while it goes on: formats, figures, events.

    Reads nothing but the file of events (autoprec_events.jsonl) that the run appends to. Ctrl-C ends it.
    """
    from autoprec.cli.watching import watch_run

    return watch_run(run, interval, once=once, as_json=json)


@command
def report(
    run: RunFile,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The page, a file that ends in .html.")],
    json: Json = False,
) -> int:
    """Write a run's formats over its steps, figures and events as one HTML page.

    Reads nothing but the file of events (autoprec_events.jsonl). The page has everything in it and fetches nothing.
    """
    from autoprec.cli.reporting import write_report

    return write_report(run, out, as_json=json)


@command
def tensorboard(
    run: RunFile,
    logdir: Annotated[Path, typer.Argument(metavar="LOGDIR", help="A new folder, for tensorboard --logdir.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on as the file grows, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="How often to look.")] = 5.0,
) -> int:
    """Write a run's formats, figures and events as curves for TensorBoard.

    Reads nothing but the file of events (autoprec_events.jsonl). Needs the tensorboard package.
    """
    from autoprec.cli.tensorboard import write_curves

    return write_curves(run, logdir, interval, follow=follow)


@command
def chaos(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:function or module:function; the function returns (model, batches, loss_fn).",
        ),
    ],
    policy: PolicyName = "balanced",
    faults: Annotated[int, typer.Option("--faults", min=1, help="How many; every kind in turn.")] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Of the ops and steps that they are put into.")] = 0,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or sgd.")] = "adamw",
    backend: Annotated[str, typer.Option("--backend", help="eager or inductor.")] = "eager",
    json: Json = False,
) -> int:
    """Put faults into training runs of a model, and count what became of them.

    Exit code 1 if a bad step changed anything, a fault was missed, or more than 5 of 100 are blamed on a wrong op.
    """
    from autoprec.cli.chaos import run_chaos

    return run_chaos(target, policy, faults, seed, optimizer, backend, as_json=json)
