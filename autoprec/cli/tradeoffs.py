"""`autoprec pareto`: what each budget costs, as a table and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from autoprec.cli.inputs import read_inputs
from autoprec.cli.output import progress_console, show
from autoprec.errors import InputError
from autoprec.planning.tradeoffs import tradeoffs
from autoprec.reporting.tradeoffs import tradeoffs_data, tradeoffs_tables
from autoprec.serial import check_writable, write_text

__all__ = ["show_tradeoffs"]


def show_tradeoffs(
    profile: Path,
    policy: str,
    budget: str | None,
    device: Path | None,
    compiled: bool | None,
    points: int,
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    """Plan for a series of budgets; draw them if there is a file to draw into."""
    if out is not None:
        if out.suffix.lower() != ".svg":
            raise InputError(f"{out}: the picture is an SVG; name a file that ends in .svg")
        check_writable(out, InputError)
    given = read_inputs(profile, policy, budget, device, compiled)
    with progress_console().status("planning without a budget") as status:
        found = tradeoffs(
            given.graph,
            given.profile,
            given.device,
            given.policy,
            points=points,
            done=lambda k, n: status.update(f"planning for budget {k + 1} of {n}"),
        )
    written = None
    if out is not None:
        from autoprec.reporting.pictures import tradeoffs_svg

        title = f"{given.graph.model}, policy {given.policy.name}, timings of {given.device.name}"
        write_text(out, tradeoffs_svg(found, title), InputError)
        written = Text(f"picture  {out}")
    data = {
        "policy": given.policy.name,
        "device": given.device.name,
        "picture": None if out is None else str(out),
        **tradeoffs_data(found),
    }
    show(data, *tradeoffs_tables(found), written, as_json=as_json)
    return 0
