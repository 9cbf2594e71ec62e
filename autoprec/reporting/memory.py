"""Where every byte of a step's peak is, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from autoprec.errors import PlanError
from autoprec.planning.reasons import bytes_text
from autoprec.plans import Holding, Plan
from autoprec.serial.codec import encode

__all__ = ["memory_data", "memory_tables"]


def memory_tables(plan: Plan) -> tuple[Table, Table]:
    """Bytes by kind, with the peaks that were measured, and by layer. `PlanError` if the plan does not say."""
    _check(plan)
    by_kind = _table("Where the bytes of a step are at its peak, predicted", "kind")
    for kind in dict.fromkeys(h.kind for h in plan.memory):
        by_kind.add_row(kind, *_texts(_sum(h for h in plan.memory if h.kind == kind)))
    by_kind.add_section()
    by_kind.add_row("peak, predicted", *_texts(_sum(plan.memory)))
    if any(told := _told(plan)):
        by_kind.add_row("peak of the compiled code, predicted", *_texts(told))
    if any(measured := _measured(plan)):
        by_kind.add_row("peak, measured", *_texts(measured))
    by_layer = _table("And by layer", "layer", "kind")
    for h in plan.memory:
        if h.layer:
            by_layer.add_row(h.layer, h.kind, *_texts((h.fp32, h.bf16, h.plan)))
    return by_kind, by_layer


def memory_data(plan: Plan) -> dict[str, Any]:
    """The same as plain data."""
    _check(plan)
    names = ("fp32", "bf16", "plan")
    return {
        "predicted": dict(zip(names, _sum(plan.memory), strict=True)),
        "predicted_compiled": dict(zip(names, _told(plan), strict=True)),
        "measured": dict(zip(names, _measured(plan), strict=True)),
        "holdings": [encode(h) for h in plan.memory],
    }


def _check(plan: Plan) -> None:
    if not plan.memory:
        raise PlanError("the plan does not say where its bytes are: make it again with `autoprec plan` or compile()")


def _table(title: str, *first: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name, overflow="fold")
    for name in ("fp32", "bf16", "this plan"):
        table.add_column(name, justify="right")
    return table


def _sum(held: Iterable[Holding]) -> tuple[int, int | None, int]:
    rows = list(held)
    narrow = [h.bf16 for h in rows if h.bf16 is not None]
    return sum(h.fp32 for h in rows), sum(narrow) if narrow else None, sum(h.plan for h in rows)


def _measured(plan: Plan) -> tuple[int | None, int | None, int | None]:
    """Peaks of the contestants on a replayed step."""
    ran = {c.name: c.measured.peak_bytes for c in plan.contestants if c.measured and not c.measured.failure}
    return ran.get("fp32"), ran.get("bf16"), None if plan.adopted is None else ran.get(plan.adopted.name)


def _told(plan: Plan) -> tuple[int | None, int | None, int | None]:
    """Peaks of a compiled step as its code tells them, where that is not what the bytes above add up to."""
    if plan.predicted is None or plan.predicted.peak_bytes == _sum(plan.memory)[2]:
        return None, None, None
    by_name = {c.name: c.predicted.peak_bytes for c in plan.contestants if c.measured and not c.measured.failure}
    return by_name.get("fp32"), by_name.get("bf16"), plan.predicted.peak_bytes


def _texts(sizes: Iterable[int | None]) -> list[str]:
    return ["" if n is None else bytes_text(n) if n else "0" for n in sizes]
