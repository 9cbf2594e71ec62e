"""What a run does and tells when its plan cannot be solved again, and of ops whose roles have several formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.events import EventLog
from autoprec.graphs import Role
from autoprec.plans import Assignment, Event, Plan, Storage
from autoprec.policies import Policy
from autoprec.reporting.histories import history_of
from autoprec.reporting.plans import matching
from autoprec.reporting.runs import WatchedRun, follow
from autoprec.schedules import Schedule
from autoprec.serial import write_plan


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    torch._dynamo.reset()
    made: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        made += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*made[:-1])


def half(**changes: Any) -> Policy:
    return Policy(
        name="half", formats=("fp32", "fp16"), objective="bytes", storage={"formats": ()}, calibration={"steps": 2},
        monitor={"window_steps": 4, "interval_steps": 1, "cooldown_windows": 2},
    ).replaced(**changes)  # fmt: skip


def gradients(model: nn.Module, number: int, factor: float) -> dict[str, Tensor]:
    model.zero_grad()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().mul(factor).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


# Scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("growing", [4, 5])
def test_the_scale_of_a_region_comes_back(growing: int) -> None:
    """Gradients grow 64-fold at each of some observed steps, and are then what they were. Under the scale that was
    chosen for the largest, calibration's would have been lost as well, so nobody missed them: all were zero."""
    policy = half(rules=[{"match": "*", "ceiling": "fp16", "optional": True}], noise={"gradient": 5.0, "loss": 5.0})
    model, plain = layers(16, 32, 32, 4), layers(16, 32, 32, 4)
    autoprec.compile(model, policy=policy, events=None)
    optimizer, session = torch.optim.SGD(model.parameters(), lr=0.0), autoprec.session(model)
    lowest = 1000
    for k in range(48):
        factor = 2.0 ** (6 * (k - 9)) if 10 <= k < 10 + growing else 1.0
        found = gradients(model, k, factor)
        optimizer.step()
        lowest = min([lowest, *(r.scale_log2 for r in (session.plan.regions if session.plan else ()))])
    assert session.plan is not None and session.plan.regions and lowest < 0
    assert all(r.scale_log2 > 8 for r in session.plan.regions)
    assert error(found, gradients(plain, 47, 1.0)) <= 5e-3 and session.skipped_steps == 0
    assert [e.kind for e in session.events if e.kind == "promoted"] == []


def test_an_op_that_keeps_a_role_in_fp16_keeps_its_region(tmp_path: Path) -> None:
    """Where a schedule raises one of its roles alone, and the plan cannot be solved again."""
    made = layers(16, 32, 32, 4)
    autoprec.compile(made, policy=half(), events=None)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    for k in range(3):
        gradients(made, k, 1e-6)
        optimizer.step()
    plan = autoprec.session(made).plan
    assert plan is not None and plan.regions
    write_plan(tmp_path / "plan.yaml", plan)
    entry = {"after": 3, "raise": "*", "to": "fp32", "roles": ["grad_weight"]}
    model = layers(16, 32, 32, 4)
    autoprec.compile(model, policy=half(schedule=[entry]), plan=tmp_path / "plan.yaml", events=None)
    optimizer, session = torch.optim.SGD(model.parameters(), lr=0.0), autoprec.session(model)
    for k in range(6):
        found = gradients(model, k, 1e-6)
        optimizer.step()
    now = session.plan
    assert now is not None and "scheduled" in {e.kind for e in session.events}
    assert {f for (_, role), f in now.format_of.items() if role is Role.GRAD_WEIGHT} == {"fp32"}
    assert [(r.ops, r.scale_log2) for r in now.regions] == [(r.ops, r.scale_log2) for r in plan.regions]
    assert error(found, gradients(layers(16, 32, 32, 4), 5, 1e-6)) <= 5e-3


# Overflows --------------------------------------------------------------------------------------------------------


def deep(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    torch._dynamo.reset()
    made: list[nn.Module] = []
    for _ in range(count):
        made.append(nn.Linear(16, 16, bias=False))
        nn.init.orthogonal_(made[-1].weight)  # type: ignore[arg-type]
    return nn.Sequential(*made)


def test_readers_of_what_left_a_format_leave_it_too_under_a_plan_from_a_file(tmp_path: Path) -> None:
    """One op a step, a chain of 20 of them ended the run."""
    monitor = {"window_steps": 100, "interval_steps": 50}
    rules = [{"match": "*", "pin": "fp16", "optional": True}]
    policy = half(rules=rules, noise={"gradient": 50.0, "loss": 50.0}, monitor=monitor)
    made = autoprec.compile(deep(24), policy=policy, events=None)
    run(made, [1.0] * 3)
    plan = autoprec.session(made).plan
    assert plan is not None
    write_plan(tmp_path / "plan.yaml", plan)
    model = autoprec.compile(deep(24), policy=policy, plan=tmp_path / "plan.yaml", events=None)
    run(model, [*[1.0] * 6, *[1e6] * 10])
    session = autoprec.session(model)
    assert (session.steps, session.skipped_steps) == (15, 1)
    promoted = [e.op for e in session.events if e.kind == "promoted"]
    assert len(promoted) == len(set(promoted)) == 24
    assert session.plan is not None and "fp16" not in session.plan.formats_used()


def run(model: nn.Module, sizes: Sequence[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    for size in sizes:
        optimizer.zero_grad()
        (model(torch.randn(32, 16) * size) / size).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("out", ["fp32", "bf16", "fp16"])
def test_the_format_that_a_gradient_left_is_to_blame(out: str) -> None:
    """Not the one of the result, which holds it: that was told as a flipped bit, and the wrong format was taken."""

    def pin(**how: Any) -> dict[str, Any]:
        return {"optional": True, **how}

    rules = [pin(match="2", roles=["output"], pin=out), pin(match="2", roles=["grad_input"], pin="fp16"),
             pin(match="2", roles=["grad_weight"], pin="fp16"), pin(match="*", pin="fp32")]  # fmt: skip
    policy = half(formats=("fp32", "bf16", "fp16"), rules=rules, loss_scaling={"mode": "none"},
                  noise={"gradient": 1e3, "loss": 1e3})  # fmt: skip
    model = layers(16, 32, 32, 4)
    autoprec.compile(model, policy=policy, events=None)
    optimizer, session = torch.optim.SGD(model.parameters(), lr=0.0), autoprec.session(model)
    for k in range(40):
        gradients(model, k, 1e9 if 12 <= k < 16 else 1.0)
        optimizer.step()
    changes = [(e.kind, e.was, e.now) for e in session.events if e.kind in ("promoted", "demoted", "released")]
    assert changes == [("promoted", "fp16", "fp32"), ("demoted", "fp32", "fp16")]
    (bad,) = [e for e in session.events if e.kind == "bad_step"]
    assert (bad.op, bad.role, bad.was, bad.trigger) == ("2:linear#0", "grad_input", "fp16", "overflow")
    assert session.skipped_steps == 1 and session.plan is not None
    assert session.plan.format_of["2:linear#0", Role.OUTPUT] == out


def test_where_no_plan_keeps_the_budget_all_that_overflows_leaves_at_once() -> None:
    """And what is told of the plan then is predicted of it."""
    torch.manual_seed(0)
    policy = half(objective="time", noise={"gradient": 5.0, "loss": 5.0}, storage={"formats": (), "recompute": False})
    model = layers(64, 128, 128, 128, 128, 8)
    autoprec.compile(model, policy=policy, budget="75%", events=None)
    optimizer, session = torch.optim.SGD(model.parameters(), lr=1e-9), autoprec.session(model)
    for size in [1.0] * 4 + [3e8] * 4:
        optimizer.zero_grad()
        (model(torch.randn(512, 64) * size) / size).square().mean().backward()
        optimizer.step()
    plan = session.plan
    assert plan is not None and plan.predicted is not None and plan.predicted_fp32 is not None
    assert session.skipped_steps == 1 and "outside the budgets" in plan.binding and plan.memory == ()
    left = [a.role for a in plan.assignments if a.format == "fp16"]  # of one whose gradients are in its range
    assert len(left) <= 1 and Role.OUTPUT not in left
    assert plan.predicted.peak_bytes == plan.predicted_fp32.peak_bytes > (plan.budget_bytes or 0)
    assert (plan.predicted == plan.predicted_fp32) == plan.is_identity == (not left)


# Events -----------------------------------------------------------------------------------------------------------


def test_who_pays_is_named_also_where_a_storage_does() -> None:
    def plan(fmt: str, storage: str) -> Plan:
        return Plan(assignments=(Assignment(op="a", role=Role.OUTPUT, format=fmt, reason=""),),
                    storages=(Storage(tensor="b", format=storage, reason=""),))  # fmt: skip

    log = EventLog(None)
    log.add(1, "promoted", op="a", was="fp16", trigger="overflow", evidence="x")
    log.settle(plan("fp16", "bf16"), plan("fp32", "fp8_e4m3"))
    assert log.events[-1].evidence == "x; kept b bf16 → fp8_e4m3 changed with it"


def test_a_plan_that_keeps_the_budget_begins_no_run() -> None:
    """`watch` and reports forgot all ops but those that it changed."""
    told = [
        Event(step=2, kind="planned", evidence="bf16"),
        *(Event(step=2, kind="assigned", op=op, role="output", was="fp32", now="bf16") for op in "ab"),
        Event(step=5, kind="planned", trigger="asked"),
        Event(step=9, kind="planned", trigger="budget"),
        Event(step=9, kind="assigned", op="b", role="output", was="bf16", now="fp32"),
    ]
    run_now = follow(WatchedRun(), told)
    assert {op.op: dict(op.formats)["output"] for op in run_now.ops} == {"a": "bf16", "b": "fp32"}
    assert history_of(told).counts["planned"] == 3


@pytest.mark.parametrize(("share", "steps", "after"), [(0.07, 100, 7), (0.55, 100, 55), (0.14, 50, 7), (0.071, 100, 8)])
def test_a_share_of_the_steps_is_as_it_is_written(share: float, steps: int, after: int) -> None:
    policy = half(schedule=[{"after": share, "raise": "*", "to": "fp32"}])
    ((found, _),) = Schedule.of(policy, steps).entries
    assert found == after


def test_a_fault_of_a_window_is_there_for_a_whole_one() -> None:
    """Whenever it begins."""
    for begin in range(6, 10):
        model = layers(16, 32, 32, 4)
        autoprec.compile(model, policy=half(), events=None)
        optimizer, session = torch.optim.SGD(model.parameters(), lr=0.0), autoprec.session(model)
        for k in range(20):
            if k == begin:
                autoprec.testing.inject(model, "2:linear#0", "zero")
            gradients(model, k, 1.0)
            optimizer.step()
        assert [(e.op, e.trigger) for e in session.events if e.kind == "incident"] == [("2:linear#0", "zero")], begin


def test_a_policy_whose_schedule_leaves_no_format_is_no_good_one() -> None:
    from autoprec.planning.rules import rule_findings

    policy = half(formats=("fp32", "bf16"), rules=[{"match": "*", "pin": "bf16"}],
                  schedule=[{"after": 10, "raise": "*", "to": "fp32"}])  # fmt: skip
    model = layers(16, 32, 4)
    data = [torch.randn(8, 16)] * 2
    calm = policy.replaced(schedule=(), noise={"gradient": 1e3, "loss": 1e3})
    autoprec.compile(model, policy=calm, batches=data, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(model)
    assert session.graph is not None and session.profile is not None and session.device is not None
    seen = session.graph, session.profile, session.device
    (found,) = [f for f in rule_findings(policy, *seen) if f.level == "problem"]
    assert "once all of the schedule counts" in found.what
    fine = replace_schedule(policy, [{"after": 10, "raise": "0", "to": "bf16"}])
    assert not [f for f in rule_findings(fine, *seen) if f.level == "problem"]


def replace_schedule(policy: Policy, schedule: Sequence[dict[str, Any]]) -> Policy:
    return policy.replaced(schedule=tuple(schedule))


# Names -----------------------------------------------------------------------------------------------------------


def test_an_op_is_found_by_its_name_also_where_that_reads_as_a_glob() -> None:
    """`nn.ModuleDict` takes brackets and stars as names."""
    names = ("heads.a[0]", "heads.a0", "heads.*", "heads.b")
    plan = Plan(
        assignments=tuple(Assignment(op=f"{n}:linear#0", role=Role.OUTPUT, format="bf16", reason="") for n in names)
    )
    for name in names:
        for text in (name, f"{name}:linear#0"):
            assert [d.op for d in matching(plan, text)] == [f"{name}:linear#0"]
    assert len(matching(plan, "heads.[ab]*")) == 3 and len(matching(plan, "h*")) == 4


# Frozen weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_out_reaches_a_frozen_weight_that_lives_narrow(storage: str) -> None:
    """As when a low-rank update is merged: `addmm(w, a, b, out=w)` did nothing."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    for p in model[0].parameters():
        p.requires_grad_(False)
    torch._dynamo.reset()
    kept = Storage(tensor="param:0.weight", format=storage, reason="")
    formats = Assignment(op="0:linear#0", role=Role.OUTPUT, format="bf16", reason="")
    autoprec.compile(model, plan=Plan(assignments=(formats,), storages=(kept,)), events=None)
    model(torch.randn(8, 32)).sum().backward()
    weight = model[0].weight
    assert type(weight).__name__ == "NarrowParameter"
    before = float(weight.mean())
    with torch.no_grad():
        given = torch.add(weight, torch.full((32, 32), 0.5), out=weight)
        assert given is weight and float(weight.mean()) == pytest.approx(before + 0.5, abs=0.05)
        torch.addmm(weight, torch.ones(32, 1), torch.ones(1, 32), out=weight)
    assert float(weight.mean()) == pytest.approx(before + 1.5, abs=0.1)
