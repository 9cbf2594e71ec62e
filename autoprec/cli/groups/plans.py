"""Commands that make plans and speak of them: plan, explain, diff, pareto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import BudgetText, Compiled, DeviceFile, Json, PolicyName, command

__all__ = ["diff", "explain", "pareto", "plan"]

Profile = Annotated[Path, typer.Argument(metavar="PROFILE", help="What calibrate wrote.")]


@command
def plan(
    profile: Profile,
    policy: PolicyName = "balanced",
    budget: BudgetText = None,
    device: DeviceFile = None,
    compiled: Compiled = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Plan file to write.")] = Path("plan.yaml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and print, but write no file.")] = False,
    save_case: Annotated[
        Path | None, typer.Option("--save-case", metavar="FILE", help="JSON file for the problem, as replay reads it.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="Run the plans on this model, here: file.py:function."),
    ] = None,
    json: Json = False,
) -> int:
    """Decide the format of every op, from files alone.

    Needs neither the model nor torch nor the device. With --target the plans that may be adopted run a step of that
    model against each other, compiled if they are to be, and what was measured decides.
    """
    from autoprec.cli.planning import write_offline_plan

    return write_offline_plan(
        profile, policy, budget, device, compiled, None if dry_run else out, save_case, target, as_json=json
    )


@command
def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    op: Annotated[str | None, typer.Argument(metavar="[OP]", help="An op or module, or a glob: 'blocks.0.*'.")] = None,
    why_not: Annotated[
        str | None, typer.Option("--why-not", metavar="FORMAT", help="Why OP is not (or not kept) in this format.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Where every byte of the peak is, by layer and kind.")
    ] = False,
    json: Json = False,
) -> int:
    """Say what each op of a plan got, and why."""
    from autoprec.cli.planning import show_plan

    return show_plan(plan, op, why_not, memory=memory, as_json=json)


@command
def diff(
    before: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    after: Annotated[Path, typer.Argument(metavar="PLAN", help="Another one.")],
    json: Json = False,
) -> int:
    """Say what the second of two plans does otherwise.

    Exit code 0 if they decide the same (formats, storages, FP16 regions, casts that saturate), 1 if not. Policy,
    device, budget and predictions are told, but are no decisions.
    """
    from autoprec.cli.planning import show_differences

    return show_differences(before, after, as_json=json)


@command
def pareto(
    profile: Profile,
    policy: PolicyName = "balanced",
    budget: BudgetText = None,
    device: DeviceFile = None,
    compiled: Compiled = None,
    points: Annotated[int, typer.Option("--points", min=2, max=100, help="Budgets to plan for.")] = 8,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="SVG file to draw into.")] = None,
    json: Json = False,
) -> int:
    """Say what each budget would cost, from the smallest on.

    All figures are predicted. Plans that another one beats are left out. The budget that is named (here or in the
    policy) is marked, else the knee of the curve.
    """
    from autoprec.cli.tradeoffs import show_tradeoffs

    return show_tradeoffs(profile, policy, budget, device, compiled, points, out, as_json=json)
