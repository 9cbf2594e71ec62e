"""From what was observed to plans: the first one, and those after promotions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoprec.calibration.foreseeing import with_private_bytes, without_hooks
from autoprec.calibration.structure import TimingCase
from autoprec.calibration.timing import measure_casts, time_ops
from autoprec.devices import Device
from autoprec.errors import DeviceError, InfeasibleError, InputError, SolverError
from autoprec.execution.slots import Slot
from autoprec.execution.tournament import Outcome, Tournament
from autoprec.formats import format_named, is_operands_only
from autoprec.graphs import OpGraph, Role
from autoprec.monitoring.budgets import NoiseJudge
from autoprec.numerics.dtypes import native_formats
from autoprec.observing import Observations
from autoprec.planning.contest import adopt, runners
from autoprec.planning.frozen import living_bytes
from autoprec.planning.planner import ask, by_prediction, fp32_totals, propose, resolve_budget, uniform_plan
from autoprec.planning.predicting import predicted_totals
from autoprec.planning.problem import fixed_bytes, optimizer_bytes
from autoprec.planning.proposals import Proposals, Question
from autoprec.plans import AS_IS, KEPT, Assignment, Measurement, Plan, Storage
from autoprec.policies import Budget, Policy, parse_budget
from autoprec.profiles import Profile

__all__ = ["PeakOf", "Scheduler", "contest"]

#: Bytes that a step takes under a plan, above what is held before it; None where nobody knows.
PeakOf = Callable[[Plan], "int | None"]


#: Peak of an observed step in those of a plain one (python -m tests.bench: 1.04 to 1.08).
OBSERVED_FRAC = 1.1


class Scheduler:
    """Mutable; owned by the session.

    Attributes:
        policy: what was asked for.
        device: measured timings; None until they were needed.
        given: a plan that came without the profile that it was made from: what comes back is as it says.
    """

    def __init__(
        self,
        policy: Policy,
        device: Device | None,
        device_type: str,
        observed: Observations,
        *,
        given: Plan | None = None,
        fuses: bool = False,
    ) -> None:
        """`fuses`: whether plans run compiled."""
        self.policy, self.device, self.given = policy, device, given
        self._device_type, self._observed = device_type, observed
        #: On a CPU what a compiler makes of a cast takes about as long as ours.
        self._fuses = fuses and device_type == "cuda"
        #: The least that a GPU was seen to hold beside the model and its optimizer: what is not the step's.
        self._others_bytes = 1 << 62

    def _seen(self) -> tuple[dict[str, TimingCase], OpGraph, Profile]:
        """What calibration recorded; `InputError` if that is nothing."""
        seen = self._observed
        profile = seen.known
        if seen.graph is None or profile is None:
            raise InputError("nothing was observed yet: run at least one training step, or pass batches= and loss_fn=")
        return seen.cases, seen.graph, profile

    def measure_device(self) -> Device:
        """Time every distinct op of the model in the policy's formats, once; what is known is not timed again.

        Raises `InputError` if nothing was observed yet.
        """
        cases, graph, _ = self._seen()
        self.device = self._timed(cases, self.policy.formats)
        if self._observed.foreseen:
            self._observed.graph = with_private_bytes(graph, self.device)
        return self.device

    def _timed(self, cases: Mapping[str, TimingCase], formats: Iterable[str]) -> Device:
        """With timings of the ops, of formats that the device would emulate only those that a rule pins."""
        pinned = {rule.pin for rule in self.policy.rules}
        with torch.random.fork_rng(devices=cuda_devices(self._device_type)):
            native = native_formats(self._device_type)
            wanted = [f for f in formats if not is_operands_only(f) or f in native or f in pinned]
            kept = (*self.policy.storage.formats, *self.policy.storage.frozen)
            casts = measure_casts(self._device_type, (*wanted, *kept), fused=self._fuses)
            if self.device is None:
                return time_ops(cases, wanted, casts)
            _check_switches(self.device, casts.fp32_products)
            known = self.device.told_of_casts(fused=self._fuses)
            return time_ops(cases, wanted, known.extended(casts=casts.casts))

    def provisional_plan(self, slot: Slot, arguments: Sequence[Any], state_bytes: int) -> tuple[Plan | None, str]:
        """Before a graph is observed: BF16 for everything that may have it, where an observed FP32 step is predicted to
        exceed the budget's bytes or the device's memory; None where it fits, where BF16 takes no less, or where the
        policy has no BF16. And a warning: why the plan, or why none although FP32 may not fit.

        `state_bytes` is what the optimizer holds, 0 before its first step.
        """
        budget = parse_budget(self.policy.budget)
        limits = [] if budget is None or budget.bytes is None else [budget.bytes]
        if "bf16" not in self.policy.formats or (not limits and self._device_type != "cuda"):
            return None, ""
        try:
            graph, cases = self._observed.expect(slot, arguments)
            with without_hooks():
                self.device = self._timed(cases, ("fp32", "bf16"))
            graph = with_private_bytes(graph, self.device)
            if self._device_type == "cuda":
                free, _ = torch.cuda.mem_get_info()
                others = torch.cuda.memory_allocated() - graph.parameter_bytes - state_bytes
                self._others_bytes = max(0, min(others, self._others_bytes))
                limits.append(free + torch.cuda.memory_reserved() - self._others_bytes)
            state = state_bytes or optimizer_bytes(self.policy.optimizer, graph.gradient_bytes)
            graph = replace(graph, optimizer_bytes=state)
            nothing = Profile(graph_fingerprint=graph.fingerprint, steps=1, tensors=())
            rules = tuple(r for r in self.policy.rules if r.pin in (None, "fp32", "bf16"))
            policy = self.policy.replaced(formats=("fp32", "bf16"), rules=rules, storage={"formats": ()}, budget=None)
            question = ask(graph, nothing, self.device, policy)
        except Exception as error:  # an FP32 step may fit all the same
            return None, f"cannot tell whether fp32 fits, calibrating in it: {type(error).__name__}: {error}"
        need = math.ceil(OBSERVED_FRAC * question.fp32.peak_bytes)
        if need <= min(limits) or fixed_bytes(graph) >= min(limits):  # in the second case nothing helps
            return None, ""
        plan = uniform_plan(question, "bf16")
        assert plan.predicted is not None
        less = math.ceil(OBSERVED_FRAC * plan.predicted.peak_bytes)
        evidence = (
            f"an observed step may take {need} bytes in fp32 and {less} in bf16, of {min(limits)}: calibrating in"
        )
        return (plan, f"{evidence} bf16") if less < need else (None, f"{evidence} fp32")

    def first_plan(
        self, measured_optimizer_bytes: int, tournament: Tournament, banned: frozenset[tuple[str, ...]] = frozenset()
    ) -> Plan:
        """Plan from what calibration recorded, and let the proposals run against each other. `banned` as in
        `solve_again`; `measured_optimizer_bytes` is 0 where no optimizer was seen: then the policy's name for one
        counts.

        Raises `InputError` if nothing was observed yet, `PolicyError` for a rule that matches nothing,
        `InfeasibleError` if no plan keeps the budgets.
        """
        self.measure_device()
        _, graph, _ = self._seen()
        state = measured_optimizer_bytes or optimizer_bytes(self.policy.optimizer, graph.gradient_bytes)
        graph = self._observed.graph = replace(graph, optimizer_bytes=state)
        self.policy.check_against(graph)
        proposals = propose(self._question(None, banned=banned))
        if tournament.empty or (proposals.question.budget_bytes is None and len(proposals.all) == 1):
            return by_prediction(proposals)
        return contest(proposals, tournament)

    def _question(
        self,
        budget_bytes: int | None,
        living: Mapping[str, str] | None = None,
        banned: frozenset[tuple[str, ...]] = frozenset(),
    ) -> Question:
        _, graph, profile = self._seen()
        assert self.device is not None
        return ask(graph, profile, self.device, self.policy, budget_bytes=budget_bytes, banned=banned, living=living)

    def bytes_of(self, budget: Budget | None) -> int | None:
        """A budget in bytes."""
        _, graph, profile = self._seen()
        assert self.device is not None
        return (
            None
            if budget is None
            else resolve_budget(budget, graph, fp32_totals(graph, profile, self.device, self.policy))
        )

    def solve_again(
        self, before: Plan, budget_bytes: int | None, banned: frozenset[tuple[str, ...]], peak_of: PeakOf
    ) -> tuple[Plan, str]:
        """The plan without the (op id, format) and (op id, format, role) that may not be, and "" or by how much it
        breaks the budget. Where its peak is known it is made again for less while that breaks the budget.

        Raises `InfeasibleError` if no plan keeps the budget by its prediction.
        """
        question = self._question(budget_bytes, before.living, banned)
        fastest = None if before.adopted is None else before.adopted.name
        proposals = propose(question, advise=False)
        plan, limit = by_prediction(proposals, prefer=fastest), question.budget_bytes
        excess = self.excess_bytes(plan, peak_of)
        tried = [(excess, plan)]
        while limit is not None and excess > 0 and len(tried) <= _TIGHTENINGS and plan.predicted is not None:
            told = min(proposals.problem.budget_bytes or limit, plan.predicted.peak_bytes)
            if (smaller := _smaller(question, told, excess)) is None:
                break
            proposals, plan = smaller, replace(by_prediction(smaller, prefer=fastest), budget_bytes=limit)
            excess = self.excess_bytes(plan, peak_of)
            tried.append((excess, plan))
        excess, plan = min(tried, key=lambda found: max(0, found[0]))
        return plan, "" if excess <= 0 else _exceeds(excess)

    def noise_of(self, plan: Plan, window: Profile) -> NoiseJudge | None:
        """Who judges the noise of a plan under the ranges of a window; None without a calibration."""
        graph, known = self._observed.graph, self._observed.known
        if graph is None or known is None or self.device is None:
            return None
        return NoiseJudge(plan, graph, self.device, self.policy, known=known, window=window)

    def excess_bytes(self, plan: Plan, peak_of: PeakOf) -> int:
        """By how much a plan's peak breaks its budget; 0 where it has none, or where the peak is not known: the plan
        then stands by its prediction."""
        limit = plan.budget_bytes
        if self._observed.graph is None or limit is None or (peak := peak_of(plan)) is None:
            return 0
        return self.beside_bytes(plan) + peak - limit

    def beside_bytes(self, plan: Plan) -> int:
        """Bytes that are there from the beginning of a step to its end. The graph was observed."""
        graph = self._observed.graph
        assert graph is not None
        living = ((graph.tensor_by_id[t].numel, f) for t, f in plan.living.items())
        return fixed_bytes(graph) + sum(living_bytes(n, f) - 4 * n for n, f in living)

    def within_budget(self, plan: Plan, banned: frozenset[tuple[str, ...]], peak_of: PeakOf) -> tuple[Plan, str]:
        """The plan itself if it keeps its budget, one that is made again for less if not, and "" or by how much that
        breaks it, too."""
        excess = self.excess_bytes(plan, peak_of)
        if excess <= 0 or self._observed.profile is None or self.device is None:
            return plan, ""
        try:
            return self.solve_again(plan, plan.budget_bytes, banned, peak_of)
        except (InfeasibleError, SolverError):
            return plan, _exceeds(excess)

    def plan_again(self, before: Plan, banned: frozenset[tuple[str, ...]], peak_of: PeakOf) -> tuple[Plan, str]:
        """The plan without what may not be, and "" or why it does not keep the budgets: that runs in FP32 then, with
        what else reads or makes numbers that its format does not hold, and all else stays."""
        try:
            if self._observed.profile is None or self.device is None:
                raise InfeasibleError("the plan came from a file, without the profile that it was made from")
            return self.solve_again(before, before.budget_bytes, banned, peak_of)
        except (InfeasibleError, SolverError) as error:  # whatever it is, the run goes on
            told = f"what may not keep its format runs in fp32 outside the budgets: {error}"
            plan = self.given or before
            return self._told_again(replace(_without(plan, banned | self._beyond(plan)), binding=told)), told

    def _told_again(self, plan: Plan) -> Plan:
        """The plan with what is predicted of it, as far as anybody can tell."""
        graph, known = self._observed.graph, self._observed.known
        if graph is None or known is None or self.device is None:
            return replace(plan, predicted=None)
        return replace(plan, predicted=predicted_totals(plan, graph, known, self.device, self.policy))

    def _beyond(self, plan: Plan) -> frozenset[tuple[str, ...]]:
        """(op, format) of ops whose numbers, as far as they are known, are beyond the format that the plan has."""
        graph, known = self._observed.graph, self._observed.known
        if graph is None or known is None:
            return frozenset()
        found = set[tuple[str, ...]]()
        for op in graph.ops:
            fmt = format_named(plan.format_of.get((op.id, Role.OUTPUT), "fp32"))
            tensors = {graph.seen_as(t, known.tensor_by_id) for t in (*op.inputs, *op.outputs)} - {*plan.saturating}
            seen = (known.tensor_by_id[t].values.amax for t in tensors if t in known.tensor_by_id)
            if not fmt.scaled and max(seen, default=0.0) > fmt.max_value:
                found.add((op.id, fmt.name))
        return frozenset(found)


#: How often a plan whose measured peak breaks the budget is made again for a smaller one.
_TIGHTENINGS = 3

#: What a measured peak may be above the budget where no plan does better.
_BUDGET_SLACK = 1.02


def contest(proposals: Proposals, tournament: Tournament) -> Plan:
    """Run the proposals. Where the solver's plan proves to break the budget, it is made again for as much less; where
    all of those do, the one that breaks it least stands."""
    budget, tried = proposals.question.budget_bytes, []
    while True:
        plans = runners(proposals)
        outcomes = tournament.run(plans)
        measured = _measured(proposals, outcomes, _exact(proposals, plans, outcomes, tournament))
        excess = _excess_bytes(proposals, measured, budget)
        tried.append((excess, proposals, measured, _told(proposals, outcomes)))
        if excess <= 0 or math.isinf(excess) or len(tried) > _TIGHTENINGS:
            break
        assert proposals.problem.budget_bytes is not None
        # Below what was predicted of it, or it would be proposed again.
        predicted_bytes = min(proposals.problem.budget_bytes, proposals.best.solution.evaluation.peak_bytes)
        if (smaller := _smaller(proposals.question, predicted_bytes, int(excess))) is None:
            break
        proposals = smaller
    _, proposals, measured, told = min(tried, key=lambda found: max(0, found[0]))
    plan = adopt(proposals, measured, budget, told)
    found, predicted = measured[proposals.best.name], proposals.best.solution.evaluation
    if budget is not None and plan.adopted is not None and plan.adopted.verdict:
        if found.failure or found.peak_bytes > _BUDGET_SLACK * budget:
            raise InfeasibleError(
                f"no plan fits the budget of {budget} bytes: {found.failure or f'{found.peak_bytes} were measured'}"
                f" for the one that was predicted to take {predicted.peak_bytes}"
            )
    return plan


def _exceeds(excess: int) -> str:
    return f"its peak exceeds the budget by {excess} bytes, and so does that of every other plan that was tried"


def _smaller(question: Question, told: int, excess: int) -> Proposals | None:
    """Proposals for as much less than `told`, or, where that is not to be had, for the least there is; None if that is
    no less."""
    try:
        return propose(question.under(told - excess), advise=False)
    except InfeasibleError as error:
        if error.smallest_bytes is None or error.smallest_bytes >= told:
            return None
        return propose(question.under(error.smallest_bytes), advise=False)


def _excess_bytes(proposals: Proposals, measured: Mapping[str, Measurement], budget: int | None) -> float:
    """By how much the solver's plan breaks the budget; infinite if it failed."""
    found = measured[proposals.best.name]
    if budget is None:
        return 0
    return math.inf if found.failure else found.peak_bytes - budget


def _exact(
    proposals: Proposals, plans: Mapping[str, Plan], outcomes: Mapping[str, Outcome], tournament: Tournament
) -> Outcome | None:
    """The model as it was written: a contestant, or, where rules let none be that, run beside them. None where it would
    not fit."""
    if (name := next((name for name, plan in plans.items() if plan.is_identity), None)) is not None:
        return outcomes[name]
    budget, fp32 = proposals.question.budget_bytes, proposals.question.fp32
    return tournament.as_written() if budget is None or fp32.peak_bytes <= budget else None


def _measured(proposals: Proposals, outcomes: Mapping[str, Outcome], plain: Outcome | None) -> dict[str, Measurement]:
    """Outcomes beside the model's as it was written, in the units of the plan's totals."""
    if plain is None or plain.failure:
        plain = None
    beside = _beside(proposals)
    predicted = {p.name: p.solution.evaluation.rows for p in proposals.all}
    return {name: _measurement(proposals, o, plain, beside[name], predicted[name]) for name, o in outcomes.items()}


def _told(proposals: Proposals, outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """Peaks as the compiler's code tells them, in the units of the plan's totals."""
    beside = _beside(proposals)
    told = {name: o.predicted_bytes for name, o in outcomes.items()}
    return {name: beside[name] + size for name, size in told.items() if size is not None}


def _beside(proposals: Proposals) -> dict[str, int]:
    """Bytes that a step under each proposal holds from its beginning to its end."""
    problem = proposals.problem
    return {p.name: problem.fixed_bytes + problem.frozen_bytes(p.solution.choice.options) for p in proposals.all}


#: No rounding that was predicted makes a gradient that is off by more than so much of itself and by more than so many
#: times what is predicted: somebody computes something else (docs/measurements/noise.md).
_OFF_FRAC, _OFF_TIMES = 0.5, 10.0


def _measurement(
    proposals: Proposals, found: Outcome, plain: Outcome | None, beside: int, predicted: Sequence[float]
) -> Measurement:
    """`predicted`: E‖δ∇W‖² by row."""
    if found.failure:
        return Measurement(failure=found.failure)
    change = ratio = None
    if plain is not None:
        change = found.output - plain.output
        weights = proposals.question.profile.weight_by_fqn
        squares = [0.0]
        for row, expected in zip(proposals.problem.rows, predicted, strict=True):
            a, b = found.gradients.get(row.weight), plain.gradients.get(row.weight)
            if a is not None and b is not None and (energy := float(b.square().sum())) > 0.0:
                relative = float((a - b).square().sum()) / energy
                error = relative * weights[row.weight].energy
                if relative > _OFF_FRAC**2 and error > _OFF_TIMES**2 * expected:
                    return Measurement(failure=_off(row.weight, relative, error, expected))
                squares.append(error / row.reference)
        ratio = math.sqrt(max(squares))
    return Measurement(
        seconds=found.seconds,
        ratio=found.ratio,
        ratio_margin=found.ratio_margin,
        peak_bytes=beside + found.peak_bytes,
        loss_change=change,
        gradient_ratio=ratio,
    )


def _off(weight: str, relative: float, error: float, expected: float) -> str:
    times = f"{math.sqrt(error / expected):.0f} times what" if expected > 0.0 else "where nothing"
    return f"the gradient of {weight} is off by {math.sqrt(relative):.2g} of itself, {times} is predicted of rounding"


def _check_switches(device: Device, now: str) -> None:
    """`DeviceError` if FP32 is another arithmetic now than the one that was timed."""
    if device.source == "measured" and device.fp32_products not in ("", now):
        raise DeviceError(
            f"device {device.name!r} was timed with fp32 products in {device.fp32_products}, and torch computes them in"
            f" {now} here: time again (leave the device out), or set torch.set_float32_matmul_precision and the"
            " fp32_precision of torch.backends as they were then"
        )


def cuda_devices(device_type: str) -> list[int]:
    """The device whose random state must be kept, for `torch.random.fork_rng`."""
    return [torch.cuda.current_device()] if device_type == "cuda" else []


def _without(plan: Plan, banned: frozenset[tuple[str, ...]]) -> Plan:
    """The plan with banned (op, format) and (op, format, role) in FP32, outside every region, and (tensor, format,
    "kept") kept as they are. What was predicted of the plan does not hold of this one."""

    def fix(a: Assignment) -> Assignment:
        is_banned = (a.op, a.format) in banned or (a.op, a.format, str(a.role)) in banned
        return replace(a, format="fp32", reason="promoted") if is_banned else a

    def keep(s: Storage) -> Storage:
        return replace(s, format=AS_IS, reason="promoted") if (s.tensor, s.format, KEPT) in banned else s

    assignments = tuple(fix(a) for a in plan.assignments)
    stay = {a.op for a in assignments if a.format == "fp16"}  # in any role: its gradients carry the scale
    kept = [(r, tuple(op for op in r.ops if op in stay)) for r in plan.regions]
    regions = tuple(replace(r, ops=ops) for r, ops in kept if ops)
    storages = tuple(map(keep, plan.storages))
    made = replace(plan, assignments=assignments, storages=storages, regions=regions)
    return made if made == plan else replace(made, gap=0.0, memory=())
