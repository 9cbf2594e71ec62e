"""Tables of the narrow copies of parts, and of tensors that are kept in parts: `Step.keep_narrow`, of several."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autoprec.planning.recorder import Recorder
from autoprec.planning.tables import Entries, Group, Held, Pattern
from autoprec.planning.values import PlanTensor

__all__ = ["PartTables"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class PartTables(Recorder):
    """The part of a `Tabulated` about these."""

    def _kept_in_parts(self, t: PlanTensor, storage: int) -> None:
        p, of = self.problem, self.decisions.of
        first = min(use.moment for use in t.keepers)
        figures = [t.numel, p.phase(first), p.phase(p.backward(first))]
        sure = any(not use.part for use in t.keepers) and t.part_of is None
        units = dict.fromkeys(of(use.unit) for use in t.keepers if not sure)
        fixed = [storage, of(t.born)]
        rooms = self._rooms(fixed, units)
        for room in rooms:
            self._record("narrow", [*fixed, *room], (t.part_of is not None, sure, len(rooms)), figures)

    def _narrow(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (storage, maker, *units), part, sure, tables = pattern.reads
        kept, born = entries.format(storage), self._result[entries.format(maker)]
        read = self._any([self._copy[entries.format(unit)] for unit in units], entries.count)
        narrow, width = (kept >= 0) & (kept != self._again), np.array(self._sizes, np.float64)
        numel, (first, last) = figures[0], figures[1:].astype(np.int64)
        each = numel[:, None] * width[kept] + np.where(width[kept] == 1.0, 4.0, 0.0)
        seconds, size = np.zeros_like(each), np.zeros_like(each)
        for f, there in enumerate(read):
            one = narrow & (there & (born != f) if part else (born == f) & (there | sure))
            seconds += np.where(one, self._cast(np.full(entries.count, f), np.where(one, kept, f), numel), 0.0)
            size += each * one
        return self._group(scopes, entries, seconds / tables, size / tables, held=(Held(size / tables, first, last),))
