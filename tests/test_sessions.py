"""A run from the first observed step to promotions: what the session does and when."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.planning.problem import build_problem
from autoprec.serial import read_plan, write_plan
from tests.models import CASES, ConvNet, Transformer, class_loss, language_loss

LANGUAGE = CASES[0]


def train(model: nn.Module, case: Any, steps: int, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)
    batches, losses = case.batches(), []
    for i in range(steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = case.loss(model, batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def memory(**changes: Any) -> autoprec.Policy:
    from autoprec.serial import load_policy

    return load_policy("memory").replaced(**changes)


def test_the_plan_takes_over_after_the_calibration_steps() -> None:
    torch.manual_seed(0)
    model = Transformer()
    plain = copy.deepcopy(model)
    autoprec.compile(model, policy=memory(calibration={"steps": 4}))
    session = autoprec.session(model)
    a, b = train(plain, LANGUAGE, 4), train(model, LANGUAGE, 4)
    assert a == b  # observed steps are the model, bitwise
    assert session.plan is not None and not session.plan.is_identity
    assert session.profile.steps == 4
    assert any(f.endswith("storage") for f in session.plan.formats_used())
    before = dict(session.executed_formats())
    train(model, LANGUAGE, 1)
    executed = session.executed_formats()
    claimed = {a.op: a.format for a in session.plan.assignments if a.role is autoprec.Role.OUTPUT}
    assert before == {}
    assert {op: executed[op] for op in claimed} == claimed


@pytest.mark.parametrize("policy", ["balanced", "memory", "speed", "safe", "bf16", "observe"])
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda c: c.name)
def test_every_policy_trains_close_to_fp32(policy: str, case: Any) -> None:
    torch.manual_seed(0)
    model = case.model()
    plain = copy.deepcopy(model)
    autoprec.compile(model, policy=policy)
    a, b = train(plain, case, 24), train(model, case, 24)
    assert autoprec.session(model).plan is not None
    assert abs(a[-1] - b[-1]) <= 0.02 * abs(a[-1])
    if policy == "observe":
        assert a == b


def test_calibrating_up_front_leaves_everything_as_it_was() -> None:
    model = ConvNet()
    batches = CASES[2].batches()
    class_loss(model, batches[0]).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    autoprec.compile(model, policy="memory", batches=batches, loss_fn=class_loss)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    session = autoprec.session(model)
    assert session.plan is not None and session.profile.steps == 5 and session.steps == 0
    assert session.profile.loss is not None and session.profile.loss.spread > 0


def test_a_plan_from_a_file_trains_like_the_session_that_made_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = Transformer()
    second = copy.deepcopy(first)
    autoprec.compile(first, policy="memory", batches=LANGUAGE.batches(), loss_fn=language_loss)
    write_plan(tmp_path / "plan.yaml", autoprec.session(first).plan)
    autoprec.compile(second, plan=tmp_path / "plan.yaml")
    assert autoprec.session(second).plan == read_plan(tmp_path / "plan.yaml")
    assert train(first, LANGUAGE, 4) == train(second, LANGUAGE, 4)


def test_a_budget_is_kept_and_an_impossible_one_names_the_smallest() -> None:
    model = autoprec.compile(
        Transformer(), policy="balanced", budget="70%", batches=LANGUAGE.batches(), loss_fn=language_loss
    )
    plan = autoprec.session(model).plan
    assert plan.budget_bytes is not None and plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes < plan.predicted_fp32.peak_bytes
    model = Transformer()
    with pytest.raises(autoprec.InfeasibleError, match="smallest feasible budget is [0-9]+ bytes"):
        autoprec.compile(model, policy="memory", budget=1000, batches=LANGUAGE.batches(), loss_fn=language_loss)
    autoprec.compile(model)  # a failed compile leaves the plain model behind


def test_accumulated_micro_batches_count_as_batches() -> None:
    model = autoprec.compile(Transformer(), policy="observe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in LANGUAGE.batches()[:3]:
        (language_loss(model, batch) / 3).backward()
    optimizer.step()
    session = autoprec.session(model)
    assert session.steps == 1 and session.profile.steps == 3
    # The loss is scaled by 1/3 on its way back; relative to what enters, the profile does not see it.
    again = autoprec.compile(copy.deepcopy(autoprec.unwrap(model)), policy="observe")
    assert again is not model


def test_loss_scaling_does_not_show_in_the_profile() -> None:
    energies = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = autoprec.compile(Transformer(), policy="observe")
        torch.manual_seed(0)
        (language_loss(model, LANGUAGE.batches()[0]) * scale).backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        energies.append(autoprec.session(model).profile.tensor_by_id["norm:layer_norm#0"].loss.energy)
    assert energies[0] == pytest.approx(energies[1], rel=1e-5)


def growing(policy: autoprec.Policy, steps: int, factor: float, until: int = 1000) -> autoprec.Session:
    """One layer's weights are multiplied at every step from the fifth on."""
    torch.manual_seed(0)
    model = autoprec.compile(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)), policy=policy
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for i in range(steps):
        if 3 < i < until:
            with torch.no_grad():
                model[2].weight.mul_(factor)
        optimizer.zero_grad()
        (model(torch.randn(64, 16)).mean() * 1e-6).backward()
        optimizer.step()
    return autoprec.session(model)


def test_the_window_promotes_before_the_overflow() -> None:
    """Values crowd the top of FP16 for a while: promoted at the end of a window, with no bad step at all."""
    policy = autoprec.Policy(
        name="half",
        formats=("fp32", "fp16"),
        objective="bytes",
        storage={"formats": ()},
        calibration={"steps": 2},
        monitor={"window_steps": 2, "interval_steps": 1, "saturation_frac": 1e-5},
    )
    session = growing(policy, steps=200, factor=1.06)
    promoted = [e for e in session.events if e.kind == "promoted"]
    assert promoted and promoted[0].trigger in ("saturation", "overflow")
    assert promoted[0].was == "fp16" and promoted[0].now == "fp32" and promoted[0].evidence
    assert session.skipped_steps == 0
    banned = {(e.op, e.was) for e in promoted}
    assert not any((a.op, a.format) in banned for a in session.plan.assignments)


def test_a_plan_from_a_file_is_watched_too() -> None:
    """There is no profile to plan from again: what leaves its format runs in FP32, and the event says so."""
    ops = ["0:linear#0", "1:relu#0", "2:linear#0", "3:relu#0", "4:linear#0"]
    from autoprec.plans import Assignment, Plan

    plan = Plan(
        assignments=tuple(Assignment(op=o, role=autoprec.Role.OUTPUT, format="fp16", reason="test") for o in ops)
    )
    torch.manual_seed(0)
    policy = autoprec.Policy(
        name="half", formats=("fp32", "fp16"), monitor={"window_steps": 2, "interval_steps": 1, "saturation_frac": 1e-5}
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    autoprec.compile(model, plan=plan, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for _ in range(200):
        with torch.no_grad():
            model[2].weight.mul_(1.06)
        optimizer.zero_grad()
        (model(torch.randn(64, 16)).mean() * 1e-6).backward()
        optimizer.step()
    session = autoprec.session(model)
    promoted = {e.op for e in session.events if e.kind == "promoted"}
    assert "2:linear#0" in promoted and session.skipped_steps == 0
    assert all(session.plan.format_of[(op, autoprec.Role.OUTPUT)] == "fp32" for op in promoted)
    assert any("without the profile" in e.evidence for e in session.events)


def test_one_overflow_moves_every_reader_of_the_value() -> None:
    """The jump passes 65504 at once; the ReLU that reads the value must leave FP16 with the linear that made it."""
    policy = autoprec.Policy(
        name="half", formats=("fp32", "fp16"), objective="bytes", storage={"formats": ()}, calibration={"steps": 2}
    )
    session = growing(policy, steps=12, factor=1e6, until=5)
    assert session.skipped_steps == 1
    formats = session.plan.format_of
    assert formats[("2:linear#0", autoprec.Role.OUTPUT)] == formats[("3:relu#0", autoprec.Role.OUTPUT)] == "fp32"


def test_a_quiet_run_is_not_touched() -> None:
    session = growing(memory(calibration={"steps": 2}, monitor={"window_steps": 2, "interval_steps": 1}), 40, 1.0)
    assert [e.kind for e in session.events] == ["planned"]


def test_gradscaler_skips_are_boundaries() -> None:
    model = autoprec.compile(ConvNet(), policy="observe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    buffers = [b.clone() for b in model.buffers()]
    scaler.scale(class_loss(model, CASES[2].batches()[0]) * 1e3).backward()
    scaler.step(optimizer)
    scaler.update()
    session = autoprec.session(model)
    assert session.step_was_skipped and session.steps == 0 and session.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert scaler.get_scale() == 2.0**126


def test_two_optimizers_make_one_step() -> None:
    model = autoprec.compile(Transformer(), policy="observe")
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(p, lr=0.01) for p in (parameters[:5], parameters[5:])]
    for _ in range(3):
        language_loss(model, LANGUAGE.batches()[0]).backward()
        for o in optimizers:
            o.step()
    assert autoprec.session(model).steps == 3


def test_other_optimizers_are_not_ours() -> None:
    autoprec.compile(Transformer(), policy="observe")
    stranger = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([stranger], lr=0.5)
    stranger.grad = torch.full((2,), float("inf"))
    optimizer.step()
    assert bool(stranger.isinf().all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "balansed"}, "balanced"),
        ({"batches": []}, "belong together"),
        ({"budget": "60 %%"}, "budget"),
        ({"plan": "nowhere.yaml"}, "nowhere.yaml"),
        ({"batches": [1], "loss_fn": lambda m, b: 3.0}, "scalar tensor"),
        ({"batches": [], "loss_fn": lambda m, b: None}, "at least 2 batches"),
    ],
)
def test_mistakes_get_a_sentence(arguments: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(autoprec.InputError, match=message):
        autoprec.compile(model, **arguments)
    assert getattr(model, "_compiled_call_impl", None) is None


def test_compiling_twice_or_a_part_is_refused() -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(4, 4)), policy="observe")
    with pytest.raises(autoprec.InputError, match="compiled already"):
        autoprec.compile(model)
    with pytest.raises(autoprec.InputError, match="another model"):
        autoprec.compile(model[0])
    with pytest.raises(autoprec.InputError, match="no parameters"):
        autoprec.compile(nn.ReLU())


def test_sessions_let_go_of_models() -> None:
    import gc
    import weakref

    model = autoprec.compile(nn.Sequential(nn.Linear(4, 4)), policy="observe")
    model(torch.randn(2, 4)).sum().backward()
    seen: weakref.ref[Tensor] = weakref.ref(model[0].weight)
    autoprec.unwrap(model)
    del model
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert seen() is None


def test_bytes_that_ops_keep_privately_are_measured_in_each_format() -> None:
    """Dropout's noise and batch norm's statistics: in FP32 timing finds what the observed step found; in BF16 the noise
    is half as large and the statistics are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 1))
    batches = [torch.randn(64, 32) for _ in range(3)]
    policy = autoprec.Policy(name="p", formats=["fp32", "bf16", "fp16"])
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(model)
    assert session.graph is not None and session.device is not None
    found = session.device.private_bytes_by_key
    for op in session.graph.ops:
        if op.roles:
            assert found[op.timing_key, "fp32"] == op.private_saved_bytes, op.id
    dropout, norm = session.graph.op_by_id["2:dropout#0"], session.graph.op_by_id["1:batch_norm#0"]
    assert dropout.private_saved_bytes == 64 * 32 * 4 and norm.private_saved_bytes == 2 * 32 * 4
    assert found[dropout.timing_key, "bf16"] == found[dropout.timing_key, "fp16"] == 64 * 32 // 8
    problem = build_problem(session.graph, session.profile, session.device, policy)
    (unit,) = [u for u in problem.units if u.op == dropout.id]
    assert dict(zip(unit.options, unit.kept, strict=True)) == {"fp32": 64 * 32 * 4, "bf16": 256, "fp16": 256}
    assert found[norm.timing_key, "bf16"] == 2 * 32 * 4


class HandMadeNorm(nn.Module):
    """RMS norm in plain ops: its gain's gradient is a sum over all rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.gain * scaled.to(x.dtype)


def test_the_scale_of_a_region_leaves_room_for_sums_over_rows() -> None:
    """In FP16 the gradient of a gain overflows long before the gradients that it is the sum of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), HandMadeNorm(32), nn.Linear(32, 32), HandMadeNorm(32), nn.Linear(32, 1))
    policy = autoprec.Policy(
        name="half", formats=("fp32", "fp16"), objective="bytes", storage={"formats": ()}, calibration={"steps": 2}
    )
    autoprec.compile(model, policy=policy, events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(12):
        optimizer.zero_grad()
        (model(torch.randn(4096, 16)) + 1.0).square().mean().backward()
        optimizer.step()
    session = autoprec.session(model)
    assert session.plan is not None
    assert session.plan.format_of["1:mul#1", autoprec.Role.OUTPUT] == "fp16"
    assert session.skipped_steps == 0 and [e.kind for e in session.events] == ["planned"]


def test_a_cast_back_ends_a_promise() -> None:
    """`gain * scaled.to(x.dtype)` is a product like any other; what stands between the casts keeps FP32."""
    model = nn.Sequential(nn.Linear(8, 8), HandMadeNorm(8), nn.Linear(8, 1))
    autoprec.compile(model, policy="bf16", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(9):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    session = autoprec.session(model)
    executed = session.executed_formats()
    assert executed["1:mul#0"] == "fp32" and executed["1:mul#1"] == "bf16"
    assert session.graph is not None
    assert [op.id for op in session.graph.ops if op.pinned] == ["1:pow#0", "1:add#0", "1:mul#0"]


@pytest.mark.parametrize(("where", "words"), [("nowhere/e.jsonl", "does not exist"), (".", "is a directory")])
def test_events_that_cannot_be_written_are_refused_at_once(where: str, words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(autoprec.InputError, match=words):
        autoprec.compile(model, events=where)
    autoprec.compile(model, events=None)
