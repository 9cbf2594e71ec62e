"""Plans under a budget of bytes: their peaks on a replay of the last step, as they will run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from autoprec.errors import InfeasibleError
from autoprec.execution.tournament import Tournament, last_batch, told_peak
from autoprec.plans import Plan
from autoprec.scheduling import PeakOf

if TYPE_CHECKING:
    from autoprec.sessions import Session

__all__ = [
    "Solve",
    "first_plan",
    "fits_uncompiled",
    "given_breaks",
    "leave_uncompiled",
    "made_again",
    "told_bytes",
    "tournament_of",
    "within_budget",
]

#: Makes a plan, and says "" or by how much it breaks its budget, by peaks that it is told.
Solve = Callable[[PeakOf], tuple[Plan, str]]


def tournament_of(session: Session) -> Tournament:
    """The calls of the last step, to be replayed."""
    buffers, loss_bytes = session._guard.buffers.values(), session._observed.loss_bytes
    return Tournament(list(session._calls), buffers, session._device_type, session.lowering, loss_bytes)


def first_plan(session: Session, banned: frozenset[tuple[str, ...]]) -> Plan:
    """The one that won, without what is banned, if there is such a one. Where none of the contestants keeps the budget
    compiled, one that does so uncompiled stays uncompiled."""
    try:
        return _first_plan(session, banned)
    except InfeasibleError:
        if not banned:
            raise
        return _first_plan(session, frozenset())


def _first_plan(session: Session, banned: frozenset[tuple[str, ...]]) -> Plan:
    tournament, make = tournament_of(session), partial(session._scheduler.first_plan, banned=banned)
    try:
        return make(session._guard.optimizer_bytes, tournament)
    except InfeasibleError as error:
        if error.smallest_bytes is not None or not session.lowering.compiles:
            raise
        plan = make(session._guard.optimizer_bytes, tournament.uncompiled)
        leave_uncompiled(session, plan, str(error))
        return plan


def made_again(session: Session, before: Plan, solve: Solve, tournament: Tournament) -> tuple[Plan, str]:
    """A plan that keeps its budget as it will run first, with scales for the gradients of the last window, and "" or
    by how much it breaks it: uncompiled, if it is to be compiled beside the run, else compiled. Where every one that is
    tried breaks it so, one that keeps it uncompiled stays uncompiled."""
    scaled, beside = session._stability.scaled, False

    def first(plan: Plan) -> int | None:
        nonlocal beside
        waits = session._takeover.would_begin(before, plan, session.steps)
        beside |= waits
        return (tournament.uncompiled if waits else tournament).peak_of(plan)

    def found(peak_of: PeakOf) -> tuple[Plan, str]:
        plan, shortfall = solve(lambda plan: peak_of(scaled(plan, before)))
        return scaled(plan, before), shortfall

    plan, shortfall = found(first)
    if shortfall and beside:
        plan, shortfall = found(tournament.peak_of)
    if shortfall and session.lowering.compiles:
        uncompiled, breaks = found(tournament.uncompiled.peak_of)
        if not breaks:
            leave_uncompiled(session, uncompiled, shortfall)
            return uncompiled, ""
    return plan, shortfall


def within_budget(session: Session, *, runs: bool = True) -> tuple[Plan, str]:
    """At a takeover, the plan that runs uncompiled, or what takes its place where it would break its budget compiled:
    as measured, or, if it `runs` not, as the compiler's code tells it. The plan itself, and by how much, where every
    one that is tried would."""
    assert (before := session.plan) is not None
    tournament, scaled = tournament_of(session), session._stability.scaled
    peak_of = tournament.peak_of if runs else tournament.told_peak_of

    def peak(plan: Plan) -> int | None:
        return peak_of(plan if plan is before else scaled(plan, before))

    plan, shortfall = session._scheduler.within_budget(before, session._banned, peak)
    if shortfall or plan is before:
        return before, shortfall
    return scaled(plan, before), ""


def fits_uncompiled(session: Session, plan: Plan, tournament: Tournament | None) -> bool:
    """Whether a plan keeps its budget for as long as it runs as it is; not if nobody knows. `tournament`: where it was
    measured."""
    if plan.budget_bytes is None:
        return True
    peak = (tournament or tournament_of(session)).uncompiled.peak_of(plan)
    return peak is not None and session._scheduler.excess_bytes(plan, lambda _: peak) <= 0


def given_breaks(session: Session) -> str:
    """By how much a plan that was made elsewhere, and never measured, breaks its budget, as it runs, on a replay of the
    step that was just observed; "" if it does not, or the plan is the run's own."""
    plan, graph = session.plan, session.graph
    if session._scheduler.given is None or plan is None or graph is None:
        return ""
    session._observed.graph = replace(graph, optimizer_bytes=session._guard.optimizer_bytes)
    if plan.budget_bytes is None:
        return ""
    excess = session._scheduler.excess_bytes(plan, tournament_of(session).peak_of)
    if excess <= 0:
        return ""
    told = "" if plan.predicted is None else f", and {plan.predicted.peak_bytes} were predicted"
    return (
        f"a step takes {plan.budget_bytes + excess} bytes under the plan that was given, for a budget of"
        f" {plan.budget_bytes}{told}; plan for {excess} bytes less, or let this run calibrate and plan for itself"
    )


def told_bytes(session: Session, plan: Plan) -> int | None:
    """The peak of the step that is over, if it runs compiled under the plan that is there now, as the code tells it.
    None where there is no code, or no step, and before a step was observed."""
    if session.graph is None or not session.lowering.compiles:
        return None
    runners = {slot.binding: slot.runner for slot in session._slots.values()}
    calls = last_batch(session._calls)
    if any(call.binding not in runners for call in calls):
        return None
    peak = told_peak(calls, [runners[call.binding] for call in calls], session._observed.loss_bytes)
    return None if peak is None else session._scheduler.beside_bytes(plan) + peak


def leave_uncompiled(session: Session, plan: Plan, shortfall: str) -> None:
    """It keeps its budget so; compiled it would not."""
    session.lowering.leave_uncompiled(plan)
    session._event("warning", trigger="budget", evidence=f"runs uncompiled under this plan; compiled, {shortfall}")
