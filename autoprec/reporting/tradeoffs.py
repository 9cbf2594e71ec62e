"""Trade-offs for people and for programs; every figure is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.planning.reasons import bytes_text, seconds_text
from autoprec.planning.tradeoffs import Point, Tradeoffs
from autoprec.plans import Totals

__all__ = ["tradeoffs_data", "tradeoffs_tables"]


def tradeoffs_data(found: Tradeoffs) -> dict[str, Any]:
    """Plain data; all figures of a point are predicted."""
    return {
        "objective": found.objective,
        "smallest_peak_bytes": found.smallest_peak_bytes,
        "predicted_fp32": asdict(found.fp32),
        "points": [_point_data(p, found) | {"chosen": i == found.chosen} for i, p in enumerate(found.points)],
        "chosen": found.chosen,
        "why": found.why,
        "budgets_planned": found.budgets,
    }


def _point_data(point: Point, found: Tradeoffs) -> dict[str, Any]:
    return {
        "budget_bytes": point.budget_bytes,
        "predicted": asdict(point.predicted),
        "seconds_over_fp32": _ratio(point.predicted, found),
        "formats": list(point.plan.formats_used()),
        "gap": point.plan.gap,
        "binding": point.plan.binding,
        "fingerprint": point.plan.fingerprint,
    }


def tradeoffs_tables(found: Tradeoffs) -> Iterator[RenderableType]:
    """One row per point, and FP32 below."""
    table = Table(title="What a budget costs: one training step, predicted", title_justify="left")
    table.add_column("budget", justify="right")
    for name in ("peak", "step time", "/ fp32", "kept for backward", "loss noise σ", "gradient noise / spread"):
        table.add_column(name, justify="right")
    table.add_column("formats", overflow="fold")
    table.add_column("")
    for i, p in enumerate(found.points):
        budget = "none" if p.budget_bytes is None else bytes_text(p.budget_bytes)
        mark = {"budget": "← the budget", "knee": "← the knee"}.get(found.why, "") if i == found.chosen else ""
        table.add_row(budget, *_figures(p.predicted, found), ", ".join(p.plan.formats_used()), mark)
    table.add_section()
    table.add_row("as written", *_figures(found.fp32, found), "fp32", "")
    yield table
    told = f"{found.budgets} budgets planned for, {len(found.points)} plans that no other one beats"
    least = bytes_text(found.smallest_peak_bytes)
    yield Text(f"{told}; the smallest feasible budget is {found.smallest_peak_bytes} bytes ({least})")


def _figures(totals: Totals, found: Tradeoffs) -> tuple[str, ...]:
    return (
        bytes_text(totals.peak_bytes),
        seconds_text(totals.seconds).lstrip("+"),
        f"{ratio:.2f}" if (ratio := _ratio(totals, found)) is not None else "",
        bytes_text(totals.saved_bytes),
        f"{totals.loss_sigma:.2g}",
        f"{totals.gradient_ratio:.2g}",
    )


def _ratio(totals: Totals, found: Tradeoffs) -> float | None:
    return totals.seconds / found.fp32.seconds if found.fp32.seconds > 0.0 else None
