"""A run's file of events, read as it grows: one event a line, as JSON."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from autoprec.errors import InputError
from autoprec.plans import MOST_STEPS, Event
from autoprec.serial.values import event_from_json_line

__all__ = ["EventsFile", "run_of"]

_CHUNK_BYTES = 1 << 20

#: No event has as many; what has is another kind of file.
_LONGEST_LINE_BYTES = 1 << 20


T = TypeVar("T")


class EventsFile(Generic[T]):
    """A file of events that is read as it grows: only what was appended, unless it is no longer the same file. Several
    runs may write to it, one after the other or in turn; each line names its run.

    Attributes:
        path: of the file.
        run: what it said of one run when it was read last: `nothing()`, and then `fold(run, events)` for those that
            were read. Of several runs it is the one that was planned last, or where none was, that of the last line.
    """

    def __init__(self, path: Path, nothing: Callable[[], T], fold: Callable[[T, Sequence[Event]], T]) -> None:
        self.path, self._nothing, self._fold = path, nothing, fold
        self._begin()

    def of(self, run: str) -> T:
        """What it said of the run with this name."""
        return self._runs.get(run, self._nothing())

    def _begin(self) -> None:
        self.run = self._nothing()
        self._runs = {"": self.run}
        self._shown, self._is_planned = "", False
        self._lines = self._bytes = 0
        self._last, self._identity = b"", (0, 0)

    def read(self) -> None:
        """Read on. `InputError` with the line for one that is no event, `FileNotFoundError` if there is no file."""
        with _opened(self.path) as file:
            if not self._goes_on(file):
                self._begin()
            self._identity = _identity(file)
            file.seek(self._bytes)
            begun = b""
            while chunk := file.read(_CHUNK_BYTES):
                *lines, begun = (begun + chunk).split(b"\n")
                self._take(lines)
                self._check_begun(begun)

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether what was read is still there: in the same file the same last line at the same place."""
        file.seek(self._bytes - len(self._last))
        return _identity(file) == self._identity and file.read(len(self._last)) == self._last

    def _take(self, lines: list[bytes]) -> None:
        named = [self._event(line, self._lines + i) for i, line in enumerate(lines, start=1)]
        places: dict[str, list[int]] = {}
        for i, (name, event) in enumerate(named):
            places.setdefault(name, []).append(i)
            if event.is_first_plan or not self._is_planned:
                self._shown, self._is_planned = name, event.is_first_plan
        for name, own in places.items():  # each at once: runs that write in turn are not folded line by line
            try:
                self._runs[name] = self._fold(self._runs.get(name, self._nothing()), [named[i][1] for i in own])
            except InputError as error:
                number = self._lines + 1 + own[int(error.at[0])]
                raise InputError(f"{self.path}:{number}: {error}{_HINT}") from error
        self.run = self._runs[self._shown]
        if lines:
            self._last = lines[-1] + b"\n"
            self._lines += len(lines)
            self._bytes += sum(map(len, lines)) + len(lines)

    def _event(self, line: bytes, number: int) -> tuple[str, Event]:
        """Whose event it is, and the event."""
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}:{number}: the byte 0x{line[error.start]:02x} is not UTF-8{_HINT}") from None
        if not text.strip():
            raise InputError(f"{self.path}:{number}: is empty{_HINT}")
        found = _quick_event(text)
        if found is None:
            try:
                found = run_of(line), event_from_json_line("\n" * (number - 1) + text, str(self.path))
            except InputError as error:
                raise InputError(f"{str(error).splitlines()[0]}{_HINT}") from error
        run, event = found
        return run, _printable(event) if "\\ud" in text.lower() else event

    def _check_begun(self, line: bytes) -> None:
        """A line without its end waits for the rest, unless no rest can make an event of it."""
        if len(line) > _LONGEST_LINE_BYTES:
            raise InputError(f"{self.path}:{self._lines + 1}: has more than {_LONGEST_LINE_BYTES} bytes{_HINT}")
        if line and not line.startswith(b"{"):
            self._event(line, self._lines + 1)


def run_of(line: bytes) -> str:
    """Whose line it is; "" where it says nothing of that, or is no event."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    run = found.get("run") if isinstance(found, dict) else None
    return run if isinstance(run, str) else ""


_HINT = "; each line must be an event as a run writes them: is this its file of events?"

_FIELDS = frozenset(f.name for f in fields(Event))
_DECODER = json.JSONDecoder(object_pairs_hook=tuple)


def _quick_event(line: str) -> tuple[str, Event] | None:
    """What `event_from_json_line` makes of it, in a tenth of the time; None for all that is not plainly an event."""
    try:
        pairs = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, tuple):
        return None
    found = dict(pairs)
    once = len(found) == len(pairs)
    texts = [value for name, value in pairs if name != "step"]
    run = found.pop("run", "")
    plain = (
        type(found.get("step")) is int and 0 <= found["step"] <= MOST_STEPS and all(type(text) is str for text in texts)
    )
    known = once and "kind" in found and found.keys() <= _FIELDS
    return (run, Event(**found)) if plain and known else None


def _printable(event: Event) -> Event:
    """JSON can name half a character, which no output can."""
    texts = {name: value for name, value in vars(event).items() if isinstance(value, str)}
    printable: dict[str, Any] = {name: text.encode(errors="replace").decode() for name, text in texts.items()}
    return replace(event, **printable)


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _opened(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            raise InputError(f"{path}: is not a regular file; name the file of events that a run writes")
        return path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from error
