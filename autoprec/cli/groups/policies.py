"""Commands that speak of policies: check, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import Json, command

__all__ = ["check", "schema"]


@command
def check(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A policy's name (memory, balanced, …) or its file.")],
    profile: Annotated[
        Path | None, typer.Argument(metavar="[PROFILE]", help="What calibrate wrote: check the rules on its graph.")
    ] = None,
    device: Annotated[
        Path | None,
        typer.Option("--device", help="Timings, for kernels that are missing [default: PROFILE.device.json]."),
    ] = None,
    json: Json = False,
) -> int:
    """Find rules that can never apply, or leave an op no format.

    Exit code 0 if nothing is wrong (notes are not wrong), 1 if something is, 2 if the file is not valid.
    """
    from autoprec.cli.policies import show_check

    return show_check(policy, profile, device, as_json=json)


@command
def schema(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write [default: print it].")] = None,
    json: Annotated[bool, typer.Option("--json", help="With -o: say what was written as JSON.")] = False,
) -> int:
    """Print the JSON Schema of policy files, for editors."""
    from autoprec.cli.policies import show_schema

    return show_schema(out, as_json=json)
