"""When a compiled plan takes over from the plan as it is, so that nothing waits for the compiler."""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.execution.beside import Copy, can_copy
from autoprec.execution.lowering import Lowering
from autoprec.execution.slots import Slot
from autoprec.plans import Plan

__all__ = ["Takeover"]

#: Longest that a run waits at the takeover for what is not compiled yet, before it compiles for itself.
_PATIENCE_SECONDS = 600.0


class Takeover:
    """A new plan runs as it is for a number of steps, while a copy of the process compiles it; what it leaves is the
    compiler's cache, from which the run then takes it. The number does not depend on clocks: a run that is stopped and
    goes on changes over at the same step. Mutable; owned by the session.

    Attributes:
        due_step: after which the plan runs compiled; None where nothing waits.
    """

    def __init__(self, lowering: Lowering, steps: int, device_type: str) -> None:
        self._lowering = lowering
        self._steps = steps if lowering.compiles and can_copy(device_type) else 0
        self._copy: Copy | None = None
        self.due_step: int | None = None

    def begins(self, before: Plan | None, plan: Plan, step: int) -> bool:
        """Whether a plan is to run as it is first. Not the first plan; nor one that was compiled before; nor under a
        budget of bytes, which a plan was found to keep when it was compiled."""
        self.close()
        later = before is not None and plan.budget_bytes is None and not self._lowering.knows(plan)
        self.due_step = step + self._steps if later and self._steps else None
        return self.due_step is not None

    def step_over(self, step: int, slots: Sequence[Slot]) -> str | None:
        """At the end of a step, None unless a plan takes over now: "" if its slots can be compiled from the cache, or
        why not."""
        if self.due_step is None:
            return None
        if step < self.due_step:
            try:
                self._copy = self._copy or Copy(lambda: _compile(slots))
            except OSError as error:  # no memory for it, say
                self.close()
                return f"this process cannot be copied ({error})"
            return None
        copy = self._copy
        well = copy is not None and copy.wait(_PATIENCE_SECONDS)
        self.close()
        return "" if well or copy is None else "the copy of the process that should have compiled the plan did not"

    def close(self) -> None:
        """Nothing waits any more."""
        if self._copy is not None:
            self._copy.end()
        self._copy = self.due_step = None


def _compile(slots: Sequence[Slot]) -> None:
    """In the copy."""
    from torch._inductor import config

    config.compile_threads = 1  # the processes that compile for this one are not the copy's
    for slot in slots:
        slot.prepare()
