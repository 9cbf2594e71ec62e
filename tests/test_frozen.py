"""Frozen parameters in narrow formats: what they hold, what reads them, what gives them back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.errors import InputError, PlanError, StateError
from autoprec.execution.attribution import Incident
from autoprec.execution.guard import GradientWatch
from autoprec.execution.measuring import peak_bytes
from autoprec.graphs import Role
from autoprec.numerics.frozen import NarrowParameter, narrow, widen
from autoprec.numerics.packing import decode, encode
from autoprec.plans import Assignment, Plan, Storage
from autoprec.replanning import replan
from autoprec.serial import load_policy, read_plan, write_plan
from tests.adapters import NARROW, Tuned, compiled, gradients, loss_of, made, narrow_of, policy_with

# The tensor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", NARROW)
def test_the_same_object_holds_its_bytes_alone(fmt: str) -> None:
    layer = nn.Linear(48, 32).requires_grad_(False)
    weight, values = layer.weight, layer.weight.detach().clone()
    weight.owner = "the user's"
    want = decode(encode(values, fmt), torch.float32)
    narrow(weight, fmt)
    assert layer.weight is weight and isinstance(weight, nn.Parameter) and weight.owner == "the user's"
    assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.float32, values.shape, False)
    assert weight.payload.nbytes == values.numel() * (2 if fmt == "bf16" else 1)
    assert torch.equal(weight.clone(), want) and torch.equal(weight.t().clone(), want.t())
    assert torch.equal(F.linear(values, weight), F.linear(values, want))
    assert repr(want)[:30] in repr(weight)
    widen(weight)
    assert layer.weight is weight and type(weight) is nn.Parameter and weight.owner == "the user's"
    assert torch.equal(weight, want)


@pytest.mark.parametrize("fmt", NARROW)
def test_what_is_written_is_encoded_again(fmt: str) -> None:
    weight = nn.Parameter(torch.randn(16, 8), requires_grad=False)
    narrow(weight, fmt)
    new = 300.0 * torch.randn(16, 8)  # another scale
    with torch.no_grad():
        assert weight.copy_(new) is weight
        assert torch.equal(weight.clone(), decode(encode(new, fmt), torch.float32))
        before = weight.clone()
        weight.mul_(2.0)
        assert torch.equal(weight.clone(), 2.0 * before)
        torch._foreach_mul_([weight], 0.5)
        assert torch.equal(weight.clone(), before)
        if fmt == "bf16":
            weight[0] = 1.0
            assert torch.equal(weight[0].clone(), torch.ones(8)) and torch.equal(weight[1].clone(), before[1])
        else:
            with pytest.raises(InputError, match="shares its scale"):
                weight[0] = 1.0
            assert torch.equal(weight.clone(), before)


@pytest.mark.parametrize("fmt", NARROW)
def test_its_data_is_read_and_replaced(fmt: str) -> None:
    weight = nn.Parameter(torch.randn(16, 8), requires_grad=False)
    narrow(weight, fmt)
    held = weight.clone()
    for read in (weight, weight.data, weight.detach().cpu()):
        assert (read.numpy() == held.numpy()).all() and (np.asarray(read) == held.numpy()).all()
        assert read.tolist() == held.tolist() and f"{read[0, 0]:.3f}" == f"{held[0, 0]:.3f}"
    assert weight.data_ptr() == weight.payload.data_ptr() != 0
    new = torch.randn(16, 8)
    weight.data = new
    assert isinstance(weight, NarrowParameter) and torch.equal(weight.clone(), decode(encode(new, fmt), torch.float32))
    weight.data.copy_(held)
    assert torch.equal(weight.clone(), held)
    nn.utils.vector_to_parameters(torch.zeros(128), [weight])
    assert not weight.any()
    with pytest.raises(InputError, match=r"its data is replaced by \(3,\) on cpu"):
        weight.data = torch.ones(3)


def test_rows_are_looked_up_without_the_rest() -> None:
    table = nn.Parameter(torch.randn(4096, 64), requires_grad=False)
    narrow(table, "fp8_e4m3")
    rows = torch.tensor([3, 5])
    want = table.clone()[rows]
    held = peak_bytes(lambda: F.embedding(rows, table), torch.device("cpu"))
    assert torch.equal(F.embedding(rows, table), want) and held < 0.1 * table.numel()


# The plan -----------------------------------------------------------------------------------------------------------


def test_what_an_op_computes_is_bitwise_as_if_it_had_cast() -> None:
    """In BF16, and products in BF16: the one rounding is the same, made once instead of every time."""
    model, batches = made(layers=2)
    ops = [f"{kind}.{k}.base:linear#0" for kind in ("wide", "narrow") for k in (0, 1)]
    assignments = tuple(
        Assignment(op=op, role=role, format="bf16", reason="") for op in ops for role in Role if role != "grad_weight"
    )
    cast = Plan(assignments=assignments)
    frozen = tuple(
        Storage(tensor=f"param:{op.partition(':')[0]}.weight", format="bf16", reason="") for op in ops
    )  # fmt: skip
    twin = copy.deepcopy(model)
    autoprec.compile(twin, plan=cast, events=None)
    want = gradients(twin, batches[0])
    autoprec.compile(model, plan=Plan(assignments=assignments, storages=frozen), events=None)
    assert len(narrow_of(model)) == 4
    found = gradients(model, batches[0])
    assert want.keys() == found.keys() and all(torch.equal(want[f], found[f]) for f in want)


def test_fp8_is_bitwise_the_rounded_model() -> None:
    model, batches = made()
    name = "wide.0.base.weight"
    ops = [Assignment(op="wide.0.base:linear#0", role=r, format="bf16", reason="") for r in (Role.OUTPUT,)]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = dict(twin.named_parameters())[name]
        weight.copy_(decode(encode(weight, "fp8_e4m3"), torch.float32))
    autoprec.compile(twin, plan=Plan(assignments=tuple(ops)), events=None)
    want = gradients(twin, batches[0])
    storages = (Storage(tensor=f"param:{name}", format="fp8_e4m3", reason=""),)
    autoprec.compile(model, plan=Plan(assignments=tuple(ops), storages=storages), events=None)
    found = gradients(model, batches[0])
    assert narrow_of(model) == {name: "fp8_e4m3"} and all(torch.equal(want[f], found[f]) for f in want)


def test_convolutions_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 144, 4))
    model[2].requires_grad_(False)
    batches = [torch.randn(4, 8, 16, 16) for _ in range(4)]
    policy = policy_with(*NARROW)
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    assert narrow_of(model).keys() == {"2.weight"}
    profile = autoprec.session(model).profile
    assert profile.tensor_by_id["param:2.weight"].loss is not None
    model(batches[0]).square().mean().backward()
    assert model[0].weight.grad.isfinite().all() and model[2].weight.grad is None


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 8, 3), nn.ConvTranspose2d(16, 8, 3), nn.Conv2d(16, 16, 3, groups=2)])
def test_a_frozen_layer_in_fp32_lets_go_of_an_input_that_is_kept_narrow(layer: nn.Module) -> None:
    """torch's convolutions keep it, though the gradient of their weight is not asked for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.GELU(), layer.requires_grad_(False))
    x, kept = torch.randn(4, 8, 16, 16), {}
    for storage in ("as_is", "fp8_e4m3"):
        storages = () if storage == "as_is" else (Storage(tensor="1:gelu#0", format=storage, reason="by hand"),)
        plan = Plan(assignments=(), storages=storages, binding="by hand")
        tried = copy.deepcopy(model)
        autoprec.compile(tried, plan=plan, events=None)
        sizes = list[int]()
        note = sizes.append
        with torch.autograd.graph.saved_tensors_hooks(lambda t, note=note: (note(t.nbytes), t)[1], lambda t: t):
            y = tried(x)
        y.square().mean().backward()
        kept[storage] = (sum(n == 4 * 16 * 14 * 14 * 4 for n in sizes), tried[0].weight.grad)
    assert kept["as_is"][0] > kept["fp8_e4m3"][0] == 1  # what GELU itself keeps of its input
    assert torch.equal(kept["as_is"][1], kept["fp8_e4m3"][1])


def test_the_noise_budget_decides() -> None:
    """A loose one has bases in FP8, a tight one none; predicted and measured errors of gradients agree."""
    model, batches = made()
    compiled(copy.deepcopy(model), batches, *NARROW)
    compiled(loose := copy.deepcopy(model), batches, *NARROW, noise={"gradient": 0.5, "loss": 0.5})
    assert "fp8_e4m3" in narrow_of(loose).values()
    own = next(c for c in autoprec.session(loose).plan.contestants if c.adopted)
    assert 0.3 < own.measured.gradient_ratio / own.predicted.gradient_ratio < 2.0
    compiled(tight := copy.deepcopy(model), batches, *NARROW, noise={"gradient": 1e-4, "loss": 1e-7})
    assert narrow_of(tight) == {}


def test_its_worth_to_the_loss_is_that_of_the_whole_gradient() -> None:
    """The sampled square of a gradient that nobody computes, against the gradient of the same weight when trained."""
    model, batches = made(width=32, layers=2)
    observing = policy_with().replaced(formats=("fp32",), storage={"formats": ()})
    autoprec.compile(model, policy=observing, batches=batches, loss_fn=loss_of, events=None)
    found = autoprec.session(model).profile
    autoprec.unwrap(model)
    trained = copy.deepcopy(model).requires_grad_(True)
    autoprec.compile(trained, policy=observing, batches=batches, loss_fn=loss_of, events=None)
    want = autoprec.session(trained).profile
    for name in ("wide.0.base.weight", "narrow.1.base.weight", "head.weight"):
        mine, theirs = (p.tensor_by_id[f"param:{name}"].loss for p in (found, want))
        exact = name != "narrow.1.base.weight"  # of 128 columns 32 are looked at
        assert mine.energy == pytest.approx(theirs.energy, rel=1e-4 if exact else 0.5)
    assert found.tensor_by_id["param:embedding.weight"].loss is None  # no gradient arrives there


def test_what_nothing_was_observed_of_stays_out_of_fp8() -> None:
    model, batches = made()
    compiled(model, batches, "fp8_e4m3", noise={"gradient": 1.0, "loss": 1.0})
    assert "embedding.weight" not in narrow_of(model) and len(narrow_of(model)) > 2
    [storage] = [s for s in autoprec.session(model).plan.storages if s.tensor == "param:embedding.weight"]
    assert "not observed" in next(d.why for d in storage.dropped if d.format == "fp8_e4m3")


def test_rules_of_what_reads_a_parameter_are_heard() -> None:
    model, batches = made()
    rules = [{"match": "head*", "pin": "fp32", "why": "logits"}]
    compiled(model, batches, *NARROW, rules=rules)
    assert "head.weight" not in narrow_of(model) and "wide.0.base.weight" in narrow_of(model)


def test_without_being_asked_none_is_rounded() -> None:
    model, batches = made()
    before = {f: p.detach().clone() for f, p in model.named_parameters()}
    compiled(model, batches)
    assert narrow_of(model) == {} and all(torch.equal(p, before[f]) for f, p in model.named_parameters())


def test_a_contest_rounds_nothing() -> None:
    """Contestants read rounded copies; what is not adopted leaves the parameters alone."""
    model, batches = made()
    before = model.head.weight.detach().clone()
    compiled(model, batches, *NARROW, objective="time")
    plan = autoprec.session(model).plan
    if "param:head.weight" not in plan.living:
        assert torch.equal(model.head.weight, before)
    assert narrow_of(model) == {t.removeprefix("param:"): f for t, f in plan.living.items()}


def test_a_contest_reads_what_would_be_rounded() -> None:
    """Nothing else is narrow here, so the change of the loss that is measured is that of the rounded weights."""
    model, batches = made()
    plain, changes = copy.deepcopy(model), {"formats": ("fp32",), "noise": {"gradient": 10.0, "loss": 10.0}}
    policy = load_policy("memory").replaced(
        calibration={"steps": 4}, storage={"formats": (), "recompute": False, "frozen": ("fp8_e4m3",)}, **changes
    )
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_of, events=None)
    own = next(c for c in autoprec.session(model).plan.contestants if c.adopted)
    with torch.no_grad():
        change = loss_of(copy.deepcopy(model), batches[3]) - loss_of(plain, batches[3])
    assert set(narrow_of(model).values()) == {"fp8_e4m3"} and abs(change) > 1e-4
    assert own.measured.loss_change == pytest.approx(float(change), rel=0.25)
    assert own.measured.gradient_ratio > 0.01


# A run --------------------------------------------------------------------------------------------------------------


def test_training_and_what_gives_it_back(tmp_path: Path) -> None:
    model, batches = made()
    compiled(model, batches, *NARROW, monitor={"window_steps": 4, "interval_steps": 2})
    kept = {f: model.get_parameter(f).clone() for f in narrow_of(model)}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    for step in range(9):  # two windows; weight decay does not reach what is frozen
        optimizer.zero_grad()
        loss_of(model, batches[step % 4]).backward()
        optimizer.step()
    assert narrow_of(model).keys() == kept.keys()
    state = model.state_dict()
    assert all(type(v) is Tensor and v.dtype is torch.float32 for v in state.values())
    assert all(torch.equal(state[f], v) for f, v in kept.items())
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert all(torch.equal(v, state[k]) for k, v in torch.load(file).items())
    twin = copy.deepcopy(model)
    assert narrow_of(twin) == {} and all(type(p) is nn.Parameter for p in twin.parameters())
    with torch.no_grad():
        model.load_state_dict({k: v * 1.0 for k, v in state.items()})
    assert narrow_of(model).keys() == kept.keys()
    assert all(torch.equal(model.get_parameter(f), v) for f, v in kept.items())
    autoprec.unwrap(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(model.get_parameter(f), v) for f, v in kept.items())
    assert not any(m._state_dict_hooks for m in model.modules())


def test_a_model_can_be_moved() -> None:
    model, batches = made()
    compiled(model, batches, *NARROW)
    living, weight, values = narrow_of(model), model.head.weight, model.head.weight.clone()
    want = gradients(model, batches[0])
    twin = copy.deepcopy(model)
    assert model.cpu() is model and model.to(torch.float32).share_memory() is model
    assert narrow_of(model) == living and model.head.weight is weight and torch.equal(weight, values)
    found = gradients(model, batches[0])
    assert all(torch.equal(want[f], found[f]) for f in want)
    twin.double()
    assert twin.head.weight.dtype is torch.float64 and narrow_of(model) == living
    autoprec.unwrap(model)
    assert all("_apply" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_that_is_trained_later_has_a_master_again(backend: str) -> None:
    """And the guard watches it."""
    model, batches = made()
    compiled(model, batches, "bf16", backend=backend)
    weight, rounded = model.head.weight, model.head.weight.clone()
    assert isinstance(weight, NarrowParameter)
    weight.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loss_of(model, batches[0]).backward()
    gradient = weight.grad.clone()
    optimizer.step()
    assert model.head.weight is weight and type(weight) is nn.Parameter
    assert torch.equal(weight, torch.add(rounded, gradient, alpha=-1e-4)) and gradient.abs().max() > 0
    assert any("trained from now on" in e.evidence for e in autoprec.session(model).events)
    before = [p.detach().clone() for p in model.parameters()]
    weight.register_hook(lambda g: torch.full_like(g, torch.nan))
    loss_of(model, batches[1]).backward()
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_hooks_stay_when_its_master_comes_back() -> None:
    """Of the user's as well as of the guard's, put on while it was narrow."""
    weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    narrow(weight, "bf16")
    weight.requires_grad_(True)
    seen, watch = list[str](), GradientWatch({"weight": weight})
    weight.register_hook(lambda g: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    widen(weight)
    (weight * torch.nan).sum().backward()
    assert seen == ["gradient", "accumulated"] and not watch.verdict() and watch.bad == {"weight"}


def test_a_promotion_leaves_it_where_it_lives() -> None:
    model, batches = made()
    compiled(model, batches, "bf16")
    session, living = autoprec.session(model), narrow_of(model)
    assert session.plan is not None
    found = Incident(op="head:linear#0", trigger="overflow", evidence="test", cause="bf16", role="output")
    session._stability.overflowed(found, session.plan, (), {})
    replan(session)
    assert narrow_of(model) == living and session.plan.living["param:head.weight"] == "bf16"
    loss_of(model, batches[0]).backward()


def test_from_a_file(tmp_path: Path) -> None:
    model, batches = made()
    compiled(source := copy.deepcopy(model), batches, *NARROW)
    plan = autoprec.session(source).plan
    write_plan(tmp_path / "plan.yaml", plan)
    autoprec.compile(model, plan=tmp_path / "plan.yaml", events=None)
    assert narrow_of(model) == narrow_of(source) and read_plan(tmp_path / "plan.yaml").living == plan.living
    want, found = gradients(source, batches[0]), gradients(model, batches[0])
    assert all(torch.equal(want[f], found[f]) for f in want)


def test_inductor_reads_the_same_bytes() -> None:
    model, batches = made()
    compiled(twin := copy.deepcopy(model), batches, *NARROW)
    plan = autoprec.session(twin).plan
    want = gradients(twin, batches[0])
    autoprec.compile(model, plan=plan, events=None, backend="inductor")
    found = gradients(model, batches[0])
    assert narrow_of(model) == narrow_of(twin) and autoprec.session(model).lowering.compiled
    for f, g in want.items():
        assert float((found[f] - g).norm() / g.norm()) < 0.05  # bf16's rounding, between ops that are fused


def test_inductor_calibrates_and_trains() -> None:
    model, batches = made()
    compiled(model, batches, *NARROW, backend="inductor")
    own = next(c for c in autoprec.session(model).plan.contestants if c.adopted)
    assert narrow_of(model) and not own.measured.failure
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batches[0])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.head.requires_grad_(True), "here it is trained"),
        (lambda m: setattr(m, "head", nn.Sequential(m.head)), "none of that name"),
        (lambda m: narrow(m.head.weight, "bf16"), "NarrowParameter already"),
    ],
)
def test_a_plan_that_does_not_fit_rounds_nothing(change: Callable[[Tuned], object], told: str) -> None:
    model, _ = made()
    names = ("wide.0.base.weight", "head.weight")
    plan = Plan(assignments=(), storages=tuple(Storage(tensor=f"param:{n}", format="bf16", reason="") for n in names))
    change(model)
    with pytest.raises(PlanError, match=told):
        autoprec.compile(model, plan=plan, events=None)
    assert type(model.wide[0].base.weight) is nn.Parameter


def test_a_parameter_is_not_recomputed() -> None:
    model, _ = made()
    storage = Storage(tensor="param:head.weight", format="recomputed", reason="", made_from=("param:head.weight",))
    with pytest.raises(PlanError, match="nothing makes it"):
        autoprec.compile(model, plan=Plan(assignments=(), storages=(storage,)), events=None)


def tuned(*, tied: bool = False, thawed: bool = False) -> Tuned:
    torch.manual_seed(0)
    model = Tuned(layers=1)
    if tied:
        model.head.weight = model.embedding.weight
    if thawed:
        model.wide[0].base.requires_grad_(True)
    return model


def trained(model: Tuned, steps: int, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.randint(0, 32, (4, 17))).backward()
        optimizer.step()
    return optimizer


def test_tied_weights_have_two_owners(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = tuned(tied=True)
    autoprec.compile(model, policy=policy_with("bf16"), events=None)
    trained(model, 9)
    assert isinstance(model.head.weight, NarrowParameter) and model.head.weight is model.embedding.weight
    state = model.state_dict()
    assert all(type(state[f"{name}.weight"]) is Tensor for name in ("embedding", "head"))
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    model.to("cpu")
    assert isinstance(model.head.weight, NarrowParameter) and model.head.weight is model.embedding.weight


def test_a_run_goes_on_after_a_frozen_weight_is_trained() -> None:
    """It is planned again, saved, and resumed."""
    torch._dynamo.reset()
    model = tuned()
    autoprec.compile(model, policy=policy_with("bf16"), events=None)
    optimizer = trained(model, 9)
    weight = model.wide[0].base.weight
    assert isinstance(weight, NarrowParameter)
    model.wide[0].base.requires_grad_(True)
    trained(model, 2, optimizer)
    session = autoprec.session(model)
    early = tuned(thawed=True)
    autoprec.compile(early, policy=policy_with("bf16"), events=None)
    autoprec.session(early).load_state_dict(session.state_dict())
    session.replan(budget="90%")
    trained(model, 2, optimizer)
    assert type(weight) is nn.Parameter and isinstance(model.narrow[0].base.weight, NarrowParameter)
    other = tuned(thawed=True)
    autoprec.compile(other, policy=policy_with("bf16"), events=None)
    other.load_state_dict(model.state_dict())
    autoprec.session(other).load_state_dict(session.state_dict())
    trained(other, 2)
    assert type(other.wide[0].base.weight) is nn.Parameter
    refusing = tuned(thawed=True)
    refusing.narrow[0].base.requires_grad_(True)
    autoprec.compile(refusing, policy=policy_with("bf16"), events=None)
    with pytest.raises(StateError, match="here it is trained"):
        autoprec.session(refusing).load_state_dict(session.state_dict())


def test_a_weight_that_is_trained_before_the_plan_stays_as_it_is() -> None:
    torch._dynamo.reset()
    model = tuned()
    autoprec.compile(model, policy=policy_with("bf16"), events=None)
    optimizer = trained(model, 3)
    model.wide[0].base.requires_grad_(True)
    trained(model, 8, optimizer)
    assert autoprec.session(model).plan is not None
    assert type(model.wide[0].base.weight) is nn.Parameter
    assert isinstance(model.narrow[0].base.weight, NarrowParameter)
