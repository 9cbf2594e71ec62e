"""A run for whoever watches it, as a table on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.graphs import Role
from autoprec.planning.reasons import bytes_text
from autoprec.plans import Event
from autoprec.reporting.differences import NUMBER  # what layers of one kind differ in, there as here
from autoprec.reporting.runs import Figures, WatchedOp, WatchedRun

__all__ = ["run_header", "run_view"]

#: Of the newest events, in a low terminal.
_FEW_RECENT = 4

#: Rows of the table where no terminal says how many there is room for, and at least.
_MOST_ROWS, _LEAST_ROWS = 40, 3


def run_view(run: WatchedRun, name: str, *, width: int, height: int | None = None, note: str = "") -> RenderableType:
    """The run, as wide as it may be and (in a terminal) not higher than it may be; `note` is about the file."""
    head = _lines(run_header(run, name, note))
    low = height is not None and height < _LOW
    recent = _recent(run.recent[-_FEW_RECENT:] if low else run.recent)
    room = _MOST_ROWS if height is None else max(_LEAST_ROWS, height - len(head) - len(recent) - _AROUND)
    parts: list[RenderableType] = [*head]
    if run.ops:
        parts += ["", *_table(run, width, room)]
    if recent:
        parts += ["", *recent]
    return Group(*parts)


#: A terminal of fewer lines is low.
_LOW = 30

#: Lines around the rows of the table: its names and their rule, what is left out, blank ones.
_AROUND = 8


def run_header(run: WatchedRun, name: str, note: str = "") -> dict[str, str]:
    """What is said of the run as a whole: name → value. `note` is about the file."""
    lines = {"run": f"{name} ({note})" if note else name, "plan": _plan(run)}
    if not run.calibrating or run.steps or run.skipped_steps:
        lines["steps"] = f"{run.steps} at the newest line of the file, {run.skipped_steps} skipped"
    if run.loss_scale is not None:
        lines["scale"] = f"{run.loss_scale:g}, of the loss"
    if run.predicted_peak_bytes is not None:
        lines["memory"] = _memory(run.predicted_peak_bytes, run.budget_bytes)
    return lines


def _plan(run: WatchedRun) -> str:
    if run.calibrating:
        return "none yet: the run calibrates, or has not begun"
    if run.planned is None:
        return "not told in this file: it was made before, or came from a plan file"
    what = f"of step {run.planned.step}: {run.planned.evidence}"
    told = any(op.formats for op in run.ops) or run.planned.kind != "planned"
    return what if told else f"{what} (its formats are not told in this file)"


def _memory(peak: int, budget: int | None) -> str:
    if not budget:
        return f"{bytes_text(peak)} predicted, no budget"
    return f"{bytes_text(peak)} predicted, {100 * peak / budget:.1f} % of the budget of {bytes_text(budget)}"


def _lines(named: dict[str, str]) -> list[Text]:
    return [_line(f"{name:8} {value}") for name, value in named.items()]


def _line(text: str, style: str = "") -> Text:
    """One line on the screen, whatever is in the text."""
    return Text(_clean(text), style=style, no_wrap=True, overflow="ellipsis")


def _clean(text: str) -> str:
    """Without breaks, and without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


_STYLES = {"bad_step": "red", "incident": "red", "warning": "yellow", "promoted": "yellow", "demoted": "green"}


def _recent(events: Sequence[Event]) -> list[Text]:
    if not events:
        return []
    steps, kinds = (
        max(len(text) for text in texts) for texts in zip(*((str(e.step), e.kind) for e in events), strict=True)
    )
    lines = [_line(f"{'step':>{steps}}  what happened last", "bold")]
    for e in events:
        about = " ".join(part for part in (e.op, " → ".join(filter(None, (e.was, e.now))), e.trigger) if part)
        told = ": ".join(part for part in (about, e.evidence.removeprefix(f"{e.op}: ")) if part)
        lines.append(_line(f"{e.step:>{max(steps, 4)}}  {e.kind:{kinds}}  {told}", _STYLES.get(e.kind, "")))
    return lines


# -- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One op, or several layers that say the same; `like` has the worst figures of their newest window."""

    label: str
    ops: int
    like: WatchedOp

    @property
    def stands_out(self) -> bool:
        seen = self.like.figures
        return bool(self.like.trigger) or (seen is not None and seen.leaves)

    @property
    def weight(self) -> tuple[float, ...]:
        """What there is to see in it, for the choice between rows."""
        seen, like = self.like.figures, self.like
        changes, narrow = like.promoted + like.demoted, any(f != "fp32" for _, f in like.formats) or bool(like.kept)
        if seen is None:
            return (changes, bool(like.trigger), 0.0, 0.0, 0.0, 0.0, narrow)
        fractions = (seen.overflow_frac, seen.saturation_frac, seen.underflow_frac)
        return (changes, bool(like.trigger), *fractions, seen.nearness, narrow)


def _rows(ops: Iterable[WatchedOp]) -> list[_Row]:
    """In the order of the ops. One that leaves its format shares no row with one that does not."""
    groups: dict[tuple[Any, ...], list[WatchedOp]] = {}
    for op in ops:
        leaves = op.figures is not None and op.figures.leaves
        said = (op.formats, op.kept_as, op.promoted, op.demoted, op.trigger, leaves)
        groups.setdefault((NUMBER.sub("*", op.op), *said), []).append(op)
    return [
        _Row(
            label=alike[0].op if len(alike) == 1 else pattern,
            ops=len(alike),
            like=replace(alike[0], figures=_worst([op.figures for op in alike if op.figures is not None])),
        )
        for (pattern, *_), alike in groups.items()
    ]


def _worst(seen: Sequence[Figures]) -> Figures | None:
    """Of the newest window among them: the nearest to its largest number, and the largest of each fraction."""
    if not seen:
        return None
    newest = [f for f in seen if f.step == max(g.step for g in seen)]
    fractions = {n.name: max(getattr(f, n.name) for f in newest) for n in fields(Figures) if n.name.endswith("_frac")}
    return replace(max(newest, key=lambda f: f.nearness), **fractions)


def _table(run: WatchedRun, width: int, most: int) -> list[RenderableType]:
    """The table, and lines that say what is not in it."""
    rows = _rows(run.ops)
    # The ones to look at are chosen, and stay where the plan has them: rows that change places cannot be read.
    chosen = set(sorted(range(len(rows)), key=lambda i: rows[i].weight, reverse=True)[:most])
    shown = [row for i, row in enumerate(rows) if i in chosen]
    columns, missing = _fitting(_columns(shown), width - _LEAST_LABEL)
    room = width - sum(c.width + _GAP for c in columns)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("op", no_wrap=True)
    for c in columns:
        table.add_column(c.name, justify="right" if c.right else "left", no_wrap=True)
    for i, row in enumerate(shown):
        label = Text(_shortened(_clean(row.label), room))
        table.add_row(label, *(Text(c.cells[i]) for c in columns), style="bold" if row.stands_out else "")
    notes = list[RenderableType]()
    if left := [row for i, row in enumerate(rows) if i not in chosen]:
        ops = sum(row.ops for row in left)
        notes.append(_line(f"and {len(left)} more rows ({ops} ops) with less to see; --json has them all", "italic"))
    if missing:
        names = ", ".join(c.name.replace("-\n", "").replace("\n", " ") for c in missing)
        notes.append(_line(f"no room for: {names}; a wider terminal has it", "italic"))
    return [table, *notes]


@dataclass(frozen=True, kw_only=True)
class _Column:
    """`rank`: columns with a higher one give way first where there is no room; 0 never does."""

    name: str
    cells: tuple[str, ...]
    rank: int = 0
    right: bool = False

    @property
    def width(self) -> int:
        return max(cell_len(text) for text in (*self.name.split("\n"), *self.cells))


#: Blanks between columns, and the fewest characters in which an op can be told from others.
_GAP, _LEAST_LABEL = 2, 24


def _columns(rows: Sequence[_Row]) -> list[_Column]:
    """All but the first, without those that have nothing to say."""
    formats = [dict(row.like.formats) for row in rows]

    def column(name: str, cells: Iterable[str], rank: int, *, right: bool = False) -> _Column:
        return _Column(name=name, cells=tuple(map(_clean, cells)), rank=rank, right=right)

    def figure(name: str, field: str, rank: int) -> _Column:
        seen = (row.like.figures for row in rows)
        return column(name, ("" if f is None else f"{getattr(f, field):.2g}" for f in seen), rank, right=True)

    def count(name: str, counts: Iterable[int], least: int, rank: int) -> _Column:
        return column(name, (str(n) if n >= least else "" for n in counts), rank, right=True)

    found = (
        count("ops", (row.ops for row in rows), 2, 1),
        column("output", (f.get(Role.OUTPUT, "") for f in formats), 0),
        column("grad\ninput", (f.get(Role.GRAD_INPUT, "") for f in formats), 3),
        column("grad\nweight", (f.get(Role.GRAD_WEIGHT, "") for f in formats), 4),
        column("kept", (row.like.kept_as for row in rows), 5),
        figure("over-\nflow", "overflow_frac", 6),
        figure("satu-\nration", "saturation_frac", 8),
        figure("under-\nflow", "underflow_frac", 7),
        column("amax of\nlargest", (_amax(row.like.figures) for row in rows), 10),
        count("seen at\nstep", (-1 if (f := row.like.figures) is None else f.step for row in rows), 0, 11),
        count("pro-\nmoted", (row.like.promoted for row in rows), 1, 2),
        count("de-\nmoted", (row.like.demoted for row in rows), 1, 9),
        column("newest\ntrigger", (row.like.trigger for row in rows), 2),
    )
    return [c for c in found if any(c.cells)]


def _amax(seen: Figures | None) -> str:
    if seen is None:
        return ""
    told = f"{seen.amax:.3g} of {seen.largest:.3g}".replace("e+0", "e").replace("e+", "e")
    return told if seen.role == Role.OUTPUT else f"{told}, grad"


def _fitting(columns: Sequence[_Column], width: int) -> tuple[list[_Column], list[_Column]]:
    """The columns that there is room for, and those that gave way."""
    shown, missing = list(columns), list[_Column]()
    while sum(c.width + _GAP for c in shown) > width and any(c.rank for c in shown):
        missing.append(max(shown, key=lambda c: c.rank))
        shown.remove(missing[-1])
    return shown, missing


def _shortened(label: str, room: int) -> str:
    """A long name keeps its beginning and more of its end, where ops differ."""
    if cell_len(label) <= room or room < 3:
        return label
    head = (room - 1) // 3
    return f"{label[:head]}…{label[head + 1 - room :]}"
