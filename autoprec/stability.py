"""What proved unstable in a run, and what follows: formats that are banned, and formats that come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from autoprec.execution.replay import CallRecord
from autoprec.execution.slots import Slot
from autoprec.floors import Floors, Trends, Turn
from autoprec.monitoring.judging import Judge
from autoprec.observing import Observations
from autoprec.plans import Plan
from autoprec.policies import Policy

__all__ = ["Stability"]


class Stability:
    """Mutable; owned by the session.

    Attributes:
        floors: what is banned, since when and how often.
        trends: of the last windows.
    """

    def __init__(self, policy: Policy, observed: Observations) -> None:
        self._policy, self._observed = policy, observed
        self.floors, self.trends = Floors(), Trends()

    def watches(self, plan: Plan | None) -> bool:
        """Whether windows are worth observing: there is something to lose, or a format that may come back."""
        return plan is not None and (not plan.is_identity or bool(self.floors.banned))

    def window_over(self, plan: Plan | None) -> Turn | None:
        """Judge the window that is over; what follows has begun to count. None where nothing was observed in it."""
        window, graph = self._observed.take_window(), self._observed.graph
        if plan is None or window is None or graph is None:
            return None
        limits, self.trends = self._policy.monitor, self.trends.after(window)
        before, gradients = self._observed.profile, self._policy.loss_scaling.mode != "global"
        judge = Judge(plan, graph, window, limits, before=before, trends=self.trends, gradients=gradients)
        turn = self.floors.after(judge.verdicts(), judge.is_well, limits.cooldown_windows)
        turn = replace(turn, incidents=judge.incidents(), figures=judge.figures())
        self.floors = turn.floors
        if turn.banned:
            self._observed.learn(window, self.floors.windows)
        if turn.lifted:
            standing = [b.changed for b in self.floors.bans if not b.lifted]
            self._observed.forget(min(standing, default=self.floors.windows + 1))
        return turn

    def overflowed(
        self, op: str, format_name: str, calls: Iterable[tuple[CallRecord, Slot]], buffers: Mapping[int, Tensor]
    ) -> None:
        """A format overflowed in a step that was bad: of these calls."""
        self.floors = self.floors.with_ban(op, format_name, "overflow")
        self._observed.learn_from_replay(calls, buffers, self.floors.windows)
