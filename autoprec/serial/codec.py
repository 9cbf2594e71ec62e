"""Frozen dataclasses to plain data and back, strictly: no unknown key, no missing key, no conversion."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar

from autoprec.checks import described
from autoprec.errors import InputError, nearest
from autoprec.serial.trees import Node, Plain, Source

__all__ = ["Problem", "decode", "encode", "refused", "take_envelope"]

T = TypeVar("T")

#: Problems that one error tells; the rest are counted.
MAX_PROBLEMS = 10

#: Names that are compared with the valid ones; thousands would take a while, and few are told.
MAX_HINTS = 100


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is wrong with the value (or key) at a place."""

    line: int
    column: int
    key: str
    what: str


def refused(problems: Iterable[Problem], source: Source) -> InputError:
    """One error for all of them in the order of the file, one a line."""
    ordered = sorted(problems)
    lines = [
        f"{source.path}:{p.line}:{p.column}: {f'{p.key}: ' if p.key else ''}{p.what}" for p in ordered[:MAX_PROBLEMS]
    ]
    if len(ordered) > MAX_PROBLEMS:
        lines.append(f"{source.path}: and {len(ordered) - MAX_PROBLEMS} more")
    return source.error("\n".join(lines))


def encode(value: Any) -> Plain:
    """Plain data of a dataclass; fields that are None or () by default, and by value the same, are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {f: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {f.name: encode(v) for f, v in items.items() if not (_is_nothing(v) and v == f.default)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):  # numpy's too
        return int(value)
    if isinstance(value, Real) and not math.isnan(value):
        return float(value)
    raise InputError(f"{described(value)} is not a value that can be stored")


def _is_nothing(value: Any) -> bool:
    return value is None or isinstance(value, tuple) and not value


def take_envelope(root: Node, name: str, version: int, source: Source) -> None:
    """Take `autoprec: <name>` and `version: <version>` out of a mapping, or say where they are not."""
    if not isinstance(root.value, dict):
        raise source.refused_at(root.line, root.column, f"a {name} must be a mapping, not {described(root.value)}")
    for key, wanted in (("autoprec", name), ("version", version)):
        node = root.value.pop(key, Node(None, root.line, root.column))
        found = node.value
        if type(found) is type(wanted) and found == wanted:
            continue
        what = "a file without that key" if found is None else described(found)
        if key == "version" and type(found) is int and found > version:
            what += "; it was written by a newer autoprec: upgrade"
        raise source.refused_at(node.line, node.column, f"expected `{key}: {wanted}`, not {what}")


def decode(node: Node, kind: type[T], source: Source, *, infinite: str | None = None) -> T:
    """The dataclass `kind` from a tree; one error with every problem. `infinite`: the text for that number."""
    reading = _Reading(infinite)
    value = reading.dataclass(node, kind, "")
    if reading.problems:
        raise refused(reading.problems, source)
    return typing.cast(T, value)


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type, and whether it must be there, of each field."""
    hints = typing.get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.default is dataclasses.MISSING) for f in dataclasses.fields(kind))


class _Reading:
    """One decoding: collects problems; a value with a problem becomes None, and nothing is built from it."""

    def __init__(self, infinite: str | None) -> None:
        self.problems: list[Problem] = []
        self.infinite = infinite

    def problem(self, node: Node, key: str, what: str) -> None:
        self.problems.append(Problem(node.line, node.column, key, what))

    def value(self, node: Node, kind: Any, key: str) -> Any:
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            (kind,) = (k for k in typing.get_args(kind) if k is not type(None))
            return None if node.value is None else self.value(node, kind, key)
        if typing.get_origin(kind) is tuple:
            return self.items(node, typing.get_args(kind), key)
        if typing.get_origin(kind) is typing.Literal:
            return self.choice(node, {name: name for name in typing.get_args(kind)}, key)
        if dataclasses.is_dataclass(kind):
            return self.dataclass(node, kind, key)
        if issubclass(kind, Enum):
            return self.choice(node, {str(member.value): member for member in kind}, key)
        return self.scalar(node, kind, key)

    def items(self, node: Node, kinds: tuple[Any, ...], key: str) -> tuple[Any, ...]:
        """Any number of one kind (`tuple[X, ...]`), or one of each (`tuple[X, Y]`)."""
        if not isinstance(node.value, list):
            self.problem(node, key, f"must be a list, not {described(node.value)}")
            return ()
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(node.value)
        elif len(node.value) != len(kinds):
            self.problem(node, key, f"must be a list of {len(kinds)}, not of {len(node.value)}")
            return ()
        return tuple(
            self.value(item, kind, f"{key}[{i}]") for i, (item, kind) in enumerate(zip(node.value, kinds, strict=True))
        )

    def dataclass(self, node: Node, kind: Any, key: str) -> Any:
        if not isinstance(node.value, dict):
            self.problem(node, key, f"must be a mapping, not {described(node.value)}")
            return None
        before, prefix = len(self.problems), f"{key}." if key else ""
        fields = _fields(kind)
        names = [name for name, _, _ in fields]
        for name in node.value:
            if name not in names:
                hint = nearest(name[:60], names) if len(self.problems) < MAX_HINTS else ""
                what = f"unknown key {name[:60]!r}.{hint}"
                self.problems.append(Problem(*node.keys[name], f"{prefix}{name[:60]}", what))
        for name, _, needed in fields:
            if needed and name not in node.value:
                self.problem(node, key, f"the key {name!r} is missing")
        given = {n: self.value(node.value[n], hint, f"{prefix}{n}") for n, hint, _ in fields if n in node.value}
        if len(self.problems) > before:
            return None
        try:
            return kind(**given)
        except InputError as error:
            self.at(node, error.at, key, str(error))
            return None

    def at(self, node: Node, path: tuple[str | int, ...], key: str, what: str) -> None:
        """A problem with a part of the value of a node."""
        for part in path:
            if isinstance(part, int) and isinstance(node.value, list):
                node, key = node.value[part], f"{key}[{part}]"
            elif isinstance(part, str) and isinstance(node.value, dict) and part in node.value:
                node, key = node.value[part], f"{key}.{part}".removeprefix(".")
        self.problem(node, key, what)

    def choice(self, node: Node, choices: dict[str, Any], key: str) -> Any:
        if isinstance(node.value, str) and node.value in choices:
            return choices[node.value]
        hint = nearest(node.value, choices) if isinstance(node.value, str) else f" Valid: {', '.join(choices)}."
        self.problem(node, key, f"{described(node.value)} is not valid.{hint}")
        return None

    def scalar(self, node: Node, kind: type, key: str) -> Any:
        value = node.value
        if kind is float and type(value) is int and abs(value) < 2**1023:
            value = float(value)
        if kind is float and value is not None and value == self.infinite:
            value = math.inf
        if type(value) is not kind:
            words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
            self.problem(node, key, f"must be {words}, not {described(node.value)}")
        elif isinstance(value, float) and math.isnan(value):
            self.problem(node, key, "must be a number, not nan")
        return value
