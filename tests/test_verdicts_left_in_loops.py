"""Loops whose verdicts are left to the device do what they do under a host that waits, bit for bit."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.errors import NotCapturedError
from autoprec.execution import stepping
from tests.leaving import Net, adamw, batch, compiled, everything, is_left, step
from tests.test_guard import same


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


class Breaks(nn.Module):
    """From some step on, its last layer is outside of the captured graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(16, 16), nn.Linear(16, 4), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.outside(x) if self.breaks else self.last(x)

    @torch._dynamo.disable
    def outside(self, x: Tensor) -> Tensor:
        return self.last(x)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 4), nn.Buffer(torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Piece(nn.Module):
    """A view of a buffer crosses a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.places = nn.Linear(16, 16), nn.Linear(16, 4), nn.Buffer(torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        places = self.places[: x.shape[0]]
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.last(y + places)


Loop = Callable[[Any, Any, torch.optim.Optimizer], Any]


def two_losses(bad: tuple[bool, bool]) -> Loop:
    """Two backward passes and two steps behind one forward pass."""

    def loop(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
        states = []
        for towers_are_bad in ((False, False), bad, (False, False)):
            for y, is_bad in zip(model(batch(5)), towers_are_bad, strict=True):
                optimizer.zero_grad()
                (y.square().mean() * (math.nan if is_bad else 1.0)).backward()
                optimizer.step()
                states.append(everything(model, optimizer))
        return states

    return loop


def one_graph_twice(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    states = []
    for bad in ((True, False), (False, True), (True, True)):
        y = model(batch(5))[0]
        for is_bad in bad:
            optimizer.zero_grad()
            (y.square().mean() * (math.nan if is_bad else 1.0)).backward(retain_graph=True)
            optimizer.step()
            states.append(everything(model, optimizer))
    return states


def uncaptured(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    step(model, optimizer, batch(5))
    optimizer.zero_grad()
    model.first.weight.sum().backward()
    with pytest.raises(NotCapturedError):
        optimizer.step()


def rolled_back(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    best = copy.deepcopy(model.state_dict())
    step(model, optimizer, batch(5))
    step(model, optimizer, batch(6, bad=True))
    model.load_state_dict(best)
    model.norm.running_mean.add_(7.0)


def other_dtype(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    step(model, optimizer, batch(6, bad=True))
    model.double()
    assert session.step_was_skipped
    return [t.dtype for t in (*model.parameters(), *model.buffers())]


def validated(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    step(model, optimizer, batch(5) * 1e6)
    model.eval()
    with torch.inference_mode():
        seen = model(batch(6)).clone()
    model.train()
    step(model, optimizer, batch(7))
    return seen


def broken_later(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    step(model, optimizer, batch(5))
    model.breaks = True
    step(model, optimizer, batch(6))
    step(model, optimizer, batch(7, bad=True))


def resized(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad()
    model(batch(5)).square().mean().backward()
    model.mask.resize_(64).zero_()
    optimizer.step()
    return session.steps


def plain(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    for k in range(5, 9):
        step(model, optimizer, batch(k, bad=k == 6))


def made_in_inference_mode(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    for k in range(5, 8):
        with torch.inference_mode():
            x = batch(k)
        optimizer.zero_grad()
        model(torch.ones(8, 16), x).square().mean().backward()
        optimizer.step()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        return self.linear(x) + (0.0 if more is None else more)


def scheduled(model: Any, session: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Accumulation into zeroed gradients, clipping, a schedule, states in between."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    saved = []
    for k in range(5, 12):
        optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            model(batch(10 * k + part, bad=(k, part) in ((7, 0), (9, 1)))).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        saved.append(everything(model, optimizer))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if not session.step_was_skipped:
            scheduler.step()
    return saved


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    **{f"two losses, {bad}": (TwoTowers, two_losses(bad)) for bad in itertools.product((False, True), repeat=2)},
    "one graph twice": (TwoTowers, one_graph_twice),
    "uncaptured": (Net, uncaptured),
    "rolled back": (Net, rolled_back),
    "another dtype": (Net, other_dtype),
    "validated": (Net, validated),
    "broken later": (Breaks, broken_later),
    "resized": (Net, resized),
    "an expanded buffer": (Expanded, plain),
    "a piece of a buffer": (Piece, plain),
    "made in inference mode": (Added, made_in_inference_mode),
    "scheduled": (Net, scheduled),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_do_what_they_do_under_a_host_that_waits(
    name: str, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, loop = LOOPS[name]
    fp16_first = [{"match": "first**", "pin": "fp16"}, {"match": "**", "pin": "fp32"}]
    found = []
    for places in ({"cpu"}, set[str]()):
        monkeypatch.setattr(stepping, "LEAVES_OUT", places)
        torch._dynamo.reset()
        torch.manual_seed(0)
        rules = {"rules": fp16_first, "formats": ["fp32", "bf16", "fp16"]} if name == "validated" else {}
        model, session = compiled(model=make(), **rules)
        optimizer, left = adamw(model), []
        for k in range(4):
            optimizer.zero_grad()
            y = model(batch(k))
            sum(z.square().mean() for z in (y if isinstance(y, tuple) else (y,))).backward()  # type: ignore[union-attr]
            optimizer.step()
            left.append(is_left(session))
        seen = loop(model, session, optimizer)
        told = [(e.step, e.kind, e.op, e.trigger) for e in session.events]
        counts = (session.steps, session.skipped_steps, session.step_was_skipped)
        found.append([seen, everything(model, optimizer), told, counts, session.plan.format_of])
        assert left[-1] == (bool(places) and name != "an expanded buffer")
    if name == "another dtype":  # then nothing can be replayed
        assert found[0][2][-1][2] == ""
        found[0][2][-1] = found[1][2][-1]
    assert same(*found), found
