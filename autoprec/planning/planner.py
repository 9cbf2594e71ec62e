"""From a graph, a profile, a device and a policy to a `Plan` with reasons, predictions and a proof."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from autoprec.devices import Device
from autoprec.errors import InfeasibleError, PolicyError
from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import evaluate, holders
from autoprec.planning.highs import smallest_peak
from autoprec.planning.polish import polish
from autoprec.planning.problem import Problem, build_problem, fixed_bytes
from autoprec.planning.proposals import Proposals, rivals, totals_of
from autoprec.planning.reasons import bytes_text, violation_text
from autoprec.planning.relaxing import what_to_change
from autoprec.planning.solvers import LARGE, decisions_count, gap_for, solve
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Choice, Solution
from autoprec.plans import Plan, Totals
from autoprec.policies import Policy, parse_budget
from autoprec.profiles import Profile

__all__ = [
    "best_solution",
    "by_prediction",
    "fp32_totals",
    "make_plan",
    "problem_of",
    "proposals_of",
    "propose",
    "resolve_budget",
]


class BudgetLike(Protocol):
    """Bytes, or a percentage of the part that precision can change."""

    @property
    def bytes(self) -> int | None:
        """Bytes, or None."""

    @property
    def percent(self) -> float | None:
        """Percent, or None."""


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


def propose(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, str]] = frozenset(),
    relative_gap: float | None = None,
    advise: bool = True,
) -> Proposals:
    """The best choice that keeps the noise limits and the budget (the policy's, unless `budget_bytes` is given), and
    its rivals.

    `banned` holds (op id, format) pairs that proved unstable. `relative_gap` is how far from the proven optimum the
    solver may stop: by default 0 for small models and a thousandth for large ones (timings are not measured more
    finely); the plan carries the gap that was reached. `InfeasibleError` with the smallest feasible budget if there is
    no such choice, and, unless `advise` is False, with what every limit of the policy costs, which takes longer.
    """
    problem, fp32 = problem_of(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned)
    advice = partial(what_to_change, graph, profile, device, policy) if advise else None
    solution = best_solution(problem, relative_gap=relative_gap, advice=advice)
    return proposals_of(graph, profile, device, policy, problem, solution, fp32)


def problem_of(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[Problem, Totals]:
    """What `propose` solves, and the totals of FP32."""
    fp32 = fp32_totals(graph, profile, device, policy)
    if budget_bytes is None and (budget := parse_budget(policy.budget)) is not None:
        budget_bytes = resolve_budget(budget, graph, fp32)
    return build_problem(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned), fp32


def best_solution(
    problem: Problem, *, relative_gap: float | None = None, advice: Callable[[int], list[str]] | None = None
) -> Solution:
    """The best choice within a gap, as in `propose`; `InfeasibleError` if there is none. `advice`, given the smallest
    feasible budget, says what to change for a smaller one."""
    gap = gap_for(problem) if relative_gap is None else relative_gap
    solution = solve(problem, relative_gap=gap)
    if solution is None:
        raise InfeasibleError(_why_infeasible(problem, gap, advice))
    return polish(problem, solution) if solution.gap > 0.0 and decisions_count(problem) <= LARGE else solution


def proposals_of(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    problem: Problem,
    solution: Solution,
    fp32: Totals,
) -> Proposals:
    """A solution of a problem, and its rivals."""
    return Proposals(
        graph=graph,
        profile=profile,
        device=device,
        policy=policy,
        problem=problem,
        fp32=fp32,
        all=rivals(problem, solution, policy.formats),
    )


def make_plan(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, str]] = frozenset(),
    relative_gap: float | None = None,
    prefer: str | None = None,
    advise: bool = True,
) -> Plan:
    """The plan that is best by prediction alone: the solver's, or all-FP32 where that is as fast within what
    predictions err by. `prefer` names another proposal (one that proved fastest), taken where it keeps every limit.
    The rest as for `propose`.
    """
    proposals = propose(
        graph,
        profile,
        device,
        policy,
        budget_bytes=budget_bytes,
        banned=banned,
        relative_gap=relative_gap,
        advise=advise,
    )
    return by_prediction(proposals, prefer=prefer)


def by_prediction(proposals: Proposals, *, prefer: str | None = None, explained: bool = True) -> Plan:
    """The proposal that is best by prediction alone; see `make_plan`. Without reasons if it need not be `explained`."""
    kept = {p.name: p.solution for p in proposals.all if not p.broken}
    best, plain = proposals.best.solution, kept.get("fp32")
    made = proposals.plan if explained else proposals.decisions
    if prefer is not None:
        return made(kept.get(prefer, best))
    if proposals.policy.objective == "bytes" or plain is None or plain is best:
        return made(best)
    gain = 1.0 - best.evaluation.seconds / plain.evaluation.seconds
    if gain > _TIME_ERROR_FRAC:
        return made(best)
    if not explained:
        return made(plain)
    why = f"the fastest plan gains {gain:.1%} of the predicted time, less than predictions err by: fp32 stays"
    return proposals.plan(plain, why=why)


#: A predicted gain below this share of a step's seconds does not count: predicted and measured ratios to FP32 of small
#: models differed by up to that much (docs/measurements/demo.md).
_TIME_ERROR_FRAC = 0.05


def _why_infeasible(problem: Problem, gap: float, advice: Callable[[int], list[str]] | None) -> str:
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
    changes = advice(peak) if advice is not None else []
    helps = f" Smallest feasible budgets with another policy: {'; '.join(changes)}." if changes else ""
    return (
        f"no plan fits the budget of {problem.budget_bytes} bytes; the smallest feasible budget is {peak} bytes"
        f" ({bytes_text(peak)}). It is held up by the {problem.moment_name(moment)}: {bytes_text(problem.fixed_bytes)}"
        f" of parameters, gradients, optimizer state and inputs{', ' if held else ''}{held}.{helps}"
    )
