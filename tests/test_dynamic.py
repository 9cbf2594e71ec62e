"""`DynamicPrecisionScheduler`, and what a policy with one scale for the loss asks of the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import InputError
from autoprec.policies import Policy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def train(model: nn.Module, scheduler: autoprec.DynamicPrecisionScheduler, steps: int = 12) -> list[float]:
    """The loop of such code: the forward pass and the loss inside of the context, a GradScaler around."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = autoprec.GradScaler("cpu", init_scale=4096.0)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        with scheduler.precision_context():
            loss = nn.MSELoss()(model(x), x[:, :4])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("given", [True, False], ids=["model=", "adopted"])
def test_a_model_is_scheduled(given: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    plain_call = nn.Module.__call__
    scheduler = autoprec.DynamicPrecisionScheduler(8, 32, 500, model=model if given else None, events=None)
    losses = train(model, scheduler)
    assert nn.Module.__call__ is plain_call
    session = scheduler.session
    assert session is autoprec.session(model) and session.plan is not None and session.steps == 12
    assert losses[-1] < losses[0] and session.skipped_steps == 0
    assert scheduler.policy.monitor.window_steps == 500 and scheduler.policy.name == "dynamic"
    scheduler.close()
    with pytest.raises(InputError):
        autoprec.session(model)


def test_the_outermost_module_with_parameters_is_adopted() -> None:
    model, scheduler = Net(), autoprec.DynamicPrecisionScheduler(events=None)
    with pytest.raises(InputError, match="no model was called"):
        _ = scheduler.session
    with scheduler.precision_context():
        nn.ReLU()(torch.ones(1))
        assert scheduler.model is None
        model(torch.ones(2, 16))
        assert scheduler.model is model
        nn.Linear(2, 2)(torch.ones(2))
    assert scheduler.model is model
    with pytest.raises(RuntimeError, match="on purpose"), scheduler.precision_context():
        raise RuntimeError("on purpose")


def test_the_patch_is_gone_after_an_error() -> None:
    plain_call = nn.Module.__call__
    scheduler = autoprec.DynamicPrecisionScheduler(events=None)
    with pytest.raises(RuntimeError, match="on purpose"), scheduler.precision_context():
        raise RuntimeError("on purpose")
    assert nn.Module.__call__ is plain_call
    half = Net().half()
    with pytest.raises(InputError, match="float16"), scheduler.precision_context():
        half(torch.ones(2, 16).half())
    assert nn.Module.__call__ is plain_call and scheduler.model is None


@pytest.mark.parametrize(
    ("least", "most", "allowed"),
    [(16, 16, {"bf16", "fp16"}), (32, 32, {"fp32"}), (8, 16, {"bf16", "fp16"}), (16, 32, {"bf16", "fp16", "fp32"})],
)
def test_bounds_hold(least: int, most: int, allowed: set[str]) -> None:
    """On a device without FP8 products, where 8 bits mean 16."""
    torch.manual_seed(0)
    model = Net()
    scheduler = autoprec.DynamicPrecisionScheduler(least, most, model=model, events=None)
    train(model, scheduler)
    assert {a.format for a in scheduler.session.plan.assignments} <= allowed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 32), "min_precision must be 8, 16 or 32 bits, not 4"),
        ((8, 64), "max_precision must be 8, 16 or 32 bits, not 64"),
        ((32, 8), "min_precision 32 is above max_precision 8"),
        ((8, 32, 0), "window_steps"),
        ((8, 32, "many"), "window_steps"),
    ],
)
def test_bad_arguments(arguments: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        autoprec.DynamicPrecisionScheduler(*arguments)


def test_fp16_gradients_need_a_scaler_in_the_loop() -> None:
    """Forgotten, most gradients would be 0; nothing else would show it."""
    pins = {"match": "*", "kinds": ["linear", "tanh"], "pin": "fp16"}
    policy = Policy(name="mine", formats=("fp32", "fp16"), rules=(pins,), calibration={"steps": 2},
                    noise={"gradient": 1e3, "loss": 1e3}, loss_scaling={"mode": "global"})  # fmt: skip
    torch.manual_seed(0)
    model = autoprec.compile(Net(), policy=policy, events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 16)
    for _ in range(2):  # calibration, in FP32
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    model(x).square().mean().backward()
    with pytest.raises(InputError, match=r"policy 'mine' .*GradScaler\(model=model\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for scaler in (torch.amp.GradScaler("cpu", init_scale=64.0), autoprec.GradScaler("cpu", init_scale=64.0)):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert autoprec.session(model).steps == 4
