"""Graphs through torch's compiler: what they compute and what they keep, against the same graphs run as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import autoprec
from autoprec.errors import InputError
from autoprec.execution import inductor
from autoprec.execution.partitioning import Narrow
from autoprec.graphs import Role
from autoprec.numerics.compilers import made_in_backward, saved_for_backward
from autoprec.planning.problem import fixed_bytes
from autoprec.plans import Assignment, Plan, Storage
from autoprec.policies import Rule
from autoprec.reporting.memory import memory_data
from autoprec.serial import load_policy

BF16_EPS = 2.0**-8


class Block(nn.Module):
    """A norm, two linears with GELU between, dropout and a residual."""

    def __init__(self, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


def plan_of(formats: dict[str, str] | None = None, storages: dict[str, str | tuple[str, ...]] | None = None) -> Plan:
    """Formats by op id, and storages by tensor id: a format, or what it is made again from."""
    kept = []
    for tensor, how in (storages or {}).items():
        again = isinstance(how, tuple)
        kept.append(
            Storage(
                tensor=tensor,
                format="recomputed" if again else how,  # type: ignore[arg-type]
                made_from=how if again else (),  # type: ignore[arg-type]
                reason="test",
            )
        )
    return Plan(
        assignments=tuple(
            Assignment(op=op, role=role, format=f, reason="test") for op, f in (formats or {}).items() for role in Role
        ),
        storages=tuple(kept),
    )


def step(model: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(seed)
    y = model(x)
    y.square().mean().backward()
    return y.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def both(model: nn.Module, plan: Plan, *inputs: Tensor) -> tuple[list[Any], list[Any], nn.Module]:
    """A step on each input, run as it is and compiled, and the compiled model."""
    found = []
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        mine = copy.deepcopy(model)
        autoprec.compile(mine, plan=plan, events=None, backend=backend)
        found.append([step(mine, x) for x in inputs])
    return found[0], found[1], mine


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest ‖a − b‖ / ‖a‖ of any parameter."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / a[n].norm()) for n in a)


STORAGES: dict[str, str | tuple[str, ...]] = {
    ":tanh#0": "fp8_e4m3",
    "norm:layer_norm#0": (":tanh#0",),
    "up:linear#0": "fp8_e4m3",
    ":gelu#0": ("up:linear#0",),
}
FORMATS = {op: "bf16" for op in ("up:linear#0", ":gelu#0", "down:linear#0")}


def test_fp32_is_fp32() -> None:
    eager, compiled, model = both(Block(), plan_of({":gelu#0": "fp32"}), torch.randn(64, 16))
    torch.testing.assert_close(compiled[0][0], eager[0][0], rtol=1e-5, atol=1e-6)
    assert furthest(eager[0][1], compiled[0][1]) < 1e-5
    assert [made.plan == "" for made in autoprec.session(model).lowering.compiled] == [False]


@pytest.mark.parametrize("formats", [{}, FORMATS], ids=["fp32", "bf16"])
def test_what_is_kept_is_what_the_plan_says(formats: dict[str, str]) -> None:
    """Rounding to E4M3 changes gradients by far more than compiling does; the bytes are those of the storages."""
    x = torch.randn(256, 16)
    eager, compiled, model = both(Block(), plan_of(formats, STORAGES), x)
    as_is, _, _ = both(Block(), plan_of(formats or {":gelu#0": "fp32"}), x)
    bound = BF16_EPS if formats else 1e-5
    assert float((eager[0][0] - compiled[0][0]).norm() / eager[0][0].norm()) < bound
    assert furthest(eager[0][1], compiled[0][1]) < bound
    assert autoprec.session(model).executed_formats()["up:linear#0"] == ("bf16" if formats else "fp32")
    (made,) = autoprec.session(model).lowering.compiled
    assert made.seconds > 0.0 and not any(t.again for t in made.kept)
    # tanh and up:linear in a byte each, with a scale each; beside them a mean and a deviation for each row.
    planned = {(t.tensor, t.dtype): t.bytes for t in made.kept if t.planned}
    assert planned[":tanh#0", "float8_e4m3fn"] == 256 * 16
    assert planned["up:linear#0", "float8_e4m3fn"] == 256 * 64
    assert made.kept_bytes == 256 * (16 + 64) + 2 * 4 + 256 * 2 * 4


def test_what_equals_a_storage_is_not_kept_twice() -> None:
    """Where a storage is the tensor itself (BF16 of BF16), what is made again of it is what the forward pass made."""
    plan = plan_of(FORMATS, {"up:linear#0": "bf16", ":gelu#0": ("up:linear#0",)})
    eager, compiled, model = both(Block(), plan, torch.randn(256, 16))
    assert furthest(eager[0][1], compiled[0][1]) < BF16_EPS
    (made,) = autoprec.session(model).lowering.compiled
    wide = [(t.tensor, t.bytes, t.planned) for t in made.kept if t.bytes >= 256 * 64]
    assert wide == [("up:linear#0", 256 * 64 * 2, True)]


class NormsBetween(nn.Module):
    """Two blocks, with a norm before each and after the last, on the way of the residual."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = norm(x)
            x = x + layer(x)
        return self.norms[2](x)


def test_a_norm_may_keep_its_input_normalized() -> None:
    """What it gives is kept in BF16, and what it reads as it is: normalized in FP32 in its place, and not beside it."""
    formats = {f"layers.{i}:linear#0": "bf16" for i in range(2)}
    storages: dict[str, str | tuple[str, ...]] = {f"norms.{i}:layer_norm#0": "bf16" for i in range(2)}
    plan = plan_of(formats, {**storages, ":add#0": "as_is", ":add#1": "as_is"})
    _, _, model = both(NormsBetween(), plan, torch.randn(256, 64))
    (made,) = autoprec.session(model).lowering.compiled
    wide = [t.tensor for t in made.kept if t.bytes == 256 * 64 * 4]
    assert len(wide) == 2 and not any(t.again for t in made.kept)
    # Two tensors in FP32, two in BF16, and two numbers for each row of the three norms at most.
    assert made.kept_bytes <= 2 * 256 * 64 * (4 + 2) + 3 * 2 * 4 * 256


def test_what_is_kept_beside_its_storage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the plan did not keep as it is what it does."""
    said = {":gelu#0": Narrow(256 * 64, "float8_e4m3fn", ("elsewhere",))}
    monkeypatch.setattr(inductor.Inductor, "_narrow", said)
    _, _, model = both(Block(), plan_of({":gelu#0": "fp32"}), torch.randn(256, 16))
    (made,) = autoprec.session(model).lowering.compiled
    assert {t.tensor for t in made.kept if t.again} == {":gelu#0"}


def test_gradients_are_those_of_the_rounded_tensors() -> None:
    """Furthest from the plan without storages, near to eager's with them: the storages are really read."""
    torch.manual_seed(1)
    model, x = Block(), torch.randn(256, 16)
    eager, compiled, _ = both(model, plan_of({}, STORAGES), x)
    plain = step(copy.deepcopy(model), x)
    assert furthest(plain[1], compiled[0][1]) > 100 * furthest(eager[0][1], compiled[0][1])


class Chain(nn.Module):
    """Pointwise ops that fuse into one kernel, where a rounding between them shows in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w
        y = y + x
        return y * x


def test_casts_survive_fusion() -> None:
    """Every op rounds its result to BF16, as eager does; a compiler's own way keeps FP32 between fused ops."""
    plan = plan_of({":mul#0": "bf16", ":add#0": "bf16", ":mul#1": "bf16"})
    eager, compiled, _ = both(Chain(), plan, torch.randn(128, 64))
    assert torch.equal(eager[0][0], compiled[0][0])
    assert furthest(eager[0][1], compiled[0][1]) < 1e-5  # sums in another order


@pytest.mark.parametrize(
    ("formats", "storages"),
    [({}, {":tanh#0": "bf16"}), ({":dropout#0": "bf16"}, {}), ({":dropout#0": "bf16"}, STORAGES)],
    ids=["unplanned", "as it is", "narrow"],
)
def test_dropout_drops_the_same(formats: dict[str, str], storages: dict[str, str | tuple[str, ...]]) -> None:
    eager, compiled, _ = both(Block(p=0.5), plan_of(formats, storages), torch.randn(64, 16))
    torch.testing.assert_close(compiled[0][0], eager[0][0], rtol=2 * BF16_EPS, atol=2 * BF16_EPS)
    assert furthest(eager[0][1], compiled[0][1]) < BF16_EPS


def test_other_sizes() -> None:
    """Dynamo captures the second size with a symbol; what was compiled for it is used for a third."""
    xs = [torch.randn(n, 16) for n in (8, 12, 20, 28)]
    eager, compiled, model = both(Block(), plan_of(FORMATS, STORAGES), *xs)
    for e, c in zip(eager, compiled, strict=True):
        assert furthest(e[1], c[1]) < BF16_EPS
    assert len(autoprec.session(model).lowering.compiled) == 2


def test_a_plan_that_comes_back_is_not_compiled_again() -> None:
    model, x = Block(), torch.randn(32, 16)
    first, second = plan_of(FORMATS, STORAGES), plan_of(FORMATS)
    at_once = load_policy("balanced").replaced(monitor={"takeover_steps": 0})
    autoprec.compile(model, plan=first, policy=at_once, events=None, backend="inductor")
    session = autoprec.session(model)
    results = [step(model, x)]
    session.adopt(second)
    results.append(step(model, x))
    made = session.lowering.compiled
    assert [m.plan for m in made] == [first.fingerprint, second.fingerprint]
    session.adopt(first)
    results.append(step(model, x))
    assert session.lowering.compiled == made
    assert furthest(results[0][1], results[2][1]) == 0.0 < furthest(results[0][1], results[1][1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside = Block(), Block(p=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, self.first(x), use_reentrant=False)


def test_checkpoints_keep_nothing_of_what_is_inside() -> None:
    plan = plan_of({f"{b}.{op}:linear#0": "bf16" for b in ("first", "inside") for op in ("up", "down")})
    eager, compiled, model = both(Checkpointed(), plan, torch.randn(256, 16))
    torch.testing.assert_close(compiled[0][0], eager[0][0], rtol=4 * BF16_EPS, atol=4 * BF16_EPS)
    assert furthest(eager[0][1], compiled[0][1]) < 4 * BF16_EPS
    (made,) = autoprec.session(model).lowering.compiled
    alone = plan_of({"up:linear#0": "bf16", "down:linear#0": "bf16"})
    (first,) = autoprec.session(both(Block(), alone, torch.randn(256, 16))[2]).lowering.compiled
    # What the checkpoint reads, and the random state that it began with.
    assert made.kept_bytes == first.kept_bytes + 256 * 16 * 4 + torch.get_rng_state().numel()
    assert not [t for t in made.kept if t.tensor.startswith("inside")]


class Normed(nn.Module):
    """With running statistics, which a bad step must not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


def test_a_bad_step_changes_nothing() -> None:
    model = Normed()
    plan = plan_of({"a:linear#0": "bf16"}, {":relu#0": "fp8_e4m3", "a:linear#0": "fp8_e4m3"})
    autoprec.compile(model, plan=plan, events=None, backend="inductor")
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    train(torch.randn(32, 16))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    bad = torch.randn(32, 16)
    bad[3, 5] = float("nan")
    train(bad)
    after = (model.state_dict(), optimizer.state_dict())
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name]), name
    for number, state in before[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after[1]["state"][number][name]), name
    assert autoprec.session(model).step_was_skipped
    train(torch.randn(32, 16))
    assert not torch.equal(before[0]["norm.running_mean"], model.norm.running_mean)


def test_calibrated_planned_and_raced_as_it_will_run() -> None:
    torch.manual_seed(0)
    model = Block(32)
    batches = [torch.randn(256, 32) for _ in range(3)]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    policy = load_policy("memory").replaced(calibration={"steps": 2})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_fn, events=None, backend="inductor")
    session = autoprec.session(model)
    raced = len(session.lowering.compiled)
    assert raced == len([c for c in session.plan.contestants if c.measured is not None])
    loss_fn(model, batches[0]).backward()
    assert len(session.lowering.compiled) == raced  # the winner was compiled for the race


class Blocks(nn.Module):
    """Two blocks and a linear, in one graph or in two: the peak is in the backward pass of the blocks, which keep what
    they give to the linear."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(Block(64), Block(64), nn.Tanh()), nn.Linear(64, 64)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("broken", [False, True])
def test_the_peak_of_a_compiled_step_is_that_of_its_code(broken: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = Blocks(broken), [torch.randn(1024, 64) for _ in range(3)]
    policy = load_policy("memory").replaced(calibration={"steps": 2})
    autoprec.compile(
        model,
        policy=policy,
        batches=batches,
        loss_fn=lambda m, x: m(x).square().mean(),
        events=None,
        backend="inductor",
    )
    session = autoprec.session(model)
    plan = session.plan
    assert plan is not None and plan.predicted is not None and session.graph is not None
    assert len(session.lowering.compiled) % (2 if broken else 1) == 0
    always = fixed_bytes(session.graph)
    ran = [c for c in plan.contestants if c.measured is not None]
    assert len(ran) > 1
    for c in ran:
        ratio = (c.predicted.peak_bytes - always) / (c.measured.peak_bytes - always)
        assert abs(ratio - 1.0) <= 0.01, (c.name, ratio)
    assert plan.adopted is not None and plan.predicted == plan.adopted.predicted
    told = memory_data(plan)
    if told["predicted"]["plan"] == plan.predicted.peak_bytes:  # the planner was right to the byte
        assert told["predicted_compiled"]["plan"] is None
        return
    assert told["predicted_compiled"]["plan"] == plan.predicted.peak_bytes
    assert told["predicted_compiled"]["fp32"] == next(c.predicted.peak_bytes for c in ran if c.name == "fp32")


def test_a_contestant_that_does_not_compile_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race goes on without it, and says why."""
    compiler = inductor.compile_fx

    def refuse_narrow(module: Any, examples: Any, **options: Any) -> Any:
        if any(getattr(n.target, "__name__", "") == "open_cell" for n in module.graph.nodes):
            raise RuntimeError("no such kernel")
        return compiler(module, examples, **options)

    monkeypatch.setattr(inductor, "compile_fx", refuse_narrow)
    torch.manual_seed(0)
    model, batches = Block(32), [torch.randn(256, 32) for _ in range(3)]
    policy = load_policy("memory").replaced(calibration={"steps": 2})
    autoprec.compile(
        model,
        policy=policy,
        batches=batches,
        loss_fn=lambda m, x: m(x).square().mean(),
        events=None,
        backend="inductor",
    )
    found = {c.name: c for c in autoprec.session(model).plan.contestants}
    assert "no such kernel" in found["solver"].verdict and not found["solver"].adopted
    model(batches[0]).square().mean().backward()


def test_marks_are_for_what_is_traced_alone() -> None:
    """Others may run backward passes meanwhile, on threads of their own, and the marks are the process's."""
    x = torch.randn(4)
    for around in (saved_for_backward(x, "x"), made_in_backward(x)):
        with around:
            assert "recompute" not in traceback.current_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        with saved_for_backward(fake, "x"):
            assert traceback.current_meta["recompute"] is CheckpointPolicy.MUST_SAVE
            assert traceback.current_meta["custom"] == {"autoprec_tensor": "x"}
    assert "recompute" not in traceback.current_meta


@pytest.mark.parametrize("mistake", ["backend", "rule", "plan"])
def test_mistakes(mistake: str) -> None:
    def made(**changes: Any) -> Callable[[], object]:
        return lambda: autoprec.compile(Block(), events=None, **changes)

    tf32 = load_policy("balanced").replaced(rules=(Rule(match="up", pin="tf32"),))
    run, told = {
        "backend": (made(backend="inductr"), "unknown backend 'inductr'. Did you mean 'inductor'?"),
        "rule": (made(backend="inductor", policy=tf32), "a rule computes in tf32"),
        "plan": (made(backend="inductor", plan=plan_of({"up:linear#0": "tf32"})), "the plan computes in tf32"),
    }[mistake]
    with pytest.raises(InputError) as raised:
        run()
    assert told in str(raised.value)
