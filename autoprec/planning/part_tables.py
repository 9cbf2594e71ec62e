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
        moments, whole = sorted({use.moment for use in t.keepers}), t.part_of is None
        figures = [t.numel, *map(p.phase, moments), *(p.phase(p.backward(m)) for m in moments)]
        fixed = [storage, of(t.born)]
        # What keeps all of a tensor does so whatever it reads.
        keepers = [(moments.index(u.moment), -1 if whole and not u.part else of(u.unit), whole and not u.part)
                   for u in t.keepers]  # fmt: skip
        rooms = self._rooms(fixed, [place for _, place, _ in keepers if place >= 0 and place not in fixed])
        for room in rooms:
            known = sorted(k for k in keepers if k[1] < 0 or k[1] in {*fixed, *room})
            reads = (not whole, len(moments), tuple((k, sure) for k, _, sure in known), len(rooms))
            self._record("narrow", [*fixed, *(place for _, place, _ in known)], reads, figures)

    def _narrow(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (storage, maker, *units), part, count, keepers, tables = pattern.reads
        kept, born = entries.format(storage), self._result[entries.format(maker)]
        narrow, width = (kept >= 0) & (kept != self._again), np.array(self._sizes, np.float64)
        each = figures[0][:, None] * width[kept] + np.where(width[kept] == 1.0, 4.0, 0.0)
        phases = figures[1:].astype(np.int64)
        seconds, size, held = np.zeros_like(each), np.zeros_like(each), list[Held]()
        for f in range(self._formats):
            may, there = narrow & ((born != f) if part else (born == f)), np.zeros(entries.count, np.bool_)
            for (k, sure), unit in zip(keepers, units, strict=True):
                first = may & ((self._copy[entries.format(unit)] == f) | sure) & ~there
                there |= first
                held.append(Held(each * first / tables, phases[k], phases[count + k]))
            seconds += np.where(there, self._cast(np.full(entries.count, f), np.where(there, kept, f), figures[0]), 0.0)
            size += each * there
        return self._group(scopes, entries, seconds / tables, size / tables, held=tuple(held))
