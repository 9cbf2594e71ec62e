"""Who is to blame for a bad step of several calls, or of a model in several graphs: where it began is not where it was
met first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.testing import inject
from autoprec.testing.watching import Seen, Watch
from tests.test_testing import policy


class Halves(nn.Module):
    """Two graphs, of which each has its own replay."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.second = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Whole(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Training:
    """Steps of as many calls as batches."""

    def __init__(self, model: nn.Module, fmt: str = "fp16") -> None:
        torch._dynamo.reset()
        self.model = autoprec.compile(model, policy=policy(fmt), events=None)
        self.session = autoprec.session(model)
        self.watch = Watch(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        for _ in range(4):
            assert not self.step(*self.batches()).bad

    def batches(self) -> list[Tensor]:
        return [torch.randn(64, 16) for _ in range(2)]

    def step(self, *batches: Tensor) -> Seen:
        """Each result is the other's gradient."""
        return self.watch.step(lambda: math.prod(self.model(x) for x in batches).square().mean())

    def told(self, kind: str) -> list[tuple[str, str]]:
        return [(e.op, e.trigger) for e in self.session.events if e.kind == kind]


@pytest.mark.parametrize("op", ["first.0:linear#0", "first.2:linear#0", "second.1:linear#0", "second.3:linear#0"])
@pytest.mark.parametrize("kind", ["forward_overflow", "gradient_overflow"])
def test_of_a_model_in_two_graphs(op: str, kind: str) -> None:
    run = Training(Halves())
    assert len(run.session.graph.first_ops) == 2
    inject(run.model, op, kind)
    seen = run.step(*run.batches()[:1])
    assert seen.bad and not seen.changed
    assert run.told("bad_step") == run.told("promoted") == [(op, "overflow")]


@pytest.mark.parametrize("which", [0, 1])
def test_of_two_calls(which: int) -> None:
    """What is too large for a format in one of them is promoted, whichever that is."""
    run = Training(Whole())
    batches = run.batches()
    batches[which] *= 1e7
    seen = run.step(*batches)
    assert seen.bad and not seen.changed
    assert run.told("bad_step") == run.told("promoted") == [("first.0:linear#0", "overflow")]


@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_in_the_batch_of_one_call(which: int) -> None:
    run = Training(Whole())
    batches = run.batches()
    batches[which][3, 5] = math.nan
    seen = run.step(*batches)
    assert seen.bad and not seen.changed
    assert run.told("bad_step") == [("first.0:linear#0", "nonfinite")] and not run.told("promoted")
    [event] = [e for e in run.session.events if e.kind == "bad_step"]
    assert event.role == "output" and "what it was given was not finite already" in event.evidence


def test_a_gradient_too_large_to_square_is_of_where_it_was_first() -> None:
    run = Training(Halves(), "bf16")
    [x] = run.batches()[:1]
    seen = run.watch.step(lambda: run.model(x).square().mean() * 1e36)
    assert seen.bad and not seen.changed
    assert run.told("bad_step") == [("second.3:linear#0", "nonfinite")]
