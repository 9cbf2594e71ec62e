"""25 windows of each model, half as long; `python -m tests.campaigns.clean` runs 2,000. And bugs that it must see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor

from autoprec import stability
from autoprec.calibration.observer import StepObserver
from autoprec.monitoring.judging import Judge
from autoprec.numerics.histograms import Sample
from autoprec.plans import Plan
from autoprec.policies import Monitor
from tests.bench.measure import one_thread
from tests.campaigns import clean
from tests.campaigns.clean import BY_KIND, RULED, TASKS

SHORTER = Monitor(window_steps=10, interval_steps=2)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", TASKS)
def test_clean_runs_are_left_alone(name: str) -> None:
    assert clean.clean_run(TASKS[name], RULED, SHORTER, windows=25).wrong == []


def test_a_jump_of_the_gradients_fits_into_their_room() -> None:
    """With three octaves left, and another scale below one, the 202nd step was skipped."""
    training = clean.Training(TASKS["text"], clean.policy(TASKS["text"], BY_KIND, clean.SHORT), steps=4000, seed=0)
    training.planned()
    for _ in range(220):
        training.step()
    assert training.session.steps > 220 and not training.session.skipped_steps
    assert {e.kind for e in training.session.events} <= {"planned", "rescaled"}


@pytest.mark.parametrize("name", TASKS)
def test_a_monitor_changes_no_bit(name: str) -> None:
    assert clean.unlike_unmonitored(TASKS[name], RULED, steps=40) == (40, [])


# Planted bugs --------------------------------------------------------------------------------------------------------


def test_a_judge_whose_limits_are_far_too_low_would_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stern(Judge):
        def __init__(self, plan: Plan, graph: object, window: object, limits: object, **rest: object) -> None:
            low = SHORTER.model_copy(update={"sqnr_drop_db": 1e-3, "underflow_frac": 1e-9, "saturation_frac": 1e-9})
            super().__init__(plan, graph, window, low, **rest)

    monkeypatch.setattr(stability, "Judge", Stern)
    row = clean.clean_run(TASKS["visits"], RULED, SHORTER, windows=2)
    assert row.changes["promoted"] and f"{row.changes['promoted']} promoted" in row.wrong
    assert any("noise" in line for line in clean.told(row))


def test_windows_that_nobody_judges_would_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability.Stability, "watches", lambda self, plan: False)
    row = clean.clean_run(TASKS["visits"], RULED, SHORTER, windows=2)
    assert any(w.startswith("0 windows and 0 observed steps") for w in row.wrong)


def test_a_bad_batch_would_be_red() -> None:
    task, drawn = TASKS["visits"], 0

    def batch(generator: Generator) -> tuple[Tensor, Tensor]:
        nonlocal drawn
        drawn += 1
        inputs, wanted = task.batch(generator)
        return (inputs * torch.nan if drawn == 20 else inputs), wanted

    row = clean.clean_run(replace(task, batch=batch), RULED, SHORTER, windows=2)
    assert "1 skipped steps, 1 reported" in row.wrong


def test_an_observer_that_draws_random_numbers_would_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StepObserver.value

    def drawing(self: StepObserver, tensor_id: str, x: Tensor, **rest: bool) -> Sample:
        torch.rand(1)
        return plain(self, tensor_id, x, **rest)

    monkeypatch.setattr(StepObserver, "value", drawing)
    _, found = clean.unlike_unmonitored(TASKS["visits"], RULED, steps=6)
    assert found[0].startswith("step ") and "parameters and buffers" in found[1]


def test_a_plan_without_narrow_formats_would_be_red() -> None:
    assert clean.narrowness(Plan(assignments=()), RULED)[0].startswith("the plan has no bf16, fp16, fp8_e4m3 storage")


def test_a_loss_that_rises_or_stands_still_would_be_red() -> None:
    def told(losses: list[float]) -> str:
        return " ".join(clean.health(clean.course(losses)))

    falling = [1.0 + 0.01 * (k % 7) - k / 2000 for k in range(1000)]
    assert told(falling) == ""
    assert "did not go down" in told([1.0] * 1000) and "did not go down" in told([*falling[:-1], torch.nan])
    assert "did not stay down" in told([*falling[:900], *(x + 0.3 for x in falling[900:])])
