"""Strict YAML and JSON: text to a tree of values that know their line and column, and back to YAML text.

YAML is read as its 1.2 core schema with the ambiguous parts closed: only `true` and `false` are booleans, `1e-3` is a
number, `no`, `010` and `1_000` are text; duplicate keys, aliases, anchors, tags, merge keys, directives and a second
document are refused. JSON is RFC 8259 without duplicate keys; NaN and Infinity are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import yaml

from autoprec.checks import described
from autoprec.errors import InputError

__all__ = ["MAX_DEPTH", "Node", "Plain", "Source", "dump_yaml", "parse_json", "parse_yaml"]

#: Deepest nesting of lists and mappings.
MAX_DEPTH = 40

#: Shared by all nodes that are not mappings, because there are many.
NO_KEYS: dict[str, tuple[int, int]] = {}

Scalar = str | int | float | bool | None
Plain = Any  # nested dicts with str keys, lists, tuples and scalars


@dataclass(slots=True)
class Node:
    """A value, where it starts (1-based), and for a mapping where each key starts."""

    value: Scalar | list[Node] | dict[str, Node]
    line: int
    column: int
    keys: dict[str, tuple[int, int]] = field(default_factory=lambda: NO_KEYS)

    @property
    def plain(self) -> Plain:
        """The value alone; lists as tuples."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        return tuple(node.plain for node in self.value) if isinstance(self.value, list) else self.value


@dataclass(frozen=True, slots=True)
class Source:
    """What is being read, for people, and the error that problems with it are."""

    path: str
    error: type[InputError]

    def refused(self, message: str) -> InputError:
        """A problem with the whole."""
        return self.error(f"{self.path}: {message}")

    def refused_at(self, line: int, column: int, message: str) -> InputError:
        """A problem at a place."""
        return self.error(f"{self.path}:{line}:{column}: {message}")


def _place(text: str, index: int) -> tuple[int, int]:
    """Line and column, 1-based, of a character."""
    before = text[:index]
    return before.count("\n") + 1, index - before.rfind("\n")


# -- YAML ----------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,99})")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    ".inf": math.inf,
    "-.inf": -math.inf,
    ".nan": math.nan,
}
_OTHERS_READ_AS_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_UNREADABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")
_DIRECTIVE = re.compile("^%", re.MULTILINE)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _scalar(text: str) -> Scalar:
    """What an unquoted scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= 400 and not re.fullmatch("[-+]?[0-9]+", text) and _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


def parse_yaml(text: str, source: Source) -> Node:
    """The one document of a YAML text."""
    found = _UNREADABLE.search(text)
    if found:
        raise source.refused_at(
            *_place(text, found.start()),
            f"the character U+{ord(found[0]):04X} is not allowed; is this a binary file? Save it as plain UTF-8 text",
        )
    found = _DIRECTIVE.search(text)
    if found:
        raise source.refused_at(
            *_place(text, found.start()), "directives are not allowed; remove this line (or indent it if it is text)"
        )
    try:
        root = _tree(yaml.parse(text, Loader=_LOADER), source)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(text, error, source) from error
    except yaml.YAMLError as error:
        raise source.refused(f"is not YAML: {error}") from error
    if root is None:
        raise source.refused("is empty; it must hold a mapping")
    return root


def _syntax_error(text: str, error: yaml.MarkedYAMLError, source: Source) -> InputError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    lines = text.splitlines()
    here = lines[line - 1] if line <= len(lines) else ""
    hint = "; indent with spaces, not tabs" if "\t" in here else ""
    context = f"{error.context}: " if error.context else ""
    return source.refused_at(line, column, f"is not YAML: {context}{error.problem}{hint}")


def _tree(events: Iterator[Any], source: Source) -> Node | None:
    """The root of the only document; nothing recursive, so depth costs nothing before it is refused."""
    root: Node | None = None
    open_nodes: list[Node] = []
    pending: list[tuple[str, int, int] | None] = []  # of each open mapping: the key that waits for its value

    for event in events:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.DocumentStartEvent):
            if root is not None:
                raise source.refused_at(line, column, "a second document starts here; keep one per file")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            open_nodes.pop()
            pending.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        _refuse_features(event, source, line, column)
        node = Node(_value_of(event), line, column)
        if not open_nodes:
            root = node
        elif isinstance(parent := open_nodes[-1].value, list):
            parent.append(node)
        elif (key := pending[-1]) is None:
            pending[-1] = _key(event, node, open_nodes[-1], source)
        else:
            assert isinstance(parent, dict)
            parent[key[0]], open_nodes[-1].keys[key[0]] = node, key[1:]
            pending[-1] = None
        if isinstance(event, yaml.CollectionStartEvent):
            node.keys = {}
            if len(open_nodes) >= MAX_DEPTH:
                raise source.refused_at(line, column, f"nested deeper than {MAX_DEPTH} levels")
            open_nodes.append(node)
            pending.append(None)
    return root


def _refuse_features(event: Any, source: Source, line: int, column: int) -> None:
    if event.anchor:
        what = "alias *" if isinstance(event, yaml.AliasEvent) else "anchor &"
        raise source.refused_at(line, column, f"the {what}{event.anchor[:60]} is not allowed; write the value out")
    if event.tag is not None:
        raise source.refused_at(line, column, f"the tag {event.tag[:60]!r} is not allowed; remove it (quote text)")


def _value_of(event: Any) -> Any:
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event.value) if event.implicit[0] else event.value
    return [] if isinstance(event, yaml.SequenceStartEvent) else {}


def _key(event: Any, node: Node, mapping: Node, source: Source) -> tuple[str, int, int]:
    if node.value == "<<" and event.implicit[0]:
        raise source.refused_at(node.line, node.column, "merge keys (<<) are not allowed; write the keys out")
    if not isinstance(node.value, str):
        raise source.refused_at(node.line, node.column, f"a key must be text, not {described(node.value)}; quote it")
    if node.value in mapping.keys:
        raise _twice(node.value, mapping, node.line, node.column, source)
    return node.value, node.line, node.column


def _twice(key: str, mapping: Node, line: int, column: int, source: Source) -> InputError:
    first = mapping.keys[key][0]
    return source.refused_at(line, column, f"the key {key[:60]!r} is there twice (first in line {first}); keep one")


def dump_yaml(value: Plain, inline: Collection[str] = ()) -> str:
    """YAML text in block style that `parse_yaml` reads back as the same values; the same text every time.

    `inline`: keys of lists whose items take one line each.
    """
    document = [yaml.DocumentStartEvent(explicit=False), *_events(value, inline), yaml.DocumentEndEvent(explicit=False)]
    stream = [yaml.StreamStartEvent(), *document, yaml.StreamEndEvent()]
    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.emit(stream, Dumper=dumper, allow_unicode=True, width=1 << 30)
    return text


def _events(
    value: Plain, inline: Collection[str], flow: bool = False, flow_items: bool = False
) -> Iterator[yaml.Event]:
    if isinstance(value, dict):
        yield yaml.MappingStartEvent(anchor=None, tag=None, implicit=True, flow_style=flow or not value)
        for key, item in value.items():
            yield from _events(str(key), inline)
            yield from _events(item, inline, flow, key in inline)
        yield yaml.MappingEndEvent()
    elif isinstance(value, (list, tuple)):
        yield yaml.SequenceStartEvent(anchor=None, tag=None, implicit=True, flow_style=flow or not value)
        for item in value:
            yield from _events(item, inline, flow or flow_items)
        yield yaml.SequenceEndEvent()
    else:
        text, style = _scalar_text(value)
        yield yaml.ScalarEvent(anchor=None, tag=None, implicit=(style is None, True), value=text, style=style)


def _scalar_text(value: Scalar) -> tuple[str, str | None]:
    """The text, and its quotes if without them it would mean something else."""
    if isinstance(value, str):
        ours = isinstance(_scalar(value), str) and value.isprintable()
        quoted = not ours or value[0] in "%<=.+-0123456789" or value.lower() in _OTHERS_READ_AS_WORDS
        return value, '"' if quoted else None
    if value is None:
        return "null", None
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan"), None
    return str(value).lower() if isinstance(value, bool) else repr(value), None


# -- JSON ----------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS: dict[str, Scalar] = {"true": True, "false": False, "null": None}
_LITERAL = re.compile("true|false|null")


def parse_json(text: str, source: Source) -> Node:
    """The value of a JSON text."""
    if not text.strip():
        raise source.refused("is empty; it must hold a mapping")
    return _JsonReader(text, source).document()


class _JsonReader:
    """Recursive descent, no deeper than `MAX_DEPTH`."""

    def __init__(self, text: str, source: Source) -> None:
        self.text = text
        self.source = source
        self.at = 0
        self.line = 1
        self.line_start = 0

    def document(self) -> Node:
        node = self.value(0)
        self.space()
        if self.at < len(self.text):
            raise self.refused("expected the end of the file")
        return node

    def refused(self, message: str) -> InputError:
        return self.source.refused_at(*self.place(), f"is not JSON: {message}")

    def space(self) -> None:
        end = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        breaks = self.text.count("\n", self.at, end)
        if breaks:
            self.line += breaks
            self.line_start = self.text.rfind("\n", self.at, end) + 1
        self.at = end

    def place(self) -> tuple[int, int]:
        return self.line, self.at - self.line_start + 1

    def take(self, character: str) -> bool:
        self.space()
        found = self.text.startswith(character, self.at)
        self.at += found
        return found

    def value(self, depth: int) -> Node:
        self.space()
        node = Node(None, *self.place())
        character = self.text[self.at : self.at + 1]
        if character in "[{" and character:
            if depth >= MAX_DEPTH:
                raise self.refused(f"nested deeper than {MAX_DEPTH} levels")
            self.at += 1
            node.value = self.items(depth) if character == "[" else self.members(node, depth)
        elif character == '"':
            node.value = self.string()
        elif literal := _LITERAL.match(self.text, self.at):
            self.at = literal.end()
            node.value = _LITERALS[literal[0]]
        else:
            node.value = self.number()
        return node

    def items(self, depth: int) -> list[Node]:
        found: list[Node] = []
        if self.take("]"):
            return found
        while True:
            found.append(self.value(depth + 1))
            if self.take("]"):
                return found
            if not self.take(","):
                raise self.refused("expected , or ] here")

    def members(self, mapping: Node, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        mapping.keys = {}
        if self.take("}"):
            return found
        while True:
            self.space()
            place = self.place()
            if not self.text.startswith('"', self.at):
                raise self.refused("expected a key in double quotes")
            key = self.string()
            if key in found:
                raise _twice(key, mapping, *place, self.source)
            if not self.take(":"):
                raise self.refused("expected : here")
            mapping.keys[key] = place
            found[key] = self.value(depth + 1)
            if self.take("}"):
                return found
            if not self.take(","):
                raise self.refused("expected , or } here")

    def string(self) -> str:
        try:
            text, self.at = scanstring(self.text, self.at + 1, True)
        except JSONDecodeError as error:
            self.at = error.pos
            raise self.refused(error.msg) from error
        return str(text)

    def number(self) -> int | float:
        found = _NUMBER.match(self.text, self.at)
        if not found:
            word = self.text[self.at : self.at + 20].split()
            raise self.refused(f"expected a value, not {word[0]!r}" if word else "expected a value")
        if found.end() - found.start() > 400:
            raise self.refused("a number of more than 400 characters")
        if not found[1] and not found[2]:
            self.at = found.end()
            return int(found[0])
        number = float(found[0])
        if not math.isfinite(number):
            raise self.refused(f"{found[0]} is beyond the largest number")
        self.at = found.end()
        return number
