"""Tables of what tensors take while they are made again: `Step.open`, of several."""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

from autoprec.planning.recorder import Recorder
from autoprec.planning.tables import Entries, Group, Held, Pattern
from autoprec.planning.values import PlanTensor

__all__ = ["RemadeTables"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class RemadeTables(Recorder):
    """The part of a `Tabulated` about these."""

    def _open(self, t: PlanTensor, storage: int) -> None:
        if (opened := self.problem.opened(t)) is None:
            return
        of = self.decisions.of
        later = -1 if opened.later is None else self.decisions.storage.get(opened.later, -1)
        fixed = [storage, of(opened.other), later]
        steps = [[(of(unit), numel) for unit, numel in step] for step in opened.steps]
        rooms = self._rooms(fixed, [u for step in steps for u, _ in step if u >= 0 and u not in fixed])
        for room in rooms:
            known = [step for step in steps if all(u < 0 or u in {*fixed, *room} for u, _ in step)]
            reads = (later >= 0, tuple(map(len, known)), len(rooms))
            figures = [opened.phase, opened.numel, opened.later_numel, *(n for step in known for _, n in step)]
            self._record("open", [*fixed, *(u for step in known for u, _ in step)], reads, figures)

    def _opened(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (storage, other, kept, *units), decided, lengths, tables = pattern.reads
        width = np.array(self._sizes, np.float64)
        again, sizes = entries.format(storage) == self._again, iter(figures[3:])
        counted = figures[1][:, None] + figures[2][:, None] * (decided & (entries.format(kept) >= 0))
        more = np.zeros((len(scopes), entries.count))
        held, widths = counted * width[self._result[entries.format(other)]], iter(units)
        for n in lengths:
            each = [next(sizes)[:, None] * width[self._result[entries.format(next(widths))]] for _ in range(n)]
            more = np.maximum(more, reduce(np.add, each) - held)
        phase = figures[0].astype(np.int64)
        return self._group(scopes, entries, held=(Held(more * again / tables, phase, phase),))
