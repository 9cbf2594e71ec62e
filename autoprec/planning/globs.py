"""Whether a glob can match what other globs do not: decided, not guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["uncovered"]

#: States that are looked at before it is called undecided.
_MOST_STATES = 5_000


def uncovered(pattern: str, others: Sequence[str]) -> str | None:
    """The shortest name (or one of them) that `pattern` matches and none of `others` does; None if there is none.

    All as in `fnmatch.fnmatchcase`. Globs are automata with one state per token, so this walks through the names that
    `pattern` matches, state by state, and through the states that the others can be in meanwhile. After 5,000 states
    it gives up and answers "", which is no proof of anything.
    """
    if not any(c in pattern for c in "*?["):
        return None if any(fnmatchcase(pattern, other) for other in others) else pattern
    mine, theirs = _tokens(pattern), [_tokens(other) for other in others]
    letters = _letters(pattern, *others)
    end = len(mine)
    start = (_closed(mine, {0}), tuple(_closed(t, {0}) for t in theirs))
    names = {start: ""}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        here, there = state
        if end in here and not any(len(t) in s for t, s in zip(theirs, there, strict=True)):
            return names[state]
        for letter in letters:
            after = _read(mine, here, letter)
            if not after:
                continue
            following = (after, tuple(_read(t, s, letter) for t, s in zip(theirs, there, strict=True)))
            if following not in names:
                if len(names) >= _MOST_STATES:
                    return ""
                names[following] = names[state] + letter
                queue.append(following)
    return None


def _tokens(pattern: str) -> list[str]:
    """Its parts that match one character each, and stars; read as fnmatch reads them."""
    found: list[str] = []
    i = 0
    while i < len(pattern):
        end = i + 1
        if pattern[i] == "[":
            close = i + 1 + (pattern[i + 1 : i + 2] == "!")
            close = pattern.find("]", close + (pattern[close : close + 1] == "]"))
            end = close + 1 if close >= 0 else end
        if not (pattern[i] == "*" and found and found[-1] == "*"):
            found.append(pattern[i:end])
        i = end
    return found


def _letters(*patterns: str) -> list[str]:
    """One character of every set of characters that no pattern tells apart: each set begins at a character of a pattern
    or right behind one. A letter first where there is one, for people."""
    points = {0, ord("x")} | {ord(c) + step for p in patterns for c in p for step in (0, 1)}
    return sorted((chr(p) for p in points if p <= 0x10FFFF), key=lambda c: (not c.isalnum(), c != "x", c))


def _closed(tokens: list[str], states: set[int]) -> frozenset[int]:
    """With what is reached by a star that matches nothing."""
    return frozenset(states | {s + 1 for s in states if s < len(tokens) and tokens[s] == "*"})


def _read(tokens: list[str], states: frozenset[int], letter: str) -> frozenset[int]:
    """States after one more character."""
    after = set()
    for s in states:
        if s < len(tokens) and tokens[s] == "*":
            after.add(s)
        elif s < len(tokens) and _matches(tokens[s], letter):
            after.add(s + 1)
    return _closed(tokens, after)


def _matches(token: str, letter: str) -> bool:
    return fnmatchcase(letter, token) if token[0] in "[?" and token != "[" else token == letter
