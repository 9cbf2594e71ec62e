"""Files: bounded reading, and writing that either happens wholly or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from autoprec.errors import InputError
from autoprec.serial.trees import Node, Source, parse_json, parse_yaml

__all__ = ["check_apart", "check_writable", "read_bytes", "read_tree", "write_atomic", "write_text"]

PathLike = str | os.PathLike[str]


def read_bytes(source: Source, limit: int) -> bytes:
    """What a regular file of at most `limit` bytes holds."""
    try:
        mode = os.stat(source.path).st_mode
        if stat.S_ISDIR(mode):
            raise source.refused("is a directory; name a file in it")
        if not stat.S_ISREG(mode):
            raise source.refused("is not a regular file (a pipe or a device); save it to a file first")
        with open(source.path, "rb") as file:
            data = file.read(limit + 1)
            size = max(len(data), os.fstat(file.fileno()).st_size)
    except FileNotFoundError as error:
        raise source.refused("does not exist; check the path") from error
    except PermissionError as error:
        raise source.refused("cannot be read; check its permissions") from error
    except (OSError, ValueError) as error:
        raise source.refused(f"cannot be read: {_reason(error)}") from error
    if len(data) > limit:
        raise source.refused(f"has {size} bytes; at most {limit} are read. Is this the right file?")
    return data


def read_tree(source: Source, limit: int) -> Node:
    """The tree of a JSON file (by its suffix) or a YAML file."""
    data = read_bytes(source, limit)
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode()) + 1
        raise source.refused_at(
            before.count(b"\n") + 1, column, f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error
    return (parse_json if source.path.lower().endswith(".json") else parse_yaml)(text, source)


def check_writable(path: PathLike, error: type[InputError]) -> None:
    """Raise `error` where nothing can be written, before the work whose result is to be written there."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise error(f"{path}: its directory does not exist; create it first")
    _check_regular(path, error)
    if not os.access(folder, os.W_OK):
        raise error(f"{path}: cannot be written: its directory is read-only")


def _check_regular(path: PathLike, error: type[InputError]) -> None:
    """Raise `error` where something else than a file is there, which a file must not take the place of."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # nothing is there
    if stat.S_ISDIR(mode):
        raise error(f"{path}: is a directory; name a file in it")
    if not stat.S_ISREG(mode):
        raise error(f"{path}: is not a regular file (a pipe or a device); name a file to write to")


def check_apart(outputs: Mapping[str, PathLike | None], inputs: Mapping[str, PathLike | None]) -> None:
    """Raise `InputError` where two outputs are one file, or one is an input. By what each is, for people."""
    seen = {os.path.realpath(path): what for what, path in inputs.items() if path is not None}
    for what, path in outputs.items():
        if path is None:
            continue
        if (other := seen.setdefault(os.path.realpath(path), what)) is not what:
            raise InputError(f"{path}: {what} would overwrite {other}; name another file")


def write_atomic(path: PathLike, data: bytes, error: type[InputError]) -> None:
    """Replace the file, or leave it and the directory as they were and raise `error`."""
    _check_regular(path, error)
    try:
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".autoprec-{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileNotFoundError as reason:
        raise error(f"{path}: its directory does not exist; create it first") from reason
    except (OSError, ValueError) as reason:
        raise error(f"{path}: cannot be written: {_reason(reason)}") from reason
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as reason:
        temporary.unlink(missing_ok=True)
        if isinstance(reason, OSError):
            raise error(f"{path}: cannot be written: {_reason(reason)}") from reason
        raise


def write_text(path: PathLike, text: str, error: type[InputError]) -> None:
    """Write a text as UTF-8, wholly or not at all."""
    write_atomic(path, text.encode(), error)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
