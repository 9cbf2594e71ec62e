"""How a session comes to its plan, and from one plan to the next: calibration is over, a window is over, a step was
bad, the schedule says so, somebody asks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from autoprec.budgeting import (
    Solve,
    first_plan,
    fits_uncompiled,
    given_breaks,
    leave_uncompiled,
    made_again,
    told_bytes,
    tournament_of,
    within_budget,
)
from autoprec.budgets import parse_budget
from autoprec.devices import Device
from autoprec.errors import InputError
from autoprec.execution.slots import Slot
from autoprec.execution.tournament import Tournament
from autoprec.floors import Turn
from autoprec.planning.proposals import SOLVER
from autoprec.plans import Plan
from autoprec.profiles import Profile

if TYPE_CHECKING:
    from autoprec.sessions import Session

__all__ = ["Replanning"]


class Replanning:
    """What a session has for plans. Every change is at a step boundary."""

    def plan_or_judge(self: Session, seen: Profile | None) -> None:  # type: ignore[misc]
        """At the end of a good step: is calibration over, is a window over, is something due? `seen`: what the step
        showed, if it was observed."""
        if self.calibrating:
            if self._observed.steps >= self.policy.calibration.steps:
                _plan_in_the_loop(self)
                if _due(self):  # the first plan could not keep the budget and the schedule both
                    replan(self)
            return
        # Once, after the first step that is observed, also in a run that goes on from a state.
        if seen is not None and self.steps == self.policy.monitor.interval_steps and (told := given_breaks(self)):
            self._event("warning", trigger="budget", evidence=told)
        if self.steps - self._window_steps >= self.policy.monitor.window_steps:
            _judge_window(self)
        elif seen is not None and self.plan is not None:
            _follow_gradients(self, seen)
        if _due(self):
            replan(self)
        if self._takeover.due_step is not None:
            _take_over(self)
        if _tell_peak(self):
            _note_run(self)

    def make_plan(self: Session) -> Plan:  # type: ignore[misc]
        """Plan from what calibration recorded, and run it from the next step on.

        Raises `InputError` if nothing was observed yet, `InfeasibleError` if no plan keeps the budgets.
        """
        due, banned = _due(self), self._schedule.banned(self.steps, self.graph, self.policy.formats)
        plan = self.adopt(first_plan(self, banned))
        self._event("planned", evidence=f"{', '.join(plan.formats_used()) or 'fp32'}; binding: {plan.binding}")
        solved = next((c.measured for c in plan.contestants if c.name == SOLVER), None)
        if solved is not None and solved.failure and plan.adopted is not None:
            told = f"the solver's plan failed: {solved.failure}; {plan.adopted.name} was adopted"
            self._event("warning", trigger="contest", evidence=told)
        if due and not any((a.op, a.format, str(a.role)) in banned for a in plan.assignments):
            _raise(self, due)
        self._log.assign(self.steps, None, plan)
        _note_run(self)
        return plan

    def measure_device(self: Session) -> Device:  # type: ignore[misc]
        """Time every distinct op in the policy's formats, once. Raises `InputError` if nothing was observed yet."""
        return self._scheduler.measure_device()

    def replan(self: Session, *, budget: str | int | None = None) -> Plan:  # type: ignore[misc]
        """Solve again from what calibration recorded and what proved unstable since, now under another budget: bytes,
        "6GiB", or "60%" of the part that precision can change; None for the same. Between two steps.

        Raises `InputError` in the middle of a step or before there is a plan, `InfeasibleError` if no plan keeps the
        budget; the plan that runs then goes on.
        """
        self.settle()
        if not self.is_between_steps():
            raise InputError("a step is in progress: replan() between optimizer.step() and the next forward pass")
        if self.plan is None or self.profile is None or self.device is None:
            raise InputError(
                "there is nothing to plan again from: calibration is not over, or the plan came from a file"
            )
        limit = self._scheduler.bytes_of(parse_budget(budget)) if budget is not None else self.plan.budget_bytes
        before, banned = self.plan, self._banned
        plan = _adopt_again(self, before, lambda peak: self._scheduler.solve_again(before, limit, banned, peak))
        asked = "the same budget" if budget is None else f"a budget of {budget}"
        self._event("planned", trigger="asked", evidence=f"for {asked}: {', '.join(plan.formats_used()) or 'fp32'}")
        self._log.assign(self.steps, before, plan)
        _note_run(self)
        return plan

    def adopt(  # type: ignore[misc]
        self: Session, plan: Plan, *, new_window: bool = True, tournament: Tournament | None = None
    ) -> Plan:
        """Run a plan from the next call on; between two steps. A window is of one plan, whatever the scales in it.
        `tournament`: where its peak was measured. The plan, with the peak that its compiled code tells, if that is
        known."""
        self._frozen.adopt(plan)
        before, self.plan = self.plan, plan
        if new_window:
            self._window_steps = self.steps
            self._observed.take_window()
            self._stability.was_noisy = False
        fits = partial(fits_uncompiled, self, plan, tournament)
        later = self._takeover.begins(before, plan, self.steps, fits)
        for slot in self._slots.values():
            slot.adopt(plan, self._device_type, compiled=not later)
        if not later:
            _prepare(self)
            _tell_peak(self)
        return self.plan

    @property
    def _banned(self: Session) -> frozenset[tuple[str, ...]]:  # type: ignore[misc]
        """(op, format) pairs that proved unstable, and (op, format, role) that the schedule forbids by now."""
        graph = self._observed.graph
        return self._stability.floors.banned | self._schedule.banned(
            self.steps, graph, self.policy.formats, self._raised
        )


def _due(session: Session) -> frozenset[int]:
    """Entries of the schedule that count by now, and that the plan does not know yet. None before a step was observed:
    nobody can say which ops they are about."""
    return frozenset() if session.graph is None else session._schedule.due(session.steps, session._raised)


def _raise(session: Session, due: frozenset[int]) -> None:
    """These entries are in the plan from now on."""
    session._raised |= due
    if said := session._schedule.said(session.steps, due):
        session._event("scheduled", trigger="schedule", evidence=said)


def _adopt_again(session: Session, before: Plan, solve: Solve) -> Plan:
    """A plan that is made again runs from the next call on; with a warning, if it breaks its budget."""
    tournament = tournament_of(session)
    plan, shortfall = made_again(session, before, solve, tournament)
    if shortfall:
        session._event("warning", trigger="budget", evidence=shortfall)
    return session.adopt(plan, tournament=tournament)


def _lowered(session: Session) -> list[Slot]:
    """What is compiled before its next call: graphs that train."""
    return [slot for slot in session._slots.values() if slot.trains and slot.calls]


def _prepare(session: Session) -> bool:
    """Whether the compiler took any."""
    taken = False
    for slot in _lowered(session):
        if refused := slot.prepare():
            session._tell_refused(refused)
        else:
            taken = True
    return taken


def _tell_peak(session: Session) -> bool:
    """Of a plan that runs compiled, the peak is what its code tells: the planner knows nothing of what was fused. True
    if that is another."""
    plan = session.plan
    if plan is None or plan.predicted is None or plan is session._told:
        return False
    if (peak_bytes := told_bytes(session, plan)) is None:
        return False
    if changes := peak_bytes != plan.predicted.peak_bytes:
        session.plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=peak_bytes))
    session._told = session.plan
    return changes


def _take_over(session: Session) -> None:
    """Is what was compiled beside the run due?"""
    foresee = partial(within_budget, session, runs=False)
    missing = session._takeover.step_over(session.steps, _lowered(session), session._device_type, foresee)
    if missing is None:
        return
    if missing:
        session._event("warning", trigger="lowering", evidence=f"{missing}: the run waits for its compiler")
    before = session.plan
    plan, shortfall = within_budget(session)
    if shortfall:
        leave_uncompiled(session, plan, shortfall)
        return
    if plan is not before:
        session.adopt(plan)
        evidence = f"compiled, the plan before would break its budget: {', '.join(plan.formats_used()) or 'fp32'}"
        session._event("planned", trigger="budget", evidence=evidence)
        session._log.assign(session.steps, before, plan)
        _note_run(session)
    if session._takeover.due_step is not None:  # other scales: it waits in turn
        return
    for slot in session._slots.values():  # also those that are compiled when they are called
        slot.lower()
    if _prepare(session):
        session._event("lowered", evidence="the plan runs compiled from now on")


def _plan_in_the_loop(session: Session) -> None:
    """An error is raised once; a loop that goes on does so in FP32, with the guard."""
    try:
        session.make_plan()
    except Exception as error:  # raised again, whatever it is: without a plan it would come at every step
        session.adopt(Plan(assignments=(), binding=f"no plan: {error}", policy=session.policy.name))
        session._event("warning", trigger="no_plan", evidence=f"{error}; everything stays in fp32")
        raise


def _note_run(session: Session) -> None:
    """A line of the file about the run as a whole."""
    plan = session.plan
    told: dict[str, object] = {"steps": session.steps, "skipped_steps": session.skipped_steps}
    if plan is not None and plan.predicted is not None:
        told |= {"predicted_peak_bytes": plan.predicted.peak_bytes}
    if plan is not None and plan.budget_bytes is not None:
        told |= {"budget_bytes": plan.budget_bytes}
    if (scale := session._guard.loss_scale) is not None:
        told |= {"loss_scale": scale}
    session._log.note(session.steps, "window", evidence=" ".join(f"{name}={value}" for name, value in told.items()))


def _judge_window(session: Session) -> None:
    session._window_steps = session.steps
    if (spike := session._losses.window_over()) is not None:
        told = (
            f"the loss {spike.loss:.4g} of step {spike.step} is {spike.sigmas:.3g} spreads ({spike.spread:.3g}) above"
            f" the median {spike.median:.4g} of its window"
        )
        session._event("incident", trigger="loss_spike", evidence=told)
    if (turn := session._stability.window_over(session.plan, session._scheduler.noise_of)) is None:
        return
    for fields in turn.figures:
        session._log.note(session.steps, "observed", **fields)
    _note_run(session)
    for v in turn.incidents:
        told = {"op": v.op, "role": v.role, "trigger": v.trigger}
        session._log.add_once(session.steps, "incident", **told, evidence=v.evidence)
    for v in turn.banned:
        session._event("promoted", op=v.op, role=v.role, was=v.format, trigger=v.trigger, evidence=v.evidence)
    for b in turn.lifted:
        evidence = f"well in {b.format} for {b.well} windows, after {b.trigger}"
        session._event("demoted", op=b.op, role=b.role, now=b.format, trigger="quiet", evidence=evidence)
    _tell_scales(session, turn)
    if turn.banned or turn.lifted:
        replan(session)
    elif turn.plan is not None:
        session.adopt(turn.plan)


def _follow_gradients(session: Session, seen: Profile) -> None:
    """An observed step within a window may change the scales of FP16 regions, and nothing else."""
    assert session.plan is not None
    if (turn := session._stability.step_over(session.plan, seen)) is not None and turn.plan is not None:
        _tell_scales(session, turn)
        session.adopt(turn.plan, new_window=False)


def _tell_scales(session: Session, turn: Turn) -> None:
    for r in turn.rescaled:
        told = {"op": r.verdict.op, "role": r.verdict.role, "trigger": r.verdict.trigger}
        change = {"was": f"2^{r.was.scale_log2}", "now": f"2^{r.now.scale_log2}"}
        evidence = f"{r.verdict.evidence}; the region of {len(r.was.ops)} ops: {r.now.reason}"
        session._event("rescaled", **told, **change, evidence=evidence)


def replan(session: Session) -> None:
    """Solve again without what is banned now; what was promoted or demoted is told with what came of it."""
    assert (before := session.plan) is not None
    banned, due = session._banned, _due(session)
    plan = _adopt_again(session, before, lambda peak: session._scheduler.plan_again(before, banned, peak))
    session._log.settle(before, plan)
    _raise(session, due)
    session._log.assign(session.steps, before, plan)
    _note_run(session)
