"""Planning cases: one JSON file each, a line for each part of the problem."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from autoprec.errors import InputError
from autoprec.planning.cases import Case
from autoprec.serial.codec import decode, encode, take_envelope
from autoprec.serial.files import PathLike, read_tree, write_text
from autoprec.serial.trees import Plain, Source

__all__ = ["check_case_path", "finite", "read_case", "write_case"]

VERSION = 1
CASE_LIMIT = 64 << 20


def read_case(path: PathLike) -> Case:
    """The case in a file; `InputError` with the place of what is wrong."""
    source = Source(os.fspath(path), InputError)
    root = read_tree(source, CASE_LIMIT)
    take_envelope(root, "case", VERSION, source)
    return decode(root, Case, source, infinite="inf")


def check_case_path(path: PathLike) -> None:
    """Cases are JSON, and a file's name says so."""
    if not os.fspath(path).lower().endswith(".json"):
        raise InputError(f"{os.fspath(path)}: a case is JSON; name a file that ends in .json")


def write_case(path: PathLike, case: Case) -> None:
    """Write a case as JSON; energies without bound, which JSON has no number for, as "inf"."""
    check_case_path(path)
    fields = encode(case)
    problem = fields.pop("problem")
    head = [f"{_line(k)}: {_line(v)}" for k, v in {"autoprec": "case", "version": VERSION, **fields}.items()]
    parts = [f"  {_line(k)}: {_lines(v)}" for k, v in problem.items()]
    text = "{\n " + ",\n ".join([*head, '"problem": {\n' + ",\n".join(parts) + "\n }"]) + "\n}\n"
    write_text(path, text, InputError)


def _lines(value: Plain) -> str:
    """A list with one line for each item."""
    if not isinstance(value, list) or not value:
        return _line(value)
    return "[\n   " + ",\n   ".join(map(_line, value)) + "\n  ]"


def _line(value: Plain) -> str:
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False)


def finite(value: Plain) -> Any:
    """Plain data in which what is infinite is text."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return "inf" if isinstance(value, float) and value == math.inf else value
