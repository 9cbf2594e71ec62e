"""Whether the noise of a plan keeps the policy's budget under the ranges of a window, and which ops are to blame."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cached_property

from autoprec.devices import Device
from autoprec.errors import InfeasibleError
from autoprec.floors import Ban, Verdict
from autoprec.graphs import OpGraph, Role
from autoprec.monitoring.renewing import renewed
from autoprec.monitoring.scaling import RegionScales
from autoprec.planning.evaluator import Step
from autoprec.planning.problem import build_problem
from autoprec.planning.solutions import Choice
from autoprec.planning.values import Problem
from autoprec.plans import AS_IS, KEPT, RECOMPUTED, Plan, Storage, is_parameter
from autoprec.policies import Policy
from autoprec.profiles import Profile

__all__ = ["NoiseJudge"]

#: What stands for the loss among weights.
_LOSS = ""

#: A format whose roundings are a smaller part of the noise than this is not to blame.
_LEAST_PART = 0.01


class NoiseJudge:
    """The noise of a plan, predicted as when it was made, with the sensitivities of calibration and the ranges of a
    window. `known`: what plans are made from."""

    def __init__(
        self, plan: Plan, graph: OpGraph, device: Device, policy: Policy, *, known: Profile, window: Profile
    ) -> None:
        self.plan, self.graph, self.device, self.policy = plan, graph, device, policy
        self._known, self._window = known, window

    def verdicts(self) -> tuple[Verdict, ...]:
        """What must not be, so that the noise is within what the policy allows: formats of ops, and of kept tensors. Of
        each weight's gradient, or the loss, that is above that by half of `monitor.sqnr_drop_db`, and above
        calibration's by as much: those whose roundings are the largest parts.

        Formats whose steps are in proportion to the numbers, whatever these are, have the noise that they had.
        """
        formats = {key[1] for key in self._narrow()}
        if formats <= {"bf16", "tf32"} or self._now is None:
            return ()
        slack = 10.0 ** (self.policy.monitor.sqnr_drop_db / 20.0)
        found, wide, now = list[Verdict](), frozenset[tuple[str, ...]](), self._levels(frozenset())
        while (worst := self._worst(now, slack)) is not None:
            without = {key: self._levels(wide | {key})[worst] for key in self._narrow() if key not in wide}
            largest = [k for k, left in without.items() if left <= now[worst] * (1.0 - _LEAST_PART)]
            for key in sorted(largest, key=without.__getitem__):
                wide |= {key}
                before, now = now[worst], self._levels(wide)
                found.append(self._verdict(key, worst, before, now[worst]))
                if self._worst({worst: now[worst]}, slack) is None:
                    break
            if not largest:
                break  # what is left comes of roundings that every plan has
        return tuple(found)

    def _verdict(self, key: tuple[str, ...], worst: str, before: float, after: float) -> Verdict:
        """That something must not be (`Ban.key`), by the levels of what is the furthest beyond its limit."""
        op, fmt, *kept = key
        told = (
            f"noise of {_name(worst)} {math.sqrt(before):.3g} of what the policy allows, and"
            f" {math.sqrt(self._usual[worst]):.3g} in calibration; {math.sqrt(after):.3g} without"
            f" {'keeping it in ' if kept else ''}{fmt} here"
        )
        role = kept[0] if kept else str(self._role(op, fmt))
        return Verdict(op=op, format=fmt, trigger="noise_budget", evidence=told, role=role)

    def allows(self, ban: Ban) -> bool:
        """Whether the noise would be within what the policy allows, or no more than in calibration, without the ban: if
        all roles of the op had the format, or the tensor was kept in it."""
        if ban.role == KEPT:
            rest = (s for s in self.plan.storages if s.tensor != ban.op)
            plan = replace(self.plan, storages=(*rest, Storage(tensor=ban.op, format=ban.format, reason="")))
        else:
            changed = (replace(a, format=ban.format) if a.op == ban.op else a for a in self.plan.assignments)
            plan = replace(self.plan, assignments=tuple(changed))
        return self._now is not None and self._worst(_levels(self._now, plan), 1.0) is None

    @cached_property
    def _usual(self) -> dict[str, float]:
        return _levels(self._problem(self._known), self.plan)

    @cached_property
    def _now(self) -> Problem | None:
        """None where a rule's format does not hold the window's values: that is another verdict."""
        carried = RegionScales(self.plan, self.graph).carried
        try:
            return self._problem(renewed(self._known, self._window, self.graph, carried))
        except InfeasibleError:
            return None

    def _problem(self, profile: Profile) -> Problem:
        return build_problem(self.graph, profile, self.device, self.policy, living=self.plan.living)

    def _levels(self, wide: frozenset[tuple[str, ...]]) -> dict[str, float]:
        assert self._now is not None
        return _levels(self._now, self.plan, wide)

    def _worst(self, now: Mapping[str, float], slack: float) -> str | None:
        """What is the furthest beyond so many times the limit, or calibration's; None if nothing is."""
        least = slack * (1.0 + 1e-9)
        beyond = {name: level for name, level in now.items() if level > least}  # the usual levels take as long again
        over = {name: level / max(1.0, self._usual.get(name, math.inf)) for name, level in beyond.items()}
        worst = max(over, key=over.__getitem__, default=None)
        return None if worst is None or over[worst] <= least else worst

    def _narrow(self) -> list[tuple[str, ...]]:
        """What can be banned (`Ban.key`)."""
        kept = ((t, f, KEPT) for t, f in self.plan.storage_of.items() if f not in (AS_IS, RECOMPUTED))
        formats = dict.fromkeys((op, f) for (op, _), f in self.plan.format_of.items() if f != "fp32")
        return [*formats, *(key for key in kept if not is_parameter(key[0]))]

    def _role(self, op: str, fmt: str) -> Role:
        return next(role for role in Role if self.plan.format_of.get((op, role)) == fmt)


class _Step(Step):
    """A step under a plan, whatever the problem offers, but without what `wide` bans (`Ban.key`)."""

    def __init__(self, problem: Problem, plan: Plan, wide: Container[tuple[str, ...]]) -> None:
        kept = ((i, t, plan.storage_of.get(t.id, AS_IS)) for i, t in enumerate(problem.tensors))
        stored = frozenset((i, f) for i, t, f in kept if f in t.storages and (t.id, f, KEPT) not in wide)
        super().__init__(problem, Choice(options=(0,) * len(problem.units), stored=stored))
        decided = {**plan.format_of, **{(t, Role.OUTPUT): f for t, f in plan.living.items()}}
        formats = [(u.op, decided.get((u.op, u.role), "fp32")) for u in problem.units]
        self._formats = ["fp32" if pair in wide else pair[1] for pair in formats]

    def format(self, unit: int | None) -> str:
        """See `Step`."""
        return "fp32" if unit is None else self._formats[unit]


def _levels(problem: Problem, plan: Plan, wide: Container[tuple[str, ...]] = ()) -> dict[str, float]:
    """Predicted variance in relation to its limit: of each weight's gradient, and of the loss."""
    step = _Step(problem, plan, wide)
    found = {row.weight: v / row.limit for row, v in zip(problem.rows, step.rows(), strict=True) if row.limit > 0.0}
    return found | ({_LOSS: step.loss_variance() / problem.loss_limit} if problem.loss_limit else {})


def _name(weight: str) -> str:
    return "the loss" if weight == _LOSS else f"the gradient of {weight}"
