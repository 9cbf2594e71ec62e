"""A bad step changes nothing, wherever in a run it falls, and nobody sees it do so."""

from __future__ import annotations

import copy
import os
import random
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import StateError


class Skipping(nn.Module):
    """Drops layers by chance: torch's tracer leaves its forward alone, so its modules are captured on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        for block in self.blocks:
            if self.training and random.random() < 0.3:
                continue
            x = x + block(x).relu()
        y: Tensor = self.outer(x)
        return y


class Quantizer(nn.Module):
    """Writes its codes in the forward pass; they are a parameter that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codes = nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def forward(self, x: Tensor, learn: bool = True) -> Tensor:
        z = self.encode(x)
        near = torch.cdist(z, self.codes).argmin(1)
        if self.training and learn:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(z.mean(0), alpha=0.1)
        y: Tensor = self.decode(z + (self.codes[near] - z).detach())
        return y


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]


@pytest.mark.parametrize("bad", ["batch", "target"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_in_the_step_that_shows_what_must_be_captured_on_its_own(bad: str, micro_batches: int) -> None:
    """No captured graph runs in it."""
    torch.manual_seed(0)
    random.seed(0)
    model = autoprec.compile(Skipping(), policy="memory", events=None)
    session, optimizer = autoprec.session(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        before = state_of(model)
        optimizer.zero_grad()
        for k in range(micro_batches):
            x, y = torch.randn(32, 16), torch.zeros(32, 4)
            if step == 0 and k == micro_batches - 1:
                (x if bad == "batch" else y)[0, 0] = torch.nan
            (model(x) - y).square().mean().backward()
        optimizer.step()
        assert session.step_was_skipped == (step == 0)
        assert bool(changed(model, before)) == (step > 0)
    assert (session.steps, session.skipped_steps) == (2, 1)


def test_such_a_step_counts() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    autoprec.compile(model, policy="memory", events=None)
    session, optimizer = autoprec.session(model), torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5, 16), torch.randn(4, 6, 16), tgt_mask=mask).square().mean().backward()
        optimizer.step()
    assert (session.steps, session.skipped_steps) == (3, 0)


@pytest.mark.parametrize("first", [0, 3])
def test_in_the_first_step_that_writes_to_a_parameter(first: int) -> None:
    torch.manual_seed(0)
    model = autoprec.compile(Quantizer(), policy="observe", events=None)
    session, optimizer = autoprec.session(model), torch.optim.AdamW(model.parameters())
    for step in range(first + 2):
        before, x = state_of(model), torch.randn(32, 16)
        if step == first:
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        (model(x, learn=step >= first) - x).square().mean().backward()
        optimizer.step()
        assert session.step_was_skipped == (step == first)
        assert bool(changed(model, before)) == (step != first)
    assert "codes" in changed(model, before)


def same(a: Any, b: Any) -> bool:
    """Text and tensors, in dictionaries and lists."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def normed() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    autoprec.compile(model, policy="memory", events=None)
    return model, autoprec.session(model), torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("bad", [False, True])
def test_a_state_that_is_taken_in_the_middle_of_a_step_leaves_it_alone(bad: bool) -> None:
    """By a handler of a signal, say; it is that of the step's beginning. With gradients there it is refused."""
    model, session, optimizer = normed()
    taken = []
    for step in range(12):
        x = torch.randn(32, 16)
        if bad and step == 10:
            x[0, 0] = torch.nan
        before = state_of(model)
        optimizer.zero_grad()
        taken.append(session.state_dict())
        loss = model(x).square().mean()
        taken.append(session.state_dict())
        loss.backward()
        with pytest.raises(StateError, match="in progress"):
            session.state_dict()
        optimizer.step()
        assert bool(changed(model, before)) != session.step_was_skipped
        assert step == 0 or same(taken[-1], taken[-2])  # where ops are is known from the first call on
    assert (session.steps, session.skipped_steps) == (12 - bad, int(bad))


class Restless(torch.optim.SGD):
    """One that torch does not know: it changes parameters whatever their gradients are, and says how often it ran."""

    def decay(self) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.999)
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1

    def step(self, closure: Any = None) -> Any:
        self.decay()
        loss = super().step(closure)
        self.decay()
        return loss


class Restless2(Restless):
    """The class between them is hooked twice, too, once somebody has made a `Restless`."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.decay()
        return loss


OPTIMIZERS = {"AdamW": torch.optim.AdamW, "LBFGS": torch.optim.LBFGS, "one's own": Restless, "of that": Restless2}


@pytest.mark.parametrize(
    ("kind", "closes"), [(kind, c) for kind in OPTIMIZERS for c in (False, True) if c or kind != "LBFGS"]
)
def test_hooks_of_the_optimizer_see_a_model_that_nothing_has_changed(kind: str, closes: bool) -> None:
    """Averages of weights and buffers are kept by such; they can ask whether the step was skipped. torch runs them more
    than once in a step where a class calls that of its base class, and somebody has made one of those before."""
    model, session, _ = normed()
    torch.optim.SGD(model.parameters(), lr=1.0)
    Restless(model.parameters(), lr=1.0)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-3)
    seen = []

    def look(*_: Any) -> None:
        there = all(p.grad is not None for p in model.parameters())
        seen.append((step, session.step_was_skipped, not changed(model, before), there))

    optimizer.register_step_post_hook(look)
    for step in range(12):
        before, held, x = state_of(model), copy.deepcopy(optimizer.state_dict()), torch.randn(32, 16)
        if step == 9:
            x[0, 0] = torch.nan

        def loss() -> Tensor:
            optimizer.zero_grad()
            found: Tensor = model(x).square().mean()  # noqa: B023
            found.backward()
            return found

        if closes:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        bad = step == 9
        assert (session.step_was_skipped, not changed(model, before)) == (bad, bad)
        assert not bad or same(optimizer.state_dict(), held)
    times = {"one's own": 2, "of that": 3}.get(kind, 1)
    assert seen == [(step, step == 9, step == 9, True) for step in range(12) for _ in range(times)]
    assert (session.steps, session.skipped_steps) == (11, 1)


def test_gradients_that_an_optimizer_makes_itself_are_looked_at() -> None:
    """Where torch has wrapped the step of its base class, whose hooks run when they are there."""

    class Makes(Restless):
        def step(self, loss: Any = None) -> Any:
            loss.backward()
            return torch.optim.SGD.step(self)

    model, session, _ = normed()
    torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Makes(model.parameters(), lr=1e-3)
    for step in range(6):
        before, factor = state_of(model), torch.inf if step == 4 else 1.0
        optimizer.zero_grad()
        optimizer.step(factor * model(torch.randn(32, 16)).square().mean())
        assert (session.step_was_skipped, not changed(model, before)) == (step == 4, step == 4)
    assert (session.steps, session.skipped_steps) == (5, 1)


def test_an_interrupt_in_an_observed_step_is_no_trouble_to_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a gradient is recorded: what that would be added to is there, and empty."""
    model, session, optimizer = normed()
    square, recorded = Tensor.square, list[Tensor]()

    def interrupted(x: Tensor) -> Tensor:
        frame = sys._getframe(1)
        if step == 2 and frame.f_code.co_name == "record" and "part" in frame.f_locals:
            recorded.append(x)
            if len(recorded) == 3:  # others have arrived by then
                raise KeyboardInterrupt
        return square(x)

    monkeypatch.setattr(Tensor, "square", interrupted)
    for step in range(4):  # noqa: B007
        optimizer.zero_grad()
        y = square(model(torch.randn(32, 16))).mean()
        try:
            y.backward()
            optimizer.step()
        except KeyboardInterrupt:
            assert step == 2
    assert (session.steps, session.skipped_steps) == (3, 0)


@pytest.mark.parametrize("validates", [False, True])
def test_a_bad_batch_that_the_loop_leaves_out_itself_costs_nothing_but_itself(validates: bool) -> None:
    model, session, optimizer = normed()
    for step in range(12):
        x = torch.randn(32, 16)
        if step == 10:
            x[0] = torch.nan
        before = state_of(model)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError:
            assert step == 10
            optimizer.zero_grad()
            if validates:
                model.eval()
                with torch.no_grad():
                    assert model(torch.randn(8, 16)).isfinite().all()
                model.train()
                assert not changed(model, before)
            continue
        optimizer.step()
        assert not session.step_was_skipped and changed(model, before)
    assert (session.steps, session.skipped_steps) == (11, 0)
    assert all(x.isfinite().all() for x in model.state_dict().values())


@pytest.mark.parametrize("what", ["pipe", "link to a pipe"])
def test_nothing_is_written_in_the_place_of_what_is_no_file(tmp_path: Path, what: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe if what == "pipe" else tmp_path / "link"
    if path is not pipe:
        path.symlink_to(pipe)
    _, session, _ = normed()
    with pytest.raises(StateError, match="not a regular file"):
        session.save(path)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(list(tmp_path.iterdir())) == (1 if path is pipe else 2)
