"""A replay for people and for programs. Seconds of solvers are measured; all else is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.planning.brute_force import choices_count
from autoprec.planning.cases import Case
from autoprec.planning.reasons import bytes_text, seconds_text
from autoprec.planning.replays import Attempt, Replay, count_text

__all__ = ["replay_data", "replay_tables"]


def replay_data(case: Case, found: Replay) -> dict[str, Any]:
    """Plain data."""
    p = case.problem
    return {
        "ops": len(p.ops),
        "decisions": len(p.units) + len(p.storable),
        "budget_bytes": p.budget_bytes,
        "recorded": None if case.objective is None else {"objective": case.objective, "gap": case.gap},
        "agree": not found.complaints,
        "complaints": list(found.complaints),
        "attempts": [_attempt(a) for a in found.attempts],
    }


def _attempt(a: Attempt) -> dict[str, Any]:
    data: dict[str, Any] = {"solver": a.solver, "status": a.status, "why": a.why, "measured_seconds": a.seconds}
    if a.solution is not None:
        found = a.solution.evaluation
        data |= {
            "objective": found.objective,
            "bound": a.solution.bound,
            "gap": a.solution.gap,
            "predicted_seconds": found.seconds,
            "predicted_saved_bytes": found.saved_bytes,
            "predicted_peak_bytes": found.peak_bytes,
            "noise": found.noise,
            "loss_sigma": found.loss_sigma,
            "gradient_ratio": found.gradient_ratio,
        }
    return data


def replay_tables(case: Case, found: Replay) -> Iterator[RenderableType]:
    """One row per solver, and below what they do not agree on."""
    p = case.problem
    table = Table(title="Every solver on this case", title_justify="left")
    for name in ("solver", "status"):
        table.add_column(name, overflow="fold")
    for name in ("objective", "dual bound", "gap", "solved in (measured)", "predicted peak", "predicted noise"):
        table.add_column(name, justify="right")
    for a in found.attempts:
        table.add_row(a.solver, f"{a.status}: {a.why}" if a.why else a.status, *_figures(a))
    if case.objective is not None:
        table.add_section()
        table.add_row("the file", "recorded", f"{case.objective:.9g}", "", f"{100 * case.gap:.2g} %")
    yield table
    budget = "no budget" if p.budget_bytes is None else f"budget {bytes_text(p.budget_bytes)}"
    size = f"{len(p.ops)} ops, {len(p.units) + len(p.storable)} decisions, {count_text(choices_count(p))} choices"
    lines = [f"{size}, {budget}"]
    lines += [f"disagree: {what}" for what in found.complaints] or ["all agree"]
    yield Text("\n".join(lines))


def _figures(a: Attempt) -> tuple[str, ...]:
    if a.solution is None:
        return "", "", "", "" if a.status == "skipped" else seconds_text(a.seconds).lstrip("+")
    found = a.solution.evaluation
    return (
        f"{found.objective:.9g}",
        f"{a.solution.bound:.9g}",
        f"{100 * a.solution.gap:.2g} %" if a.solution.gap else "0",
        seconds_text(a.seconds).lstrip("+"),
        bytes_text(found.peak_bytes),
        f"{found.noise:.3g}",
    )
