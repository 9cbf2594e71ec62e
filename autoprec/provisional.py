"""Which graphs calibrate under a provisional plan, because an observed FP32 step would not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoprec.execution.slots import Slot
from autoprec.plans import Plan
from autoprec.scheduling import Scheduler

__all__ = ["Provisional"]


class Provisional:
    """Mutable; owned by the session. Every graph is weighed once a step, with those that ran before it, until it has a
    plan or proves to be one of which nothing can be told."""

    def __init__(self, scheduler: Scheduler, device_type: str) -> None:
        self._scheduler, self._device_type = scheduler, device_type
        self._weighed: set[Slot] = set()
        self._blind: set[Slot] = set()
        self._plans: dict[Slot, Plan] = {}

    def begin_step(self) -> None:
        """Graphs that had run when another one showed that FP32 does not fit get their plan now: in that step they
        could still run again, in its backward pass."""
        self._weighed.clear()
        for slot, plan in self._plans.items():
            if slot.plan is not plan:
                slot.adopt(plan, self._device_type)

    def weigh(self, slot: Slot, arguments: Sequence[Any], state_bytes: int) -> str:
        """Before a graph is observed: give it a plan where FP32 would not fit. Returns a warning for people, or ""."""
        if slot in self._weighed or slot in self._blind or slot in self._plans:
            return ""
        plan, warning = self._scheduler.provisional_plan(slot, arguments, state_bytes)
        if plan is not None:
            self._plans |= dict.fromkeys([*self._weighed, slot], plan)
            slot.adopt(plan, self._device_type)
        (self._blind if warning and plan is None else self._weighed).add(slot)
        return warning
