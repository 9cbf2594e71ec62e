"""The parts of a `Problem` sorted by pattern, and what casts cost in all entries of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autoprec.formats import held_as, other_operand, result_format
from autoprec.planning.codes import bytes_of, of_format, rounds_again
from autoprec.planning.decisions import Decisions
from autoprec.planning.evaluator import SECONDARY, TERTIARY
from autoprec.planning.tables import Copies, Entries, Group, Held, Noise, Pattern
from autoprec.planning.values import Problem
from autoprec.plans import RECOMPUTED

__all__ = ["LARGEST_TABLE", "Recorder"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

#: A tensor whose readers and savers have more combinations is described by several tables, for a few readers each:
#: their mean is a lower bound of what it costs.
LARGEST_TABLE = 3**7


class Recorder:
    """What is noted of the parts of a problem, pattern by pattern.

    Attributes:
        exact: False if some part is described by a mean of tables.
        length: the number of all entries.
    """

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self.problem, self.decisions = problem, decisions
        self._found: dict[Pattern, tuple[list[tuple[int, ...]], list[list[float]]]] = {}
        self.exact, self.length = True, 0
        time, space = 1.0 / problem.seconds_scale, 1.0 / problem.bytes_scale
        first = problem.objective == "time"
        self._second = time if first else SECONDARY * time
        self._byte = SECONDARY * space if first else space
        self._formats = len(decisions.formats)
        self._sizes = [bytes_of(f) for f in decisions.formats]
        number = decisions.number
        self._result, self._beside, self._copy = (
            np.array([number[of_format(goes_with, f)] for f in decisions.formats], np.int64)
            for goes_with in (result_format, other_operand, held_as)
        )
        known = [f for f in decisions.formats if f != RECOMPUTED]
        #: [storage, operand]: `rounds_again`.
        self._rounds_again = np.zeros((len(decisions.formats),) * 2, np.bool_)
        for kept in known:
            for operand in known:
                self._rounds_again[number[kept], number[operand]] = rounds_again(kept, operand)
        #: The number of what is no format (another than any where nothing is recomputed).
        self._again = number.get(RECOMPUTED, -2)
        n = self._formats
        self._per_call, self._per_element = np.full((n, n), np.nan), np.full((n, n), np.nan)
        np.fill_diagonal(self._per_call, 0.0)
        np.fill_diagonal(self._per_element, 0.0)
        for c in self.problem.casts:
            if c.source in number and c.target in number:
                self._per_call[number[c.source], number[c.target]] = c.seconds_per_call
                self._per_element[number[c.source], number[c.target]] = c.seconds_per_element

    def _record(self, kind: str, places: Sequence[int], reads: tuple[Any, ...], figures: Iterable[float]) -> None:
        """Note one part. `places` are the variables that it may read, or constants; `reads` is what the maker of
        tables needs beside the axis of each place."""
        axis: dict[int, int] = {}
        for place in places:
            if place >= 0 and place not in axis:
                axis[place] = len(axis)
        coded = tuple(axis[place] if place >= 0 else place for place in places)
        domains = self.decisions.domains
        pattern = Pattern(kind, tuple(domains[v] for v in axis), (coded, *reads))
        scopes, found = self._found.setdefault(pattern, ([], []))
        scopes.append(tuple(axis))
        found.append([*figures])

    def _cast(self, source: _Ints, target: _Ints, numel: _Floats) -> _Floats:
        """[tables, entries] seconds of casts."""
        return np.asarray(self._per_call[source, target] + numel[:, None] * self._per_element[source, target])

    def _vector(self, pairs: Iterable[tuple[str, float]], scale: float = 1.0) -> list[float]:
        """Amounts by format."""
        found = [0.0] * self._formats
        for f, amount in pairs:
            if f in self.decisions.number:
                found[self.decisions.number[f]] += amount / scale
        return found

    def _any(self, columns: Sequence[_Ints], count: int) -> list[npt.NDArray[np.bool_]]:
        """By format: entries in which one of the columns has it."""
        found = []
        for f in range(self._formats):
            there = np.zeros(count, np.bool_)
            for column in columns:
                there |= column == f
            found.append(there)
        return found

    def _rooms(self, fixed: Sequence[int], places: Iterable[int]) -> list[list[int]]:
        """Places in groups, of which each makes a table beside the fixed ones that is not too large."""
        rooms: list[list[int]] = []
        for place in dict.fromkeys(places):
            for room in rooms:
                if self._product([*fixed, *room, place]) <= LARGEST_TABLE:
                    room.append(place)
                    break
            else:
                rooms.append([place])
        self.exact &= len(rooms) <= 1
        return rooms or [[]]

    def _product(self, places: Iterable[int]) -> float:
        return float(np.prod([float(len(self.decisions.domains[v])) for v in set(places) if v >= 0]))

    def _group(
        self, scopes: _Ints, entries: Entries, seconds: _Floats | float = 0.0, saved: _Floats | float = 0.0,
        *, held: tuple[Held, ...] = (), copies: Copies | None = None, loss: _Floats | None = None,
        noise: Noise | None = None, rounding: Noise | None = None,
    ) -> Group:  # fmt: skip
        base = np.zeros((len(scopes), entries.count)) + self._second * seconds + self._byte * saved
        if np.isnan(base).any():
            self._complain()
        if loss is not None:
            loss = None if not loss.any() else loss
            base += 0.0 if loss is None else TERTIARY * loss
        if noise is not None:
            base += TERTIARY * noise.amount
        some = tuple(h for h in held if h.sizes.any())
        return Group(scopes, entries.shape, self.length, base, loss, noise, rounding, some, copies)

    def _complain(self) -> None:
        """Raise the error of the first cast without a timing."""
        held = dict.fromkeys(held_as(f) for f in self.decisions.formats if f != RECOMPUTED)
        for a in held:
            for b in held:
                self.problem.cast_seconds(a, b, 0)
