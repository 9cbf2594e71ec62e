"""What a session counts while the verdict on its last step may still be with the device: to ask is to settle it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torch import Tensor

from autoprec.execution.replay import CallRecord
from autoprec.plans import Plan

if TYPE_CHECKING:
    from autoprec.sessions import Session

__all__ = ["Settling"]

T = TypeVar("T")


class Settled(Generic[T]):
    """An attribute of a session that a step may change, read when no step is left to be judged."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, session: None, owner: type) -> Settled[T]: ...
    @overload
    def __get__(self, session: Session, owner: type) -> T: ...
    def __get__(self, session: Session | None, owner: type) -> Any:
        if session is None:
            return self
        if session._guard.owes:  # these are read a dozen times in a step
            session.settle()
        return getattr(session, self._name)

    def __set__(self, session: Session, value: T) -> None:
        setattr(session, self._name, value)


class Settling:
    """What changes with each step. Where a GPU leaves an update out by itself, the host reads its verdict before the
    next call of the model, or when one of these is read."""

    plan = Settled[Plan | None]()
    steps = Settled[int]()
    skipped_steps = Settled[int]()
    step_was_skipped = Settled[bool]()

    #: What the step was given whose verdict was left to the device, with the versions of it at its end.
    _given: tuple[tuple[Tensor, int], ...] = ()
    #: Its calls as they were then: a later backward pass through them is not of it.
    _left_calls: tuple[CallRecord, ...] = ()
    _is_overwritten = False

    def settle(self: Session) -> None:  # type: ignore[misc]
        """Take in how the last step went, waiting for its backward pass; events, `plan` and the counters are of all
        steps then. Asking for any of those does it. Raises what a bad step raises."""
        self._guard.settle()

    def verdict_can_wait(self: Session) -> bool:  # type: ignore[misc]
        """Not where a bad step raises at once, or the loss is asked; not while a step is observed, which the host reads
        anyway; and not in a loop that overwrites what it gives the model: no bad step could be replayed."""
        if self.policy.guard.nonfinite == "raise" or self.vetoes_losses() or self._is_overwritten:
            return False
        if self.calibrating or self._observed.observer is not None:
            return False
        given = _given_to(self._calls, self._guard.buffers.values())
        return not any(x.is_inference() for x in given)  # of which nobody could tell if it is overwritten

    def vetoes_losses(self: Session) -> bool:  # type: ignore[misc]
        """Whether a spike of the loss makes a step bad (called by the guard)."""
        return self.policy.guard.loss_spike == "skip"

    def left_to_device(self: Session) -> None:  # type: ignore[misc]
        """The step is over, and its verdict is read later (called by the guard)."""
        given = _given_to(self._calls, self._guard.buffers.values())
        self._given = tuple((x, x._version) for x in given)
        self._left_calls = tuple(replace(c, output_gradients=dict(c.output_gradients)) for c in self._calls)

    def calls_to_replay(self: Session) -> list[CallRecord]:  # type: ignore[misc]
        """Of the step that is judged; none, if what it was given is something else by now."""
        return [] if self.notice_overwritten() else list(self._left_calls or self._calls)

    def forget_left(self: Session) -> None:  # type: ignore[misc]
        """That step is over, however it ended."""
        self._given = self._left_calls = ()

    def notice_overwritten(self: Session) -> bool:  # type: ignore[misc]
        """Whether what the step was given is something else by now. Then verdicts are waited for from now on."""
        changed = any(x._version != version for x, version in self._given)
        if changed and not self._is_overwritten:
            self._is_overwritten = True
            told = (
                "the loop writes the next batch into the tensors of the last before this step was judged: from now on"
                " the host waits for the verdict on each step, before its update"
            )
            self._event("warning", trigger="overwritten", evidence=told)
        return changed


def _given_to(calls: Iterable[CallRecord], buffers: Mapping[int, Tensor]) -> Iterator[Tensor]:
    """The tensors that the model was called with."""
    for record in calls:
        for i in record.binding.template.value_positions:
            if isinstance(x := record.arguments[i], Tensor) and id(x) not in buffers:
                yield x
