"""When a compiled plan takes over from the plan as it is, so that nothing waits for the compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from autoprec.errors import UnsupportedError
from autoprec.execution.beside import Copy, can_copy
from autoprec.execution.compiling import compile_whole_files
from autoprec.execution.lowering import Lowering
from autoprec.execution.slots import Slot
from autoprec.execution.worker import Worker
from autoprec.plans import Plan

__all__ = ["Takeover"]

#: How long a run waits at the takeover for a copy of the process, before it compiles for itself: in seconds, and in
#: times what compiling took the longest so far. Other processes may have the cores.
_PATIENCE_SECONDS, _PATIENCE_TIMES = 60.0, 10.0

#: And how long for a new process, which begins with nothing and took 13 s for the suite's MLP
#: (docs/measurements/changes.md). Where compiling takes longer, as long as that: then waiting and compiling are at most
#: twice as long as compiling alone.
_BEGINS_SECONDS = 14.0


class Takeover:
    """A new plan runs as it is for a number of steps, while another process compiles it: a copy of this one, or, where
    it cannot be copied, a new one. What that leaves is the compiler's cache, from which the run then takes it. The
    number does not depend on clocks: a run that is stopped and goes on changes over at the same step. Mutable; owned by
    the session.

    Attributes:
        due_step: after which the plan runs compiled; None where nothing waits.
    """

    def __init__(self, lowering: Lowering, steps: int) -> None:
        self._lowering, self._steps = lowering, steps if lowering.compiles else 0
        self._beside: Copy | Worker | None = None
        self._waits = ""
        self.due_step: int | None = None

    def would_begin(self, before: Plan | None, plan: Plan, step: int) -> bool:
        """Whether a plan would run as it is first, if its budget lets it. Not the first plan, nor one that was compiled
        before."""
        if self._is_waiting(plan):
            return True
        new = before is not None and not self._lowering.knows(plan)
        return new and self._due_from(step) > step and _has_cache()

    def begins(self, before: Plan | None, plan: Plan, step: int, fits: Callable[[], bool]) -> bool:
        """Whether a plan is to run as it is first. One that comes while another waits waits no longer than that.
        `fits`: whether it keeps its budget as it is."""
        if self._is_waiting(plan):
            return True
        would, due = self.would_begin(before, plan, step), self._due_from(step)
        self.close()
        if would and fits():
            self.due_step, self._waits = due, plan.fingerprint
        return self.due_step is not None

    def _is_waiting(self, plan: Plan) -> bool:
        return self.due_step is not None and plan.fingerprint == self._waits

    def _due_from(self, step: int) -> int:
        return step + self._steps if self.due_step is None else self.due_step

    def goes_on(self, plan: Plan, due_step: int | None) -> None:
        """A run goes on from a state in which a plan waited."""
        self.due_step, self._waits = due_step, plan.fingerprint

    def step_over(self, step: int, slots: Sequence[Slot], device_type: str, then: Callable[[], object]) -> str | None:
        """At the end of a step, None unless a plan takes over now: "" if its slots can be compiled from the cache, or
        why not. `then`: what else a copy of the process does when it has compiled them."""
        if self.due_step is None:
            return None
        if step < self.due_step:
            if self._beside is None:
                try:
                    self._beside = self._begun(slots, device_type, then)
                except (OSError, UnsupportedError, RuntimeError) as error:  # no memory for it, say, here or on the GPU
                    self._steps = 0
                    self.close()
                    return f"no other process can compile it ({error})"
            return None
        failure = self._failure()
        if failure:  # so will the next
            self._steps = 0
        self.close()
        return failure

    def _failure(self) -> str:
        """When what compiles beside the run is done, or is not waited for any longer: "" or why it did not."""
        took: dict[str, float] = {}
        for made in self._lowering.compiled:
            took[made.first_op] = max(made.seconds, took.get(made.first_op, 0.0))
        match self._beside:
            case Copy() as copy if not copy.wait(_PATIENCE_SECONDS + _PATIENCE_TIMES * max(took.values(), default=0.0)):
                return "the copy of the process that should have compiled the plan did not"
            case Worker() as worker if not worker.wait(max(_BEGINS_SECONDS, sum(took.values()))):
                return worker.failure
        return ""

    def _begun(self, slots: Sequence[Slot], device_type: str, then: Callable[[], object]) -> Copy | Worker:
        if can_copy(device_type):
            return Copy(lambda: _compile(slots, then))
        orders = [self._lowering.order(slot.binding, slot.plan, slot.rewritten) for slot in slots]
        return Worker([order for order in orders if order is not None], device_type)

    def close(self) -> None:
        """Nothing waits any more."""
        if self._beside is not None:
            self._beside.end()
        self._beside = self.due_step = None


def _has_cache() -> bool:
    """Whether torch's compiler looks for what was compiled before."""
    from torch._inductor import config

    return bool(config.fx_graph_cache) and not config.force_disable_caches


def _compile(slots: Sequence[Slot], then: Callable[[], object]) -> None:
    """In the copy."""
    _on_one_thread()
    compile_whole_files()  # the processes that compile for the run are not the copy's
    for slot in slots:
        slot.lower()
        slot.prepare()
    then()


def _on_one_thread() -> None:
    """OpenMP's threads are not in the copy, which would wait for them without end; what is compiled, and its name in
    the cache, is for as many as there are."""
    from torch._inductor import utils

    name, threads = "parallel_num_threads", utils.parallel_num_threads()
    for module in [m for key, m in sys.modules.items() if key.startswith("torch._inductor") and name in vars(m)]:
        setattr(module, name, lambda: threads)
    torch.set_num_threads(1)
