"""Under a budget of bytes, too, plans are compiled beside the run: they keep it uncompiled and compiled, or stay
uncompiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import autoprec
from autoprec.execution.inductor import Inductor
from autoprec.execution.tournament import Tournament
from autoprec.plans import Plan
from autoprec.scheduling import Scheduler
from tests.test_lowering import plan_of
from tests.test_replanning import Training
from tests.test_takeover import STEPS, cache, made, promote, training

#: Far above what anything here takes.
BUDGET = 1 << 30


def compiled(run: Training) -> bool:
    kinds = {isinstance(slot.runner, Inductor) for slot in run.session._slots.values()}
    assert len(kinds) == 1
    return kinds.pop()


def code_tells(monkeypatch: pytest.MonkeyPatch, size: Callable[[Plan], int]) -> None:
    """The peaks of compiled steps, in place of what the compiler's code tells."""

    def told(self: Tournament, contestant: object) -> int | None:
        runner = contestant.lowered[0]  # type: ignore[attr-defined]
        return size(runner._plan) if isinstance(runner, Inductor) else None

    monkeypatch.setattr(Tournament, "_predicted", told)


def budgeted(**changes: object) -> Training:
    return training(budget=BUDGET, storage={"formats": ("bf16",)}, **changes)


def test_a_plan_that_keeps_its_budget_is_compiled_beside_the_run() -> None:
    run = budgeted()
    before = run.session.lowering.compiled
    promote(run)
    plan = run.session.plan
    assert run.session.lowering.compiled == before
    assert plan is not None and plan.budget_bytes == BUDGET and run.session._takeover.due_step == 4 + STEPS
    counters.clear()
    run.steps(STEPS - 1)
    assert not compiled(run) and not counters["inductor"]
    run.step()
    after = run.session.plan
    assert after is not None and after.fingerprint == plan.fingerprint and compiled(run)
    assert [e.step for e in run.told("lowered")] == [4 + STEPS]
    assert cache("hit") == 2 and cache("miss") == 0 and not run.told("warning")


def test_one_that_would_break_it_compiled_is_replaced_when_it_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that the copy has compiled, because it foresaw that; a run that goes on from a state does the same."""
    run = budgeted()
    before = run.session.plan
    promote(run)
    first = run.session.plan
    assert first is not None and before is not None
    code_tells(monkeypatch, lambda plan: 2 * BUDGET if plan.fingerprint == first.fingerprint else 0)
    run.steps(2)
    state, rng = run.session.state_dict(), torch.get_rng_state()
    weights = {name: x.clone() for name, x in run.model.state_dict().items()}
    counters.clear()
    run.steps(STEPS - 2)
    second = run.session.plan
    assert second is not None and second.fingerprint not in (first.fingerprint, before.fingerprint)
    assert second.budget_bytes == BUDGET and second.format_of["2:linear#0", autoprec.Role.OUTPUT] != "bf16"
    assert compiled(run) and run.session._takeover.due_step is None and not run.told("warning")
    assert cache("miss") == 0 and cache("hit") == 4  # both plans
    assert [(e.trigger, e.step) for e in run.told("planned")[-1:]] == [("budget", 4 + STEPS)]
    assert [e.step for e in run.told("lowered")] == [4 + STEPS]
    run.steps(2)

    rest = Training(run.session.policy, made(), backend="inductor")
    rest.model.load_state_dict(weights)
    rest.session.load_state_dict(state)
    torch.set_rng_state(rng)
    rest.steps(STEPS)
    assert rest.session.plan is not None and rest.session.plan.fingerprint == second.fingerprint
    assert rest.session.events == run.session.events
    assert all(torch.equal(x, rest.model.state_dict()[name]) for name, x in run.model.state_dict().items())


def test_where_every_plan_would_break_it_compiled_the_first_stays_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = budgeted()
    before = run.session.plan
    code_tells(monkeypatch, lambda plan: 2 * BUDGET)
    promote(run)
    plan = run.session.plan
    assert plan is not None and before is not None
    run.steps(STEPS)
    [warning] = run.told("warning")
    assert run.session.plan is plan and not compiled(run) and not run.told("lowered")
    assert warning.trigger == "budget" and warning.evidence.startswith("runs uncompiled under this plan; compiled, its")
    excess = re.search(r"exceeds the budget by (\d+) bytes, and so does that of every other", warning.evidence)
    assert excess is not None and BUDGET < int(excess[1]) < 1.02 * BUDGET
    run.steps(2)

    rest = Training(run.session.policy, made(), backend="inductor")  # what was found is in the state
    rest.session.load_state_dict(run.session.state_dict())
    rest.step()
    assert not compiled(rest)

    run.session.adopt(before)  # compiled before there was anything to break
    assert compiled(run)
    run.session.adopt(plan)  # it comes back as it ran
    assert not compiled(run) and run.session._takeover.due_step is None
    run.step()
    run.session.adopt(replace(plan, budget_bytes=4 * BUDGET))  # which is another matter
    assert compiled(run)
    run.step()


def test_where_the_run_waits_such_a_plan_stays_uncompiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = {"window_steps": 100, "interval_steps": 50, "takeover_steps": 0}
    run = Training(budgeted().session.policy.replaced(monitor=monitor), made(), backend="inductor")
    run.steps(4)
    code_tells(monkeypatch, lambda plan: 2 * BUDGET)
    promote(run)
    [warning] = run.told("warning")
    assert "runs uncompiled under this plan" in warning.evidence and not compiled(run)
    assert run.session.executed_formats().get("2:linear#0", "fp32") == "fp32"
    run.steps(2)


@pytest.mark.parametrize("peak", [2 * BUDGET, None])
def test_one_that_would_break_it_uncompiled_waits_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch, peak: int | None
) -> None:
    """Or of which nobody knows."""
    run = budgeted()
    measured = Tournament.peak_of

    def peak_of(self: Tournament, plan: Plan) -> int | None:
        return measured(self, plan) if self._compiled else peak

    monkeypatch.setattr(Tournament, "peak_of", peak_of)
    promote(run)
    assert run.session._takeover.due_step is None and compiled(run) and not run.told("warning")
    run.step()


def test_a_plan_from_elsewhere_is_held_against_its_own_budget() -> None:
    run = budgeted()
    run.session.adopt(replace(plan_of({"0:linear#0": "bf16"}), budget_bytes=1 << 10))
    assert run.session._takeover.due_step is None and compiled(run)
    run.step()
    run.session.adopt(replace(plan_of({"4:linear#0": "bf16"}), budget_bytes=BUDGET))
    assert run.session._takeover.due_step == 5 + STEPS and not compiled(run)
    run.step()


def test_without_a_step_to_replay_a_plan_stands_by_its_prediction() -> None:
    run = budgeted()
    promote(run)
    run.steps(STEPS - 1)
    run.session._calls.clear()
    assert Tournament([], {}, "cpu", run.session.lowering).peak_of(run.session.plan) is None  # type: ignore[arg-type]
    assert Tournament([], {}, "cpu", run.session.lowering).told_peak_of(run.session.plan) is None  # type: ignore[arg-type]
    run.step()
    assert compiled(run) and not run.told("warning")


def test_a_first_plan_that_keeps_its_budget_uncompiled_alone_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Tournament._peak

    def peak(self: Tournament, contestant: object) -> int:
        is_compiled = isinstance(contestant.lowered[0], Inductor)  # type: ignore[attr-defined]
        return 2 * BUDGET if is_compiled else measured(self, contestant)  # type: ignore[arg-type]

    monkeypatch.setattr(Tournament, "_peak", peak)
    run = budgeted()
    [warning] = run.told("warning")
    assert not compiled(run) and warning.evidence.startswith("runs uncompiled under this plan; compiled, no plan fits")
    run.step()
    monkeypatch.setattr(Tournament, "_peak", lambda *_: 2 * BUDGET)
    with pytest.raises(autoprec.InfeasibleError, match="no plan fits the budget"):
        budgeted()
    asked, solve = list[Tournament](), Scheduler.first_plan

    def noted(self: Scheduler, state: int, tournament: Tournament, banned: frozenset[tuple[str, ...]]) -> Plan:
        asked.append(tournament)
        return solve(self, state, tournament, banned)

    monkeypatch.setattr(Scheduler, "first_plan", noted)
    with pytest.raises(autoprec.InfeasibleError, match="smallest feasible budget"):
        training(budget=1)
    assert len(asked) == 1  # it would be no other for another lowering
