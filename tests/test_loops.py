"""Loops that people write, and what they do wrong in them: one test each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec import scheduling
from autoprec.plans import Assignment, Plan, Region
from autoprec.policies import Policy
from autoprec.serial import load_policy, write_plan

NAN = float("nan")


def small(policy: str = "observe", width: int = 4, **options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
    return autoprec.compile(model, policy=policy, events=None, **options)


def everything(*models: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for m in models for t in (*m.parameters(), *m.buffers())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_optimizer_over_two_models(culprit: int, closure: bool) -> None:
    """A bad step of one is a bad step of both: parameters, buffers, and what both sessions say."""
    torch.manual_seed(0)
    models = [small(), small()]
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()])

    def step(bad: bool) -> None:
        def backward() -> Tensor:
            optimizer.zero_grad()
            inputs = [torch.randn(8, 4) for _ in models]
            if bad:
                inputs[culprit][0, 0] = NAN
            loss = sum((m(x).square().mean() for m, x in zip(models, inputs, strict=True)), torch.zeros(()))
            loss.backward()
            return loss

        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()

    step(False)
    before, state = everything(*models), copy.deepcopy(optimizer.state_dict()["state"])
    step(True)
    assert same(before, everything(*models))
    assert all(torch.equal(v, state[i][k]) for i, s in optimizer.state_dict()["state"].items() for k, v in s.items())
    sessions = [autoprec.session(m) for m in models]
    assert [s.step_was_skipped for s in sessions] == [True, True]
    assert [s.steps for s in sessions] == [1, 1]
    assert sessions[culprit].events[-1].op == "0:linear#0"
    assert "another model" in sessions[1 - culprit].events[-1].evidence
    step(False)
    assert [s.steps for s in sessions] == [2, 2]
    assert not same(before, everything(*models))


def test_one_optimizer_over_two_models_of_which_one_raises() -> None:
    strict = Policy(name="strict", formats=("fp32",), guard={"nonfinite": "raise"})
    models = [small(policy=strict), small()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)

    def backward(x: Tensor) -> None:
        optimizer.zero_grad()
        sum((m(x).square().mean() for m in models), torch.zeros(())).backward()

    backward(torch.randn(8, 4))
    optimizer.step()
    before = everything(*models)
    backward(torch.full((8, 4), NAN))
    with pytest.raises(autoprec.NonFiniteError):
        optimizer.step()
    assert same(before, everything(*models))
    backward(torch.randn(8, 4))
    optimizer.step()
    assert [autoprec.session(m).steps for m in models] == [2, 2]


def test_the_verdict_of_one_model_does_not_outlive_its_step() -> None:
    """One optimizer, two models in turn: the step of one is bad, those of the other are good."""
    for keep_zeros in (False, True):
        torch.manual_seed(0)
        models = [small(), small()]
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
        for i, bad in enumerate([False, False, True, False, False, False]):
            model = models[i % 2] if not bad else models[0]
            optimizer.zero_grad(set_to_none=not keep_zeros)
            before = everything(model)
            model(torch.full((8, 4), NAN) if bad else torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            assert same(before, everything(model)) == bad, i
        assert [autoprec.session(m).skipped_steps for m in models] == [1, 0]


def test_clipping_between_two_optimizers_does_not_end_a_bad_step() -> None:
    model = small()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (parameters[:2], parameters[2:])]
    before = everything(model)
    (model(torch.randn(8, 4)) * 1e30).square().sum().backward()
    nn.utils.clip_grad_value_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert same(before, everything(model))
    assert autoprec.session(model).skipped_steps == 1


def test_a_scaler_that_skips_the_step_of_two_models() -> None:
    torch.manual_seed(0)
    models = [small(), small()]
    alone = small()
    shared = torch.optim.AdamW([p for m in models for p in m.parameters()])
    own = torch.optim.AdamW(alone.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (False, True, False):
        before = everything(*models)
        shared.zero_grad()
        own.zero_grad()
        inputs = [torch.randn(8, 4) for _ in range(3)]
        if bad:
            inputs[0][0, 0] = float("inf")
        losses = [m(x).square().mean() for m, x in zip((*models, alone), inputs, strict=True)]
        scaler.scale(losses[0] + losses[1]).backward()
        scaler.scale(losses[2]).backward()
        scaler.step(shared)
        scaler.step(own)
        scaler.update()
        assert same(before, everything(*models)) == bad
        assert [autoprec.session(m).step_was_skipped for m in (*models, alone)] == [bad, bad, False]
    assert [autoprec.session(m).steps for m in (*models, alone)] == [2, 2, 3]


class Restless(torch.optim.Optimizer):
    """An optimizer of somebody's own: weight decay for all, a counter, no question whether there is a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.mul_(0.9)
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)


def test_an_optimizer_that_does_not_ask_for_gradients_is_held_too() -> None:
    model = small()
    optimizer = Restless(model.parameters())
    for bad in (False, True):
        before = everything(model)
        counts = [s["count"] for s in optimizer.state.values()]
        optimizer.zero_grad()
        model(torch.full((8, 4), NAN) if bad else torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        assert same(before, everything(model)) == bad
        assert not bad or counts == [s["count"] for s in optimizer.state.values()]


def test_a_second_backward_after_the_first_optimizers_step() -> None:
    """One forward, two losses, two optimizers that step in turn."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model = autoprec.compile(Two(), policy="observe", events=None)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.a, model.b))
    for _ in range(3):
        y, z = model(torch.randn(8, 4))
        before = everything(model)
        first.zero_grad()
        y.square().mean().backward()
        first.step()
        second.zero_grad()
        z.square().mean().backward()
        second.step()
        assert not any(torch.equal(a, b) for a, b in zip(before, everything(model), strict=True))


def test_calls_that_go_round_are_noticed_after_good_ones() -> None:
    model = small(policy="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    model.forward(torch.randn(8, 4)).mean().backward()
    with pytest.raises(autoprec.NotCapturedError, match=r"Call the model itself, model\(x\)"):
        optimizer.step()


def test_uncaptured_report_says_it_once() -> None:
    policy = load_policy("observe").replaced(uncaptured="report")
    model = small(policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model.forward(torch.randn(8, 4)).mean().backward()
        optimizer.step()
    assert [e.trigger for e in autoprec.session(model).events] == ["uncaptured"]


def test_an_impossible_budget_is_one_error_and_then_fp32() -> None:
    torch.manual_seed(0)
    model = small(policy="memory", budget=100)
    plain = copy.deepcopy(model)
    found, errors = [], 0
    for m in (model, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            loss = m(torch.randn(8, 4)).square().mean()
            loss.backward()
            try:
                optimizer.step()
            except autoprec.InfeasibleError as error:
                errors += 1
                assert "smallest feasible budget" in str(error)
            found.append(loss.item())
    assert errors == 1
    assert found[:12] == found[12:]
    session = autoprec.session(model)
    assert session.steps == 12 and session.plan is not None and session.plan.is_identity
    assert "smallest feasible budget" in session.plan.binding
    assert [e.trigger for e in session.events] == ["no_plan"]


def test_calibration_counts_optimizer_steps() -> None:
    model = small(policy="memory")
    session = autoprec.session(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 9):
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        assert (session.plan is None) == (step < 8)
    assert session.profile is not None and session.profile.steps == 24


def test_a_model_cast_after_compile_is_refused() -> None:
    model = small(policy="bf16")
    model(torch.randn(8, 4)).mean().backward()
    model.bfloat16()
    with pytest.raises(autoprec.InputError, match=r"model\.float\(\)"):
        model(torch.randn(8, 4).bfloat16())


def test_a_plan_of_a_smaller_model_is_refused(tmp_path: Path) -> None:
    batches = [torch.randn(8, 4) for _ in range(3)]
    model = small(policy="memory", batches=batches, loss_fn=lambda m, x: m(x).square().mean())
    write_plan(tmp_path / "plan.yaml", autoprec.session(model).plan)
    torch.manual_seed(0)
    grown = nn.Sequential(*autoprec.unwrap(model), nn.Linear(1, 1))
    autoprec.compile(grown, plan=tmp_path / "plan.yaml", events=None)
    optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
    grown(torch.randn(8, 4)).mean().backward()
    with pytest.raises(autoprec.PlanError, match="1 of 3 trained layers are not in the plan, the first: 4:linear#0"):
        optimizer.step()


def test_a_plan_by_hand_may_name_a_part() -> None:
    one = Assignment(op="0:linear#0", role=autoprec.Role.OUTPUT, format="bf16", reason="by hand")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    autoprec.compile(model, plan=Plan(assignments=(one,)), events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    assert autoprec.session(model).executed_formats()["0:linear#0"] == "bf16"


def test_torch_compile_of_a_compiled_model_is_noticed() -> None:
    model = small(policy="bf16")
    outer = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer(torch.randn(8, 4)).square().mean().backward()
    with pytest.raises(autoprec.NotCapturedError, match="through a torch.compile of your own"):
        optimizer.step()


def test_a_refusal_leaves_what_was_captured() -> None:
    model = autoprec.compile(nn.Linear(4, 2), policy="observe", events=None)
    model(torch.randn(3, 4))
    session = autoprec.session(model)
    (binding,) = session.bindings
    for _ in range(3):
        with pytest.raises(autoprec.InputError, match="autocast"), torch.autocast("cpu"):
            model(torch.randn(3, 4))
    model(torch.randn(3, 4))
    assert list(session.bindings) == [binding]


def test_any_error_while_planning_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no timings today")

    monkeypatch.setattr("autoprec.scheduling.time_ops", broken)
    model = autoprec.compile(nn.Linear(4, 2), policy="bf16", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = 0
    for _ in range(12):
        model(torch.randn(3, 4)).sum().backward()
        try:
            optimizer.step()
        except ValueError:
            raised += 1
    session = autoprec.session(model)
    assert raised == 1 and session.plan.is_identity
    assert [e.trigger for e in session.events] == ["no_plan"]


def test_a_region_that_loses_all_its_ops_is_no_region() -> None:
    plan = Plan(
        assignments=(Assignment(op="0:linear#0", role=autoprec.Role.OUTPUT, format="fp16", reason="test"),),
        regions=(Region(ops=("0:linear#0",), scale_log2=3, reason="test"),),
    )
    left = scheduling._without(plan, {("0:linear#0", "fp16")})
    assert left.regions == () and left.format_of["0:linear#0", autoprec.Role.OUTPUT] == "fp32"
