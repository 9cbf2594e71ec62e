"""The predicted peak of a step is the allocator's within 5 %, and a budget is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoprec
from autoprec.devices import Device
from autoprec.execution.measuring import peak_bytes, saved_bytes, workspace_bytes
from autoprec.numerics.dtypes import native_formats
from autoprec.planning.evaluator import Step, evaluate
from autoprec.planning.planner import ask, propose
from autoprec.planning.problem import fixed_bytes
from autoprec.planning.solutions import Choice, Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.serial import load_policy
from tests.memory_study import WORKLOADS, Peak, peaks

CPU = torch.device("cpu")

#: Without BF16 instructions products hold FP32 copies of their operands for a moment, whose overlap is less sure.
EMULATED = "bf16" not in native_formats("cpu")
SLACK = 0.08 if EMULATED else 0.05


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_peak_is_predicted(workload: str) -> None:
    found = {p.plan: p for p in peaks([workload])}
    assert found["fp32"].ratio and found["bf16"].ratio
    for p in found.values():
        # Which plan fits 60 % best depends on the timings of the day, and so does how much of it overlaps.
        assert p.ratio is None or abs(p.ratio - 1.0) <= (0.08 if p.plan == "60 %" else SLACK), p
        if p.measured is not None and p.budget is not None:
            assert p.measured <= 1.02 * p.budget, p
    # The LSTM between its layers runs in FP32: it is not ours to make narrow. An emulated product holds FP32 copies.
    assert found["60 %"].measured or workload == "recurrent" or EMULATED


def off(found: list[Peak]) -> bool:
    return any(p.ratio is not None and abs(p.ratio - 1.0) > SLACK for p in found)


def test_without_workspace_the_prediction_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "workspace_by_key", {})
    plain = next(p for p in peaks(["convolutions"]) if p.plan == "fp32")
    assert plain.ratio is not None and plain.ratio < 0.96  # 1.000 with it


def test_without_gradients_the_prediction_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "gradients", lambda self, t, born: None)
    assert off(list(peaks(["mlp"])))


def test_workspace_is_what_is_held_for_a_moment() -> None:
    """A temporary of 4 kB; the result, and what autograd keeps for it, are not workspace."""
    x = torch.randn(1000, requires_grad=True)
    assert 4000 <= workspace_bytes(lambda: (x + 1.0).sum(), CPU) < 4100  # and the number 1.0
    assert workspace_bytes(lambda: x * 2.0, CPU) < 100
    assert workspace_bytes(lambda: torch.exp(x).sin(), CPU) < 100  # both are kept
    assert workspace_bytes(lambda: None, CPU) == 0
    with torch.no_grad():
        assert 4000 <= workspace_bytes(lambda: torch.exp(x).sin(), CPU) < 4100


def test_measuring_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    workspace_bytes(lambda: torch.ones(10), CPU)
    assert capfd.readouterr() == ("", "")


class AfterAnLstm(nn.Module):
    """What its linear reads is not contiguous: torch's keeps a copy of it, ours the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.up = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(self.lstm(x)[0])).square().mean()


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_what_a_product_keeps_of_an_input_that_is_not_contiguous(fmt: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = AfterAnLstm(), [torch.randn(8, 20, 16) for _ in range(2)]
    policy = autoprec.Policy.model_validate({
        "name": "test", "formats": ("fp32", "bf16", "fp16"), "storage": {"formats": ()}, "calibration": {"steps": 2},
        "noise": {"gradient": 1e6, "loss": 1e6},
        "rules": [{"kinds": ["lstm"], "pin": "fp32"}, {"match": "*", "pin": fmt}],
    })  # fmt: skip
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b), events=None)
    session = autoprec.session(model)
    model(batches[0]).backward()
    session.step()
    assert session.plan is not None and session.plan.predicted is not None
    kept = saved_bytes(lambda: model(batches[0]), [*model.parameters(), batches[0]])
    assert session.plan.predicted.saved_bytes == kept


class Skips(nn.Module):
    """A convolution of one place whose stride leaves three in four out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.skip = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 1, stride=2, bias=False)
        self.head = nn.Linear(32 * 16 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.skip(torch.tanh(self.stem(x))).flatten(1)).square().mean()


@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
def test_places_that_a_convolution_does_not_read_take_nothing(gradient: str) -> None:
    """Torch's own, in FP32, copies them: that is what is measured of it, and not what a mixture takes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = Skips(), [torch.randn(16, 3, 32, 32) for _ in range(2)]
    policy = load_policy("balanced").replaced(calibration={"steps": 2}, storage={"formats": ()})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b), events=None)
    session = autoprec.session(model)
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem = proposals.problem
    [gemm] = (g for g in problem.gemms if g.op == "skip:conv2d#0")
    assert gemm.plain_extra[1] > 0
    options = list(uniform_choice(problem, "bf16").options)
    options[gemm.grad_weight] = problem.units[gemm.grad_weight].options.index(gradient)
    choice = Choice(options=tuple(options))
    evaluation = evaluate(problem, choice)
    plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
    autoprec.unwrap(model)
    autoprec.compile(model, plan=plan, events=None)
    for _ in range(2):
        model(batches[0]).backward()
    measured = peak_bytes(lambda: model(batches[0]).backward(), CPU)
    predicted = evaluation.peak_bytes - problem.fixed_bytes
    assert abs(predicted / measured - 1.0) <= SLACK, (predicted, measured)
    # Where the whole product is FP32 it is torch's own.
    assert problem.one_after_the_other(gemm, "fp32", plain=True) == (gemm.plain_extra[0], -gemm.plain_extra[1])


class Scores(nn.Module):
    """Its logits are what is large, and the loss of them is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_outside_of_the_model_is_measured_where_it_is_given(inside: bool) -> None:
    """What it takes between the passes is a part of the peak, predicted and measured; its gradient of the logits and
    their logarithmic probabilities. A step that stays inside of the graph has none."""
    torch._dynamo.reset()
    model, labels = Scores(), torch.randint(0, 512, (256,))
    batches = [torch.randn(256, 32) for _ in range(3)]

    def loss_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m(x)
        return y.square().mean() if inside else nn.functional.cross_entropy(y, labels)

    policy = load_policy("memory").replaced(calibration={"steps": 3}, formats=("fp32",), storage={"formats": ()})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_of, events=None)
    session = autoprec.session(model)
    assert session.graph is not None and session.plan is not None and session.plan.predicted is not None
    logits = 4 * 256 * 512
    found = session.graph.loss_bytes
    assert 2 * logits <= found < 2.1 * logits if not inside else logits <= found
    for _ in range(2):
        loss_of(model, batches[0]).backward()
    measured = peak_bytes(lambda: loss_of(model, batches[0]).backward(), CPU)
    predicted = session.plan.predicted.peak_bytes - fixed_bytes(session.graph)
    assert abs(predicted / measured - 1.0) <= SLACK, (predicted, measured)


def test_the_race_holds_the_bytes_of_the_loss_for_a_moment() -> None:
    """So that a measured peak is that of a step, also where the loss has it."""
    torch._dynamo.reset()
    model, labels = Scores(), torch.randint(0, 512, (256,))
    batches = [torch.randn(256, 32) for _ in range(3)]

    def loss_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(m(x), labels)

    policy = load_policy("balanced").replaced(calibration={"steps": 3})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_of, events=None)
    session = autoprec.session(model)
    assert session.graph is not None and session.plan is not None
    for _ in range(2):
        loss_of(model, batches[0]).backward()
    measured = peak_bytes(lambda: loss_of(model, batches[0]).backward(), CPU)
    [own] = (c for c in session.plan.contestants if c.adopted)
    assert own.measured is not None
    assert abs((own.measured.peak_bytes - fixed_bytes(session.graph)) / measured - 1.0) <= SLACK


def test_who_profiles_calibration_is_not_disturbed() -> None:
    torch._dynamo.reset()
    model, batches = Scores(), [torch.randn(64, 32) for _ in range(3)]
    policy = load_policy("balanced").replaced(calibration={"steps": 3})
    autoprec.compile(model, policy=policy, events=None)
    session = autoprec.session(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        session.calibrate(batches, lambda m, x: m(x).square().mean())
    assert session.profile is not None and session.profile.steps == 3
    assert session.graph is not None and session.graph.loss_bytes == 0
