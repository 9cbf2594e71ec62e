"""Which parameters' gradients are known to have come through a captured graph, and what a call is remembered by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import NotCapturedError


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


def compiled(model: nn.Module) -> autoprec.Session:
    torch.manual_seed(0)
    autoprec.compile(model, plan=autoprec.Plan(assignments=()), events=None)
    return autoprec.session(model)


def test_a_second_backward_pass_through_a_call_of_the_step_before_is_covered() -> None:
    model = Broken()
    session = compiled(model)
    loss = model(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    session.step()  # a boundary, and no update
    loss.backward()
    session.step()
    assert session.steps == 1


def test_a_graph_that_was_called_covers_what_came_from_elsewhere() -> None:
    model = Broken()
    session = compiled(model)
    model(torch.randn(4, 8))
    sum(p.square().sum() for p in model.parameters()).backward()
    session.step()
    assert session.steps == 1 and not session._parts.names
    model.last.weight.square().sum().backward()  # and no call
    with pytest.raises(NotCapturedError):
        session.step()


def test_a_call_is_remembered_without_the_graph_of_what_it_was_given() -> None:
    model = Broken()
    session = compiled(model)
    model(torch.randn(4, 8).requires_grad_()).sum().backward()
    model(torch.randn(4, 8))
    first, last = session._calls
    given = [a for call in (first, last) for a in call.arguments if isinstance(a, Tensor)]
    assert len(given) == 6 and all(a.grad_fn is None for a in given)
    assert sum(a.requires_grad and not isinstance(a, nn.Parameter) for a in given) == 1
