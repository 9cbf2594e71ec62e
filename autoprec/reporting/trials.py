"""Faults that were put into runs, and what the runs made of them: tables for people, data for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["Trial", "trial_tables", "trials_data"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault in one run.

    Attributes:
        kind: of fault.
        by: "injected", or what it was made through: "data", "weights", "learning rate", "loss".
        run: which model, formats and optimizer.
        op: where it was, "" where that is not at one op.
        format: what the op computed in.
        step: in which it began.
        bad_steps: steps in which an independent look found a gradient or buffer that was not finite.
        skipped_steps: steps that the guard vetoed.
        noticed: "step" (the bad step was vetoed and told), "window" (told within a window), or "".
        wanted: whether it had to be noticed: it made a step bad, or its format lost what it was to hold.
        named: the op that was named first.
        trigger, evidence: with which it was told.
        right: whether that was the right one; None where there is nothing to name.
        changed: parameters, buffers and optimizer state that a bad step changed.
    """

    kind: str
    by: str
    run: str
    op: str
    format: str
    step: int
    bad_steps: int
    skipped_steps: int
    noticed: str
    wanted: bool
    named: str
    trigger: str
    evidence: str
    right: bool | None
    changed: tuple[str, ...]

    @property
    def missed(self) -> bool:
        """Whether it had to be noticed and was not, or a bad step was not vetoed."""
        return (self.wanted and not self.noticed) or self.bad_steps != self.skipped_steps


def trials_data(trials: Sequence[Trial]) -> dict[str, Any]:
    """All of them, and the sums."""
    named = [t for t in trials if t.right is not None]
    right = sum(bool(t.right) for t in named)
    return {
        "faults": len(trials),
        "not_injected": sum(t.by != "injected" for t in trials),
        "bad_steps": sum(t.bad_steps for t in trials),
        "changed": sum(len(t.changed) for t in trials),
        "missed": sum(t.missed for t in trials),
        "named": len(named),
        "right": right,
        "right_frac": right / len(named) if named else None,
        "trials": [asdict(t) for t in trials],
    }


def trial_tables(trials: Sequence[Trial]) -> list[RenderableType]:
    """A row for each kind of fault, and one for all; below, what was missed or named wrongly."""
    table = Table(title="Faults, and what became of them", title_justify="left")
    table.add_column("fault")
    table.add_column("made by")
    for name in ("faults", "bad steps", "noticed in the step", "within a window", "harmless", "missed"):
        table.add_column(name, justify="right")
    table.add_column("named right", justify="right")
    table.add_column("changed by a bad step", justify="right")
    for kind, by in dict.fromkeys((t.kind, t.by) for t in trials):
        table.add_row(kind, by, *_counts([t for t in trials if (t.kind, t.by) == (kind, by)]))
    table.add_section()
    table.add_row("all", "", *_counts(trials))
    return [table, *_wrong(trials)]


def _counts(trials: Sequence[Trial]) -> list[str]:
    def count(is_so: Callable[[Trial], bool]) -> str:
        return str(sum(map(is_so, trials)))

    named = [t for t in trials if t.right is not None]
    return [
        str(len(trials)),
        str(sum(t.bad_steps for t in trials)),
        count(lambda t: t.noticed == "step"),
        count(lambda t: t.noticed == "window"),
        count(lambda t: not t.noticed and not t.missed),
        count(lambda t: t.missed),
        f"{sum(bool(t.right) for t in named)} of {len(named)}" if named else "",
        str(sum(len(t.changed) for t in trials)),
    ]


#: Lines about single trials; programs get all.
_MOST_LINES = 20


def _wrong(trials: Iterable[Trial]) -> list[RenderableType]:
    lines = []
    for t in trials:
        what = f"{t.run}, step {t.step}: {t.kind} ({t.by}) at {t.op or 'no op'} in {t.format or 'no format'}"
        if t.changed:
            lines.append(f"{what}: changed {', '.join(t.changed[:3])}")
        if t.missed:
            lines.append(f"{what}: not noticed ({t.bad_steps} bad steps, {t.skipped_steps} vetoed)")
        elif t.right is False:
            lines.append(f"{what}: named {t.named or 'nothing'} ({t.trigger})")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more; --json has them all"]
    return [Text("\n".join(lines))] if lines else []
