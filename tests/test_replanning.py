"""Plans made again: by the schedule, on request, and what the loss tells."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import InfeasibleError, InputError
from autoprec.formats import format_named
from autoprec.losses import Losses
from autoprec.schedules import Schedule
from tests.cpus import missed_without_bf16
from tests.states import edited


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def policy(**changes: object) -> autoprec.Policy:
    return autoprec.Policy(
        name="narrow",
        formats=("fp32", "fp16", "bf16"),
        objective="bytes",
        storage={"formats": ()},
        calibration={"steps": 2},
        noise={"gradient": 10.0, "loss": 10.0},
        monitor={"window_steps": 8, "interval_steps": 2},
    ).replaced(**changes)


def in_windows_of_16(**changes: object) -> autoprec.Policy:
    """Without FP16, in which a spike would be an overflow."""
    return policy(formats=("fp32", "bf16"), monitor={"window_steps": 16, "interval_steps": 8}, **changes)


class WithLoss(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Training:
    def __init__(self, chosen: autoprec.Policy, model: nn.Module | None = None, **more: object) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model = autoprec.compile(layers() if model is None else model, policy=chosen, events=None, **more)  # type: ignore[arg-type]
        self.session = autoprec.session(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def step(self, size: float = 1.0, note: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(128, 16) * size).square().mean()
        if note:
            self.session.note_loss(loss)
        loss.backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def told(self, kind: str) -> list[autoprec.Event]:
        return [e for e in self.session.events if e.kind == kind]


# The schedule ------------------------------------------------------------------------------------------------------


def narrowest(session: autoprec.Session, fqn: str, role: str | None = None) -> int:
    assert session.plan is not None
    found = [a for a in session.plan.assignments if a.op.startswith(f"{fqn}:") and role in (None, str(a.role))]
    return min(format_named(a.format).bits for a in found)


def test_precision_is_raised_when_it_is_due_and_stays() -> None:
    """After half of 20 steps the middle layer, after 14 steps all."""
    entries = ({"after": 0.5, "raise": "2", "to": "fp32"}, {"after": 14, "raise": "*", "to": "fp32"})
    as_narrow_as_may_be = [{"ceiling": "bf16", "optional": True}]
    run = Training(policy(schedule=entries, rules=as_narrow_as_may_be), total_steps=20)
    run.steps(9)
    assert narrowest(run.session, "2") == narrowest(run.session, "0") == 16
    run.steps(1)
    assert narrowest(run.session, "2") == 32 and narrowest(run.session, "0") == 16
    run.steps(3)
    assert not run.session.plan.is_identity
    run.steps(1)
    assert run.session.plan.is_identity
    assert [e.step for e in run.told("scheduled")] == [10, 14]
    assert "'2' to fp32 or wider" in run.told("scheduled")[0].evidence
    run.steps(8)
    assert run.session.plan.is_identity and not run.told("promoted")


def test_the_schedule_speaks_of_roles() -> None:
    entry = {"after": 4, "raise": "2", "to": "fp32", "roles": ["grad_weight"]}
    chosen = policy(schedule=(entry,), rules=[{"pin": "bf16", "kinds": ["linear"], "roles": ["output", "grad_input"]}])
    run = Training(chosen)
    run.steps(8)
    assert narrowest(run.session, "2", "grad_weight") == 32
    assert narrowest(run.session, "2", "output") == narrowest(run.session, "2", "grad_input") == 16


def test_a_run_that_goes_on_is_raised_when_it_is_due() -> None:
    entry = {"after": 12, "raise": "*", "to": "fp32"}
    whole, plans = Training(policy(schedule=(entry,))), []
    whole.steps(8)
    state, weights = whole.session.state_dict(), {k: v.clone() for k, v in whole.model.state_dict().items()}
    for again in (False, True):
        run = whole
        if again:
            run = Training(policy(schedule=(entry,)))
            run.model.load_state_dict(weights)
            run.session.load_state_dict(state)
        torch.manual_seed(1)
        run.steps(3)
        assert not run.session.plan.is_identity
        run.steps(1)
        plans.append((run.session.plan.fingerprint, [e.evidence for e in run.told("scheduled")]))
        assert run.session.plan.is_identity
    assert plans[0] == plans[1]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_is_due_by_the_end_of_calibration_is_in_the_first_plan(after: int) -> None:
    """Which is made after two steps."""
    as_narrow_as_may_be = [{"ceiling": "bf16", "optional": True}]
    run = Training(policy(schedule=({"after": after, "raise": "2", "to": "fp32"},), rules=as_narrow_as_may_be))
    run.steps(2)
    assert narrowest(run.session, "0") == 16 and narrowest(run.session, "2") == (16 if after == 3 else 32)
    run.steps(8)
    assert narrowest(run.session, "2") == 32
    assert [(e.kind, e.step) for e in run.session.events] == [("planned", 2), ("scheduled", max(2, after))]
    assert ("1 steps after it was due" in run.told("scheduled")[0].evidence) == (after == 1)


def test_a_schedule_that_no_budget_allows_costs_no_plan() -> None:
    """The first plan is made without it; it then holds outside the budget, as for an entry that is due later."""
    entry = {"after": 1, "raise": "*", "to": "fp32"}
    free = Training(policy())
    free.steps(2)
    assert free.session.plan is not None and free.session.plan.predicted and free.session.plan.predicted_fp32
    least, most = free.session.plan.predicted.peak_bytes, free.session.plan.predicted_fp32.peak_bytes
    assert least < most
    run = Training(policy(schedule=(entry,)), budget=(least + most) // 2)
    run.steps(4)
    assert run.session.plan is not None and run.session.plan.is_identity
    assert [e.kind for e in run.session.events if e.kind in ("planned", "scheduled")] == ["planned", "scheduled"]
    assert any("outside the budgets" in e.evidence for e in run.told("warning"))


def test_what_is_due_before_a_given_plan_was_observed_is_raised_when_it_is_due() -> None:
    """No step but the 32nd would be observed."""
    made = Training(policy())
    made.steps(3)
    rarely = {"window_steps": 64, "interval_steps": 32}
    entries = ({"after": 5, "raise": "2", "to": "fp32"}, {"after": 7, "raise": "4", "to": "fp32"})
    run = Training(policy(schedule=entries, monitor=rarely), plan=made.session.plan)
    run.steps(4)
    assert narrowest(run.session, "2") == 16 and run.session.graph is None
    run.steps(1)
    assert narrowest(run.session, "2") == 32 and narrowest(run.session, "4") == 16
    run.steps(2)
    assert narrowest(run.session, "4") == 32
    assert [e.step for e in run.told("scheduled")] == [5, 7]


@pytest.mark.parametrize("older", [False, True])
def test_a_run_that_goes_on_with_fewer_steps_planned_catches_up_and_with_more_keeps(older: bool) -> None:
    """Of half the steps, at the eighth; an older state does not say what its plan knows."""

    def resumed(state: dict[str, Any], total_steps: int) -> Training:
        run = Training(policy(schedule=(entry,)), total_steps=total_steps)
        run.session.load_state_dict(state)
        run.steps(1)
        return run

    def saved(total_steps: int) -> dict[str, Any]:
        run = Training(policy(schedule=(entry,)), total_steps=total_steps)
        run.steps(8)
        state = run.session.state_dict()
        header = json.loads(state["autoprec"])
        if older:
            del header["run"]["scheduled"]
        return edited(state, header)

    entry = {"after": 0.5, "raise": "2", "to": "fp32"}
    state = saved(24)
    assert narrowest(resumed(state, 24).session, "2") == 16
    if not older:
        fewer = resumed(state, 12)
        assert narrowest(fewer.session, "2") == 32 and [e.step for e in fewer.told("scheduled")] == [9]
        fewer.steps(8)
        assert len(fewer.told("scheduled")) == 1
    state = saved(12)
    for total_steps in (12, 24):
        run = resumed(state, total_steps)
        assert narrowest(run.session, "2") == 32
        run.steps(5)
        run.session.replan()
        assert narrowest(run.session, "2") == 32
        assert [e.step for e in run.told("scheduled")] == ([6, 12] if older and total_steps == 24 else [6])


def test_a_share_of_steps_that_nobody_planned_is_refused() -> None:
    with pytest.raises(InputError, match=r"schedule\[0\].after is 0.9 of the planned steps.*total_steps"):
        Training(policy(schedule=({"after": 0.9, "raise": "*", "to": "bf16"},)))
    with pytest.raises(InputError, match="total_steps must be"):
        Training(policy(), total_steps=0)


def test_shares_round_up_and_nothing_is_due_before() -> None:
    entries = ({"after": 0.9, "raise": "*", "to": "bf16"}, {"after": 3, "raise": "*", "to": "bf16"})
    schedule = Schedule.of(policy(schedule=entries), 101)
    assert [after for after, _ in schedule.entries] == [91, 3]
    assert [s for s in range(200) if schedule.due(s, ()) - schedule.due(s - 1, ())] == [3, 91]
    assert schedule.due(100, {1}) == {0} and schedule.due(100, {0, 1}) == frozenset()
    assert schedule.banned(2, None, ("fp32", "fp8_e4m3")) == frozenset()


# On request --------------------------------------------------------------------------------------------------------


def test_a_new_budget_between_two_steps() -> None:
    run = Training(policy(objective="time"), budget="100%")
    run.steps(4)
    before = run.session.plan
    assert before is not None and before.budget_bytes is not None
    after = run.session.replan(budget="92%")
    assert after.budget_bytes < before.budget_bytes and after.predicted.peak_bytes <= after.budget_bytes
    assert run.session.plan is after and run.told("planned")[-1].trigger == "asked"
    run.steps(2)
    assert run.session.replan().budget_bytes == after.budget_bytes  # the same budget again
    with pytest.raises(InfeasibleError):
        run.session.replan(budget=1)
    assert run.session.plan.budget_bytes == after.budget_bytes
    run.steps(2)


def test_not_in_a_step_and_not_before_there_is_a_plan() -> None:
    run = Training(policy())
    with pytest.raises(InputError, match="calibration is not over"):
        run.session.replan()
    run.steps(3)
    loss = run.model(torch.randn(8, 16)).square().mean()
    with pytest.raises(InputError, match="a step is in progress"):
        run.session.replan(budget="50%")
    loss.backward()


@pytest.mark.parametrize(
    "budget", [None, pytest.param("100%", marks=missed_without_bf16("no BF16 plan fits, by 256 bytes"))]
)
def test_a_plan_that_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, budget: str | None) -> None:
    """The run of weeks goes on; it is told, and the plan that compiled before comes back compiled. Without a budget it
    would have been compiled beside the run."""
    from autoprec.execution import inductor

    monitor = {"window_steps": 8, "interval_steps": 2, "takeover_steps": 2}
    chosen = policy(objective="time", rules=[{"match": "2", "pin": "bf16", "optional": True}], monitor=monitor)
    run = Training(chosen, budget=budget, backend="inductor")
    run.steps(4)
    first, compiled = run.session.plan, len(run.session.lowering.compiled)
    assert first is not None and compiled and not first.is_identity

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "compile_fx", refuse)
        run.session._stability.floors = run.session._stability.floors.with_ban("2:linear#0", "bf16", "noise")
        run.session.replan()
        run.steps(2)
    assert run.session.plan is not None and run.session.plan.fingerprint != first.fingerprint
    assert "runs uncompiled under this plan" in run.told("warning")[-1].evidence and not run.told("lowered")
    refused = run.session.plan
    assert len(run.session.lowering.compiled) == compiled and run.session.skipped_steps == 0
    run.session.adopt(first)
    run.steps(2)
    assert len(run.session.lowering.compiled) == compiled
    run.session.adopt(refused)  # which is not new: nothing is compiled again, beside the run or in it
    assert run.session._takeover.due_step is None
    run.step()
    assert len(run.session.lowering.compiled) == compiled


# Spikes of the loss ------------------------------------------------------------------------------------------------


def test_a_spike_is_told_by_a_window_and_nothing_else_happens() -> None:
    run = Training(in_windows_of_16(), WithLoss())
    run.steps(30)
    before = run.session.skipped_steps
    run.step(100.0)
    run.steps(20)
    [event] = run.told("incident")
    assert event.trigger == "loss_spike" and "of step 31 " in event.evidence
    assert run.session.skipped_steps == before and not run.told("bad_step")


def test_a_spike_is_vetoed_where_the_policy_says_so() -> None:
    """By the window before; nothing changes, and the loss that was not taken does not count."""
    chosen = in_windows_of_16(guard={"loss_spike": "skip"})
    run = Training(chosen, WithLoss())
    run.steps(20)
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.step(100.0)
    assert run.session.step_was_skipped and run.told("bad_step")[0].trigger == "loss_spike"
    assert all(torch.equal(a, b) for a, b in zip(weights, run.model.parameters(), strict=True))
    run.steps(30)
    assert run.session.skipped_steps == 1 and not run.told("incident") and not run.told("promoted")


def test_a_loss_outside_of_the_model_is_told_by_hand() -> None:
    chosen = in_windows_of_16(guard={"loss_spike": "skip"})
    for note in (False, True):
        run = Training(chosen)
        for k in range(24):
            run.step(100.0 if k == 22 else 1.0, note=note)
        assert run.session.skipped_steps == int(note)


@pytest.mark.parametrize("loss", ["0.5", None, [0.5], 1j, torch.zeros(0), torch.ones(1, dtype=torch.complex64)])
def test_a_loss_is_a_number(loss: object) -> None:
    with pytest.raises(InputError, match="a loss is a number"):
        Training(policy()).session.note_loss(loss)


def test_the_limit_is_the_windows_median_and_spread() -> None:
    values = [1.0, 1.2, 0.9, 1.1, 1.0, 0.95, 1.05, 1.3, 9.0]
    after, spike = Losses().extended(values, 5).window_over(10.0)
    median = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - median) for v in values)
    assert spike is not None and (spike.step, spike.loss) == (13, 9.0)
    assert spike.sigmas == pytest.approx((9.0 - median) / spread)
    logs = [math.log(v) for v in values]
    log_spread = 1.4826 * statistics.median(abs(v - math.log(median)) for v in logs)
    assert after.window == ()
    assert after.limit(10.0) == pytest.approx(max(median + 10.0 * spread, median * math.exp(10.0 * log_spread)))
    assert Losses().extended(values, 0).window_over(1e3)[1] is None
    assert Losses().extended(values[:5], 0).window_over(0.1)[1] is None  # too few to say
    assert Losses().limit(10.0) == math.inf


def test_losses_near_zero_differ_by_factors() -> None:
    """30 times the median is no spike where each third loss is five times it, and each third a fifth."""
    values = [1e-3 * 5.0 ** (k % 3 - 1) for k in range(30)]
    assert Losses().extended([*values, 0.03], 0).window_over(10.0)[1] is None
    assert Losses().extended([*[1e-3] * 30, 0.03], 0).window_over(10.0)[1] is not None


def test_equal_losses_have_a_spread() -> None:
    after, spike = Losses().extended([2.0] * 9, 0).window_over(10.0)
    assert spike is None and after.limit(10.0) == pytest.approx(2.0 * math.exp(10.0 * 1e-3))


@pytest.mark.parametrize("window", [4, 6, 7, 8, 20])
def test_short_windows_are_judged_together(window: int) -> None:
    """A loss that rises slowly is no spike by a median that is as old as the run; one that is, is told."""
    known, step = Losses(), 0
    for _ in range(160 // window):
        losses = [1.0 + 0.01 * (step + i) for i in range(window)]
        assert max(losses) <= known.limit(10.0)
        known, spike = known.extended(losses, step).window_over(10.0)
        assert spike is None
        step += window
    known, _ = known.extended([3.0] * 8, step).window_over(1e9)
    known = known.extended([3.0] * (window - 1) + [1e4], 500)
    for _ in range(8):
        known, spike = known.window_over(10.0)
        if spike is not None:
            break
        known = known.extended([3.0] * window, 500 + window)
    assert spike is not None and spike.loss == 1e4 and spike.step == 500 + window - 1
