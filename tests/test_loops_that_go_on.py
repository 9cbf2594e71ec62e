"""One bad step costs one step: loops that write to gradients, that step a part of a model, that go back in other ways
than they did while calibrating."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.errors import InputError, StateError
from autoprec.serial import load_policy


def compiled(model: nn.Module, policy: str = "observe", **changes: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    chosen = load_policy(policy).replaced(calibration={"steps": 2}, **changes)
    autoprec.compile(model, policy=chosen, events=None)
    return model, autoprec.session(model)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(bad: bool = False) -> Tensor:
    x = torch.randn(4, 8)
    return x.index_fill(0, torch.tensor([0]), math.nan) if bad else x


def is_finite(model: nn.Module) -> bool:
    return all(bool(t.isfinite().all()) for t in (*model.parameters(), *model.buffers()))


# -- what the loop writes to gradients after the backward pass -------------------------------------------------------


def normalises(model: nn.Module, bad: bool) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.div_(p.grad.norm() * (0.0 if bad else 1.0))


def adds_noise(model: nn.Module, bad: bool) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.add_(torch.randn_like(p), alpha=math.inf if bad else 0.0)


def assigns(model: nn.Module, bad: bool) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan if bad else 0.1)


def adds_another(model: nn.Module, bad: bool) -> None:
    parameters = list(model.parameters())
    others = torch.autograd.grad(model(batch()).sum() * (math.nan if bad else 1.0), parameters)
    for p, g in zip(parameters, others, strict=True):
        p.grad = p.grad + g


def writes_to_one(model: nn.Module, bad: bool) -> None:
    *_, last = model.parameters()
    assert last.grad is not None
    last.grad[0] = math.nan if bad else 0.0


@pytest.mark.parametrize("write", [normalises, adds_noise, assigns, adds_another, writes_to_one])
def test_gradients_count_as_the_optimizer_reads_them(write: Callable[[nn.Module, bool], None]) -> None:
    model, session = compiled(two_layers())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        write(model, step == 5)
        before = copy.deepcopy([*model.parameters(), optimizer.state_dict()["state"]])
        optimizer.step()
        after = [*model.parameters(), optimizer.state_dict()["state"]]
        assert session.step_was_skipped == (step == 5)
        if step == 5:
            torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    assert session.skipped_steps == 1 and is_finite(model)


# -- gradients that nobody resets ------------------------------------------------------------------------------------


def test_bad_gradients_that_no_optimizer_reads_cost_one_step() -> None:
    """The head is trained, and the body is not frozen."""
    model, session = compiled(two_layers())
    optimizer, skipped = torch.optim.AdamW(model[2].parameters()), []
    for step in range(30):
        optimizer.zero_grad()
        model(batch(step == 5)).square().mean().backward()
        optimizer.step()
        skipped += [step] if session.step_was_skipped else []
    assert skipped == [5] and is_finite(model) and not is_finite(nn.ParameterList([p.grad for p in model.parameters()]))


def test_bad_gradients_that_another_optimizer_will_read_are_its_own() -> None:
    """It steps every eighth time, and is not to step by what a bad step left."""
    model, session = compiled(two_layers())
    fast, slow = (torch.optim.SGD(model[k].parameters(), lr=0.1) for k in (2, 0))
    skipped, moved = [], []
    for step in range(24):
        fast.zero_grad()
        model(batch(step == 8)).square().mean().backward()
        fast.step()
        skipped += [step] if session.step_was_skipped else []
        if step % 8 == 7:
            before = model[0].weight.detach().clone()
            slow.step()
            moved.append(not torch.equal(before, model[0].weight))
            slow.zero_grad()
    assert skipped == [8] and moved == [True, False, True] and session.skipped_steps == 2 and is_finite(model)


@pytest.mark.parametrize("to_none", [True, False])
def test_what_turns_bad_again_after_it_was_reset_counts(to_none: bool) -> None:
    """Also where it is reset between the forward and the backward pass, and so was there when the step began."""
    model, session = compiled(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = model(batch(step in (4, 5))).square().mean()
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.step()
        assert session.step_was_skipped == (step in (4, 5))
    assert is_finite(model)


# -- a call before the step ------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_in_training_mode_belongs_to_the_step(without: Callable[[], Any]) -> None:
    """As where a model labels a batch for itself."""
    torch.manual_seed(0)
    model, session = compiled(Normalised())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(7):
        x = batch(step == 4)
        with without():
            labels = model(x).softmax(-1).clone()
        mean = model.norm.running_mean.clone()
        optimizer.zero_grad()
        F.cross_entropy(model(x + 0.1), labels.clone()).backward()
        optimizer.step()
        assert session.step_was_skipped == (step == 4) and is_finite(model)
        assert step == 4 or not torch.equal(model.norm.running_mean, mean)


# -- other ways back than while calibrating --------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.other = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.trunk(x))
        return self.one(h), self.other(h)


def late(model: Any, step: int, factor: float) -> None:
    one, other = model(batch())
    (one.square().sum() + (other.square().sum() * factor if step >= 4 else 0.0)).backward()


def each_in_turn(model: Any, step: int, factor: float) -> None:
    (model(batch())[0].square().sum() * factor).backward()
    model(batch())[1].square().sum().backward()


def kept(model: Any, step: int, factor: float) -> None:
    one, other = model(batch())
    one.square().sum().backward(retain_graph=True)
    sum(y.square().sum() for y in model(batch())).backward()
    (other.square().sum() * factor).backward()


@pytest.mark.parametrize(("loop", "skipped"), [(late, 2), (each_in_turn, 1), (kept, 1)])
def test_an_overflow_is_promoted_whichever_way_its_gradient_came(loop: Callable[..., None], skipped: int) -> None:
    """By an output that was not differentiated while calibrating it takes one step more: that one shows it."""
    model, session = compiled(Heads(), "fp16", loss_scaling={"mode": "none"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(30):
        optimizer.zero_grad()
        loop(model, step, 1e6 if step >= 8 else 1.0)
        optimizer.step()
    assert session.skipped_steps == skipped
    assert [e.op for e in session.events if e.kind == "promoted"] == [":gelu#0"]


def test_a_resumed_run_names_what_the_run_itself_would_name() -> None:
    """Behind the step that showed that another output is differentiated by now, and before the next that overflows."""
    told = []
    for resumes in (False, True):
        model, session = compiled(Heads(), "fp16", loss_scaling={"mode": "none"})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for step in range(14):
            if step == 9 and resumes:
                state, weights = session.state_dict(), copy.deepcopy(model.state_dict())
                model, session = compiled(Heads(), "fp16", loss_scaling={"mode": "none"})
                model.load_state_dict(weights)
                session.load_state_dict(state)
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
            optimizer.zero_grad()
            torch.manual_seed(step)
            late(model, step, 1e6 if step >= 8 else 1.0)
            optimizer.step()
        told.append([(e.step, e.kind, e.op) for e in session.events])
    assert told[0] == told[1] and (8, "promoted", ":gelu#0") in told[0]


def test_a_loss_of_a_micro_batch_is_one_whatever_the_next_differentiates() -> None:
    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y[:, 0].square().mean(), y[:, 1].square().mean()

    torch.manual_seed(0)
    guard = {"loss_spike": "skip"}
    model, session = compiled(Losses(), guard=guard, monitor={"window_steps": 10, "interval_steps": 5})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(30):
        optimizer.zero_grad()
        (model(batch() * (1e4 if step == 25 else 1.0))[0]).backward()
        model(batch())[1].backward()
        optimizer.step()
        assert session.step_was_skipped == (step == 25)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given, self.state = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return F.relu(self.given(x)) + torch.tanh(self.state(h))


def test_the_first_of_many_calls_is_named() -> None:
    """A cell that the loop unrolls over more calls than are kept after a bad step."""
    rules = [{"match": "*", "kinds": ["linear"], "pin": "fp16", "optional": True}]
    model, session = compiled(Cell(), "fp16", loss_scaling={"mode": "none"}, rules=rules)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(10):
        optimizer.zero_grad()
        h, total = torch.zeros(4, 16), torch.zeros(())
        for k in range(70):
            h = model(torch.randn(4, 8) * (1e5 if step >= 4 and k == 0 else 1.0), h)
            total = total + h.clamp(-9, 9).mean()
        total.backward()
        optimizer.step()
    assert [e.op for e in session.events if e.kind == "bad_step"][0] == "given:linear#0"
    assert not session.step_was_skipped and session.skipped_steps <= 2


# -- calls that nobody goes back through -----------------------------------------------------------------------------


def test_a_call_that_is_given_up_keeps_no_micro_batch() -> None:
    model, session = compiled(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()).mean().item()  # a figure for the log
        for _ in range(8):
            model(batch()).square().mean().backward()
        assert len(session._calls) == 1
        optimizer.step()
    for _ in range(8):
        model(batch()).mean().item()
        assert len(session._calls) <= 2


def test_between_steps_is_where_nothing_waits() -> None:
    model, session = compiled(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
    state = session.state_dict()
    other, fresh = compiled(two_layers())
    other(batch())  # looked at, and forgotten
    loss = other(batch()).mean()
    with pytest.raises(StateError, match="has begun"):
        fresh.load_state_dict(state)
    del loss
    fresh.load_state_dict(state)
    assert fresh.steps == 4
    other(batch())
    fresh.replan()
    loss = other(batch()).mean()
    with pytest.raises(InputError, match="in progress"):
        fresh.replan()
    del loss


# -- what else is hooked to an optimizer -----------------------------------------------------------------------------


@pytest.mark.parametrize("closure", [False, True])
def test_hooks_of_the_users_see_the_gradients_of_a_bad_step(closure: bool) -> None:
    """As they see those of others: they clip, or count."""
    model, session = compiled(two_layers())
    optimizer, norms = torch.optim.AdamW(model.parameters()), list[float]()

    def clips(_: Any, args: Any, kwargs: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-1.0, 1.0)

    def counts(_: Any, args: Any, kwargs: Any) -> None:
        norms.append(sum(float(p.grad.norm()) for p in model.parameters()))

    if not closure:
        optimizer.register_step_pre_hook(clips)
    optimizer.register_step_post_hook(counts)
    for step in range(7):

        def goes_back(bad: bool = step == 4) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(bad)).square().mean()
            loss.backward()
            return loss

        before = copy.deepcopy([*model.parameters()])
        if closure:
            optimizer.step(goes_back)
        else:
            goes_back()
            optimizer.step()
        assert session.step_was_skipped == (step == 4)
        assert (step == 4) == all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [math.isnan(n) for n in norms] == [step == 4 for step in range(7)]
    assert not optimizer._optimizer_step_pre_hooks or len(optimizer._optimizer_step_pre_hooks) == 1
    assert len(optimizer._optimizer_step_post_hooks) == 1


# -- parameters that a forward pass writes to ------------------------------------------------------------------------


class Codes(nn.Module):
    """Means that a forward pass moves on, frozen; by `.data`, which moves no version."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 8)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        with torch.no_grad():
            self.mean.data.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return self.last(z - self.mean)


class Momentum(nn.Module):
    """An encoder that follows another one, with other memory after each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.follows = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.first.parameters(), self.follows.parameters(), strict=True):
                q.data = q.data * 0.9 + p.data * 0.1 + x.mean()
        return self.first(x) * self.follows(x)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(16, 8, max_norm=0.5), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table((x[:, 0].nan_to_num().abs() * 4).long() % 16)) + x.sum()


@pytest.mark.parametrize("make", [Codes, Momentum, Renormed])
def test_parameters_that_a_forward_pass_writes_to_are_as_before_a_bad_step(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, session = compiled(make())
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
    objects = [id(p) for p in model.parameters()]
    for step in range(8):
        before = copy.deepcopy([*model.parameters()])
        optimizer.zero_grad()
        model(batch(step == 5)).square().mean().backward()
        optimizer.step()
        assert session.step_was_skipped == (step == 5)
        if step == 5:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert is_finite(model) and [id(p) for p in model.parameters()] == objects


# -- what a scaler skips ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda m: autoprec.GradScaler(model=m), lambda m: torch.amp.GradScaler("cpu")])
def test_a_step_that_a_scaler_skips_for_another_parameter_is_skipped(make: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model, session = compiled(Normalised())
    beside = nn.Linear(3, 3)
    optimizer, scaler = torch.optim.AdamW([*model.parameters(), *beside.parameters()]), make(model)
    for step in range(7):
        before = copy.deepcopy([*model.parameters(), *model.buffers()])
        optimizer.zero_grad()
        y = model(batch())
        z = beside(y.detach()) * (math.inf if step == 5 else 1.0)
        scaler.scale(y.square().mean() + z.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert session.step_was_skipped == (step == 5)
        if step == 5:
            assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert (session.steps, session.skipped_steps) == (6, 1)
