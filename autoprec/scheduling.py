"""From what was observed to plans: the first one, and those after promotions."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoprec.calibration.structure import TimingCase
from autoprec.calibration.timing import measure_casts, time_ops
from autoprec.devices import Device
from autoprec.errors import InfeasibleError, InputError
from autoprec.graphs import OpGraph
from autoprec.monitoring.judging import Verdict, judge
from autoprec.observing import Observations
from autoprec.planning.planner import make_plan
from autoprec.planning.problem import optimizer_bytes
from autoprec.plans import Assignment, Plan
from autoprec.policies import Policy
from autoprec.profiles import Profile

__all__ = ["Scheduler"]


class Scheduler:
    """Mutable; owned by the session.

    Attributes:
        policy: what was asked for.
        device: measured timings; None until they were needed.
        banned: (op id, format) pairs that proved unstable.
    """

    def __init__(self, policy: Policy, device: Device | None, device_type: str, observed: Observations) -> None:
        self.policy, self.device = policy, device
        self.banned: set[tuple[str, str]] = set()
        self._device_type, self._observed = device_type, observed

    def _seen(self) -> tuple[dict[str, TimingCase], OpGraph, Profile]:
        """What calibration recorded; `InputError` if that is nothing."""
        seen = self._observed
        if seen.graph is None or seen.profile is None:
            raise InputError("nothing was observed yet: run at least one training step, or pass batches= and loss_fn=")
        return seen.cases, seen.graph, seen.profile

    def measure_device(self) -> Device:
        """Time every distinct op of the model in the policy's formats, once; what is known is not timed again.

        Raises `InputError` if nothing was observed yet.
        """
        cases, _, _ = self._seen()
        with torch.random.fork_rng(devices=cuda_devices(self._device_type)):
            known = self.device if self.device is not None else measure_casts(self._device_type)
            self.device = time_ops(cases, self.policy.formats, known)
        return self.device

    def first_plan(self, measured_optimizer_bytes: int) -> Plan:
        """Plan from what calibration recorded. `measured_optimizer_bytes` is 0 where no optimizer was seen: then the
        policy's name for one counts.

        Raises `InputError` if nothing was observed yet, `PolicyError` for a rule that matches nothing,
        `InfeasibleError` if no plan keeps the budgets.
        """
        device = self.measure_device()
        _, graph, profile = self._seen()
        state = measured_optimizer_bytes or optimizer_bytes(self.policy.optimizer, graph.gradient_bytes)
        graph = self._observed.graph = replace(graph, optimizer_bytes=state)
        self.policy.check_against(graph)
        return make_plan(graph, profile, device, self.policy, banned=frozenset(self.banned))

    def unstable(self, plan: Plan, window: Profile) -> tuple[Verdict, ...]:
        """What must leave its format, by the ranges of a window. They are remembered for planning again."""
        if self._observed.graph is None:
            return ()
        verdicts = judge(plan, self._observed.graph, window, self.policy.monitor)
        if verdicts:
            self._observed.learn(window)
        return verdicts

    def plan_again(self, before: Plan) -> tuple[Plan, str]:
        """The plan without what was banned, and "" or why it does not keep the budgets: the promoted ops then run in
        FP32 and all else stays."""
        graph, profile = self._observed.graph, self._observed.profile
        try:
            if graph is None or profile is None or self.device is None:
                raise InfeasibleError("the plan came from a file, without the profile that it was made from")
            plan = make_plan(
                graph,
                profile,
                self.device,
                self.policy,
                budget_bytes=before.budget_bytes,
                banned=frozenset(self.banned),
            )
        except InfeasibleError as error:
            return _without(before, self.banned), f"the promoted ops run in fp32 outside the budgets: {error}"
        return plan, ""


def cuda_devices(device_type: str) -> list[int]:
    """The device whose random state must be kept, for `torch.random.fork_rng`."""
    return [torch.cuda.current_device()] if device_type == "cuda" else []


def _without(plan: Plan, banned: set[tuple[str, str]]) -> Plan:
    """The plan with banned (op, format) pairs in FP32, outside every region."""

    def fix(a: Assignment) -> Assignment:
        return replace(a, format="fp32", reason="promoted") if (a.op, a.format) in banned else a

    left = {op for op, fmt in banned if fmt == "fp16"}
    kept = [(r, tuple(op for op in r.ops if op not in left)) for r in plan.regions]
    regions = tuple(replace(r, ops=ops) for r, ops in kept if ops)
    return replace(plan, assignments=tuple(fix(a) for a in plan.assignments), regions=regions)
