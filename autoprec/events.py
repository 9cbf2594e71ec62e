"""The log of a run: what happened, oldest first, in memory and in a JSON-lines file.

The file has more than the run keeps, for whoever watches: the formats of every role and kept tensor as plans change
them ("assigned"), figures of the ops that windows saw nearest to a limit ("observed"), and of the run ("window").
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from autoprec.errors import InputError, StateError
from autoprec.graphs import Role
from autoprec.plans import AS_IS, KEPT, Event, Plan
from autoprec.serial import check_writable, event_to_json_line, write_text
from autoprec.serial.appending import append_line
from autoprec.serial.events import EventsFile

__all__ = ["EventLog"]


class EventLog:
    """Mutable; owned by the session.

    A file that cannot be written costs the run nothing: what is not in it yet is written with the next event that can
    be, and that is told once, as a warning of Python's.

    Attributes:
        events: oldest first.
        before: lines that the file had when the run began.
        written: lines that the run has written since.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises `InputError` where no file can be written."""
        self.events: list[Event] = []
        self._path = path
        self._unwritten: deque[Event] = deque()
        self._is_told = False
        if path is not None:
            check_writable(path, InputError)
        self.before, self.written = 0 if path is None else len(_lines(path)), 0

    def add(self, step: int, kind: str, **fields: str) -> None:
        """Append an event. A promotion or demotion is written once the new plan is known (`settle`)."""
        event = Event(step=step, kind=kind, **fields)
        self.events.append(event)
        if kind not in _OF_PLANS:
            self._write(event)

    def begin_with(self, events: Iterable[Event], before: int, written: int) -> None:
        """Go on after these, which are among so many lines behind the first `before` of the file: what comes behind
        them there was of steps that come again. Of a file that has something else there nothing is taken away."""
        self.events, self.before, self.written = list(events), before, written
        if self._path is None:
            return
        own = [event_to_json_line(e) for e in self.events]
        lines = _lines(self._path)
        there = lines[before : before + written]
        rest = iter(there)
        if len(there) == written and all(line in rest for line in own):  # each, in this order
            kept = [*lines[:before], *there]
        else:
            self.before, self.written, kept = len(lines), len(own), [*lines, *own]
        write_text(self._path, "".join(f"{line}\n" for line in kept), StateError)

    def told(self) -> tuple[Path, list[Event]]:
        """The file, and what the run has written there. Raises `InputError` without one, and for a line that somebody
        else wrote into it."""
        if self._path is None:
            raise InputError("this run writes no file of events, events=None; give compile(…, events=path)")
        self._flush()
        file = EventsFile(self._path, list[Event], lambda known, new: [*known, *new])
        if self._path.exists():  # it does not before the first event
            file.read()
        return self._path, [*file.run[self.before :], *self._unwritten]

    def note(self, step: int, kind: str, **fields: str) -> None:
        """A line of the file alone."""
        self._write(Event(step=step, kind=kind, **fields))

    def assign(self, step: int, before: Plan | None, plan: Plan) -> None:
        """A line of the file for each role, and each tensor that is kept ("kept"), whose format a plan changes; of the
        first plan, for all roles."""
        was = {} if before is None else decisions(before)
        for (of, what), new in decisions(plan).items():
            old = was.get((of, what), _PLAIN[what == KEPT])
            if old != new or (before is None and what != KEPT):
                self.note(step, "assigned", op=of, role=what, was=old, now=new)

    def add_once(self, step: int, kind: str, **fields: str) -> None:
        """Append an event unless one that says the same was there before."""
        if all(replace(e, step=step) != Event(step=step, kind=kind, **fields) for e in self.events):
            self.add(step, kind, **fields)

    def has(self, kind: str, *, op: str, trigger: str) -> bool:
        """Whether there was such an event."""
        return any((e.kind, e.op, e.trigger) == (kind, op, trigger) for e in self.events)

    def settle(self, before: Plan, plan: Plan) -> None:
        """The promotions and demotions since the last plan get the formats that came out, and name who else changed: a
        format that came back without being used is "released"."""
        open_ = [i for i, e in enumerate(self.events) if e.kind in _OF_PLANS and not (e.was and e.now)]
        paid = _moved(before, plan, {self.events[i].op for i in open_})
        for i in open_:
            event = self.events[i]
            old, new = (_format_in(p, event) for p in (before, plan))
            evidence = f"{event.evidence}; {paid}" if paid else event.evidence
            if event.kind == "promoted":
                self.events[i] = replace(event, now=new, evidence=evidence)
            elif new == event.now != old:
                self.events[i] = replace(event, was=old, evidence=evidence)
            else:
                evidence = f"it may have {event.now} again, and the plan has {new}: {evidence}"
                self.events[i] = replace(event, kind="released", was=old, now=new, evidence=evidence)
            self._write(self.events[i])

    def _write(self, event: Event) -> None:
        if self._path is not None:
            self._unwritten.append(event)
            self._flush()

    def _flush(self) -> None:
        """Write what is not in the file yet, as far as that goes."""
        if self._path is None:
            return
        try:
            while self._unwritten:
                append_line(self._path, event_to_json_line(self._unwritten[0]))
                self._unwritten.popleft()
                self.written += 1
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            f"{self._path}: {len(self._unwritten)} events of this run cannot be written: {error.strerror or error}. The"
            " run goes on, they stay in memory and are written with the next event that can be: make room on the disk,"
            " or see to the permissions of the file and its folder",
            RuntimeWarning,
            stacklevel=2,
        )


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.removesuffix("\n").split("\n") if text else []


_OF_PLANS = ("promoted", "demoted")


def _format_in(plan: Plan, event: Event) -> str:
    """Of the op, or of the tensor that is kept, that an event is about."""
    if event.role == KEPT:
        return plan.storage_of.get(event.op, AS_IS)
    return plan.format_of.get((event.op, Role.OUTPUT), "fp32")


#: What roles and kept tensors have without a plan.
_PLAIN = {False: "fp32", True: AS_IS}


def decisions(plan: Plan) -> dict[tuple[str, str], str]:
    """(op, role) → format, and (tensor, "kept") → storage."""
    kept = {(tensor, KEPT): storage for tensor, storage in plan.storage_of.items()}
    return {(op, str(role)): fmt for (op, role), fmt in plan.format_of.items()} | kept


#: Ops that an event names beside its own.
_MOST_NAMED = 3


def _moved(before: Plan, after: Plan, known: set[str]) -> str:
    """Who else has another format, for people; "" if nobody."""
    changes = dict[str, str]()
    for (op, role), new in after.format_of.items():
        old = before.format_of.get((op, role), "fp32")
        if old != new and op not in known:
            changes.setdefault(op, f"{op} {old} → {new}")
    if not changes:
        return ""
    named = [*changes.values()][:_MOST_NAMED]
    rest = len(changes) - len(named)
    return f"{', '.join(named)}{f' and {rest} more' if rest else ''} changed with it"
