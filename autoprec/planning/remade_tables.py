"""Tables of what tensors take while they are made again: `Step.open`, of several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import islice

import numpy as np
import numpy.typing as npt

from autoprec.planning.recorder import LARGEST_TABLE, Recorder
from autoprec.planning.tables import Entries, Group, Held, Pattern
from autoprec.planning.uses import Steps
from autoprec.planning.values import PlanTensor

__all__ = ["RemadeTables"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class RemadeTables(Recorder):
    """The part of a `Tabulated` about these."""

    def _steps(self, places: Sequence[int], steps: Steps) -> tuple[list[int], Steps]:
        """The steps, and the places of what is there in them; without those that would make the table too large."""
        found = [self.decisions.of(unit) for step in steps for unit, _ in step]
        if self._product([*places, *found]) > LARGEST_TABLE:
            self.exact, steps = False, steps[-1:]
            found = [self.decisions.of(unit) for unit, _ in steps[0]]
        return found, steps

    def _largest(self, entries: Entries, places: Sequence[int], numel: _Floats, lengths: Sequence[int]) -> _Floats:
        """[tables, entries] bytes that are there in one of the steps at most."""
        width, left = np.array(self._sizes, np.float64), zip(places, numel, strict=False)
        most = np.zeros((numel.shape[1], entries.count))
        for count in lengths:
            each = [n[:, None] * width[self._result[entries.format(u)]] for u, n in islice(left, count)]
            most = np.maximum(most, reduce(np.add, each))
        return most

    def _open(self, t: PlanTensor, storage: int) -> None:
        if (opened := self.problem.opened(t)) is None or not opened.steps:
            return
        later = -1 if opened.later is None else self.decisions.storage.get(opened.later, -1)
        fixed = [storage, self.decisions.of(opened.unit), later]
        there, steps = self._steps(fixed, opened.steps)
        figures = [opened.phase, opened.numel, opened.later_numel, *(numel for step in steps for _, numel in step)]
        self._record("open", [*fixed, *there], (later >= 0, tuple(map(len, steps))), figures)

    def _opened(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (storage, unit, kept, *places), decided, lengths = pattern.reads
        width, again = np.array(self._sizes, np.float64), entries.format(storage) == self._again
        counted = figures[1][:, None] + figures[2][:, None] * (decided & (entries.format(kept) >= 0))
        counted = counted * width[self._result[entries.format(unit)]]
        more = self._largest(entries, places, figures[3:], lengths) - counted
        phase = figures[0].astype(np.int64)
        return self._group(scopes, entries, held=(Held(np.maximum(0.0, more) * again, phase, phase),))
