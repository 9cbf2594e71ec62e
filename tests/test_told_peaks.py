"""The peak of whatever plan runs compiled is told by its code: one that came from a file, and one that was made again,
too, of which the planner does not know what the compiler fuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.planning.problem import fixed_bytes
from autoprec.plans import Plan
from autoprec.serial import read_plan, write_plan
from tests.test_replanning import Training, policy

INTERVAL = 2
CPU = torch.device("cpu")


class Gates(nn.Module):
    """Compiled, a step takes three quarters of what it takes as it is: what is between the products is never there.
    `breaks`: in two graphs."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks, self.up, self.down = breaks, nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(4):
            y = y * torch.sigmoid(y) + torch.tanh(y)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(torch.sin(y))


class Run(Training):
    def __init__(self, plan: Plan | None = None, *, breaks: bool = False, **more: object) -> None:
        monitor = {"window_steps": 100, "interval_steps": INTERVAL, "takeover_steps": more.pop("takeover_steps", 0)}
        rules = [{"match": "up", "pin": "bf16", "optional": True}]
        chosen = policy(formats=("fp32", "bf16"), rules=rules, monitor=monitor, budget=more.pop("budget", None))
        super().__init__(chosen, Gates(breaks), plan=plan, **more)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.batch = torch.ones(1024, 16)

    def passes(self) -> None:
        self.model(self.batch).square().mean().backward()

    def step(self, size: float = 1.0, note: bool = False) -> None:
        self.optimizer.zero_grad()
        self.passes()
        self.optimizer.step()

    def told_and_measured(self) -> tuple[int, int]:
        """Bytes of the step that an optimizer, the weights and the batch do not take."""
        plan = self.session.plan
        assert plan is not None and plan.predicted is not None
        sizes = [p.nbytes for p in self.model.parameters()]
        beside = 4 * sum(sizes) + 4 * len(sizes) + self.batch.nbytes
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        return plan.predicted.peak_bytes - beside, peak_bytes(self.passes, CPU)


def made_elsewhere() -> Plan:
    run = Run()
    run.steps(3)
    assert run.session.plan is not None
    return run.session.plan


@pytest.mark.parametrize("breaks", [False, True])
def test_of_a_plan_from_a_file_once_a_step_was_observed(tmp_path: Path, breaks: bool) -> None:
    run = Run(breaks=breaks)
    run.steps(3)
    assert run.session.plan is not None
    write_plan(tmp_path / "plan.yaml", run.session.plan)
    given = read_plan(tmp_path / "plan.yaml")
    again = Run(given, breaks=breaks, backend="inductor")
    again.steps(INTERVAL)
    told, measured = again.told_and_measured()
    assert told == pytest.approx(measured, rel=0.05)
    uncompiled, as_it_is = run.told_and_measured()
    assert uncompiled == pytest.approx(as_it_is, rel=0.05) and abs(uncompiled / measured - 1.0) > 0.1
    assert again.session.plan is not None and again.session.plan.fingerprint == given.fingerprint
    run.steps(1)
    assert run.told_and_measured()[0] == uncompiled  # in eager mode there is nothing to tell
    for contestant in run.session.plan.contestants:
        assert contestant.measured is not None
        assert contestant.predicted.peak_bytes == pytest.approx(contestant.measured.peak_bytes, rel=0.01)


def test_whoever_watches_is_told_too(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    torch.manual_seed(0)
    plan = made_elsewhere()
    torch._dynamo.reset()
    model = autoprec.compile(
        Gates(False),
        plan=plan,
        policy=policy(monitor={"window_steps": 100, "interval_steps": INTERVAL}),
        backend="inductor",
        events=events,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        model(torch.ones(1024, 16)).square().mean().backward()
        optimizer.step()
    after = autoprec.session(model).plan
    assert after is not None and after.predicted is not None and plan.predicted is not None
    assert after.predicted.peak_bytes != plan.predicted.peak_bytes
    lines = [line for line in map(json.loads, events.read_text().splitlines()) if line["kind"] == "window"]
    assert len(lines) == 1 and f"predicted_peak_bytes={after.predicted.peak_bytes}" in lines[0]["evidence"]


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_of_a_plan_that_is_made_again(budget: int | None) -> None:
    """With a budget the step before is there to tell at once, without one the next step."""
    run = Run(backend="inductor", budget=budget)
    run.steps(3 if budget is None else 4)  # the step that is measured is not observed
    before = run.session.plan
    assert before is not None
    run.session._stability.floors = run.session._stability.floors.with_ban("up:linear#0", "bf16", "noise")
    given_back = run.session.replan()
    assert given_back is run.session.plan and given_back.fingerprint != before.fingerprint
    if budget is None:
        run.steps(1)
    told, measured = run.told_and_measured()
    assert told == pytest.approx(measured, rel=0.05)


def test_of_one_that_waits_for_its_compiler_when_it_takes_over() -> None:
    run = Run(backend="inductor", takeover_steps=3)
    run.steps(3)
    run.session._stability.floors = run.session._stability.floors.with_ban("up:linear#0", "bf16", "noise")
    planned = run.session.replan()
    assert run.session._takeover.due_step == 6
    run.steps(2)
    assert run.session.plan is planned
    as_it_is = run.told_and_measured()
    assert as_it_is[0] == pytest.approx(as_it_is[1], rel=0.05)
    run.steps(1)
    told, measured = run.told_and_measured()
    assert told == pytest.approx(measured, rel=0.05) and abs(as_it_is[0] / measured - 1.0) > 0.05


class Caches(Gates):
    """Gives back what nobody differentiates: the code is given zeros for it, and lets go of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), torch.cat([self.up(x)] * 6, -1)


def test_of_a_model_that_gives_back_what_nobody_differentiates() -> None:
    torch._dynamo.reset()
    model, x = Caches(False), torch.ones(1024, 16)

    def step() -> None:
        model(x)[0].square().mean().backward()
        session.step()

    autoprec.compile(
        model,
        policy=policy(formats=("fp32", "bf16")),
        batches=[x, x],
        loss_fn=lambda m, b: m(b)[0].square().mean(),
        backend="inductor",
        events=None,
    )
    session = autoprec.session(model)
    assert session.plan is not None and session.plan.predicted is not None and session.graph is not None
    step()
    step()  # observed
    measured = peak_bytes(step, CPU)
    assert session.plan.predicted.peak_bytes - fixed_bytes(session.graph) == pytest.approx(measured, rel=0.02)
    (made,) = [m for m in session.lowering.compiled if m.plan == session.plan.fingerprint]
    assert made.peak_bytes is not None and made.peak_bytes > 1.05 * measured  # if they came back to all


def test_a_run_that_goes_on_has_what_was_told() -> None:
    run = Run(made_elsewhere(), backend="inductor")
    run.steps(INTERVAL)
    state = run.session.state_dict()
    again = Run(made_elsewhere(), backend="inductor")
    again.session.load_state_dict(state)
    assert again.session.plan == run.session.plan
    run.steps(1)
    again.steps(1)
    assert again.session.plan == run.session.plan and again.session.events == run.session.events


def test_a_plan_that_says_nothing_of_its_peak_stays_as_it_is() -> None:
    plan = replace(made_elsewhere(), predicted=None)
    run = Run(plan, backend="inductor")
    run.steps(INTERVAL + 1)
    assert run.session.plan is plan
