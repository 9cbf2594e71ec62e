"""From a graph, a profile, a device and a policy to a `Plan` with reasons, predictions and a proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from autoprec.devices import Device
from autoprec.errors import InfeasibleError, PolicyError
from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import evaluate, holders
from autoprec.planning.highs import smallest_peak, solve
from autoprec.planning.polish import polish
from autoprec.planning.pricing import Prices
from autoprec.planning.problem import Problem, build_problem, fixed_bytes
from autoprec.planning.reasons import Reason, Reasons, bytes_text, violation_text
from autoprec.planning.regions import fp16_regions
from autoprec.planning.roots import resolve_roots
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Choice, Evaluation, Solution
from autoprec.plans import AS_IS, Assignment, Dropped, Plan, Storage, Totals
from autoprec.policies import Policy, parse_budget
from autoprec.profiles import Profile

__all__ = [
    "best_solution",
    "fp32_totals",
    "gap_for",
    "make_plan",
    "plan_from_choice",
    "plan_of_solution",
    "problem_of",
    "resolve_budget",
]


#: Up to this many decisions a plan is proven optimal; beyond, proven within `_LARGE_GAP`.
_EXACT_DECISIONS = 60
_LARGE_GAP = 1e-3


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
    problem, fp32 = problem_of(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned)
    solution = best_solution(problem, relative_gap=relative_gap)
    return plan_of_solution(graph, profile, device, policy, problem, solution, fp32)


def problem_of(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[Problem, Totals]:
    """What `make_plan` solves, and the totals of FP32."""
    fp32 = fp32_totals(graph, profile, device, policy)
    if budget_bytes is None and (budget := parse_budget(policy.budget)) is not None:
        budget_bytes = resolve_budget(budget, graph, fp32)
    return build_problem(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned), fp32


def best_solution(problem: Problem, *, relative_gap: float | None = None) -> Solution:
    """The best choice within a gap, as in `make_plan`; `InfeasibleError` if there is none."""
    gap = gap_for(problem) if relative_gap is None else relative_gap
    solution = solve(problem, relative_gap=gap)
    if solution is None:
        raise InfeasibleError(_why_infeasible(problem, gap))
    return polish(problem, solution) if solution.gap > 0.0 else solution


def plan_of_solution(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    problem: Problem,
    solution: Solution,
    fp32: Totals,
) -> Plan:
    """The plan that a solution gives, or all-FP32 where that is as fast within what predictions err by."""
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
        Assignment(
            op=u.op,
            role=u.role,
            format=u.options[k],
            reason=why.text,
            alternatives=why.alternatives,
            dropped=_all_dropped(why, u.options, policy.formats, "nobody asks for this gradient"),
        )
        for u, k, why in zip(problem.units, choice.options, reasons.units, strict=True)
    )
    kept = dict(choice.stored)
    storages = tuple(
        Storage(
            tensor=problem.tensors[t].id,
            format=kept.get(t, AS_IS),
            reason=why.text,
            alternatives=why.alternatives,
            dropped=_all_dropped(why, problem.tensors[t].storages, policy.storage.formats, _UNREADABLE),
        )
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


#: Why a storage of the policy's is none of a tensor that has others.
_UNREADABLE = "an op that keeps the tensor cannot read it back from there, or what that costs in noise cannot be judged"


def _all_dropped(why: Reason, options: Sequence[str], wanted: Sequence[str], otherwise: str) -> tuple[Dropped, ...]:
    """Every format that the policy wants and that is no option, so that none of them is without a word."""
    told = {*options, *(d.format for d in why.dropped)}
    return (*why.dropped, *(Dropped(format=f, why=otherwise) for f in wanted if f not in told))


def _saturating(problem: Problem, choice: Choice) -> tuple[str, ...]:
    formats = [u.options[k] for u, k in zip(problem.units, choice.options, strict=True)]
    return tuple(
        t.id
        for t in problem.tensors
        if any(use.unit is not None and formats[use.unit] in t.saturates for use in t.readers)
    )


def gap_for(problem: Problem) -> float:
    """How far from the proven optimum a solver may stop: nothing for small problems, a thousandth for large ones."""
    decisions = sum(len(u.options) > 1 for u in problem.units) + len(problem.storable)
    return 0.0 if decisions <= _EXACT_DECISIONS else _LARGE_GAP


def _why_infeasible(problem: Problem, gap: float) -> str:
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
