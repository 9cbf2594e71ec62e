"""What a review and a newcomer's trial found, one test each."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.graphs import Role
from autoprec.numerics.gemm import GemmSpec, linear
from autoprec.plans import Assignment, Plan, Region, Storage


class Body(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def steps(model: nn.Module, x: Tensor, count: int = 10) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def largest_difference(model: nn.Module, x: Tensor, policy: str) -> float:
    """Between the losses of ten steps, planned in the ninth, and those of the plain model, relative to them."""
    plain = copy.deepcopy(model)
    expected = steps(plain, x)
    found = steps(autoprec.compile(model, policy=policy), x)
    assert autoprec.session(model).plan is not None
    return max(abs(a - b) / abs(a) if math.isfinite(b) else math.inf for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_inside_a_checkpoint_is_recomputed_with_the_same_mask(reentrant: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda t: m.drop(m.a(t)), x, use_reentrant=reentrant))

    model = Body(body, a=nn.Linear(8, 8), drop=nn.Dropout(0.5), b=nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    autoprec.compile(model, policy="observe")
    x = torch.randn(4, 8, requires_grad=True)
    for m in (plain, model):
        torch.manual_seed(7)
        m(x).sum().backward()
    assert torch.equal(plain.a.weight.grad, model.a.weight.grad)


def test_planning_leaves_the_random_state_alone() -> None:
    from autoprec.calibration import timing

    timing._cast.cache_clear()
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), policy="memory")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        model(torch.ones(4, 8)).sum().backward()
        before = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(before, torch.get_rng_state())
    assert autoprec.session(model).plan is not None


@pytest.mark.parametrize("policy", ["bf16", "balanced", "memory"])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -(10**9)])
def test_causal_attention_as_people_write_it(policy: str, fill: float) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        q = m.q(x)
        scores = q @ q.transpose(-1, -2)
        mask = torch.ones(5, 5).triu(1).bool()
        mask[0] = True  # padding: in FP32 such a row looks at everything alike
        return scores.masked_fill(mask, fill).softmax(-1) @ q

    assert largest_difference(Body(body, q=nn.Linear(8, 8)), torch.randn(2, 5, 8), policy) < 0.02


def test_a_copy_that_is_changed_in_place_is_not_made_again() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = torch.exp(m.a(x))
        c = h.clone()
        c[:, :4] = 0
        return m.b(c)

    assert largest_difference(Body(body, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(6, 8), "bf16") < 0.02


def test_a_copy_from_before_a_change_in_place_is_kept() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = torch.sin(x)
        c = h.flip(0)
        h[:, :4] = 3.0
        return m.a(c)

    assert largest_difference(Body(body, a=nn.Linear(8, 8)), torch.randn(6, 8), "bf16") < 0.02


@pytest.mark.parametrize("policy", ["memory", "bf16"])
def test_parts_of_a_narrow_result(policy: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        u, v = m.a(x).chunk(2, -1)
        return torch.cat([u.softmax(-1), v], -1)

    model = Body(body, a=nn.Linear(8, 8))
    assert largest_difference(model, torch.randn(6, 8), policy) < 0.02
    assert model(torch.randn(6, 8)).dtype is torch.float32


def test_a_part_returned_by_the_model_is_fp32() -> None:
    model = Body(lambda m, x: m.a(x).chunk(2, -1)[0], a=nn.Linear(8, 8))
    plan = Plan(assignments=(Assignment(op="a:linear#0", role=Role.OUTPUT, format="bf16", reason="test"),))
    autoprec.compile(model, plan=plan)
    assert model(torch.randn(4, 8)).dtype is torch.float32


def test_a_factor_beyond_the_format_stays_a_factor() -> None:
    model = Body(lambda m, x: torch.tanh(m.a(x)) * 0.001 * 1e5, a=nn.Linear(8, 8))
    x = torch.randn(6, 8)
    plain = model(x).detach()
    ops = ["a:linear#0", ":tanh#0", ":mul#0", ":mul#1"]
    plan = Plan(assignments=tuple(Assignment(op=o, role=Role.OUTPUT, format="fp16", reason="test") for o in ops))
    autoprec.compile(model, plan=plan)
    torch.testing.assert_close(model(x).detach(), plain, rtol=0.01, atol=0.1)


def test_fp16_gradient_roles_alone_are_scaled_locally() -> None:
    """Gradients of 1e-9 are nothing in FP16; the op's own scale brings them through and is divided out."""
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True), torch.zeros(4, requires_grad=True)
    spec = GemmSpec(
        output="fp32",
        grad_input="fp16",
        grad_weight="fp16",
        native=("fp32",),
        local_scale_log2=32,
    )
    leaf = x.clone().requires_grad_()
    (linear(leaf, w, b, None, spec) * 1e-9).sum().backward()
    expected = torch.autograd.grad((F.linear(leaf, w, b) * 1e-9).sum(), [leaf, w, b])
    for found, wanted in zip((leaf.grad, w.grad, b.grad), expected, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 2.0**-9


def test_an_op_demoted_out_of_a_region_gets_unscaled_gradients() -> None:
    """Output FP32, kept input in E4M3, still named by a region: the region's scale is not its own."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(6, 8)
    (model(x) ** 2).mean().backward()
    plain = model[1].weight.grad.clone()
    model.zero_grad()
    plan = Plan(
        assignments=(Assignment(op="1:linear#0", role=Role.OUTPUT, format="fp32", reason="promoted"),),
        storages=(Storage(tensor="0:tanh#0", format="fp8_e4m3", reason="test"),),
        regions=(Region(ops=("1:linear#0",), scale_log2=20, reason="test"),),
    )
    autoprec.compile(model, plan=plan)
    (model(x) ** 2).mean().backward()
    assert float((model[1].weight.grad - plain).norm() / plain.norm()) < 0.1


def test_equal_calls_that_are_decided_and_not_are_timed_apart() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        k = h * 1.0
        seen = h.view(-1)  # so the change stays one in place
        h.add_(torch.sin(m.b(x)))
        return h + k + seen.mean()

    assert largest_difference(Body(body, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(6, 8), "memory") < 0.02


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        torch._dynamo.graph_break()
        return torch.relu(x)


def test_up_front_calibration_of_a_model_with_graph_breaks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Breaking(), nn.Linear(8, 1))
    batches = [torch.randn(4, 8) for _ in range(4)]
    autoprec.compile(model, policy="memory", batches=batches, loss_fn=lambda m, b: m(b).square().mean())
    fqns = {op.fqn for op in autoprec.session(model).graph.ops}
    assert {"0", "1.lin", "2"} <= fqns


def test_sparse_gradients() -> None:
    model = Body(lambda m, i: m.head(m.embed(i).mean(1)), embed=nn.Embedding(20, 8, sparse=True), head=nn.Linear(8, 1))
    steps(autoprec.compile(model, policy="memory"), torch.randint(0, 20, (4, 3)))
    assert autoprec.session(model).plan is not None


def test_complex_parameters() -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.lin = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin((x * self.w).abs())

    assert largest_difference(Phase(), torch.randn(4, 8), "bf16") < 0.02


def poison(model: nn.Module) -> bool:
    """A bad step; True if it changed a parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.full((4, 8), float("nan"))).sum().backward()
    optimizer.step()
    return not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_unfrozen_after_compile_are_guarded() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    autoprec.compile(model, policy="observe")
    model[0].requires_grad_(True)
    assert not poison(model)


def test_parameters_put_in_after_compile_are_refused() -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), policy="observe")
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(autoprec.NotCapturedError, match="compile it again"):
        model(torch.randn(4, 8))
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), policy="observe")
    model[1] = nn.Linear(8, 2)
    with pytest.raises(autoprec.NotCapturedError, match="1.weight"):
        model(torch.randn(4, 8))


def test_a_buffer_that_is_reassigned_comes_back() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 1)
            self.register_buffer("ema", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
            return self.lin(x)

    model = autoprec.compile(Average(), policy="observe")
    steps(model, torch.randn(4, 8), 2)
    before = model.ema.clone()
    assert not poison(model)
    assert torch.equal(before, model.ema)


def test_after_guard_raise_the_next_good_step_counts() -> None:
    policy = autoprec.Policy(name="strict", formats=("fp32",), guard={"nonfinite": "raise"})
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 1)), policy=policy)
    with pytest.raises(autoprec.NonFiniteError):
        poison(model)
    before = model[0].weight.detach().clone()
    steps(model, torch.randn(4, 8), 1)
    assert autoprec.session(model).steps == 1
    assert not torch.equal(before, model[0].weight)


def test_gradients_that_the_user_gave_up_do_not_veto() -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 1)), policy="observe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((4, 8), float("nan"))).sum().backward()
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert autoprec.session(model).steps == 1


def test_a_boundary_by_hand_asks_the_same_questions() -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 1)), policy=autoprec.Policy(name="plain", formats=("fp32",)))
    session = autoprec.session(model)
    model(torch.randn(4, 8)).sum().backward()
    session.step()
    assert session.steps == 1
    model(torch.full((4, 8), float("nan"))).sum().backward()
    session.step()
    assert session.steps == 1 and session.step_was_skipped
    model.zero_grad()
    model.forward(torch.randn(4, 8)).sum().backward()
    with pytest.raises(autoprec.NotCapturedError):
        session.step()


def test_models_are_freed_without_unwrap() -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 1), nn.BatchNorm1d(1)), policy="observe")
    model(torch.randn(4, 8)).sum().backward()
    seen = weakref.ref(model[0].weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert seen() is None


def test_a_gru_with_many_sequence_lengths() -> None:
    model = Body(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=nn.GRU(4, 8, batch_first=True), head=nn.Linear(8, 1))
    autoprec.compile(model, policy="observe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(24):
        optimizer.zero_grad()
        model(torch.randn(2, 3 + i % 12, 4)).square().mean().backward()
        optimizer.step()
    assert autoprec.session(model).steps == 24


def test_a_pin_does_not_overrule_the_users_own_cast() -> None:
    model = Body(lambda m, x: m.b(torch.relu(m.a(x).float())), a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    assert largest_difference(model, torch.randn(4, 8), "bf16") < 0.02
    executed = autoprec.session(model).executed_formats()
    assert (executed["a:linear#0"], executed[":relu#0"], executed["b:linear#0"]) == ("bf16", "fp32", "bf16")


def test_bits_of_a_narrow_value_are_those_of_fp32() -> None:
    model = Body(lambda m, x: m.a(x) * (m.a(x).view(torch.int32) >= 0), a=nn.Linear(8, 8))
    assert largest_difference(model, torch.randn(4, 8), "bf16") < 0.05


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(autoprec.PlanError, match="fp16 is no storage; possible: as_is, recomputed, bf16"):
        Storage(tensor="0:tanh#0", format="fp16", reason="test")


def test_op_ids_do_not_depend_on_an_evaluation_before_training() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if m.training:
            h = h * 1.5
        return h * 2.5

    found = []
    for evaluate_first in (False, True):
        model = autoprec.compile(Body(body, a=nn.Linear(8, 8)), policy="observe")
        if evaluate_first:
            model.eval()
            with torch.no_grad():
                model(torch.randn(4, 8))
            model.train()
        steps(model, torch.randn(4, 8), 1)
        profile, graph = autoprec.session(model).profile, autoprec.session(model).graph
        amax = {t.id: t.values.amax for t in profile.tensors}
        found.append([(op.id, round(amax[op.id] / amax["a:linear#0"], 3)) for op in graph.ops if op.kind == "mul"])
    assert found[0] == found[1] == [(":mul#0", 1.5), (":mul#1", 3.75)]


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_the_result_of_a_layer_may_be_changed_in_place(fmt: str) -> None:
    """torch's own linear gives a view for inputs of three dimensions, which a custom function must not return."""

    def body(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h[..., :4] = 0
        return h.sum()

    model = Body(body, a=nn.Linear(8, 8))
    x = torch.randn(2, 6, 8)
    model(x).backward()
    plain = model.a.weight.grad.clone()
    model.zero_grad()
    autoprec.compile(
        model, plan=Plan(assignments=(Assignment(op="a:linear#0", role=Role.OUTPUT, format=fmt, reason=""),))
    )
    model(x).backward()
    assert float((model.a.weight.grad - plain).norm()) < 0.1 * float(plain.norm())
