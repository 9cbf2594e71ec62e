"""The plans that could have been adopted, side by side: predicted, measured on a replayed step, and why not."""

from __future__ import annotations

from rich.table import Table

from autoprec.planning.reasons import bytes_text, seconds_text
from autoprec.plans import Contestant, Plan

__all__ = ["contestants_table"]

_COLUMNS = (
    "plan",
    "step, predicted",
    "measured",
    "/ fp32",
    "peak, predicted",
    "measured",
    "gradient noise, predicted",
    "measured",
    "loss change, measured",
    "verdict",
)


def contestants_table(plan: Plan) -> Table | None:
    """One row per contestant; None where none ran. Measured on one replayed step, without the optimizer."""
    if not plan.contestants:
        return None
    table = Table(title="Which plan was adopted, and why not the others", title_justify="left")
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i in (0, len(_COLUMNS) - 1) else "right", overflow="fold")
    for c in plan.contestants:
        table.add_row(*_cells(c))
    return table


def _cells(c: Contestant) -> tuple[str, ...]:
    own, name = c.measured, f"{c.name} ({', '.join(c.formats)})" if c.formats != (c.name,) else c.name
    step, peak, noise = c.predicted.seconds, c.predicted.peak_bytes, c.predicted.gradient_ratio
    predicted = seconds_text(step).lstrip("+"), bytes_text(peak), f"{noise:.2g}"
    verdict = "; ".join(v for v in ("adopted" if c.adopted else "", c.verdict) if v)
    if own is None or own.failure:
        return name, predicted[0], "", "", predicted[1], "", predicted[2], "", "", verdict
    return (
        name,
        predicted[0],
        seconds_text(own.seconds).lstrip("+"),
        f"{own.ratio:.2f}",
        predicted[1],
        bytes_text(own.peak_bytes),
        predicted[2],
        "" if own.gradient_ratio is None else f"{own.gradient_ratio:.2g}",
        "" if own.loss_change is None else f"{own.loss_change:+.2g}",
        verdict,
    )
