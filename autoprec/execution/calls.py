"""The training calls of a step: which of them are kept for replays, and for how long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from autoprec.execution.replay import CallRecord
from autoprec.tracing.bindings import Binding

__all__ = ["StepCalls"]

#: Calls of a step up to which more are kept for replay after a bad one.
_MOST_CALLS = 64


class StepCalls(Sequence[CallRecord]):
    """The calls of the step in progress, in order. Micro-batches that are known to be good nobody will replay, and what
    the loop has given up gets no gradients: both are let go of. Mutable; owned by the session."""

    def __init__(self) -> None:
        self._kept: list[CallRecord] = []
        self._good: list[tuple[Binding, set[int]]] = []  # let go of: the outputs that were differentiated

    @overload
    def __getitem__(self, index: int) -> CallRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[CallRecord]: ...
    def __getitem__(self, index: int | slice) -> CallRecord | list[CallRecord]:
        return self._kept[index]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def are_over(self) -> bool:
        """Whether there are calls, and their backward passes are over."""
        return bool(self._kept) and all(call.is_over for call in self._kept)

    @property
    def are_given_up(self) -> bool:
        """Whether none waits for a backward pass any more."""
        return all(call.is_given_up for call in self._kept)

    def begin(self) -> None:
        """A step."""
        self._kept.clear()
        self._good.clear()

    def clear(self) -> None:
        """Nobody will replay a call of this step."""
        self._kept.clear()

    def drop_given_up(self) -> None:
        """Calls that will have no backward pass; looked for as the number of calls doubles, and not each time: a cell
        may be called a thousand times."""
        if len(self._kept).bit_count() == 1:
            self._kept = [call for call in self._kept if not call.is_given_up]

    def add(self, record: CallRecord, *, after_a_bad_one: bool) -> None:
        """The next call."""
        if len(self._kept) < _MOST_CALLS or not after_a_bad_one:
            self._kept.append(record)

    def drop(self, record: CallRecord) -> None:
        """A call that failed: it gave nothing, and is not to be replayed."""
        self._kept = [call for call in self._kept if call is not record]

    def let_go(self, but: CallRecord | None = None) -> None:
        """All were good; `but` one, which is only beginning."""
        good = [call for call in self._kept if call is not but]
        self._good += ((call.binding, call.entered) for call in good)
        self._kept = [call for call in self._kept if call is but]

    def differentiated(self) -> Iterator[tuple[Binding, set[int]]]:
        """By call of the step, the outputs that a gradient came to."""
        yield from self._good
        yield from ((call.binding, call.entered) for call in self._kept)
