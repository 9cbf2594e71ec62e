"""`autoprec watch`: the file of a run that goes on, read as it grows, and a table of it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from json import JSONDecoder
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autoprec.cli.output import console, progress_console, show
from autoprec.errors import InputError
from autoprec.plans import Event
from autoprec.reporting.watching import WatchedRun, follow, run_data, run_view
from autoprec.serial import event_from_json_line

__all__ = ["EventsFile", "check_interval", "opened", "watch_run"]

#: What a run's file of events is called unless compile(…, events=) says otherwise.
EVENTS_NAME = "autoprec_events.jsonl"

SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 3600.0


def watch_run(run: Path, interval_seconds: float, *, once: bool, as_json: bool) -> int:
    """Show the run until Ctrl-C; or once, where that was asked for and where nobody looks."""
    check_interval(interval_seconds)
    file = opened(run, WatchedRun, follow)
    out = console()
    if once or as_json or not (out.file.isatty() and out.is_interactive):
        view = run_view(file.run, str(file.path), width=out.width)
        show({"run": str(file.path), **run_data(file.run)}, view, as_json=as_json)
    else:
        _watch(file, out, interval_seconds)
    return 0


def check_interval(seconds: float) -> None:
    """`InputError` where nobody could mean it."""
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        allowed = f"between {SHORTEST_SECONDS:g} and {LONGEST_SECONDS:g}"
        raise InputError(f"--interval must be {allowed} seconds, not {seconds:g}")


def opened(run: Path, nothing: Callable[[], T], fold: Callable[[T, Sequence[Event]], T]) -> EventsFile[T]:
    """The file of events of a run, or in its folder, read for the first time. `InputError` if there is none."""
    file = EventsFile(run / EVENTS_NAME if os.path.isdir(run) else run, nothing, fold)
    try:
        with progress_console().status(Text(f"reading {file.path}")):  # a str would be markup
            file.read()
    except FileNotFoundError:
        where = f"no {EVENTS_NAME} is in this folder" if file.path != run else "there is no such file"
        how = "a run writes it in the folder that it runs in, or where compile(…, events=) says, from its first plan on"
        raise InputError(f"{run}: {where}; {how}") from None
    return file


def _watch(file: EventsFile[WatchedRun], out: Console, interval_seconds: float) -> None:
    """Until Ctrl-C. What was seen last then stays in the terminal, which a screen of its own would take with it."""
    note = ""
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                view = run_view(file.run, str(file.path), width=out.width, height=out.height, note=note)
                live.update(view, refresh=True)
                time.sleep(interval_seconds)
                try:
                    file.read()
                    note = ""
                except FileNotFoundError:
                    note = "gone; waiting for a new one"
    except KeyboardInterrupt:
        out.print(run_view(file.run, str(file.path), width=out.width, height=out.height, note=note))
        raise


# -- reading -------------------------------------------------------------------------------------------------------

_CHUNK_BYTES = 1 << 20

#: No event has as many; what has is another kind of file.
_LONGEST_LINE_BYTES = 1 << 20


T = TypeVar("T")


class EventsFile(Generic[T]):
    """A file of events that is read as it grows: only what was appended, unless it is no longer the same file.

    Attributes:
        path: of the file.
        run: what it said when it was read last: `nothing()`, and then `fold(run, events)` for those that were read.
    """

    def __init__(self, path: Path, nothing: Callable[[], T], fold: Callable[[T, Sequence[Event]], T]) -> None:
        self.path, self._nothing, self._fold = path, nothing, fold
        self._begin()

    def _begin(self) -> None:
        self.run = self._nothing()
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
        events = [self._event(line, self._lines + i) for i, line in enumerate(lines, start=1)]
        try:
            self.run = self._fold(self.run, events)
        except InputError as error:
            raise InputError(f"{self.path}:{self._lines + 1 + int(error.at[0])}: {error}{_HINT}") from error
        if lines:
            self._last = lines[-1] + b"\n"
            self._lines += len(lines)
            self._bytes += sum(map(len, lines)) + len(lines)

    def _event(self, line: bytes, number: int) -> Event:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}:{number}: the byte 0x{line[error.start]:02x} is not UTF-8{_HINT}") from None
        if not text.strip():
            raise InputError(f"{self.path}:{number}: is empty{_HINT}")
        event = _quick_event(text)
        if event is None:
            try:
                event = event_from_json_line("\n" * (number - 1) + text, str(self.path))
            except InputError as error:
                raise InputError(f"{str(error).splitlines()[0]}{_HINT}") from error
        return _printable(event) if "\\ud" in text.lower() else event

    def _check_begun(self, line: bytes) -> None:
        """A line without its end waits for the rest, unless no rest can make an event of it."""
        if len(line) > _LONGEST_LINE_BYTES:
            raise InputError(f"{self.path}:{self._lines + 1}: has more than {_LONGEST_LINE_BYTES} bytes{_HINT}")
        if line and not line.startswith(b"{"):
            self._event(line, self._lines + 1)


_HINT = "; each line must be an event as a run writes them: is this its file of events?"

_FIELDS = frozenset(f.name for f in fields(Event))
_DECODER = JSONDecoder(object_pairs_hook=tuple)


def _quick_event(line: str) -> Event | None:
    """What `event_from_json_line` makes of it, in a tenth of the time; None for all that is not plainly an event."""
    try:
        pairs = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, tuple):
        return None
    found = dict(pairs)
    texts = [value for name, value in pairs if name != "step"]
    plain = type(found.get("step")) is int and all(type(text) is str for text in texts)
    known = len(found) == len(pairs) and "kind" in found and found.keys() <= _FIELDS
    return Event(**found) if plain and known else None


def _printable(event: Event) -> Event:
    """JSON can name half a character, which no output can."""
    texts = {name: value for name, value in vars(event).items() if isinstance(value, str)}
    return replace(event, **{name: text.encode(errors="replace").decode() for name, text in texts.items()})


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
