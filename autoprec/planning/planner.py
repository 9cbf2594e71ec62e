"""From a graph, a profile, a device and a policy to a `Plan` with reasons, predictions and a proof."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from autoprec.devices import Device
from autoprec.errors import InfeasibleError, PolicyError, SolverError
from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import evaluate
from autoprec.planning.highs import smallest_peak
from autoprec.planning.memory import holders
from autoprec.planning.polish import polish
from autoprec.planning.problem import as_written, build_problem, fixed_bytes
from autoprec.planning.proposals import LOW_FRAC, Proposals, Question, rivals, totals_of
from autoprec.planning.reasons import bytes_text, violation_text
from autoprec.planning.relaxing import what_to_change
from autoprec.planning.solutions import Choice, Solution
from autoprec.planning.solvers import LARGE, PRICED, decisions_count, gap_for, solve
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import Plan, Totals
from autoprec.policies import Policy, parse_budget
from autoprec.profiles import Profile

__all__ = ["ask", "by_prediction", "fp32_totals", "make_plan", "propose", "resolve_budget", "uniform_plan"]


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
    problem = as_written(graph, profile, device, policy)
    return totals_of(evaluate(problem, uniform_choice(problem, "fp32")))


def resolve_budget(budget: BudgetLike, graph: OpGraph, fp32: Totals) -> int:
    """A budget in bytes. A percentage is of the part that precision can change: fixed + percent·(FP32 peak − fixed)."""
    if budget.bytes is not None:
        return budget.bytes
    if budget.percent is None:
        raise PolicyError("a budget needs bytes or a percentage")
    fixed = fixed_bytes(graph)
    return fixed + math.floor(budget.percent / 100.0 * (fp32.peak_bytes - fixed))


def ask(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, ...]] = frozenset(),
    living: Mapping[str, str] | None = None,
) -> Question:
    """The problem of these values, under the policy's budget unless `budget_bytes` is given. `banned` and `living` as
    in `build_problem`."""
    fp32 = fp32_totals(graph, profile, device, policy)
    if budget_bytes is None and (budget := parse_budget(policy.budget)) is not None:
        budget_bytes = resolve_budget(budget, graph, fp32)
    problem = build_problem(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned, living=living)
    # Frozen weights whose format is decided count among what is kept, of both.
    fp32 = replace(fp32, saved_bytes=fp32.saved_bytes + fixed_bytes(graph) - problem.fixed_bytes)
    return Question(
        graph=graph,
        profile=profile,
        device=device,
        policy=policy,
        problem=problem,
        fp32=fp32,
        budget_bytes=budget_bytes,
    )


def propose(question: Question, *, relative_gap: float | None = None, advise: bool = True) -> Proposals:
    """The best choice that keeps the noise limits and the budget, and its rivals.

    `relative_gap` is how far from the proven optimum the solver may stop: by default 0 for small models and a
    thousandth for large ones (timings are not measured more finely); the plan carries the gap that was reached.
    `InfeasibleError` with the smallest feasible budget if there is no such choice, and, unless `advise` is False, with
    what every limit of the policy costs, which takes longer.
    """
    gap = gap_for(question.problem) if relative_gap is None else relative_gap
    limited = _at_lowest_peak(question, gap) if question.at_lowest_peak else question
    problem = limited.problem
    if question.at_lowest_peak and relative_gap is None and decisions_count(problem) > PRICED:
        gap = _LOW_PEAK_GAP
    solution = solve(problem, relative_gap=gap)
    if solution is None:
        raise _infeasible(question, gap, advise)
    if solution.gap > 0.0 and decisions_count(problem) <= LARGE:
        solution = polish(problem, solution)
    return Proposals(question=limited, all=rivals(question.problem, solution, question.policy.formats))


#: Of large problems under a budget that leaves next to no choice: the 441 decisions of the 12 layers of
#: tests/scale_study.py take 0.3 s, and 33 s to a thousandth (`relative_gap`), for 0.27 % of the step. Plans within a
#: fiftieth are as fast.
_LOW_PEAK_GAP = 5e-3


def _at_lowest_peak(question: Question, gap: float) -> Question:
    """The question under the lowest peak there is and what predictions differ by. Where the lowest is not to be found,
    that of the choice that keeps the fewest bytes stands for it."""
    problem, least = question.problem, None
    if decisions_count(problem) <= LARGE:
        with suppress(SolverError):
            least = smallest_peak(replace(problem, budget_bytes=None), relative_gap=max(gap, LOW_FRAC / 2))
    if least is None:
        least = solve(replace(problem, objective="bytes"), relative_gap=gap)
    if least is None:  # whoever asks finds out why
        return question
    low = least.evaluation.peak_bytes
    always = problem.fixed_bytes + problem.frozen_bytes(least.choice.options)
    limit = low + int(LOW_FRAC * (low - always))
    if problem.budget_bytes is not None:
        limit = min(limit, problem.budget_bytes)
    return replace(question, problem=replace(problem, budget_bytes=limit))


def uniform_plan(question: Question, format_name: str) -> Plan:
    """The format for everything that may have it, whatever it costs; without reasons."""
    choice = uniform_choice(question.problem, format_name)
    solution = Solution(choice=choice, evaluation=evaluate(question.problem, choice), bound=0.0)
    return Proposals(question=question, all=()).decisions(solution)


def make_plan(
    graph: OpGraph,
    profile: Profile,
    device: Device,
    policy: Policy,
    *,
    budget_bytes: int | None = None,
    banned: frozenset[tuple[str, ...]] = frozenset(),
    relative_gap: float | None = None,
) -> Plan:
    """The plan that is best by prediction alone: `ask`, `propose` and `by_prediction` in one."""
    question = ask(graph, profile, device, policy, budget_bytes=budget_bytes, banned=banned)
    return by_prediction(propose(question, relative_gap=relative_gap))


def by_prediction(proposals: Proposals, *, prefer: str | None = None, explained: bool = True) -> Plan:
    """The solver's proposal, or all-FP32 where that is as fast within what predictions err by. `prefer` names another
    one (it proved fastest), taken where it keeps every limit. Without reasons if it need not be `explained`."""
    kept = {p.name: p.solution for p in proposals.all if not p.broken}
    best, plain = proposals.best.solution, kept.get("fp32")
    made = proposals.plan if explained else proposals.decisions
    if prefer is not None:
        return made(kept.get(prefer, best))
    if proposals.stands or plain is None or plain is best:
        return made(best)
    gain = 1.0 - best.evaluation.seconds / plain.evaluation.seconds
    if gain > _TIME_ERROR_FRAC:
        return made(best)
    if not explained:
        return made(plain)
    why = f"the fastest plan gains {gain:.1%} of the predicted time, less than predictions err by: fp32 stays if it may"
    return proposals.plan(plain, why=why)


#: A predicted gain below this share of a step's seconds does not count: predicted and measured ratios to FP32 of small
#: models differed by up to that much (docs/measurements/demo.md).
_TIME_ERROR_FRAC = 0.05


def _infeasible(question: Question, gap: float, advise: bool) -> InfeasibleError:
    problem = question.problem
    smallest = smallest_peak(replace(problem, budget_bytes=None), relative_gap=gap)
    if smallest is None:
        widest = Choice(options=(0,) * len(problem.units))
        broken = [violation_text(v) for v in evaluate(replace(problem, budget_bytes=None), widest).violations]
        return InfeasibleError(
            "no plan keeps the noise limits, whatever the budget: even with every op in its widest allowed format "
            + ("; ".join(broken[:3]) or "the program has no solution")
            + ". Allow fp32 there, or raise noise.gradient or noise.loss."
        )
    peak, phase = smallest.evaluation.peak_bytes, smallest.evaluation.peak_phase
    held = ", ".join(f"{what} {bytes_text(size)}" for what, size in holders(problem, smallest.choice, phase))
    changes = what_to_change(question, peak) if advise else []
    helps = f" Smallest feasible budgets with another policy: {'; '.join(changes)}." if changes else ""
    return InfeasibleError(
        f"no plan fits the budget of {problem.budget_bytes} bytes; the smallest feasible budget is {peak} bytes"
        f" ({bytes_text(peak)}). It is held up by the {problem.phase_name(phase)}: {bytes_text(problem.fixed_bytes)}"
        f" of parameters, gradients, optimizer state and inputs{', ' if held else ''}{held}.{helps}",
        peak,
    )
