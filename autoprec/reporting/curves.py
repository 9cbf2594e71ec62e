"""A run's events as curves over its steps, for programs that draw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autoprec.graphs import Role
from autoprec.plans import Event
from autoprec.reporting.runs import figures_of

__all__ = ["Curves", "Point", "is_told"]

#: Lines of the file that are no events to people.
_FIGURES = ("assigned", "observed", "window")


class Point(NamedTuple):
    """One value of a curve."""

    name: str
    step: int
    value: float


class Curves:
    """Follows a run. Mutable.

    Curves: "run/…", the figures of the run as a whole; "formats/…", how many ops give their result in a format;
    "amax of largest/…", "overflow_frac/…", "saturation_frac/…", "underflow_frac/…" of an op in its format, in the
    windows that saw it near a limit; "events/…", how often a kind of event has happened.
    """

    def __init__(self) -> None:
        self._formats: dict[str, str] = {}
        self._named: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def after(self, events: Iterable[Event]) -> Iterator[Point]:
        """What these add, in their order. Formats are told when all lines of a change were read.

        Raises `InputError` for an event whose figures are none.
        """
        changed: int | None = None
        for event in events:
            if event.kind == "assigned":
                if event.role == Role.OUTPUT:
                    self._formats[event.op] = event.now
                    changed = event.step
                continue
            if changed is not None:
                yield from self._told(changed)
                changed = None
            yield from self._of(event)
        if changed is not None:
            yield from self._told(changed)

    def _told(self, step: int) -> Iterator[Point]:
        now = Counter(self._formats.values())
        self._named |= dict.fromkeys(now, step)
        yield from (Point(f"formats/{name}", step, float(now[name])) for name in self._named)

    def _of(self, event: Event) -> Iterator[Point]:
        if event.kind == "window":
            found = figures_of(event)
            yield from (Point(f"run/{name}", event.step, value) for name, value in found.items() if name != "steps")
        elif event.kind == "observed":
            found = figures_of(event)
            amax, largest = found.pop("amax", 0.0), found.pop("largest", 0.0)
            if largest > 0.0:
                yield Point(f"amax of largest/{event.op}", event.step, amax / largest)
            yield from (Point(f"{name}/{event.op}", event.step, value) for name, value in found.items())
        else:
            if event.is_first_plan:  # of another run, or the first of this one
                self._formats.clear()
            self._counts[event.kind] += 1
            yield Point(f"events/{event.kind}", event.step, float(self._counts[event.kind]))


def is_told(event: Event) -> bool:
    """Whether an event is a sentence for people, and no figure."""
    return event.kind not in _FIGURES
