"""Small tables whose sum is the objective of a `Problem`: what they hold, and what an assignment makes of them.

A table belongs to a unit, a tensor or a GEMM and has an entry for each combination of the values of the variables that
it reads. Tables that read the same pattern are a `Group`: arrays [tables, entries], priced and read in one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Copies", "Entries", "Group", "Held", "Noise", "Pattern", "Span", "summed"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pattern:
    """What tables of a group have in common: the domains of their variables, and what reads which of them."""

    kind: str
    domains: tuple[tuple[int, ...], ...]
    reads: tuple[Any, ...]


class Entries:
    """The entries of a pattern: for each variable, its format in each entry."""

    def __init__(self, pattern: Pattern) -> None:
        sizes = [len(d) for d in pattern.domains]
        self.shape = tuple(sizes)
        self.count = int(np.prod(sizes, dtype=np.int64))
        digits = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), np.int64)
        self.digits = digits
        self.columns = [np.array(d, np.int64)[k] for d, k in zip(pattern.domains, digits, strict=True)]

    def format(self, place: int) -> _Ints:
        """[entries] format of an axis, or the constant −1 − place."""
        return self.columns[place] if place >= 0 else np.full(self.count, -1 - place)


@dataclass(frozen=True)
class Held:
    """Bytes that each entry holds from one phase to another, both included: [tables, entries], [tables], [tables]."""

    sizes: _Floats
    first: _Ints
    last: _Ints


@dataclass(frozen=True)
class Noise:
    """What entries add to a row or to a place where variance enters: numbers [tables], amounts [tables, entries]."""

    place: _Ints
    amount: _Floats


@dataclass(frozen=True)
class Span:
    """One use of a tensor. The copy in a format is held from the first begin to the last end of the uses with it that
    share a `copy`; entries in which it counts have a format ≥ 0: [entries], [tables], [tables]."""

    copy: int
    formats: _Ints
    begin: _Ints
    end: _Ints


@dataclass(frozen=True)
class Copies:
    """The copies of tensors and of their gradients: which entries hold them, and when.

    Attributes:
        spans: uses; those with the same `copy` and the same format share one copy.
        sizes: by copy and format, bytes of each table's copy [tables].
    """

    spans: tuple[Span, ...]
    sizes: dict[tuple[int, int], _Floats]

    def at(self, phase: int, entries: int) -> tuple[_Ints, _Floats]:
        """Tables that may hold something in a phase, and what each of their entries holds."""
        n = len(self.spans)
        begun, last = np.array([s.begin <= phase for s in self.spans]), np.array([phase <= s.end for s in self.spans])
        rows = np.flatnonzero(begun.any(axis=0) & last.any(axis=0))
        found = np.zeros((len(rows), entries))
        if not len(rows):
            return rows, found
        patterns, which = np.unique(np.concatenate([begun, last])[:, rows], axis=1, return_inverse=True)
        for k in range(patterns.shape[1]):
            mine = which.reshape(-1) == k
            for (copy, f), size in self.sizes.items():
                there = np.zeros((2, entries), np.bool_)
                for span, *on in zip(self.spans, patterns[:n, k], patterns[n:, k], strict=True):
                    if span.copy == copy and any(on):
                        there[on] |= span.formats == f
                if (both := there.all(axis=0)).any():
                    found[mine] += size[rows[mine], None] * both
        return rows, found

    @cached_property
    def _having(self) -> list[tuple[_Floats, list[tuple[_Bools, _Ints, _Ints]]]]:
        """By copy and format: its sizes, and (entries with the format, begin, end) of the uses that may have it."""
        found = []
        for (copy, f), size in self.sizes.items():
            uses = [(s.formats == f, s.begin, s.end) for s in self.spans if s.copy == copy]
            if uses := [use for use in uses if use[0].any()]:
                found.append((size, uses))
        return found

    def held(self, entry: _Ints) -> Iterator[tuple[_Floats, _Ints, _Ints]]:
        """(bytes, first, last) of the copies that each table's entry holds."""
        for size, uses in self._having:
            mine = uses[0][0][entry]
            begin, end = np.where(mine, uses[0][1], np.iinfo(np.int64).max), np.where(mine, uses[0][2], -1)
            for there, first, last in uses[1:]:
                mine = there[entry]
                np.minimum(begin, first, out=begin, where=mine)
                np.maximum(end, last, out=end, where=mine)
            held = end >= begin
            yield size[held], begin[held], end[held]


@dataclass(frozen=True)
class Group:
    """Tables of one pattern: `scopes` [tables, axes] are variables, `shape` their numbers of values, `start` the place
    of the first entry among all entries, and `base` [tables, entries] their part of the objective.

    `loss` is a share of the problem's `loss_scale`, `noise` goes to weight rows (share of the limit), `rounding` is
    relative gradient variance by the place where it enters.
    """

    scopes: _Ints
    shape: tuple[int, ...]
    start: int
    base: _Floats
    loss: _Floats | None = None
    noise: Noise | None = None
    rounding: Noise | None = None
    held: tuple[Held, ...] = ()
    copies: Copies | None = None
    _rows: _Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", np.arange(len(self.scopes)))

    @property
    def end(self) -> int:
        """One behind the last entry."""
        return self.start + self.base.size

    def entry(self, values: _Ints) -> _Ints:
        """The entry of each table under values of the variables."""
        found = np.zeros(len(self.scopes), np.int64)
        for axis, size in enumerate(self.shape):
            found = found * size + values[self.scopes[:, axis]]
        return found

    def at(self, phase: int) -> Iterator[tuple[_Ints, _Floats]]:
        """(tables, bytes [tables, entries]) that may be held in a phase."""
        for held in self.held:
            rows = np.flatnonzero((held.first <= phase) & (phase <= held.last))
            if len(rows):
                yield rows, held.sizes[rows]
        if self.copies is not None:
            rows, sizes = self.copies.at(phase, self.base.shape[1])
            if len(rows):
                yield rows, sizes

    def spans(self, entry: _Ints) -> Iterator[tuple[_Floats, _Ints, _Ints]]:
        """(bytes, first, last) of everything that the entries hold."""
        for held in self.held:
            yield held.sizes[self._rows, entry], held.first, held.last
        if self.copies is not None:
            yield from self.copies.held(entry)


def summed(there: Sequence[npt.NDArray[np.bool_]], amounts: _Floats) -> _Floats:
    """Σ over formats that are there, of amounts [formats, tables]: [tables, entries]."""
    total = np.zeros((amounts.shape[1], len(there[0])))
    for amount, mine in zip(amounts, there, strict=True):  # no matrix product: its sums depend on threads
        total += amount[:, None] * mine
    return total
