"""The guard where gradients are not on the host: a GPU's ways, on a CPU whose tensors say that they are elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution.coming import Coming


@pytest.mark.parametrize(
    ("factor", "optimizer_class", "bad"),
    [
        (1.0, torch.optim.AdamW, False),
        (1e12, torch.optim.AdamW, True),
        (1e12, torch.optim.SGD, False),
        (1e38, torch.optim.SGD, True),
    ],
)
def test_elsewhere_the_host_waits_once_a_step(
    monkeypatch: pytest.MonkeyPatch, factor: float, optimizer_class: type[torch.optim.Optimizer], bad: bool
) -> None:
    """What a GPU does, on a CPU: gradients leave norms, which are read once, before the update. Of 1e24 they are
    finite, and AdamW could not square them."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        method = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, _n=name, _m=method: (reads.append(_n), _m(self, *a))[1])
    model = autoprec.compile(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), policy="observe", events=None
    )
    optimizer = optimizer_class(model.parameters(), foreach=True)  # type: ignore[call-arg]
    session, counts = autoprec.session(model), []
    for step in range(12):
        reads.clear()
        optimizer.zero_grad()
        (model(torch.randn(8, 16)) * (factor if step == 11 else 1.0)).square().sum().backward()
        during = list(reads)
        optimizer.step()
        counts.append((during, reads[len(during) :].count("tolist")))
    assert session.plan is not None and counts[-1] == ([], 1) and session.skipped_steps == int(bad)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_of_micro_batches_elsewhere_those_are_kept_that_nobody_knows_of(
    bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of a micro-batch are asked for before its backward pass begins, in the time that the forward pass
    of the next one takes: their outputs' gradients are not there together. What was bad stays, to be replayed."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    autoprec.compile(model, policy="observe", events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    before, kept = [p.detach().clone() for p in model.parameters()], []
    for k in range(3):
        y = model(torch.randn(8, 16) * (math.inf if k == bad else 1.0))
        kept.append(len(session._calls))
        y.square().sum().backward()
    assert kept == {None: [1, 1, 1], 0: [1, 2, 3], 1: [1, 1, 2]}[bad]
    optimizer.step()
    assert session.step_was_skipped == (bad is not None)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) == (bad is not None)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize(
    ("size", "optimizer_class"), [(1e25, torch.optim.AdamW), (math.inf, torch.optim.AdamW), (math.inf, torch.optim.SGD)]
)
def test_clipping_hides_nothing_on_any_device(
    size: float, optimizer_class: type[torch.optim.Optimizer], clip: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is not finite nor what AdamW could not square."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: on_cpu))
    model = autoprec.compile(nn.Linear(4, 4), policy="observe", events=None)
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for x in (*[torch.randn(2, 4) for _ in range(3)], torch.full((2, 4), size)):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(x).sum().backward()
        if clip == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_norms_come_by_the_stream_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that waits for another GPU's stream waits for nothing."""
    current, recorded = [0], list[int]()

    class Of:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    class Event:
        def record(self) -> None:
            recorded.append(current[0])

        def synchronize(self) -> None:
            recorded.append(-1)

    monkeypatch.setattr(torch.cuda, "device", Of)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    coming = Coming(["a", "b"], torch.tensor([1.0, 2.0]), torch.device("cuda", 1))
    assert recorded == [1] and current == [0]
    assert list(coming.read()) == [("a", 1.0), ("b", 2.0)] and recorded == [1, -1]
