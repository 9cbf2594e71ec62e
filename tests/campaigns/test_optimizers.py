"""One configuration of each of torch's optimizers; `python -m tests.campaigns.optimizers` runs all."""

from __future__ import annotations

import pytest

from autoprec.execution.guard import GradientWatch
from autoprec.plans import Assignment, Plan, Role
from tests.campaigns import optimizers


@pytest.mark.filterwarnings("ignore")
def test_optimizers_are_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    tally = optimizers.campaign((), 1)
    with capsys.disabled():
        print(f"\n  {tally.loops} loops, {tally.good_steps} good steps, {tally.bad_steps} bad steps", end="")
    assert tally.broken == []
    assert tally.loops > 35 and tally.bad_steps > 70


def test_a_planted_difference_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """One BF16 linear is not the model."""
    plan = Plan(assignments=(Assignment(op="first:linear#0", role=Role.OUTPUT, format="bf16", reason="planted"),))
    monkeypatch.setattr(optimizers, "Plan", lambda assignments: plan)
    assert len(optimizers.campaign(("SGD",), 1).broken) == 3


def test_a_bad_step_that_nobody_vetoes_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientWatch, "verdict", lambda self: True)
    broken = optimizers.campaign(("Adam",), 1).broken  # but for what a GradScaler skips by itself
    assert len(broken) == 2 and all("nan" in line or "inf" in line for line in broken)
