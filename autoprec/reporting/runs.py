"""A run since its newest plan, as its file of events tells it by now: a value, and plain data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoprec.errors import InputError
from autoprec.graphs import Role
from autoprec.plans import KEPT, Event
from autoprec.reporting.plans import maker, storage_text
from autoprec.serial.codec import encode

__all__ = ["Figures", "WatchedOp", "WatchedRun", "figures_of", "follow", "op_of", "run_data"]

#: Events that a run keeps in mind.
_MOST_RECENT = 10


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
        if event.is_first_plan:
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
        old = self.op(op_of(event))
        if event.role == KEPT:
            new = replace(old, kept=_with(old.kept, event.op, event.now))
        else:
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
            old = self.op(op_of(event))
            self.ops[old.op] = replace(
                old,
                promoted=old.promoted + (event.kind == "promoted"),
                demoted=old.demoted + (event.kind == "demoted"),
                trigger=event.trigger or old.trigger,
            )

    def op(self, name: str) -> WatchedOp:
        return self.ops.get(name) or WatchedOp(op=name)


_OBSERVED = ("amax", "largest", "overflow_frac", "saturation_frac", "underflow_frac")


def op_of(event: Event) -> str:
    """The op that an event is about; of how a tensor is kept, the op that makes it."""
    return maker(event.op) if event.role == KEPT else event.op


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
