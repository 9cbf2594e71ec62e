"""Compiled plans in loops that do more than forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.plans import Event

STEPS = 8


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 4))


def lowering_warnings(model: nn.Module) -> list[Event]:
    return [e for e in autoprec.session(model).events if e.trigger == "lowering"]


def train(model: nn.Module, x: Tensor, *, steps: int = STEPS, backward: Callable[[Tensor], Any] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x)
        (backward or (lambda y: y.square().mean().backward()))(loss)
        optimizer.step()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_validation_before_the_first_plan_records_no_gradients_after_it(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    model, x = small(), torch.randn(8, 16)
    autoprec.compile(model, policy="observe", events=None, backend="inductor")
    train(model, x, steps=3)
    with mode():
        model(x)
    train(model, x)
    assert autoprec.session(model).plan is not None
    with mode():
        y = model(x)
    assert y.grad_fn is None and not y.requires_grad
    assert sum(made.kept != () for made in autoprec.session(model).lowering.compiled) == 1


def test_a_graph_may_be_differentiated_twice() -> None:
    """The second pass reads what the first has read."""

    def twice(y: Tensor) -> None:
        y.mean().backward(retain_graph=True)
        y.square().mean().backward()

    found, x = list[Tensor](), torch.randn(8, 16)
    for backend in ("eager", "inductor"):
        model = small()
        autoprec.compile(model, policy="observe", events=None, backend=backend)
        train(model, x, backward=twice)
        model.zero_grad()
        twice(model(x))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert lowering_warnings(model) == []
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_batch_of_another_size_of_what_is_kept_narrow() -> None:
    """A norm's result and its cast are kept once, whatever symbol their size is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4))
    autoprec.compile(model, policy="memory", events=None, backend="inductor")
    for rows in (8, 5):
        train(model, torch.randn(rows, 3, 12, 12))
    assert autoprec.session(model).plan is not None and lowering_warnings(model) == []


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def test_an_lstm_of_inputs_without_gradients() -> None:
    """Of which torch's compiler makes code that fails."""
    torch.manual_seed(0)
    model, x = Rnn(), torch.randn(4, 5, 8)
    autoprec.compile(model, policy="observe", events=None, backend="inductor")
    train(model, x)
    assert autoprec.session(model).lowering.compiled and not lowering_warnings(model)
    model.zero_grad()
    model(x).square().mean().backward()
    given = {n: p.grad for n, p in model.named_parameters()}
    autoprec.unwrap(model)
    model.zero_grad()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(given[name], p.grad)


def test_sizes_that_the_compiler_refuses_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.execution import inductor

    model = small()
    autoprec.compile(model, policy="observe", events=None, backend="inductor")
    train(model, torch.randn(8, 16))
    assert autoprec.session(model).plan is not None

    def refuse(*_: object) -> None:
        raise RuntimeError("not for these sizes")

    monkeypatch.setattr(inductor, "compile_graph", refuse)
    train(model, torch.randn(5, 16))
    [told] = lowering_warnings(model)
    assert "not for these sizes" in told.evidence and "runs uncompiled" in told.evidence


def test_code_that_fails_at_its_first_run_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.execution import inductor

    compile_graph = inductor.compile_graph

    def failing(*arguments: Any) -> tuple[Any, ...]:
        def run(*_: object) -> None:
            torch.rand(3)
            raise RuntimeError("a tensor of another size")

        return run, *compile_graph(*arguments)[1:]

    monkeypatch.setattr(inductor, "compile_graph", failing)
    model, x = small(), torch.randn(8, 16)
    autoprec.compile(model, policy="observe", events=None, backend="inductor")
    train(model, x)
    before = torch.get_rng_state()
    train(model, x, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    [told] = lowering_warnings(model)
    assert "a tensor of another size" in told.evidence and "runs uncompiled" in told.evidence


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.rand(4, 8))


def test_telling_the_peak_of_compiled_code_draws_no_random_numbers() -> None:
    model = Noisy()
    autoprec.compile(model, policy="observe", events=None, backend="inductor")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        before = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
    assert autoprec.session(model).plan is not None
