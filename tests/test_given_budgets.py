"""A plan that was made elsewhere is held against its budget once a step under it is known."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.plans import Plan
from tests.test_replanning import Training, policy

#: Steps before and with the first observed one.
INTERVAL = 2


def chosen() -> autoprec.Policy:
    return policy(formats=("fp32", "bf16"), storage={"formats": ("bf16",)})


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))


@cache
def made_elsewhere() -> Plan:
    run = Training(chosen(), layers())
    run.steps(2)
    plan = run.session.plan
    assert plan is not None and not plan.is_identity and plan.predicted is not None
    return plan


class Given(Training):
    """With a larger batch than the plan was made for."""

    def __init__(self, budget_bytes: int | None, **more: Any) -> None:
        super().__init__(chosen(), layers(), plan=replace(made_elsewhere(), budget_bytes=budget_bytes), **more)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def passes(self) -> None:
        self.model(torch.ones(2048, 16)).square().mean().backward()

    def step(self, size: float = 1.0, note: bool = False) -> None:
        self.optimizer.zero_grad()
        self.passes()
        self.optimizer.step()

    @property
    def warnings(self) -> list[str]:
        return [e.evidence for e in self.told("warning") if e.trigger == "budget"]


def told_bytes(run: Given) -> int:
    (warning,) = run.warnings
    found = re.match(r"a step takes (\d+) bytes under the plan that was given, for a budget of \d+, and", warning)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_plan_that_breaks_its_budget_is_told_once(backend: str) -> None:
    run = Given(1, backend=backend)
    run.steps(INTERVAL - 1)
    assert not run.warnings
    run.steps(2 * INTERVAL + 1)  # the next is not observed
    found = told_bytes(run)
    # Weights, their gradients, AdamW's two states and a step for each, the batch; and the step itself.
    sizes = [p.nbytes for p in run.model.parameters()]
    beside = 4 * sum(sizes) + 4 * len(sizes) + 4 * 2048 * 16
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    assert found == pytest.approx(beside + peak_bytes(run.passes, torch.device("cpu")), rel=0.02)
    for budget, breaks in ((found, False), (found - 1, True), (None, False)):
        again = Given(budget, backend=backend)
        again.steps(INTERVAL)
        assert bool(again.warnings) == breaks


def test_a_run_that_goes_on_tells_it_at_the_same_step() -> None:
    run = Given(1)
    run.steps(INTERVAL - 1)
    before = run.session.state_dict()
    run.steps(1)
    after, (warning,) = run.session.state_dict(), run.warnings
    for state in (before, after):
        again = Given(1)
        again.session.load_state_dict(state)
        again.steps(2 * INTERVAL)
        assert again.warnings == [warning]


def test_a_plan_that_the_run_made_was_measured_when_it_was_made() -> None:
    later = {"window_steps": 8, "interval_steps": 4}  # than calibration
    run = Training(chosen().replaced(budget="90%", monitor=later), layers())
    run.steps(2)
    plan = run.session.plan
    assert plan is not None and plan.budget_bytes is not None
    run.session.adopt(replace(plan, budget_bytes=1))
    run.steps(4)
    assert not run.told("warning")
