"""Least sums of small tables over many shared variables: bucket elimination, many buckets at a time.

The tables lie behind one another in a flat buffer. Eliminating a variable adds up the tables that it is in, and what is
left of their minimum over it is a new table of its neighbours. A round eliminates variables that are not neighbours;
those whose tables have the same shapes are one numpy operation, so graphs that repeat themselves take few of them.

Where a bucket would be larger than `LARGEST` entries it is split, and each part has its own minimum: the sum is then a
lower bound, and the assignment no longer sure to reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    @property
    def strides(self) -> list[int]:
        return [int(np.prod(self.shape[k + 1 :], dtype=np.int64)) for k in range(len(self.shape))]

    def read(self, buffer: _Floats, dims: int) -> _Floats:
        """The tables of all buckets, with the axes of the buckets."""
        count, size = len(self.starts), int(np.prod(self.shape, dtype=np.int64))
        step = int(self.starts[1] - self.starts[0]) if count > 1 else size
        if count < 2 or (np.diff(self.starts) == step).all():
            begin = int(self.starts[0])
            width = buffer.itemsize
            found = as_strided(buffer[begin:], (count, size), (step * width, width), writeable=False)
        else:
            found = buffer[self.starts[:, None] + np.arange(size)]
        found = found.reshape(count, *self.shape)
        order = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        shape = [count] + [1] * dims
        for k in order:
            shape[1 + self.axes[k]] = self.shape[k]
        return found.transpose(0, *(1 + k for k in order)).reshape(shape)


@dataclass(frozen=True)
class _Buckets:
    """Buckets of one shape: variables [count, axes], the eliminated one last, and the tables in them."""

    scopes: _Ints
    sizes: tuple[int, ...]
    parts: tuple[_Part, ...]

    def minimum(self, buffer: _Floats, begin: int) -> None:
        """The minimum of the sum over the last variable, into the buffer."""
        total = np.zeros((1,) * (1 + len(self.sizes)))
        for part in self.parts:
            total = total + part.read(buffer, len(self.sizes))
        count, rest = len(self.scopes), self.sizes[:-1]
        least = np.broadcast_to(total, (count, *self.sizes)).min(axis=-1)
        buffer[begin : begin + count * int(np.prod(rest, dtype=np.int64))] = least.reshape(-1)

    def decide(self, buffer: _Floats, values: _Ints) -> None:
        """The best value of the last variable, given the others; the first of equals."""
        count, last = len(self.scopes), len(self.sizes) - 1
        total = np.zeros((count, self.sizes[-1]))
        for part in self.parts:
            index, own = part.starts.copy(), 0
            for axis, stride in zip(part.axes, part.strides, strict=True):
                if axis == last:
                    own = stride
                else:
                    index += stride * values[self.scopes[:, axis]]
            total += buffer[index[:, None] + own * np.arange(self.sizes[-1])]
        values[self.scopes[:, last]] = total.argmin(axis=1)


class Elimination:
    """An order of elimination for tables over variables with `sizes` values; fills `buffer` behind the tables."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Tables]) -> None:
        self.exact = True
        self._sizes = list(sizes)
        self._scopes: list[tuple[int, ...]] = []
        self._starts: list[int] = []
        self._in: list[list[int]] = [[] for _ in sizes]
        self.length = 0
        for group in tables:
            size = int(np.prod(group.shape, dtype=np.int64))
            for k, scope in enumerate(group.scopes.tolist()):
                self._add(tuple(scope), group.start + k * size)
            self.length = max(self.length, group.start + len(group.scopes) * size)
        self._minima: list[tuple[_Buckets, int]] = []
        self._decisions: list[_Buckets] = []
        self._order()
        constants = [start for scope, start in zip(self._scopes, self._starts, strict=True) if not scope]
        self._constants = np.array(constants, np.int64)

    def _add(self, scope: tuple[int, ...], start: int) -> None:
        for v in scope:
            self._in[v].append(len(self._scopes))
        self._scopes.append(scope)
        self._starts.append(start)

    # The order

    def _order(self) -> None:
        waiting = dict.fromkeys(range(len(self._sizes)))
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
            size = int(np.prod(buckets.sizes[:-1], dtype=np.int64))
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
                if np.prod([float(self._sizes[u]) for u in scope.union(self._scopes[f])]) <= LARGEST:
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

    def minimum(self, buffer: _Floats) -> float:
        """The least sum of the tables (a lower bound of it if not `exact`); infinite if every sum is."""
        for buckets, begin in self._minima:
            buckets.minimum(buffer, begin)
        return float(buffer[self._constants].sum())

    def assignment(self, buffer: _Floats) -> _Ints:
        """Values that reach the minimum (or were found on the way to the bound), after `minimum`."""
        values = np.zeros(len(self._sizes), np.int64)
        for buckets in reversed(self._decisions):
            buckets.decide(buffer, values)
        return values
