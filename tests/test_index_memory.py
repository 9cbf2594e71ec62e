"""Integers that a model is given, and shows as it needs them, take no bytes; and what no peak tells is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.planning.problem import fixed_bytes


class Edges(nn.Module):
    """What comes along the edges of a graph is added up at its nodes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(64, 64), nn.Linear(64, 64), how

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.first(x)
        at = torch.zeros(len(x) // 6, 64)
        if self.how == "index_add":
            at = at.index_add(0, index, h)
        elif self.how == "scatter_add":
            at = at.scatter_add(0, index[:, None].expand_as(h), h)
        elif self.how == "shown":
            at = at.scatter_add(0, index[:, None].expand(-1, 64), h)
        else:
            at = at.scatter_reduce(0, index[:, None].expand(-1, 64), h, self.how)
        y: Tensor = self.second(at)
        return y


@pytest.mark.parametrize("how", ["index_add", "scatter_add", "shown", "mean", "amax"])
def test_the_peak_of_what_is_added_up_by_an_index(how: str) -> None:
    torch.manual_seed(0)
    model = Edges(how)
    batch = torch.randn(12000, 64), torch.randint(0, 2000, (12000,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        y: Tensor = model(*batch)
        return y.square().mean()

    autoprec.compile(model, policy="observe", batches=[batch] * 2, loss_fn=loss, events=None)
    session = autoprec.session(model)

    def step() -> None:
        loss(model, batch).backward()
        session.step()

    step()
    measured = peak_bytes(step, torch.device("cpu"))
    assert session.plan is not None and session.plan.predicted is not None and session.graph is not None
    predicted = session.plan.predicted.peak_bytes - fixed_bytes(session.graph)
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("twice", [False, True])
def test_a_loop_that_differentiates_gradients_is_told_that_no_peak_counts_it(twice: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    autoprec.compile(model, policy="observe", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        x = torch.randn(8, 16, requires_grad=True)
        y = model(x).sum()
        penalty = torch.autograd.grad(y, x, create_graph=True)[0].square().sum() if twice else 0.0
        optimizer.zero_grad()
        (y + penalty).backward()
        optimizer.step()
    told = [e for e in autoprec.session(model).events if "create_graph" in e.evidence]
    assert len(told) == int(twice)
