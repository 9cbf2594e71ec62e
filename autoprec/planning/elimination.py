"""Least sums of small tables over many shared variables: bucket elimination, many buckets at a time.

The tables lie behind one another in a flat buffer. Eliminating a variable adds up the tables that it is in, and what is
left of their minimum over it is a new table of its neighbours. A round eliminates variables that are not neighbours;
those whose tables have the same shapes are one numpy operation, so graphs that repeat themselves take few of them.

Where a bucket would be larger than `LARGEST` entries it is split, and each part has its own minimum: the sum is then a
lower bound, and the assignment no longer sure to reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

__all__ = ["LARGEST", "Elimination", "Tables"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

#: Entries of the largest table that an elimination makes.
LARGEST = 3**9
#: A round eliminates what costs up to this many entries, or `_SPREAD` times the least that is left.
_CHEAP = 3**4
_SPREAD = 3


@dataclass(frozen=True)
class Tables:
    """Tables of one shape: variables of each, row by row, and where in the buffer the first one begins."""

    scopes: _Ints
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class _Part:
    """One table of each bucket: where they begin, their shape, and the bucket's axis for each of theirs."""

    starts: _Ints
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def view(self, buffer: _Floats, dims: int) -> tuple[_Floats, tuple[_Floats, _Ints] | None]:
        """The tables of all buckets with the axes of the buckets: a view of the buffer where they lie at equal
        distances, else a view of a place for copies, and that place with the entries to copy."""
        count, size = len(self.starts), math.prod(self.shape)
        step = int(self.starts[1] - self.starts[0]) if count > 1 else size
        copies = None
        memory, distance = buffer[int(self.starts[0]) :], step
        if not (np.diff(self.starts) == step).all():
            memory, distance = np.empty(count * size), size
            copies = memory.reshape(count, size), self.starts[:, None] + np.arange(size)
        strides = [buffer.itemsize * stride for stride in (distance, *_strides(self.shape))]
        found = as_strided(memory, (count, *self.shape), strides, writeable=False)
        order = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        found = found.transpose(0, *(1 + k for k in order))
        places: list[Any] = [None] * dims
        for axis in self.axes:
            places[axis] = slice(None)
        return found[(slice(None), *places)], copies


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[k + 1 :]) for k in range(len(shape))]


@dataclass(frozen=True)
class _Buckets:
    """Buckets of one shape: variables [count, axes], the eliminated one last, and the tables in them."""

    scopes: _Ints
    sizes: tuple[int, ...]
    parts: tuple[_Part, ...]


class _Minimum:
    """The minimum of the sums of buckets over their last variables, from a buffer into it."""

    def __init__(self, buckets: _Buckets, buffer: _Floats, begin: int) -> None:
        count, rest = len(buckets.scopes), buckets.sizes[:-1]
        self._buffer = buffer
        self._views = []
        self._copies: list[tuple[_Floats, _Ints]] = []
        for part in buckets.parts:
            view, copies = part.view(buffer, len(buckets.sizes))
            self._views.append(np.moveaxis(view, -1, 0))  # the minimum is taken along whole arrays
            if copies is not None:
                self._copies.append(copies)
        self._total = np.empty((buckets.sizes[-1], count, *rest))
        self._least = buffer[begin : begin + count * math.prod(rest)].reshape(count, *rest)

    def __call__(self) -> None:
        """Do it."""
        for place, index in self._copies:
            np.take(self._buffer, index, out=place)
        total = self._total
        if len(self._views) == 1:
            total[...] = self._views[0]
        else:
            np.add(self._views[0], self._views[1], out=total)
        for view in self._views[2:]:
            total += view
        np.min(total, axis=0, out=self._least)


class _Decision:
    """The best values of the last variables of buckets, given the others; the first of equals."""

    def __init__(self, buckets: _Buckets) -> None:
        last = len(buckets.sizes) - 1
        self._mine = buckets.scopes[:, last]
        self._total = np.empty((len(buckets.scopes), buckets.sizes[-1]))
        self._parts = []
        for part in buckets.parts:
            strides, own, others = _strides(part.shape), 0, []
            for axis, stride in zip(part.axes, strides, strict=True):
                if axis == last:
                    own = stride
                else:
                    others.append((buckets.scopes[:, axis], stride))
            index = part.starts[:, None] + own * np.arange(buckets.sizes[-1])
            self._parts.append((index, others))

    def __call__(self, buffer: _Floats, values: _Ints) -> None:
        """Decide."""
        self._total[...] = 0.0
        for index, others in self._parts:
            if others:
                shift = sum(stride * values[scope] for scope, stride in others)
                index = index + np.asarray(shift)[:, None]
            self._total += buffer[index]
        values[self._mine] = self._total.argmin(axis=1)


class Elimination:
    """An order of elimination for tables over variables with `sizes` values; `buffer` has room for them, and behind
    them for what elimination makes of them."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Tables]) -> None:
        self.exact = True
        self._sizes = list(sizes)
        self._scopes: list[tuple[int, ...]] = []
        self._starts: list[int] = []
        self._in: list[list[int]] = [[] for _ in sizes]
        self.length = 0
        for group in tables:
            size = math.prod(group.shape)
            for k, scope in enumerate(group.scopes.tolist()):
                self._add(tuple(scope), group.start + k * size)
            self.length = max(self.length, group.start + len(group.scopes) * size)
        self._minima: list[tuple[_Buckets, int]] = []
        self._decisions: list[_Buckets] = []
        self._order()
        self.buffer = np.empty(self.length)
        self._minimize = [_Minimum(buckets, self.buffer, begin) for buckets, begin in self._minima]
        self._decide = [_Decision(buckets) for buckets in reversed(self._decisions)]
        constants = [start for scope, start in zip(self._scopes, self._starts, strict=True) if not scope]
        self._constants = np.array(constants, np.int64)

    def _add(self, scope: tuple[int, ...], start: int) -> None:
        for v in scope:
            self._in[v].append(len(self._scopes))
        self._scopes.append(scope)
        self._starts.append(start)

    # The order

    def _order(self) -> None:
        waiting = dict.fromkeys(v for v, tables in enumerate(self._in) if tables)
        cost: dict[int, int] = {}
        stale = list(waiting)
        while waiting:
            for v in stale:
                cost[v] = self._cost(v)
            limit = max(_CHEAP, _SPREAD * min(cost[v] for v in waiting))
            cheap = sorted((cost[v], v) for v in waiting if cost[v] <= limit)
            blocked: set[int] = set()
            picked = []
            for _, v in cheap:
                if v not in blocked:
                    picked.append(v)
                    blocked.update(u for f in self._in[v] for u in self._scopes[f])
            for v in picked:
                del waiting[v]
            self._eliminate(picked)
            stale = sorted(v for v in blocked if v in waiting)

    def _cost(self, variable: int) -> int:
        size = self._sizes[variable]
        for u in {u for f in self._in[variable] for u in self._scopes[f]} - {variable}:
            size *= self._sizes[u]
        return size

    def _eliminate(self, picked: list[int]) -> None:
        """One round: buckets of the variables, batched by shape, and the tables that they leave."""
        minima: dict[tuple[object, ...], list[tuple[tuple[int, ...], list[int]]]] = {}
        decisions: dict[tuple[object, ...], list[tuple[tuple[int, ...], list[int]]]] = {}
        for v in picked:
            whole = self._in[v]
            parts = self._split(v, whole)
            for part in parts:
                key, scope = self._shape(v, part)
                minima.setdefault(key, []).append((scope, part))
            if len(parts) > 1:
                self.exact = False
            key, scope = self._shape(v, whole)
            decisions.setdefault(key, []).append((scope, whole))
        for found in decisions.values():
            self._decisions.append(self._buckets(found))
        new: list[tuple[tuple[int, ...], int]] = []
        for found in minima.values():
            buckets = self._buckets(found)
            self._minima.append((buckets, self.length))
            size = math.prod(buckets.sizes[:-1])
            for k, (scope, _) in enumerate(found):
                new.append((scope[:-1], self.length + k * size))
            self.length += len(found) * size
        gone = {f for v in picked for f in self._in[v]}
        for u in {u for f in gone for u in self._scopes[f]}:
            self._in[u] = [f for f in self._in[u] if f not in gone]
        for scope, start in new:
            self._add(scope, start)

    def _split(self, variable: int, factors: list[int]) -> list[list[int]]:
        """The factors of a bucket in groups that are small enough, mostly one."""
        if self._cost(variable) <= LARGEST:
            return [factors]
        groups: list[tuple[set[int], list[int]]] = []
        for f in sorted(factors, key=lambda f: (-len(self._scopes[f]), f)):
            for scope, members in groups:
                if math.prod(self._sizes[u] for u in scope.union(self._scopes[f])) <= LARGEST:
                    scope.update(self._scopes[f])
                    members.append(f)
                    break
            else:
                groups.append((set(self._scopes[f]), [f]))
        return [members for _, members in groups]

    def _shape(self, variable: int, factors: list[int]) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """What buckets must share to be one batch, and the bucket's variables, the eliminated one last."""
        scope = dict.fromkeys(u for f in factors for u in self._scopes[f])
        scope.pop(variable, None)
        scope[variable] = None
        axis = {u: k for k, u in enumerate(scope)}
        key = (
            tuple(self._sizes[u] for u in scope),
            tuple(tuple(axis[u] for u in self._scopes[f]) for f in factors),
        )
        return key, tuple(scope)

    def _buckets(self, found: list[tuple[tuple[int, ...], list[int]]]) -> _Buckets:
        scope, factors = found[0]
        axis = {u: k for k, u in enumerate(scope)}
        parts = []
        for j, f in enumerate(factors):
            own = self._scopes[f]
            parts.append(
                _Part(
                    starts=np.array([self._starts[members[j]] for _, members in found], np.int64),
                    shape=tuple(self._sizes[u] for u in own),
                    axes=tuple(axis[u] for u in own),
                )
            )
        scopes = np.array([s for s, _ in found], np.int64)
        return _Buckets(scopes, tuple(self._sizes[u] for u in scope), tuple(parts))

    # Use

    def minimum(self) -> float:
        """The least sum of the tables in `buffer` (a lower bound of it if not `exact`); infinite if every sum is."""
        for minimize in self._minimize:
            minimize()
        return float(self.buffer[self._constants].sum())

    def assignment(self) -> _Ints:
        """Values that reach the last minimum (or were found on the way to the bound)."""
        values = np.zeros(len(self._sizes), np.int64)
        for decide in self._decide:
            decide(self.buffer, values)
        return values
