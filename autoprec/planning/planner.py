"""From a graph, a profile, a device and a policy to a `Plan` with reasons, predictions and a proof."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from autoprec.devices import Device
from autoprec.errors import InfeasibleError, PolicyError
from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import evaluate, holders
from autoprec.planning.highs import smallest_peak
from autoprec.planning.polish import polish
from autoprec.planning.pricing import Prices
from autoprec.planning.problem import Problem, build_problem, fixed_bytes
from autoprec.planning.reasons import Reasons, bytes_text, violation_text
from autoprec.planning.regions import fp16_regions
from autoprec.planning.roots import resolve_roots
from autoprec.planning.solvers import LARGE, decisions_count, gap_for, solve
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Choice, Evaluation, Solution
from autoprec.plans import AS_IS, Assignment, Plan, Storage, Totals
from autoprec.policies import Policy, parse_budget
from autoprec.profiles import Profile

__all__ = ["fp32_totals", "make_plan", "plan_from_choice", "resolve_budget"]


class BudgetLike(Protocol):
    """Bytes, or a percentage of the part that precision can change."""

    @property
    def bytes(self) -> int | None:
        """Bytes, or None."""

    @property
    def percent(self) -> float | None:
        """Percent, or None."""


def totals_of(found: Evaluation) -> Totals:
    """The figures of an evaluation that a plan carries."""
    return Totals(
        seconds=found.seconds,
        saved_bytes=found.saved_bytes,
        peak_bytes=found.peak_bytes,
        loss_sigma=found.loss_sigma,
        gradient_ratio=found.gradient_ratio,
    )


def fp32_totals(graph: OpGraph, profile: Profile, device: Device, policy: Policy) -> Totals:
    """Predicted totals of the model as it was written: all FP32, saved tensors as they are."""
    plain = policy.replaced(formats=("fp32",), rules=(), budget=None, storage={"formats": ()})
    problem = build_problem(graph, profile, device, plain)
    return totals_of(evaluate(problem, uniform_choice(problem, "fp32")))


def resolve_budget(budget: BudgetLike, graph: OpGraph, fp32: Totals) -> int:
    """A budget in bytes. A percentage is of the part that precision can change: fixed + percent·(FP32 peak − fixed)."""
    if budget.bytes is not None:
        return budget.bytes
    if budget.percent is None:
        raise PolicyError("a budget needs bytes or a percentage")
    fixed = fixed_bytes(graph)
    return fixed + math.floor(budget.percent / 100.0 * (fp32.peak_bytes - fixed))


def make_plan(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, str]] = frozenset(),
    relative_gap: float | None = None,
) -> Plan:
    """The best plan that keeps the noise limits and the budget (the policy's, unless `budget_bytes` is given).

    `banned` holds (op id, format) pairs that proved unstable. `relative_gap` is how far from the proven optimum the
    solver may stop: by default 0 for small models and a thousandth for large ones (timings are not measured more
    finely); the plan carries the gap that was reached. `InfeasibleError` with the smallest feasible budget if there is
    no such plan.
    """
    fp32 = fp32_totals(graph, profile, device, policy)
    if budget_bytes is None and (budget := parse_budget(policy.budget)) is not None:
        budget_bytes = resolve_budget(budget, graph, fp32)
    problem = build_problem(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned)
    gap = gap_for(problem) if relative_gap is None else relative_gap
    solution = solve(problem, relative_gap=gap)
    if solution is None:
        raise InfeasibleError(_why_infeasible(problem, gap))
    if solution.gap > 0.0 and decisions_count(problem) <= LARGE:
        solution = polish(problem, solution)
    earned = _earned(problem, solution) if policy.objective == "time" else solution
    plan = plan_from_choice(graph, profile, device, policy, problem, earned, fp32)
    if earned is solution:
        return plan
    gain = 1.0 - solution.evaluation.seconds / earned.evaluation.seconds
    why = f"the fastest plan gains {gain:.1%} of the predicted time, less than predictions err by: fp32 stays"
    return replace(plan, binding=why)


#: A predicted gain below this share of a step's seconds does not count: predicted and measured ratios to FP32 of small
#: models differed by up to that much (docs/measurements/demo.md).
_TIME_ERROR_FRAC = 0.05


def _earned(problem: Problem, solution: Solution) -> Solution:
    """The solution, or all-FP32 where that keeps every limit and is as fast within what predictions err by."""
    choice = uniform_choice(problem, "fp32")
    plain = evaluate(problem, choice)
    if not plain.feasible or solution.evaluation.seconds < (1.0 - _TIME_ERROR_FRAC) * plain.seconds:
        return solution
    if choice == solution.choice:
        return solution
    return Solution(choice=choice, evaluation=plain, bound=solution.bound)


def plan_from_choice(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    problem: Problem,
    solution: Solution,
    fp32: Totals,
) -> Plan:
    """A solution of a problem as a `Plan`."""
    reasons = Reasons(problem, solution)
    choice = solution.choice
    assignments = tuple(
        Assignment(op=u.op, role=u.role, format=u.options[k], reason=why)
        for u, k, why in zip(problem.units, choice.options, reasons.units, strict=True)
    )
    kept = dict(choice.stored)
    storages = tuple(
        Storage(tensor=problem.tensors[t].id, format=kept.get(t, AS_IS), reason=why)
        for t, why in reasons.storages.items()
    )
    roots = resolve_roots(graph)
    prices = Prices(graph, roots, profile, policy)
    needed = {(u.op, u.role): u.options[k] for u, k in zip(problem.units, choice.options, strict=True) if u.needed}
    scaled = policy.loss_scaling.mode == "regional"
    return Plan(
        assignments=assignments,
        storages=storages,
        regions=fp16_regions(graph, roots, prices, needed) if scaled else (),
        saturating=_saturating(problem, choice),
        predicted=totals_of(solution.evaluation),
        predicted_fp32=fp32,
        budget_bytes=problem.budget_bytes,
        gap=solution.gap,
        binding=reasons.binding,
        policy=policy.name,
        graph_fingerprint=graph.fingerprint,
        device=device.name,
    )


def _saturating(problem: Problem, choice: Choice) -> tuple[str, ...]:
    formats = [u.options[k] for u, k in zip(problem.units, choice.options, strict=True)]
    return tuple(
        t.id
        for t in problem.tensors
        if any(use.unit is not None and formats[use.unit] in t.saturates for use in t.readers)
    )


def _why_infeasible(problem: Problem, gap: float) -> str:
    if decisions_count(problem) > LARGE:
        narrow = evaluate(problem, uniform_choice(problem, "bf16"))
        return (
            f"no plan keeps the noise limits and the budget of {problem.budget_bytes} bytes; with every op in bf16 as"
            f" far as allowed, the peak is {narrow.peak_bytes} bytes ({bytes_text(narrow.peak_bytes)})."
        )
    smallest = smallest_peak(replace(problem, budget_bytes=None), relative_gap=gap)
    if smallest is None:
        widest = Choice(options=(0,) * len(problem.units))
        broken = [violation_text(v) for v in evaluate(replace(problem, budget_bytes=None), widest).violations]
        return (
            "no plan keeps the noise limits, whatever the budget: even with every op in its widest allowed format "
            + ("; ".join(broken[:3]) or "the program has no solution")
            + ". Allow fp32 there, or raise noise.gradient or noise.loss."
        )
    peak, moment = smallest.evaluation.peak_bytes, smallest.evaluation.peak_moment
    held = ", ".join(f"{what} {bytes_text(size)}" for what, size in holders(problem, smallest.choice, moment))
    return (
        f"no plan fits the budget of {problem.budget_bytes} bytes; the smallest feasible budget is {peak} bytes"
        f" ({bytes_text(peak)}). It is held up by the {problem.moment_name(moment)}: {bytes_text(problem.fixed_bytes)}"
        f" of parameters, gradients, optimizer state and inputs{', ' if held else ''}{held}."
    )
