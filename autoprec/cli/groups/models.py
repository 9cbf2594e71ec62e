"""Commands that run models: demo, calibrate, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import Json, PolicyName, command

__all__ = ["calibrate", "demo", "doctor"]


@command
def demo(
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=20, help="Runs of each contestant; fewer are sooner over.")
    ] = 3,
    json: Json = False,
) -> int:
    """Compare FP32, autocast and autoprec on two small models.

    A transformer on real text and a CNN on real digits, one to three minutes, no downloads. Exit code 1 if something
    does not hold that autoprec promises.
    """
    from autoprec.cli.demo import show_demo

    return show_demo(seeds, as_json=json)


@command
def doctor(json: Json = False) -> int:
    """Say what this device does natively, emulated, not at all."""
    from autoprec.cli.doctor import show_doctor

    return show_doctor(as_json=json)


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
