"""A run for whoever watches it: what its file of events says by now, as a value, as a table and as plain data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.errors import InputError
from autoprec.graphs import Role
from autoprec.planning.reasons import bytes_text
from autoprec.plans import Event
from autoprec.reporting.differences import NUMBER  # what layers of one kind differ in, there as here
from autoprec.reporting.plans import maker, storage_text
from autoprec.serial.codec import encode

__all__ = ["Figures", "WatchedOp", "WatchedRun", "figures_of", "follow", "run_data", "run_header", "run_view"]

#: What a tensor that is kept for backward has for a role in an "assigned" line.
_KEPT = "kept"

#: Events that a run keeps in mind; in a low terminal fewer are shown.
_MOST_RECENT, _FEW_RECENT = 10, 4

#: Rows of the table where no terminal says how many there is room for, and at least.
_MOST_ROWS, _LEAST_ROWS = 40, 3


# -- the value -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the window that ended at `step` saw of an op: of its result, or of the gradient that arrives there.

    Attributes:
        role: "output", or "grad_input" for the gradient.
        format: that it was held against.
        amax, largest: of the tensor, and of the format under its scale.
        overflow_frac, saturation_frac, underflow_frac: of the tensor's elements.
    """

    step: int
    role: str
    format: str
    amax: float
    largest: float
    overflow_frac: float
    saturation_frac: float
    underflow_frac: float

    @property
    def nearness(self) -> float:
        """How much of the format's range the tensor needs: 1 where its amax is the largest number."""
        return self.amax / self.largest if self.largest > 0.0 else math.inf

    @property
    def leaves(self) -> bool:
        """Whether elements are beyond the format's largest number, or about to be."""
        return self.overflow_frac > 0.0 or self.saturation_frac > 0.0


@dataclass(frozen=True, kw_only=True)
class WatchedOp:
    """An op, or a tensor that no op makes, since the newest plan.

    Attributes:
        formats: (role, format).
        kept: (tensor, storage) of what it makes and backward needs, where the plan decides that.
        figures: the newest of the format that it has; None where no window told any.
        promoted, demoted: how often.
        trigger: of the newest event about it, "" without one.
    """

    op: str
    formats: tuple[tuple[str, str], ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    figures: Figures | None = None
    promoted: int = 0
    demoted: int = 0
    trigger: str = ""

    @property
    def kept_as(self) -> str:
        """Its storages for people, "" if the plan decides none."""
        return ", ".join(dict.fromkeys(storage_text(storage) for _, storage in self.kept))


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """A run since its newest plan, or since the beginning of the file.

    Attributes:
        planned: the event of the newest plan, or of the failure to make one; None while there is none.
        steps: completed at the newest event.
        window_step: of the newest line about the whole run; None before the first, as while the run calibrates.
        skipped_steps: vetoed by the guard.
        predicted_peak_bytes, budget_bytes, loss_scale: None where the run has none.
        ops: in the order in which the plan names them.
        recent: the last events that are more than figures and formats, oldest first.
    """

    planned: Event | None = None
    steps: int = 0
    window_step: int | None = None
    skipped_steps: int = 0
    predicted_peak_bytes: int | None = None
    budget_bytes: int | None = None
    loss_scale: float | None = None
    ops: tuple[WatchedOp, ...] = ()
    recent: tuple[Event, ...] = ()

    @property
    def calibrating(self) -> bool:
        """Whether the file tells of no plan yet."""
        return self.planned is None and self.window_step is None


def follow(run: WatchedRun, events: Iterable[Event]) -> WatchedRun:
    """The run once these happened too. A new plan begins it anew.

    Raises `InputError` for an event whose figures are none; `at` says which of the events it is.
    """
    draft = _Draft(run)
    for i, event in enumerate(events):
        try:
            draft.add(event)
        except InputError as error:
            raise InputError(str(error), at=(i,)) from error
    return replace(draft.run, ops=tuple(draft.ops.values()), recent=tuple(draft.recent))


class _Draft:
    """A run with its many parts open: an op is found by its name, and not the whole copied for each event."""

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self.ops = {op.op: op for op in run.ops}
        self.recent = deque(run.recent, maxlen=_MOST_RECENT)

    def add(self, event: Event) -> None:
        if event.kind == "planned" and event.trigger != "asked":
            self.begin(event)
        if event.kind == "assigned":
            self.assign(event)
        elif event.kind == "observed":
            self.observe(event)
        elif event.kind == "window":
            self.tell(event)
        else:
            self.happen(event)
        if event.step != self.run.steps:
            self.run = replace(self.run, steps=event.step)

    def begin(self, event: Event) -> None:
        """Of what happened before, only what may be of the same run counts: warnings of its calibration."""
        while self.recent and any(e.step > event.step for e in self.recent):
            self.recent.popleft()
        self.ops, self.run = {}, WatchedRun()

    def assign(self, event: Event) -> None:
        if event.role == _KEPT:
            old = self.op(maker(event.op))
            new = replace(old, kept=_with(old.kept, event.op, event.now))
        else:
            old = self.op(event.op)
            new = replace(old, formats=_with(old.formats, event.role, event.now))
            new = replace(new, figures=_still_true(new))
        self.ops[new.op] = new

    def observe(self, event: Event) -> None:
        told = figures_of(event)
        if missing := [name for name in _OBSERVED if name not in told]:
            raise InputError(f"evidence: {', '.join(missing)} must be among an op's figures")
        seen = {name: told[name] for name in _OBSERVED}
        figures = Figures(step=event.step, role=event.role, format=event.now, **seen)
        self.ops[event.op] = replace(self.op(event.op), figures=figures)

    def tell(self, event: Event) -> None:
        told = figures_of(event)
        if wrong := [name for name, value in told.items() if not math.isfinite(value)]:
            raise InputError(f"evidence: {wrong[0]} must be finite")
        # A window in the middle of a bad step does not count that step yet.
        skipped = max(int(told.get("skipped_steps", 0)), self.run.skipped_steps)
        peak, budget = (_whole(told.get(name)) for name in ("predicted_peak_bytes", "budget_bytes"))
        self.run = replace(
            self.run,
            window_step=event.step,
            skipped_steps=skipped,
            predicted_peak_bytes=peak,
            budget_bytes=budget,
            loss_scale=told.get("loss_scale"),
        )

    def happen(self, event: Event) -> None:
        self.recent.append(event)
        if event.kind == "planned" or (event.kind, event.trigger) == ("warning", "no_plan"):
            self.run = replace(self.run, planned=event)
        elif event.kind == "bad_step":
            self.run = replace(self.run, skipped_steps=self.run.skipped_steps + 1)
        if event.op:
            old = self.op(event.op)
            self.ops[event.op] = replace(
                old,
                promoted=old.promoted + (event.kind == "promoted"),
                demoted=old.demoted + (event.kind == "demoted"),
                trigger=event.trigger or old.trigger,
            )

    def op(self, name: str) -> WatchedOp:
        return self.ops.get(name) or WatchedOp(op=name)


_OBSERVED = ("amax", "largest", "overflow_frac", "saturation_frac", "underflow_frac")


def figures_of(event: Event) -> dict[str, float]:
    """The numbers of an evidence that is nothing but numbers."""
    found = dict[str, float]()
    for part in event.evidence.split():
        name, _, value = part.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise InputError(f"evidence: {part[:60]!r} is no figure, as steps=12 is one") from None
    return found


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _still_true(op: WatchedOp) -> Figures | None:
    """Its figures, unless they are of a format that it no longer has there."""
    if op.figures is None:
        return None
    roles = (Role.OUTPUT,) if op.figures.role == Role.OUTPUT else (Role.GRAD_INPUT, Role.GRAD_WEIGHT)
    return op.figures if any((role, op.figures.format) in op.formats for role in roles) else None


def _with(pairs: tuple[tuple[str, str], ...], key: str, value: str) -> tuple[tuple[str, str], ...]:
    return tuple({**dict(pairs), key: value}.items())


def run_data(run: WatchedRun) -> dict[str, Any]:
    """All of it as plain data."""
    told = ("steps", "window_step", "skipped_steps", "predicted_peak_bytes", "budget_bytes", "loss_scale")
    return {
        "calibrating": run.calibrating,
        "planned": None if run.planned is None else encode(run.planned),
        **{name: getattr(run, name) for name in told},
        "ops": [asdict(op) | {"formats": dict(op.formats), "kept": dict(op.kept)} for op in run.ops],
        "recent": [encode(event) for event in run.recent],
    }


# -- for people ----------------------------------------------------------------------------------------------------


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
    fractions = {name: max(getattr(f, name) for f in newest) for name in _OBSERVED if name.endswith("_frac")}
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
