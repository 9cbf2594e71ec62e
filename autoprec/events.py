"""The log of a run: what happened, oldest first, in memory and in a JSON-lines file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autoprec.graphs import Role
from autoprec.plans import Event, Plan
from autoprec.serial import event_to_json_line

__all__ = ["EventLog"]


class EventLog:
    """Mutable; owned by the session.

    Attributes:
        events: oldest first.
    """

    def __init__(self, path: Path | None) -> None:
        self.events: list[Event] = []
        self._path = path

    def add(self, step: int, kind: str, **fields: str) -> None:
        """Append an event. A promotion is written once its new format is known (`settle`)."""
        event = Event(step=step, kind=kind, **fields)
        self.events.append(event)
        if kind != "promoted":
            self._write(event)

    def add_once(self, step: int, kind: str, **fields: str) -> None:
        """Append an event unless one that says the same was there before."""
        if all(replace(e, step=step) != Event(step=step, kind=kind, **fields) for e in self.events):
            self.add(step, kind, **fields)

    def settle(self, plan: Plan) -> None:
        """The promotions since the last plan get the formats that came out."""
        for i, event in enumerate(self.events):
            if event.kind == "promoted" and not event.now:
                now = plan.format_of.get((event.op, Role.OUTPUT), "fp32")
                self.events[i] = replace(event, now=now)
                self._write(self.events[i])

    def _write(self, event: Event) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(event_to_json_line(event) + "\n")
