"""Rewritten graphs against code that casts by hand, and the hazards of rewriting, one test each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.graphs import Role
from autoprec.numerics import specs
from autoprec.numerics.dtypes import native_formats
from autoprec.plans import Assignment, Plan, Region, Storage

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plan_of(formats: dict[str, str], *, storages: tuple[str, ...] = (), **more: Any) -> Plan:
    """All roles of each op in one format."""
    return Plan(
        assignments=tuple(
            Assignment(op=op, role=role, format=f, reason="test") for op, f in formats.items() for role in Role
        ),
        storages=tuple(Storage(tensor=t, format="fp8_e4m3", reason="test") for t in storages),
        **more,
    )


def run(model: nn.Module, *inputs: Tensor, seed: int = 0) -> list[Tensor]:
    """Output, then the gradients of parameters."""
    torch.manual_seed(seed)
    model.zero_grad()
    y = model(*inputs)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class Lambda(nn.Module):
    """A module around a function of one linear and its input."""

    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.lin, x)


def compiled(model: nn.Module, plan: Plan) -> nn.Module:
    return autoprec.compile(model, plan=plan, events=None)


def operand(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor rounded to dtype, in the dtype of the product on this machine."""
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    return t.to(dtype) if name in native_formats("cpu") else t.to(dtype).float()


class Rounded(torch.autograd.Function):
    """Rounds forward, and the gradient on its way back: what a cast pair does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.to(ctx.dtype).float(), None


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_linears_equal_casts_by_hand(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linears and a ReLU between them, as on a CPU without such GEMMs: both sides multiply upcast operands."""
    monkeypatch.setattr(specs, "native_formats", lambda device_type: ("fp32",))
    dtype = DTYPES[fmt]
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(6, 16)

    def by_hand() -> list[Tensor]:
        model.zero_grad()
        h = Rounded.apply(x, dtype)
        for i in (0, 2):
            w, b = model[i].weight, model[i].bias
            h = Rounded.apply(F.linear(h, w.to(dtype).float(), b.to(dtype).float()), dtype)
            h = torch.relu(h) if i == 0 else h
        h.square().mean().backward()
        return [h.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = by_hand()
    ops = ["0:linear#0", "1:relu#0", "2:linear#0"]
    found = run(compiled(model, plan_of(dict.fromkeys(ops, fmt))), x)
    assert found[0].dtype is torch.float32  # outputs come back in the dtype that the model gave before
    # Weight gradients by hand pass through .to(dtype) once more, so they are rounded there and not here.
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.to(dtype), b.to(dtype))


def test_identity_formats_leave_the_graph_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    x = torch.randn(3, 8)
    expected = run(model, x)
    found = run(compiled(model, plan_of({"0:linear#0": "fp32", "1:gelu#0": "fp32"})), x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_one_cast_serves_all_readers() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(x)
            return self.a(h) + self.b(h) + self.c(h)

    model = compiled(Three(), plan_of({f"{n}:linear#0": "bf16" for n in "abc"}))
    run(model, torch.randn(4, 8))
    slot = next(iter(autoprec.session(model)._slots.values()))
    casts = [n for n in slot.module.graph.nodes if getattr(n.target, "__name__", "") == "cast"]
    # One into BF16 for three readers; three back, one per result that the FP32 adds read.
    assert len([n for n in casts if n.args[1] is torch.bfloat16]) == 1
    assert len(casts) == 4


def test_e4m3_storage_gives_the_gradient_of_the_rounded_input() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(16, 8))
    x = torch.randn(5, 16)
    plain = run(model, x)
    h = torch.tanh(x)
    scale = 2.0 ** torch.floor(torch.log2(448.0 / h.abs().max()))
    kept = (h * scale).to(torch.float8_e4m3fn).float() / scale
    g = 2.0 * plain[0] / plain[0].numel()
    found = run(compiled(model, plan_of({"1:linear#0": "fp32"}, storages=("0:tanh#0",))), x)
    assert torch.equal(found[0], plain[0])  # the forward pass does not see the storage
    torch.testing.assert_close(found[1], g.t() @ kept)
    assert not torch.equal(found[1], plain[1])
    torch.testing.assert_close(found[2], plain[2])


def test_conv_keeps_its_input_in_e4m3_and_relu_one_bit() -> None:
    """The gradient that passes relu is bitwise the plain one; the weight gradient is that of the rounded input."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 3, 3, groups=1, bias=False))
    x = torch.randn(2, 2, 9, 9)
    plain = run(model, x)
    formats = {"0:conv2d#0": "fp32", "1:relu#0": "fp32", "2:conv2d#0": "fp32"}
    session_model = compiled(model, plan_of(formats, storages=("1:relu#0",)))
    found = run(session_model, x)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    h = torch.relu(model[0].forward(x)).detach()
    scale = 2.0 ** torch.floor(torch.log2(448.0 / h.abs().max()))
    kept = (h * scale).to(torch.float8_e4m3fn).float() / scale
    g = 2.0 * plain[0] / plain[0].numel()
    torch.testing.assert_close(found[2], torch.nn.grad.conv2d_weight(kept, model[2].weight.shape, g))


def test_fp16_region_keeps_gradients_that_fp16_cannot_hold() -> None:
    """Six FP16 linears, gradient about 1e-9: with the region's scale the weight gradients are FP16-accurate."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    x = torch.randn(8, 16)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        (model(x).sum() * 1e-9).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    ops = [f"{i}:linear#0" for i in range(6)]
    compiled(model, plan_of(dict.fromkeys(ops, "fp16"), regions=(Region(ops=tuple(ops), scale_log2=36, reason="t"),)))
    found = gradients()
    for a, b in zip(expected, found, strict=True):
        assert float((a - b).norm() / a.norm()) < 6 * 2.0**-11 * 4
    autoprec.unwrap(model)
    compiled(model, plan_of(dict.fromkeys(ops, "fp16")))  # no region: the gradient 1e-9 is zero in FP16
    assert float(gradients()[0].abs().max()) == 0.0


@pytest.mark.parametrize("kind", ["layer", "batch", "group"])
def test_norm_parameters_in_a_scaled_fp16_region_get_unscaled_gradients(kind: str) -> None:
    """With a region scale of 2^14 and 4096 rows torch's FP16 sum of the weight's gradient would overflow."""
    torch.manual_seed(0)
    norms = {"layer": nn.LayerNorm(8), "batch": nn.BatchNorm1d(8), "group": nn.GroupNorm(2, 8)}
    model = nn.Sequential(nn.Linear(8, 8), norms[kind], nn.Linear(8, 8))
    x = torch.randn(4096, 8)
    plain, buffers = run(model, x), [b.clone() for b in model.buffers()]
    if kind == "batch":
        model[1].reset_running_stats()
    ops = ["0:linear#0", f"1:{kind}_norm#0", "2:linear#0"]
    regions = (Region(ops=tuple(ops), scale_log2=14, reason="test"),)
    found = run(compiled(model, plan_of(dict.fromkeys(ops, "fp16"), regions=regions)), x)
    for a, b in zip(plain[3:5], found[3:5], strict=True):  # weight and bias of the norm
        assert float((a - b).norm() / a.norm()) < 0.01
    del plain[2], found[2]  # the bias before a batch norm has no gradient but rounding
    assert close(plain, found)
    for a, b in zip(buffers, model.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)


def hazard(body: Callable[[nn.Linear, Tensor], Tensor], formats: dict[str, str], x: Tensor, **more: Any) -> list[Any]:
    """Plain result and the result under a plan, of the same module."""
    model = Lambda(body, x.shape[-1])
    plain = run(model, x)
    return [plain, run(compiled(model, plan_of(formats, **more)), x), model]


def close(a: list[Tensor], b: list[Tensor], tolerance: float = 0.05) -> bool:
    return all(
        bool(y.isfinite().all()) and float((x - y).detach().norm() / (x.detach().norm() + 1e-12)) < tolerance
        for x, y in zip(a, b, strict=True)
    )


def test_in_place_on_a_view_of_a_narrow_result() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        h = lin(x)
        h[:, :4].mul_(2.0)
        h += 1.0
        return h.view(-1) * 1.0

    plain, found, _ = hazard(body, {"lin:linear#0": "bf16", ":mul#0": "bf16"}, torch.randn(6, 8))
    assert close(plain, found)


def test_a_cast_is_not_shared_across_an_in_place_change() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        h = lin(x)
        a = h + x
        h.mul_(3.0)
        return a - (h + x)

    plain, found, _ = hazard(body, {":add#0": "bf16", ":add#1": "bf16"}, torch.randn(6, 8))
    assert close(plain, found)


def test_a_cast_is_not_shared_across_no_grad() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        h = torch.sin(lin(x))
        with torch.no_grad():
            a = lin(h)
        return a + lin(h)

    formats = {"lin:linear#0": "fp32", "lin:linear#1": "bf16", "lin:linear#2": "bf16"}
    plain, found, _ = hazard(body, formats, torch.randn(6, 8))
    assert close(plain, found)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_additive_mask_with_finfo_min_and_a_fully_masked_row(fmt: str) -> None:
    """finfo.min would become -inf in the narrow format and the fully masked row NaN."""

    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        scores = lin(x) @ x.transpose(0, 1)
        mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)
        mask[0] = torch.finfo(torch.float32).min
        return torch.softmax(scores + mask, dim=-1) @ x

    formats = {"lin:linear#0": fmt, ":matmul#0": fmt, ":add#0": fmt, ":matmul#1": fmt}
    plain, found, _ = hazard(body, formats, torch.randn(6, 8), saturating=(":triu#0",))
    assert close(plain, found)


def test_masked_fill_with_finfo_min() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        h = lin(x).masked_fill(x > 0, torch.finfo(torch.float32).min)
        return torch.softmax(h, -1)

    plain, found, _ = hazard(body, {"lin:linear#0": "bf16", ":masked_fill#0": "bf16"}, torch.randn(6, 8))
    assert close(plain, found)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_softmax_of_masked_scores(fmt: str) -> None:
    """FP32 inside, narrow in and out; scores of finfo.min saturate, so that a row that is all masked stays uniform."""
    masked = torch.ones(6, 8).triu(2).bool()
    masked[0] = True

    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        return torch.softmax(lin(x).masked_fill(masked, torch.finfo(torch.float32).min), -1)

    plain, found, model = hazard(body, {":softmax#0": fmt}, torch.randn(6, 8), saturating=(":masked_fill#0",))
    assert close(plain, found) and torch.allclose(found[0][0], torch.full((8,), 0.125))
    with torch.no_grad():
        x = torch.randn(6, 8)
        dtype = torch.bfloat16 if fmt == "bf16" else torch.float16
        scores = model.lin(x).masked_fill(masked, torch.finfo(dtype).min).to(dtype)
        assert torch.equal(model(x), torch.softmax(scores, -1).float())


def test_the_planner_lets_softmax_of_masked_scores_be_narrow() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        mask = torch.ones(6, 8).triu(2).bool()
        return torch.softmax(lin(x).masked_fill(mask, torch.finfo(torch.float32).min), -1) @ x.t()

    model = Lambda(body)
    batches = [torch.randn(6, 8) for _ in range(3)]
    autoprec.compile(model, policy="bf16", batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    plan = autoprec.session(model).plan
    assert plan.format_of[":softmax#0", Role.OUTPUT] == "bf16"
    assert bool(model(batches[0]).isfinite().all())


def test_the_users_own_float_is_a_promise() -> None:
    seen: list[torch.dtype] = []

    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        h = lin(x).float()
        return (h * h).mean(-1, keepdim=True) * lin(h)

    model = Lambda(body)
    autoprec.compile(model, policy="observe", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    ops = autoprec.session(model).graph.op_by_id
    assert ops[":mul#0"].pinned and not ops["lin:linear#1"].pinned
    assert not ops[":mul#1"].pinned or ":mul#1" in ops
    assert seen == []


def test_softmax_dtype_is_kept() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        return torch.softmax(lin(x), -1, dtype=torch.float64).float()

    plain, found, _ = hazard(body, {"lin:linear#0": "bf16"}, torch.randn(4, 8))
    assert found[0].dtype is plain[0].dtype and close(plain, found)


def test_dropout_draws_the_same_mask_and_the_generator_ends_in_the_same_state() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.3))
    x = torch.randn(32, 64)
    plain = run(model, x, seed=3)
    after_plain = torch.get_rng_state()
    ops = ["0:linear#0", "1:dropout#0", "2:linear#0", "3:dropout#0"]
    found = run(compiled(model, plan_of(dict.fromkeys(ops, "bf16"))), x, seed=3)
    assert torch.equal(plain[0] == 0, found[0] == 0)
    assert torch.equal(after_plain, torch.get_rng_state())


def test_tied_weights_stay_tied_and_keys_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Tied()
    keys, first = list(model.state_dict()), model.a.weight
    x = torch.randn(4, 8)
    plain = run(model, x)
    compiled(model, plan_of({"a:linear#0": "bf16", "b:linear#0": "bf16"}))
    found = run(model, x)
    assert close(plain, found)
    assert list(model.state_dict()) == keys
    assert model.a.weight is model.b.weight is first


def test_integers_float64_and_constants_are_left_alone() -> None:
    def body(lin: nn.Linear, x: Tensor) -> Tensor:
        index = torch.arange(4) % 3
        scale = torch.ones(8, dtype=torch.float64) * 1.5
        return lin(x)[index] * scale

    plain, found, _ = hazard(body, {"lin:linear#0": "bf16"}, torch.randn(4, 8))
    assert found[0].dtype is torch.float64 and close(plain, found)


def test_dynamic_batch_sizes_and_eval() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled(model, plan_of(dict.fromkeys(["0:linear#0", "1:relu#0", "2:linear#0"], "bf16"), storages=("1:relu#0",)))
    for n in (4, 7, 5, 1):
        x = torch.randn(n, 8)
        assert close([model[2].forward(torch.relu(model[0].forward(x)))], [model(x).detach()])
    model.eval()
    with torch.no_grad():
        assert model(torch.randn(3, 8)).dtype is torch.float32
    assert set(autoprec.session(model).executed_formats().values()) == {"bf16"}


def test_hooks_still_fire() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen: list[int] = []
    model[0].register_forward_hook(lambda m, i, o: o * 2)
    model.register_forward_hook(lambda m, i, o: seen.append(1))
    x = torch.randn(4, 8)
    plain = run(model, x)
    compiled(model, plan_of({"0:linear#0": "bf16", "1:linear#0": "bf16"}))
    assert close(plain, run(model, x))
    assert len(seen) == 2


def test_ambient_autocast_is_refused() -> None:
    model = compiled(nn.Sequential(nn.Linear(8, 8)), plan_of({"0:linear#0": "bf16"}))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(autoprec.InputError, match="remove the autocast"):
        model(torch.randn(2, 8))


def test_activation_checkpointing_runs() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(lambda t: torch.relu(self.a(t)), x, use_reentrant=False))

    model = Checkpointed()
    x = torch.randn(4, 8)
    plain = run(model, x)
    compiled(model, plan_of({"b:linear#0": "bf16"}))
    assert close(plain, run(model, x))


def test_trainable_half_parameters_are_refused() -> None:
    with pytest.raises(autoprec.InputError, match="model.float"):
        autoprec.compile(nn.Linear(4, 4).bfloat16())


def test_a_format_for_an_op_that_takes_none_is_refused() -> None:
    with pytest.raises(autoprec.PlanError, match=":sum#0.*wide"):
        hazard(lambda lin, x: lin(x).sum(-1), {":sum#0": "bf16"}, torch.randn(4, 8))


def test_a_plan_of_another_model_is_refused() -> None:
    model = compiled(nn.Sequential(nn.Linear(8, 8)), plan_of({"elsewhere:linear#0": "bf16"}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(autoprec.PlanError, match="elsewhere:linear#0"):
        optimizer.step()


def test_a_second_derivative_through_a_packed_input_is_refused() -> None:
    """torch's `once_differentiable` would stay silent here: the arriving gradient is a constant."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 8, requires_grad=True)
    compiled(model, plan_of({"2:linear#0": "fp32"}, storages=("1:tanh#0",)))
    y = model(x).sum()
    with pytest.raises(autoprec.UnsupportedError, match="create_graph=True goes through a layer that keeps its input"):
        torch.autograd.grad(y, x, create_graph=True)
