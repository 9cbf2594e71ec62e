"""Whether a glob is covered by others, held against fnmatch on every short name."""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoprec.planning.globs import uncovered

NAMES = ["".join(n) for size in range(6) for n in itertools.product("ab.", repeat=size)]
PARTS = st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]", "[a-b]", "[", "]", "**", "[]a]", "[!]", "[!.]"])
GLOBS = st.lists(PARTS, max_size=5).map("".join)


@given(GLOBS, st.lists(GLOBS, max_size=3))
@example("a[ab]", ["aa", "a[!a]"])
@example("*", ["?*", ""])
@example("", [])
@example("[!a]", ["b", "."])
def test_a_witness_is_one_and_a_proof_holds_for_every_short_name(pattern: str, others: list[str]) -> None:
    found = uncovered(pattern, others)
    if found is None:
        for name in NAMES:
            assert not fnmatchcase(name, pattern) or any(fnmatchcase(name, other) for other in others), name
    else:
        assert fnmatchcase(found, pattern) and not any(fnmatchcase(found, other) for other in others)


@pytest.mark.parametrize(
    ("pattern", "others"),
    [
        ("*norm*", ["*"]),
        ("blocks.3.*", ["blocks.*"]),
        ("blocks.3.attn", ["blocks.?.*"]),
        ("lm_head", ["lm_head"]),
        ("*lm_head", ["*head"]),
        ("blocks.*.mlp.*", ["blocks.*mlp*"]),
        ("layer.[0-3]", ["layer.[0-1]", "layer.[2-9]"]),
        ("*", ["", "?*"]),
        ("[!x]", ["[!xy]", "y"]),
    ],
)
def test_covered(pattern: str, others: list[str]) -> None:
    assert uncovered(pattern, others) is None
    for k in range(len(others)):
        if len(others) > 1:  # each is needed
            assert uncovered(pattern, others[:k] + others[k + 1 :]) is not None


@pytest.mark.parametrize(
    ("pattern", "others"),
    [
        ("blocks.*", ["blocks.3.*"]),
        ("*", ["?*"]),
        ("*a*", ["*a", "a*"]),
        ("[0-9]", ["[0-8]"]),
        ("[0-9]", ["0", "9"]),
        ("a", []),
    ],
)
def test_not_covered(pattern: str, others: list[str]) -> None:
    assert uncovered(pattern, others) is not None


def test_what_would_take_too_long_is_not_called_proven() -> None:
    hard = "*" + "?*a" * 18
    answer = uncovered(hard, ["*a" + "?" * k + "b*" for k in range(12)])
    assert answer is not None
