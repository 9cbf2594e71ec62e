"""What a model's forward reads is another in every call: a plan must outlive it, or be told to end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution.dispatch import RECOMPILE_LIMIT
from autoprec.graphs import Role
from autoprec.serial import load_policy


class Counting(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        self.what, self.count, self.seen = what, 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.what == "number":
            self.count += 1
        elif self.training:
            self.seen.append(float(len(self.seen)))
        y: Tensor = self.layers(x)
        return y


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def test_a_counter_costs_no_plan() -> None:
    """Nor one graph for each of its values."""
    model = autoprec.compile(Counting("number"), policy="bf16", events=None)
    train(model, 20)
    session = autoprec.session(model)
    assert len(session._slots) <= 3 and session.steps == 20
    assert model.count == 20
    assert not any(e.kind == "warning" for e in session.events)


def test_where_nothing_more_is_captured_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.refusals.RECOMPILE_LIMIT", 12)
    monkeypatch.setitem(autoprec.execution.dispatch._CONFIG, "recompile_limit", 12)
    monkeypatch.setattr("autoprec.execution.dispatch._patches", [])
    assert RECOMPILE_LIMIT > 12
    model = autoprec.compile(Counting("list"), policy="bf16", events=None)
    train(model, 16)
    told = [e.evidence for e in autoprec.session(model).events if e.trigger == "unplanned"]
    assert told and all("captures it no more" in text and "stays in fp32" in text for text in told)
    assert autoprec.session(model).steps == 16


@pytest.mark.parametrize("at", [2, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_batch_that_the_model_does_not_take_costs_nothing_but_itself(at: int, dtype: torch.dtype) -> None:
    """It raises what torch raises, and the run goes on, in its calibration and under its plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    autoprec.compile(model, policy="memory", events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(12):
        x = torch.randn(8, 16).to(dtype if step == at else torch.float32)
        optimizer.zero_grad()
        known = len(session.bindings)
        try:
            model(x).square().mean().backward()
        except RuntimeError as error:
            assert step == at and "dtype" in str(error)
            assert len(session.bindings) == known  # what never ran is no graph of the model
            continue
        optimizer.step()
    assert session.steps == 11 and session.plan is not None
    assert not any(e.kind == "warning" for e in session.events)


class Narrowing(nn.Module):
    """Takes what it is given to FP32 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(torch.tanh(x).float())))
        return y


@pytest.mark.parametrize("storages", [(), ("fp8_e4m3",)])
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_what_is_given_another_dtype_than_it_was_runs_as_written_and_the_rest_as_planned(
    fmt: str, storages: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    loose, rules = {"gradient": 1e3, "loss": 1e3}, ({"match": "*", "pin": fmt, "optional": True},)
    policy = load_policy("memory").replaced(
        formats=("fp32", fmt), noise=loose, rules=rules, storage={"formats": storages, "recompute": False}
    )
    model = autoprec.compile(Narrowing(), policy=policy, events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [torch.randn(8, 16) for _ in range(12)]
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert session.plan is not None and (":tanh#0", Role.OUTPUT) in session.plan.format_of
    assert bool(session.plan.storages) == bool(storages) and not session.plan.is_identity
    narrow, wide = model(batches[0]), model(batches[0].double())
    plain = Narrowing()
    plain.load_state_dict(model.state_dict())
    exact = plain(batches[0])
    assert wide.dtype is torch.float32 and not torch.equal(wide, exact)
    assert float((wide - exact).abs().max()) <= 2 * float((narrow - exact).abs().max())
    optimizer.zero_grad()
    wide.square().mean().backward()
    optimizer.step()
    assert session.steps == 13


@pytest.mark.parametrize("bad", [False, True])
def test_a_call_that_fails_in_the_middle_of_a_step_is_no_part_of_it(bad: bool) -> None:
    """Nor is it replayed, when the step is a bad one and somebody asks where that began."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    autoprec.compile(model, policy="memory", events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        (loss * (torch.inf if bad and step in (2, 10) else 1.0)).backward()
        if step in (2, 10):  # calibrating, and under the plan
            with pytest.raises(RuntimeError, match="dtype"):
                model(torch.randn(8, 16, dtype=torch.float64))
        optimizer.step()
        assert session.step_was_skipped == (bad and step in (2, 10))
    assert session.steps == 12 - 2 * bad
    told = [e.evidence for e in session.events if e.kind == "bad_step"]
    assert len(told) == 2 * bad and all("from outside of the graph, from the loss" in text for text in told)
