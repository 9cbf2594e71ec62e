"""When a compiled plan takes over from the plan as it is, so that nothing waits for the compiler."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence

import torch

from autoprec.execution.beside import Copy, can_copy
from autoprec.execution.lowering import Lowering
from autoprec.execution.slots import Slot
from autoprec.plans import Plan

__all__ = ["Takeover"]

#: How long a run waits at the takeover for what is not compiled yet, before it compiles for itself: in seconds, and in
#: times what compiling took the longest so far. Other processes may have the cores.
_PATIENCE_SECONDS, _PATIENCE_TIMES = 60.0, 10.0


class Takeover:
    """A new plan runs as it is for a number of steps, while a copy of the process compiles it; what it leaves is the
    compiler's cache, from which the run then takes it. The number does not depend on clocks: a run that is stopped and
    goes on changes over at the same step. Mutable; owned by the session.

    Attributes:
        due_step: after which the plan runs compiled; None where nothing waits.
    """

    def __init__(self, lowering: Lowering, steps: int) -> None:
        self._lowering, self._steps = lowering, steps if lowering.compiles else 0
        self._copy: Copy | None = None
        self._waits = ""
        self.due_step: int | None = None

    def would_begin(self, before: Plan | None, plan: Plan, step: int, device_type: str) -> bool:
        """Whether a plan would run as it is first, if its budget lets it. Not the first plan, nor one that was compiled
        before."""
        if self._is_waiting(plan):
            return True
        new = before is not None and not self._lowering.knows(plan)
        return new and self._due_from(step) > step and can_copy(device_type) and _has_cache()

    def begins(self, before: Plan | None, plan: Plan, step: int, device_type: str, fits: Callable[[], bool]) -> bool:
        """Whether a plan is to run as it is first. One that comes while another waits waits no longer than that.
        `fits`: whether it keeps its budget as it is."""
        if self._is_waiting(plan):
            return True
        would, due = self.would_begin(before, plan, step, device_type), self._due_from(step)
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
        why not. `then`: what else the copy does when it has compiled them."""
        if self.due_step is None:
            return None
        if step < self.due_step:
            if self._copy is None and can_copy(device_type):
                try:
                    self._copy = Copy(lambda: _compile(slots, then))
                except OSError as error:  # no memory for it, say
                    self._steps = 0
                    self.close()
                    return f"this process cannot be copied ({error})"
            return None
        copy, took = self._copy, max((made.seconds for made in self._lowering.compiled), default=0.0)
        well = copy is None or copy.wait(_PATIENCE_SECONDS + _PATIENCE_TIMES * took)
        if not well:  # nor will the next
            self._steps = 0
        self.close()
        return "" if well else "the copy of the process that should have compiled the plan did not"

    def close(self) -> None:
        """Nothing waits any more."""
        if self._copy is not None:
            self._copy.end()
        self._copy = self.due_step = None


def _has_cache() -> bool:
    """Whether torch's compiler looks for what was compiled before."""
    from torch._inductor import config

    return bool(config.fx_graph_cache) and not config.force_disable_caches


def _compile(slots: Sequence[Slot], then: Callable[[], object]) -> None:
    """In the copy."""
    from torch._inductor import config, cpp_builder

    config.compile_threads = 1  # the processes that compile for this one are not the copy's
    _on_one_thread()
    cpp_builder.run_compile_cmd = _whole(cpp_builder.run_compile_cmd)
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


def _whole(build: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """A compiler's command whose result has its name when it is whole: a copy may be ended at any time, and what has
    the name is taken for good."""

    def call(command: str, cwd: str) -> None:
        words = shlex.split(command)
        if "-o" not in words:
            return build(command, cwd)
        place = words.index("-o") + 1
        made, target = f"{words[place]}.{os.getpid()}", words[place]
        words[place] = made
        build(shlex.join(words), cwd)
        os.replace(os.path.join(cwd, made), os.path.join(cwd, target))

    return call
