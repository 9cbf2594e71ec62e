"""What training loops do that no tutorial shows: batches that are given up, gradients put there by hand, buffers that
begin late, heads with optimizers of their own, states saved between two models' steps."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import NonFiniteError, StateError
from autoprec.losses import Losses

HUGE = 1e38


def policy(fmt: str = "fp16", **changes: Any) -> autoprec.Policy:
    """All in one format, observed every second step."""
    return autoprec.Policy(
        name="one",
        formats=("fp32", fmt),
        noise={"gradient": 1e3, "loss": 1e3},
        rules=[{"match": "*", "pin": fmt, "optional": True}],
        storage={"formats": ()},
        calibration={"steps": 3},
        monitor={"window_steps": 8, "interval_steps": 2},
    ).replaced(**changes)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(i: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
    if bad:
        x[0, 0] = math.nan
    return x


def compiled(model: nn.Module, chosen: autoprec.Policy | str = "observe") -> tuple[nn.Module, autoprec.Session, Any]:
    model = autoprec.compile(model, policy=chosen, events=None)
    return model, autoprec.session(model), torch.optim.SGD(model.parameters(), lr=1e-3)


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def changed(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    now = everything(model)
    return [n for n in now.keys() | before.keys() if n not in now or n not in before or not now[n].equal(before[n])]


def vetoed(model: nn.Module, optimizer: Any, run: Callable[[nn.Module], Tensor]) -> list[str]:
    """What a step changes that is bad."""
    before = everything(model)
    optimizer.zero_grad()
    run(model).backward()
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    return changed(before, model)


# Batches that are given up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 5], ids=["while calibrating", "observed by the monitor"])
@pytest.mark.parametrize("when", ["before backward", "after backward", "zeroed"])
def test_a_batch_that_the_loop_gives_up_tells_nothing(at: int, when: str) -> None:
    model, session, optimizer = compiled(layers(), policy())
    for i in range(24):
        optimizer.zero_grad()
        loss = model(batch(i, bad=i == at)).square().mean()
        if not math.isfinite(loss.item()):
            if when != "before backward":
                loss.backward()
                optimizer.zero_grad(set_to_none=when == "after backward")
            continue
        loss.backward()
        optimizer.step()
    assert [e.kind for e in session.events] == ["planned"]
    assert set(session.executed_formats().values()) == {"fp16"} and session.skipped_steps == 0


def test_a_model_with_results_that_are_never_finite_is_calibrated() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = layers(), nn.Linear(8, 1)

        def forward(self, x: Tensor, only_look: bool) -> Tensor:
            return self.seen(x) - math.inf if only_look else self.net(x)

    model, session, optimizer = compiled(Masked(), policy())
    for i in range(12):
        optimizer.zero_grad()
        model(batch(i), True)
        model(batch(i), False).square().mean().backward()
        optimizer.step()
    assert session.plan is not None


# Losses ------------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.off = layers(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean() + self.off


@pytest.mark.parametrize("off", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_can_be_saved_and_is_a_spike(off: float) -> None:
    """Its gradients are."""
    chosen = policy("bf16", monitor={"window_steps": 16, "interval_steps": 4})
    model, session, optimizer = compiled(WithLoss(), chosen)
    for i in range(40):
        model.off = off if i == 30 else 0.0
        optimizer.zero_grad()
        model(batch(i)).backward()
        optimizer.step()
        session.state_dict()
    (spike,) = [e for e in session.events if e.trigger == "loss_spike"]
    assert "inf" in spike.evidence and session.skipped_steps == 0


def test_only_losses_of_good_steps_are_kept() -> None:
    """Neither one that the loop gives up nor one of a step that an error ended."""
    model, session, optimizer = compiled(WithLoss(), policy("bf16", guard={"nonfinite": "raise"}))
    given_up = raised = 0
    for i in range(8):
        optimizer.zero_grad()
        loss = model(batch(i, bad=i in (5, 6)))
        if i == 5:
            given_up += 1
            continue
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError:
            raised += 1
    kept = session._losses.known.window
    assert given_up == raised == 1 and len(kept) == 6 and all(map(math.isfinite, kept))


def test_the_latest_losses_are_kept_and_the_number_of_the_first() -> None:
    found = Losses().extended([1.0] * 5000, 10)
    assert len(found.window) == 4096 and found.first_step == 10 + 5000 - 4096


# Buffers -----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Statistics of the input, a graph break, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = x - self.mean
        torch._dynamo.graph_break()
        return self.net(x)


class Frozen(nn.Module):
    """In front of a graph break, with batch norm in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.net = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        torch._dynamo.graph_break()
        return self.net(x)


class Lazy(nn.Module):
    """Statistics that begin with the first batch, and a buffer that there was not even a name for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.mean is None:
            self.mean = mean
            self.register_buffer("first", mean.clone())
        else:
            self.mean = 0.9 * self.mean + 0.1 * mean
        return self.net(x - self.mean)


class Bank(nn.Module):
    """Of more than 1 MiB, filled from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.fill = layers(), False
        self.register_buffer("bank", torch.zeros(40_000, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.fill:
            self.bank[: len(x)] = x.detach()
        return self.net(x)


@pytest.mark.parametrize(("make", "good"), [(Normed, 2), (Frozen, 2), (Lazy, 0), (Bank, 4)])
def test_a_bad_step_changes_no_buffer(make: type[nn.Module], good: int) -> None:
    model, _, optimizer = compiled(make())
    for i in range(good):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()
    model.fill = True
    assert vetoed(model, optimizer, lambda m: m(batch(9, bad=True)).square().mean()) == []
    optimizer.zero_grad()
    model(batch(10)).square().mean().backward()
    optimizer.step()
    assert not autoprec.session(model).step_was_skipped
    assert all(bool(t.isfinite().all()) for t in everything(model).values())


# Gradients and optimizers ------------------------------------------------------------------------------------------


def test_gradients_that_the_loop_puts_there_are_looked_at() -> None:
    model, session, optimizer = compiled(layers())
    for i in range(4):
        before = everything(model)
        loss = model(batch(i, bad=i == 2)).square().mean()
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            p.grad = g
        optimizer.step()
        assert session.step_was_skipped == (i == 2) == (changed(before, model) == [])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@pytest.fixture
def heads() -> Iterator[tuple[nn.Module, autoprec.Session, dict[str, Any]]]:
    model, session, _ = compiled(Heads())
    yield model, session, {n: torch.optim.SGD(getattr(model, n).parameters(), lr=0.1) for n in "ab"}


def test_a_bad_gradient_that_is_left_is_not_stepped_by_later(heads: Any) -> None:
    """The second optimizer steps every second time."""
    model, session, by_head = heads
    for i in range(4):
        a, b = model(batch(i))
        told = 0.0 if i % 2 else (b * HUGE * HUGE if i == 2 else b).square().mean()
        (a.square().mean() + told).backward()
        by_head["a"].step()
        by_head["a"].zero_grad()
        if i % 2:
            before = everything(model)
            by_head["b"].step()
            by_head["b"].zero_grad()
            assert (changed(before, model) == []) == (i == 3) == session.step_was_skipped


@pytest.mark.parametrize("first", ["a", "b"])
def test_no_part_of_a_bad_backward_pass_is_stepped_by(heads: Any, first: str) -> None:
    """Whichever optimizer has the part that is not finite, and although its gradients are reset before the other's
    step."""
    model, session, by_head = heads
    second = "b" if first == "a" else "a"
    for i in range(3):
        before = everything(model)
        a, b = model(batch(i))
        ((a * HUGE * HUGE if i == 1 else a).mean() + b.square().mean()).backward()
        for head in (first, second):
            by_head[head].step()
            by_head[head].zero_grad()
        assert (changed(before, model) == []) == (i == 1)
    assert session.skipped_steps == 1


def test_a_second_optimizers_bad_steps_are_counted(heads: Any) -> None:
    """Each head has a backward pass of its own."""
    model, session, by_head = heads
    for i in range(3):
        for optimizer in by_head.values():
            optimizer.zero_grad()
        a, b = model(batch(i))
        a.square().mean().backward()
        by_head["a"].step()
        (b * HUGE * HUGE if i else b).square().mean().backward()
        by_head["b"].step()
        assert session.step_was_skipped == bool(i)
    assert session.skipped_steps == 2 and session.steps == 3


def test_what_an_optimizer_keeps_with_its_groups_is_put_back() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"k": 0})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["k"] += 1
                group["last"] = group["k"]

    model, _, _ = compiled(layers())
    optimizer = Counting(model.parameters())
    vetoed(model, optimizer, lambda m: m(batch(0, bad=True)).square().mean())
    assert optimizer.param_groups[0]["k"] == 0 and "last" not in optimizer.param_groups[0]


def test_a_compiled_optimizer_step() -> None:
    model, session, optimizer = compiled(layers(), policy("bf16"))
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(6):
        optimizer.zero_grad()
        model(batch(i, bad=i == 4)).square().mean().backward()
        step()
    assert session.plan is not None and session.skipped_steps == 1


def test_a_fault_that_was_injected_once_ends_with_its_step() -> None:
    """Also where an error ends that."""
    model, session, optimizer = compiled(layers(), policy(guard={"nonfinite": "raise"}))
    raised = []
    for i in range(8):
        fault = autoprec.testing.inject(model, "0:linear#0") if i == 5 else None
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        try:
            optimizer.step()
        except NonFiniteError:
            raised.append(i)
        if fault is not None:
            fault.remove()
    assert raised == [5]


# The rest ----------------------------------------------------------------------------------------------------------


def test_a_model_that_another_trains_through_can_be_saved() -> None:
    """As the discriminator of a GAN: once its gradients are reset, or where there are none."""
    model, session, optimizer = compiled(layers())
    optimizer.zero_grad()
    model(batch(0)).square().mean().backward()
    optimizer.step()
    model(batch(1)).square().mean().backward()
    with pytest.raises(StateError, match="zero_grad"):
        session.state_dict()
    optimizer.zero_grad()
    session.state_dict()
    model(batch(2))
    session.state_dict()
    optimizer.zero_grad()
    model(batch(3)).square().mean().backward()
    optimizer.step()
    assert session.steps == 2


def test_calls_leave_nothing() -> None:
    model, _, _ = compiled(layers())

    def variables(calls: int) -> int:
        for i in range(calls):
            with torch.no_grad():
                model(batch(i))
        return len(contextvars.copy_context())

    assert variables(4) == variables(12)
