"""The log of a run: what happened, oldest first, in memory and in a JSON-lines file.

The file has more than the run keeps, for whoever watches: the formats of every role and kept tensor as plans change
them ("assigned"), figures of the ops that windows saw nearest to a limit ("observed"), and of the run ("window").
"""

from __future__ import annotations

import secrets
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.errors import InputError, StateError
from autoprec.graphs import Role
from autoprec.plans import AS_IS, KEPT, Event, Plan
from autoprec.serial import check_writable, event_from_json_line, event_to_json_line
from autoprec.serial.appending import append_line, mend
from autoprec.serial.events import EventsFile, run_of
from autoprec.serial.files import write_atomic

__all__ = ["EventLog"]


class EventLog:
    """Mutable; owned by the session.

    A file that cannot be written costs the run nothing: what is not in it yet is written with the next event that can
    be, and that is told once, as a warning of Python's.

    Attributes:
        events: oldest first.
        run: names the run in each line of the file, where other runs write, too; it goes on with the same name.
        written: lines of the run in the file.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises `InputError` where no file can be written."""
        self.events: list[Event] = []
        if path is not None:
            check_writable(path, InputError)
        # A program that changes its folder goes on with the file that it began.
        self._name, self._path = path, None if path is None else path.absolute()
        self.run, self.written = secrets.token_hex(4), 0
        self._unwritten: deque[Event] = deque()
        self._left: _Left | None = None
        self._is_told = False

    def add(self, step: int, kind: str, **fields: str) -> None:
        """Append an event. A promotion or demotion is written once the new plan is known (`settle`)."""
        event = Event(step=step, kind=kind, **fields)
        self.events.append(event)
        if kind not in _OF_PLANS:
            self._write(event)

    def begin_with(self, events: Iterable[Event], *, run: str, before: int, written: int) -> None:
        """Go on after these events of a run that had written so many lines. What the file has of the run beyond those
        was of steps that come again, and is taken away; what others wrote stays. `before`: lines that the file had
        before a run without a name ("", of a state by an older version)."""
        self.events, mine = list(events), self.run
        self._left = _Left(mine, run, before, written)
        self.run, self.written = run or mine, written
        self._unwritten.clear()  # of this session before it went on as that run
        self._flush()

    def told(self) -> tuple[Path, list[Event]]:
        """The file, and what the run has told for it. Raises `InputError` without one, and for a line that somebody
        else wrote into it."""
        if self._path is None or self._name is None:
            raise InputError("this run writes no file of events, events=None; give compile(…, events=path)")
        self._flush()
        file = EventsFile(self._path, list[Event], lambda known, new: [*known, *new])
        if not self._path.exists():  # it does not before the first event
            return self._name, [*self._unwritten]
        file.read()
        return self._name, [*file.of(self.run), *self._unwritten]

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
            old, new = _formats_of(event, before, plan)
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
            if self._left is not None:
                self._go_on(self._path, self._left)
            while self._unwritten:
                append_line(self._path, event_to_json_line(self._unwritten[0], self.run))
                self._unwritten.popleft()
                self.written += 1
        except (OSError, StateError) as error:
            self._tell(error.strerror or str(error) if isinstance(error, OSError) else str(error))

    def _go_on(self, path: Path, left: _Left) -> None:
        """Leave in the file what the run had told when its state was taken, and nothing behind it; what is missing
        there of its events, as in another file, is written again."""
        mend(path)
        *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
        runs = [run_of(line) for line in lines]
        own = [i for i, run in enumerate(runs) if run == left.run and (run or i >= left.before)]
        kept = own[: left.written]
        there = Counter(_event_text(lines[i]) for i in kept)
        missing = list[Event]()
        for event in self.events:
            text = event_to_json_line(event)
            if there[text] > 0:
                there[text] -= 1
            else:
                missing.append(event)
        if missing and not left.run:  # nobody knows whose lines these are
            own, kept, missing = [], [], self.events
        gone = {*own[len(kept) :], *(i for i, run in enumerate(runs) if run == left.mine)}
        named = set() if left.run else {*kept}
        if gone or named:
            texts = [_named(line, self.run) if i in named else line for i, line in enumerate(lines) if i not in gone]
            write_atomic(path, b"".join(line + b"\n" for line in texts), StateError)
        self._unwritten.extendleft(reversed(missing))
        self.written, self._left = len(kept), None

    def _tell(self, reason: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            f"{self._path}: {len(self._unwritten)} events of this run cannot be written: {reason}. The"
            " run goes on, they stay in memory and are written with the next event that can be: make room on the disk,"
            " or see to the permissions of the file and its folder",
            RuntimeWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Left:
    """Where a run was left: what it and this session are called, lines that the file had before it, and its own."""

    mine: str
    run: str
    before: int
    written: int


def _event_text(line: bytes) -> str:
    """The line without the name of its run."""
    try:
        return event_to_json_line(event_from_json_line(line.decode()))
    except (InputError, UnicodeDecodeError):
        return ""


def _named(line: bytes, run: str) -> bytes:
    """The line of a run that had no name."""
    return line[:-1] + f', "run": "{run}"}}'.encode() if line.endswith(b"}") else line


_OF_PLANS = ("promoted", "demoted")


def _formats_of(event: Event, before: Plan, after: Plan) -> tuple[str, str]:
    """What the op, or the tensor that is kept, had and has: of its roles, the first that lost the format that was taken
    or got the one that came back; else its result."""
    if event.role == KEPT:
        return before.storage_of.get(event.op, AS_IS), after.storage_of.get(event.op, AS_IS)
    found = [tuple(p.format_of.get((event.op, role), "fp32") for p in (before, after)) for role in Role]
    changed = [(a, b) for a, b in found if a != b and (a == event.was if event.kind == "promoted" else b == event.now)]
    return changed[0] if changed else (found[0][0], found[0][1])


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
    for tensor in dict.fromkeys((*before.storage_of, *after.storage_of)):
        old, new = (p.storage_of.get(tensor, AS_IS) for p in (before, after))
        if old != new and tensor not in known:
            changes.setdefault(f"kept {tensor}", f"kept {tensor} {old} → {new}")
    if not changes:
        return ""
    named = [*changes.values()][:_MOST_NAMED]
    rest = len(changes) - len(named)
    return f"{', '.join(named)}{f' and {rest} more' if rest else ''} changed with it"
