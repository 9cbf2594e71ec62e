"""Gradients that hooks of somebody else's may have changed are looked at behind them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import autoprec
from autoprec.serial import load_policy


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def bf16() -> autoprec.Plan:
    ops = ("0:linear#0", "2:linear#0")
    return autoprec.Plan(
        assignments=tuple(
            autoprec.Assignment(op=op, role=role, format="bf16", reason="test") for op in ops for role in autoprec.Role
        )
    )


def spoil(g: Tensor) -> None:
    """Where no version tells."""
    g.data[0] = math.inf


@pytest.mark.parametrize("hook", ["tensor", "accumulated", "accumulated last", "returned"])
def test_a_gradient_that_somebody_else_has_written_to_is_looked_at(hook: str) -> None:
    model = net()
    if hook == "tensor":
        model[-1].weight.register_hook(spoil)
    elif hook == "returned":
        model[-1].weight.register_hook(lambda g: g * math.inf)
    elif hook == "accumulated":
        model[-1].weight.register_post_accumulate_grad_hook(lambda p: spoil(p.grad))
    autoprec.compile(model, policy="bf16", plan=bf16(), events=None)
    if hook == "accumulated last":  # behind the guard's
        model[-1].weight.register_post_accumulate_grad_hook(lambda p: spoil(p.grad))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(64, 16)).square().mean().backward()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_what_a_backward_pass_left_that_died_is_looked_at() -> None:
    model = autoprec.compile(net(), policy="bf16", plan=bf16(), events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 16, requires_grad=True)

    def dies(_: Tensor) -> None:
        raise RuntimeError("a hook's own error")

    x.register_hook(dies)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="own"):
        model(x).square().mean().mul(math.inf).backward()
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_many_gradients_at_once() -> None:
    """Where no op works in place (docs/limitations.md)."""
    model = autoprec.compile(net(), policy="bf16", plan=bf16(), events=None)
    x, parameters = torch.randn(64, 16), list(model.parameters())
    batched = torch.autograd.grad(model(x).mean(0), parameters, torch.eye(4), is_grads_batched=True)
    single = [torch.autograd.grad(model(x).mean(0)[k], parameters) for k in range(4)]
    for many, one in zip(batched, zip(*single, strict=True), strict=True):
        assert torch.allclose(many, torch.stack(one), rtol=0.02, atol=0.02)


class Late(nn.Module):
    """A module whose hooks come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("where", ["act", "down", ""])
def test_a_hook_that_comes_later_and_goes_again_is_called(where: str, at: int) -> None:
    """In calibration and under a plan; as the plain model has it."""
    torch.manual_seed(0)
    model = autoprec.compile(Late(), policy=load_policy("bf16").replaced(calibration={"steps": 3}), events=None)
    plain, x = Late(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handles, calls = list[RemovableHandle](), list[object]()
    for step in range(8):
        if step in (at, at + 2):
            if step == at:
                for m in (model, plain):
                    hook = m.get_submodule(where).register_forward_hook(lambda m, i, y: (calls.append(m), 2.0 * y)[1])
                    handles.append(hook)
            else:
                for handle in handles:
                    handle.remove()
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        seen = len(calls)
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        assert len(calls) - seen == (at <= step < at + 2)
        assert float((y - plain(x)).norm() / plain(x).norm()) < 0.02
