"""What proved unstable in a run, and what follows: formats that are banned, and formats that come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from autoprec.execution.attribution import Incident
from autoprec.execution.replay import CallRecord
from autoprec.execution.slots import Slot
from autoprec.floors import Ban, Floors, Trends, Turn, Verdict
from autoprec.formats import FP16
from autoprec.graphs import Role
from autoprec.monitoring.budgets import NoiseJudge
from autoprec.monitoring.judging import Judge
from autoprec.monitoring.scaling import (
    RegionScales,
    adapted,
    gradient_ranges,
    scaled_tensors,
    summed_parameters,
)
from autoprec.observing import Observations
from autoprec.plans import KEPT, Plan
from autoprec.policies import Policy
from autoprec.profiles import Profile

__all__ = ["Stability"]


class Stability:
    """Mutable; owned by the session.

    Attributes:
        floors: what is banned, since when and how often.
        trends: of the last windows.
        gradients: (tensor, largest magnitude of its gradient), of the last window that told; scales of new plans are
            for these.
        was_noisy: whether in the last window the plan as a whole had more noise than is allowed.
    """

    def __init__(self, policy: Policy, observed: Observations) -> None:
        self._policy, self._observed = policy, observed
        self.floors, self.trends = Floors(), Trends()
        self.gradients: tuple[tuple[str, float], ...] = ()
        self.was_noisy = False

    def watches(self, plan: Plan | None) -> bool:
        """Whether windows are worth observing: there is something to lose, or a format that may come back."""
        return plan is not None and (not plan.is_identity or bool(self.floors.banned))

    def step_over(self, plan: Plan, seen: Profile) -> Turn | None:
        """An observed step is over: whether its gradients have come near to FP16's largest value in a region. That is
        not left to the end of the window: gradients grow by several octaves between two observed steps."""
        if (graph := self._observed.graph) is None:
            return None
        judge = Judge(plan, graph, seen, self._policy.monitor, scaling=self._policy.loss_scaling.mode)
        better, changes = judge.with_better_scales(near_alone=True)
        if not changes:
            return None
        before, after = RegionScales(plan, graph), RegionScales(better.plan, graph)
        self._observed.shift_window(lambda t: after.carried(t) - before.carried(t))
        return Turn(floors=self.floors, plan=better.plan, rescaled=changes)

    def window_over(self, plan: Plan | None, noise_of: Callable[[Plan, Profile], NoiseJudge | None]) -> Turn | None:
        """Judge the window that is over; what follows has begun to count. None where nothing was observed in it.
        `noise_of`: who judges the noise of a plan as a whole."""
        window, graph = self._observed.take_window(), self._observed.graph
        if plan is None or window is None or graph is None:
            return None
        limits, scales = self._policy.monitor, RegionScales(plan, graph)
        self.trends = self.trends.after(window, scales.carried)
        self.gradients = tuple((dict(self.gradients) | gradient_ranges(window, scales)).items())
        scaling, before = self._policy.loss_scaling.mode, self._observed.profile
        judge = Judge(plan, graph, window, limits, before=before, trends=self.trends, scaling=scaling)
        better, changes = judge.with_better_scales()
        noise, verdicts = noise_of(plan, window), better.verdicts()
        if verdicts:  # what is wrong with an op by itself may be the cause of the rest
            self.was_noisy = False
        else:
            verdicts = self._too_noisy(noise)

        def is_well(ban: Ban) -> bool:
            if ban.trigger == "noise_budget" and (noise is None or not noise.allows(ban)):
                return False
            return ban.role == KEPT or better.is_well(ban.op, ban.format)

        turn = self.floors.after(verdicts, is_well, limits.cooldown_windows)
        turn = replace(turn, plan=better.plan if changes else None, rescaled=changes)
        turn = replace(turn, incidents=judge.incidents(), figures=judge.figures())
        self.floors = turn.floors
        if turn.banned:
            self._observed.learn(window, self.floors.windows)
        if turn.lifted:
            standing = [b.changed for b in self.floors.bans if not b.lifted]
            self._observed.forget(min(standing, default=self.floors.windows + 1))
        return turn

    def _too_noisy(self, noise: NoiseJudge | None) -> tuple[Verdict, ...]:
        """Verdicts on the noise of the plan as a whole, in the second window in a row that has any: one batch with an
        outlier makes a window look noisier than its steps are."""
        found = () if noise is None else noise.verdicts()
        again = self.was_noisy and bool(found)
        self.was_noisy = bool(found) and not again
        return found if again else ()

    def scaled(self, plan: Plan, before: Plan) -> Plan:
        """A plan that was made from calibration, with scales for the gradients of the last window; `before` runs."""
        graph = self._observed.graph
        if graph is None or self._policy.loss_scaling.mode != "regional":
            return plan
        return adapted(plan, before, graph, self._known_gradients())

    def _known_gradients(self) -> dict[str, float]:
        """The newest of each: a sum that was made in FP32 in the last windows is known from before."""
        profile = self._observed.profile
        tensors = () if profile is None else profile.tensors
        return {t.id: t.gradients.amax for t in tensors if t.gradients is not None} | dict(self.gradients)

    def summed(self, plan: Plan | None) -> frozenset[str]:
        """Parameters whose gradients are made in FP16: the monitor looks at those."""
        graph = self._observed.graph
        return frozenset() if plan is None or graph is None else summed_parameters(plan, graph)

    def overflowed(
        self, incident: Incident, plan: Plan, calls: Iterable[tuple[CallRecord, Slot]], buffers: Mapping[int, Tensor]
    ) -> None:
        """A format overflowed in a step that was bad: of these calls."""
        self.floors = self.floors.with_ban(incident.op, incident.cause, "overflow")
        self._observed.learn_from_replay(calls, buffers, self.floors.windows)
        if incident.role != Role.OUTPUT and incident.cause == "fp16":
            self._note_overflow(incident.op, plan)

    def ban(self, op: str, format_name: str) -> None:
        """An op has left a format because of an overflow elsewhere."""
        self.floors = self.floors.with_ban(op, format_name, "overflow")

    def _note_overflow(self, op: str, plan: Plan) -> None:
        """Gradients of a region reached FP16's largest value under its scale: the next one is smaller."""
        graph = self._observed.graph
        for region in plan.regions if graph is not None else ():
            if op in region.ops:
                least = math.ldexp(FP16.max_value, -region.scale_log2)
                known = self._known_gradients()
                reached = {t: max(least, known.get(t, 0.0)) for t in scaled_tensors(region, plan, graph)}
                self.gradients = tuple((dict(self.gradients) | reached).items())
