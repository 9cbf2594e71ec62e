"""When the copies of tables of tensors are held: uses of the tensors and of their gradients, as `Span`s.

Where a tensor is described by several tables, each knows a few of its uses. What it says of casts is then what is sure:
those of the first use of all, whatever format that has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoprec.planning.tables import Span

__all__ = ["Read", "Sent", "added", "of_copies", "of_gradients"]

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class Read(NamedTuple):
    """A forward use, in a format [entries]; phases [tables] of its cast and of its end; whether it is one of a part,
    in the format of birth (-1 where it is not)."""

    format: _Ints
    cast: _Ints
    end: _Ints
    part: bool


class Sent(NamedTuple):
    """The gradient of a use, in a format [entries]; phases [tables] in which it is sent, and cast. Where the other term
    of a sum was born in another format, which is `other` [entries], it is sent in the phase `alone`."""

    format: _Ints
    sent: _Ints
    cast: _Ints
    other: _Ints
    alone: _Ints


def _new(formats: Sequence[_Ints], born: _Ints, k: int) -> _Bools:
    """Entries in which a use is the first to have a format that the tensor was not born in."""
    found: _Bools = np.not_equal(formats[k], born)
    for earlier in formats[:k]:
        found &= formats[k] != earlier
    return found


def of_copies(born: _Ints, birth: _Ints, first: _Ints, reads: Sequence[Read], whole: bool) -> Iterator[Span]:
    """Copies (number 0) of tensors, each in the format that it was born in until all casts are made."""
    yield Span(0, born, birth, first)
    own = [read for read in reads if not read.part]
    for read in reads:
        yield Span(0, read.format, read.cast, read.end)
        if read.part:
            yield Span(0, born, birth, read.cast)
    for k, read in enumerate(own if whole else ()):
        yield Span(0, np.where(_new([r.format for r in own], born, k), born, -1), birth, read.cast)


def of_gradients(
    copy: int, born: _Ints, birth: _Ints, first: _Ints, sent: Sequence[Sent], whole: bool
) -> Iterator[Span]:
    """Gradients, each in the format of the reader until it is cast, and in that of birth until that runs backward."""
    formats = [s.format for s in sent]
    for k, one in enumerate(sent):
        for mine, begin in ((one.format == one.other, one.sent), (one.format != one.other, one.alone)):
            yield Span(copy, np.where(mine & (one.format == born), born, -1), begin, birth)
            yield Span(copy, np.where(mine & (one.format != born), one.format, -1), begin, one.cast)
        new = _new(formats, born, k) if whole else one.format != born
        yield Span(copy, np.where(new, born, -1), one.cast if whole else first, birth)


def added(k: int, born: _Ints, then: _Ints, sent: Sequence[Sent], whole: bool) -> _Bools:
    """[tables, entries] in which what use `k` sends, `then`, is added to what is there."""
    formats, mine = [s.format for s in sent], sent[k].format
    found = np.zeros((len(then), len(mine)), np.bool_)
    for later in range(k + 1, len(sent)):
        found |= formats[later] == mine
        if whole:
            there = (mine == born) & _new(formats, born, later)
            found |= there & (sent[later].cast <= then)[:, None]
    return found
