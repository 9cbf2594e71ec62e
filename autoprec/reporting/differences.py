"""What two plans do not agree on: decisions first, then what they were made from and what they promise."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.planning.reasons import bytes_text
from autoprec.plans import Plan, Totals
from autoprec.reporting.plans import TOTALS, decisions, storage_text

__all__ = ["NUMBER", "Change", "Differences", "RegionChange", "difference_tables", "differences", "differences_data"]

#: Rows of one table for people; programs get all.
_MOST_ROWS = 40

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One decision of two plans: `what` is a role or "kept", of an op or a tensor; "" where a plan decides nothing."""

    of: str
    what: str
    was: str
    now: str


@dataclass(frozen=True, kw_only=True)
class RegionChange:
    """An FP16 region (by its ops) of two plans: log2 of its gradient scale; None where a plan has no such region."""

    ops: tuple[str, ...]
    was: int | None
    now: int | None


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Everything that differs between two plans.

    Attributes:
        roles, storages, regions: decisions, in the order of the plans.
        stopped_saturating, saturating: tensors whose casts saturate in one plan only.
        only_before, only_after: ops that only one of the plans speaks of.
        headers: (name, was, now) of what the plans were made from and for, where that differs.
    """

    roles: tuple[Change, ...]
    storages: tuple[Change, ...]
    regions: tuple[RegionChange, ...]
    stopped_saturating: tuple[str, ...]
    saturating: tuple[str, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    headers: tuple[tuple[str, Any, Any], ...]

    @property
    def same_decisions(self) -> bool:
        """Whether both plans decide the same: formats, storages, regions, what saturates and what has a scale."""
        decided = (self.roles, self.storages, self.regions, self.stopped_saturating, self.saturating)
        return not any(decided) and all(name != "scales" for name, _, _ in self.headers)


_HEADERS = ("scales", "policy", "device", "graph_fingerprint", "budget_bytes", "gap", "binding")


def differences(before: Plan, after: Plan) -> Differences:
    """What `after` has otherwise than `before`."""
    roles = [
        Change(of=op, what=str(role), was=before.format_of.get((op, role), ""), now=after.format_of.get((op, role), ""))
        for op, role in _both(before.format_of, after.format_of)
    ]
    storages = [
        Change(of=t, what="kept", was=before.storage_of.get(t, ""), now=after.storage_of.get(t, ""))
        for t in _both(before.storage_of, after.storage_of)
    ]
    was, now = ({r.ops: r.scale_log2 for r in plan.regions} for plan in (before, after))
    regions = [RegionChange(ops=ops, was=was.get(ops), now=now.get(ops)) for ops in _both(was, now)]
    ops_before, ops_after = ({d.op for d in decisions(plan)} for plan in (before, after))
    return Differences(
        roles=tuple(c for c in roles if c.was != c.now),
        storages=tuple(c for c in storages if c.was != c.now),
        regions=tuple(r for r in regions if r.was != r.now),
        stopped_saturating=tuple(t for t in before.saturating if t not in set(after.saturating)),
        saturating=tuple(t for t in after.saturating if t not in set(before.saturating)),
        only_before=tuple(d.op for d in decisions(before) if d.op not in ops_after),
        only_after=tuple(d.op for d in decisions(after) if d.op not in ops_before),
        headers=tuple(
            (name, getattr(before, name), getattr(after, name))
            for name in _HEADERS
            if getattr(before, name) != getattr(after, name)
        ),
    )


def differences_data(found: Differences, before: Plan, after: Plan) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "same_decisions": found.same_decisions,
        **asdict(found),
        "headers": {name: {"was": was, "now": now} for name, was, now in found.headers},
        "predicted": {"was": _plain(before.predicted), "now": _plain(after.predicted)},
    }


def difference_tables(found: Differences, before: Plan, after: Plan) -> Iterator[RenderableType]:
    """For people: equal changes of layers whose names differ in a number share a row, long tables are cut."""
    if found.same_decisions:
        yield Text("The decisions are the same.")
    missing = {*found.only_before, *found.only_after}
    changes = [c for c in (*found.roles, *found.storages) if c.of not in missing]
    by_place: dict[str, list[str]] = {}
    for c in changes:
        by_place.setdefault(c.of, []).append(f"{c.what} {_shown(c.was)} → {_shown(c.now)}")
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for place, what in by_place.items():
        grouped.setdefault((NUMBER.sub("*", place), tuple(what)), []).append(place)
    rows = [
        (places[0] if len(places) == 1 else pattern, str(len(places)), ", ".join(what))
        for (pattern, what), places in grouped.items()
    ]
    yield from _table("Decisions that differ", ("op or tensor", "how many", "was → now"), rows)
    yield from _table("Ops in the first plan only", ("op", "how many"), _by_pattern(found.only_before))
    yield from _table("Ops in the second plan only", ("op", "how many"), _by_pattern(found.only_after))
    scales = [(_ends(r.ops), _scale(r.was), _scale(r.now)) for r in found.regions]
    yield from _table("FP16 regions", ("ops", "scale was", "scale now"), scales)
    saturating = [(t, "saturated", "") for t in found.stopped_saturating]
    saturating += [(t, "", "saturates") for t in found.saturating]
    yield from _table("Casts that saturate", ("tensor", "was", "now"), saturating)
    headers = [
        (name.removesuffix("_bytes"), _header(name, was), _header(name, now)) for name, was, now in found.headers
    ]
    yield from _table("Made from and for", ("", "was", "now"), headers)
    yield from _totals(before.predicted, after.predicted)


#: Numbers that are a whole part of a module's name, which layers of one kind differ in.
NUMBER = re.compile(r"(?<![^.])\d+(?=[.:])")


def _by_pattern(ops: Sequence[str]) -> list[tuple[str, str]]:
    found: dict[str, list[str]] = {}
    for op in ops:
        found.setdefault(NUMBER.sub("*", op), []).append(op)
    return [(names[0] if len(names) == 1 else pattern, str(len(names))) for pattern, names in found.items()]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    """Nothing without rows; a long table says how much it leaves out."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} more rows; --json has them all"
    yield table


def _totals(was: Totals | None, now: Totals | None) -> Iterator[Table]:
    """Predicted totals of both plans, if they carry any."""
    if was is None and now is None:
        return
    table = Table(title="One training step, predicted", title_justify="left")
    for name in ("", "was", "now", "now / was"):
        table.add_column(name, justify="left" if not name else "right")
    for label, field, text in TOTALS:
        old, new = (None if t is None else getattr(t, field) for t in (was, now))
        ratio = f"{new / old:.2f}" if old and new is not None else ""
        table.add_row(label, *("" if value is None else text(value) for value in (old, new)), ratio)
    yield table


def _both(before: dict[K, Any], after: dict[K, Any]) -> Iterator[K]:
    yield from dict.fromkeys((*before, *after))


def _shown(name: str) -> str:
    return storage_text(name) if name else "not decided"


def _scale(scale_log2: int | None) -> str:
    return "no such region" if scale_log2 is None else f"2^{scale_log2}"


def _ends(ops: tuple[str, ...]) -> str:
    return ", ".join(ops) if len(ops) <= 3 else f"{ops[0]} … {ops[-1]} ({len(ops)} ops)"


def _header(name: str, value: Any) -> str:
    if name == "budget_bytes":
        return "none" if value is None else f"{bytes_text(value)} ({value} bytes)"
    return f"{100 * value:.2g} %" if name == "gap" else str(value)


def _plain(totals: Totals | None) -> dict[str, Any] | None:
    return None if totals is None else asdict(totals)
