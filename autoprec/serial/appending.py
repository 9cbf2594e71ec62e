"""Lines of JSON at the end of a file that others append to as well."""

from __future__ import annotations

import json
import os

from autoprec.serial.files import PathLike

__all__ = ["append_line", "mend"]

#: No event has as many; what has is not a line that a run began.
_LONGEST_LINE_BYTES = 1 << 20

#: How every line of ours begins.
_BEGINNING = b'{"step": '


def append_line(path: PathLike, line: str) -> None:
    """Append a line, behind whole lines (`mend`), wholly or not at all. `OSError` where nothing can be written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _mend(descriptor)
        _append(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def mend(path: PathLike) -> None:
    """Complete the last line of a file if only its end is missing, and take it away if it is an event whose writing
    never finished: what is appended next would be glued to it. `OSError` where the file cannot be written; one that is
    not there needs nothing."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        _mend(descriptor)
    finally:
        os.close(descriptor)


def _append(descriptor: int, data: bytes) -> None:
    done = 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:  # of a disk that is full there may be half a line; behind it there is none of others, or it stays
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if done and os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - done)
        raise


def _mend(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    start = max(0, size - _LONGEST_LINE_BYTES)
    line = os.pread(descriptor, size - start, start).rpartition(b"\n")[2]
    # What does not begin as an event is something else of somebody else's, and only gets its end.
    begun = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
    if begun and not _is_json(line):
        os.ftruncate(descriptor, size - len(line))
    else:
        _append(descriptor, b"\n")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
