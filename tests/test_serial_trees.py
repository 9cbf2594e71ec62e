"""YAML and JSON as trees: traps, positions, and the same meaning as other readers give."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import PolicyError
from autoprec.serial import trees
from autoprec.serial.trees import Source, dump_yaml, parse_json, parse_yaml

SOURCE = Source("f", PolicyError)

TRAPS = [
    ("a: 1\nb: 2\na: 3\n", "3:1", "'a' is there twice (first in line 1)"),
    ("a: {b: 1, b: 2}\n", "1:11", "'b' is there twice"),
    ("a: &x 1\n", "1:4", "the anchor &x is not allowed"),
    ("- a\n- *x\n", "2:3", "the alias *x is not allowed"),
    ("a: !!str 1\n", "1:4", "the tag 'tag:yaml.org,2002:str' is not allowed"),
    ("a:\n  - !x 1\n", "2:5", "the tag '!x' is not allowed"),
    ("a: ! 1\n", "1:4", "the tag '!' is not allowed"),
    ("a:\n  <<: {b: 1}\n", "2:3", "merge keys"),
    ("%YAML 1.1\n---\na: 1\n", "1:1", "directives"),
    ("a: 1\n---\nb: 1\n", "2:1", "second document"),
    ("1: a\n", "1:1", "a key must be text, not 1"),
    ("a: {null: b}\n", "1:5", "a key must be text, not nothing"),
    ("true: b\n", "1:1", "a key must be text, not true"),
    ("? [a]\n: b\n", "1:3", "a key must be text, not a list"),
    ("a:\n\tb: 1\n", "2:1", "indent with spaces, not tabs"),
    ("a: [1\n", "2:1", "is not YAML"),
    ("a: b: c\n", "1:5", "is not YAML: mapping values"),
    ("a: x\0y\n", "1:5", "U+0000"),
    ("ü: 1\nö: \x1b\n", "2:4", "U+001B"),
    ("[" * 41 + "]" * 41, "1:41", "nested deeper than 40"),
    ("[" * 60000, "1:41", "nested deeper than 40"),
    ("- " * 20000, "1:81", "nested deeper than 40"),
]


@pytest.mark.parametrize(("text", "place", "words"), TRAPS, ids=range(len(TRAPS)))
@pytest.mark.parametrize("loader", [trees._LOADER, yaml.SafeLoader], ids=["c", "python"])
def test_yaml_traps_are_closed(
    text: str, place: str, words: str, loader: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "_LOADER", loader)
    with pytest.raises(PolicyError) as caught:
        parse_yaml(text, SOURCE)
    assert str(caught.value).startswith(f"f:{place}: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(word, word) for word in ("no", "yes", "on", "off", "No", "True", "FALSE", "Null", "010", "0x10", "1_000")],
        *[(word, word) for word in ("1:30", "2024-01-01", "1e999", "1" * 101, "nan", "inf", "e3", "-", "0b1")],
        *[("true", True), ("false", False), ("null", None), ("~", None), ("", None)],
        *[("1e-3", 1e-3), ("1e6", 1e6), ("1.", 1.0), (".5", 0.5), ("-1.5E+3", -1500.0), (".inf", math.inf)],
        *[("0", 0), ("-12", -12), ("+5", 5), ("'1'", "1"), ('"true"', "true"), ("''", ""), ("'<<'", "<<")],
    ],
)
def test_scalars_mean_one_thing(text: str, expected: object) -> None:
    node = parse_yaml(f"[x, {text}]" if text else "- x\n-\n", SOURCE).plain[1]
    assert node == expected and type(node) is type(expected)


def test_nodes_and_keys_know_their_place() -> None:
    root = parse_yaml("# c\na:\n  - ü: [1,\n      2]\n  -\nb: {c: }\n", SOURCE)
    inner = root.value["a"].value[0]  # type: ignore[call-overload,index]
    assert (root.line, root.column) == (2, 1) and root.keys == {"a": (2, 1), "b": (6, 1)}
    assert (inner.line, inner.column) == (3, 5) and inner.keys == {"ü": (3, 5)}
    assert [(n.line, n.column) for n in inner.value["ü"].value] == [(3, 9), (4, 7)]
    assert root.plain == {"a": ({"ü": (1, 2)}, None), "b": {"c": None}}


JSON_TRAPS = [
    ('{"a": 1,\n "a": 2}', "2:2", "'a' is there twice (first in line 1)"),
    ('{"a": NaN}', "1:7", "expected a value, not 'NaN}'"),
    ('{"a": -Infinity}', "1:7", "expected a value"),
    ('{"a": 1e999}', "1:7", "beyond the largest number"),
    ('{"a": ' + "1" * 5000 + "}", "1:7", "more than 400 characters"),
    ('{"a": 1,}', "1:9", "a key in double quotes"),
    ("{'a': 1}", "1:2", "a key in double quotes"),
    ('{"a" 1}', "1:6", "expected : here"),
    ('{"a": [1 2]}', "1:10", "expected , or ] here"),
    ('{"a": 1} x', "1:10", "expected the end"),
    ('{"a": 01}', "1:8", "expected , or } here"),
    ('{"a": "x\ny"}', "1:9", "Invalid control character"),
    ('{"a": "x', "1:7", "Unterminated string"),
    ('{"a":', "1:6", "expected a value"),
    ("[" * 100000, "1:41", "nested deeper than 40"),
]


@pytest.mark.parametrize(("text", "place", "words"), JSON_TRAPS, ids=range(len(JSON_TRAPS)))
def test_json_traps_are_closed(text: str, place: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_json(text, SOURCE)
    assert str(caught.value).startswith(f"f:{place}: ") and words in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text() | st.sampled_from(["no", "1e3", "~", ""])
TREES = st.recursive(
    SCALARS | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


@given(TREES)
def test_dumped_yaml_reads_back(value: Any) -> None:
    read = parse_yaml(dump_yaml(value), SOURCE).plain
    assert repr(read) == repr(tuples(value))  # repr: 1 is not 1.0, 0.0 is not -0.0


@given(st.lists(SCALARS | st.dictionaries(st.text(max_size=40), SCALARS, max_size=3), max_size=5))
def test_dumped_yaml_means_the_same_to_pyyaml(value: Any) -> None:
    assert yaml.safe_load(dump_yaml(value)) == value


@given(TREES, st.integers(0, 200), st.sampled_from(["", ",", "}", '"', "\\", "\n", "\x01", "1", "-", "t", "]", ":"]))
def test_json_is_what_the_json_module_says(value: Any, at: int, junk: str) -> None:
    text = json.dumps(value, indent=at % 3 or None)
    for candidate in (text, text[:at] + junk + text[at + 1 :]):
        try:
            read = json.loads(candidate, object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
        except ValueError:
            with pytest.raises(PolicyError):
                parse_json(candidate, SOURCE)
        else:
            assert repr(parse_json(candidate, SOURCE).plain) == repr(tuples(read))


def finite(digits: str) -> float:
    """Ours refuses the json module's NaN and Infinity, and numbers that round to infinity."""
    if not math.isfinite(value := float(digits)):
        raise ValueError("not finite")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("twice")
    return dict(pairs)
