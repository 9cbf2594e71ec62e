"""Ops and graphs that few models have, each of which was once wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.errors import PlanError
from autoprec.graphs import OpClass, Role
from autoprec.plans import Assignment, Plan, Region
from autoprec.policies import Policy, Rule


class Middle(nn.Module):
    """A function between two linears."""

    def __init__(self, body: Callable[[Middle, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.w = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.randn(8, 16))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.body(self, self.a(x), x))


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, X).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative distance of the gradients."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in a)


def given(op: str, fmt: str) -> Assignment:
    return Assignment(op=op, role=Role.OUTPUT, format=fmt, reason="")


def planned(body: Callable[..., Tensor], policy: Policy, data: Sequence[Tensor] | None = None) -> nn.Module:
    torch._dynamo.reset()
    batches = [torch.randn(64, 8) for _ in range(3)] if data is None else data
    return autoprec.compile(Middle(body), policy=policy, batches=batches, loss_fn=loss, events=None)


# Saturating casts -------------------------------------------------------------------------------------------------


def masked(_: Middle, h: Tensor, x: Tensor) -> Tensor:
    return h.masked_fill(h < 0, torch.finfo(h.dtype).min).softmax(-1)


@pytest.mark.parametrize("mask", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("softmax", ["fp32", "bf16", "fp16"])
def test_a_cast_that_saturates_carries_the_scale_of_its_region(mask: str, softmax: str) -> None:
    """A gradient left the region multiplied by it; and a mask in FP16 that BF16 reads was an error."""
    ops = {":masked_fill#0": mask, ":softmax#0": softmax}
    half = tuple(op for op, fmt in ops.items() if fmt == "fp16")
    regions = (Region(ops=half, scale_log2=7, reason=""),) if half else ()
    plan = Plan(
        assignments=tuple(given(*pair) for pair in ops.items()), regions=regions, saturating=(":masked_fill#0",)
    )
    model = autoprec.compile(Middle(masked), plan=plan, events=None)
    assert apart(gradients(model), gradients(Middle(masked))) <= (1e-2 if "bf16" in ops.values() else 2e-3)


# The reference of a contest ---------------------------------------------------------------------------------------


def test_contestants_are_compared_with_the_model_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rule leaves no plan in FP32: gradients that are off by a factor had nothing beside them."""
    from autoprec.rewriting import rewrite

    monkeypatch.setattr(rewrite, "enter_region", lambda x, dtype, _: x.to(dtype))  # planted
    policy = Policy(name="p", formats=("fp32", "fp16"), noise={"gradient": 1.0, "loss": 1.0},
                    rules=[Rule(match="*", kinds=["tanh"], pin="fp16")])  # fmt: skip
    model = planned(lambda s, h, x: torch.tanh(h), policy)
    plan = autoprec.session(model).plan
    assert plan is not None and plan.regions and plan.regions[0].scale_log2 != 0
    off = [c for c in plan.contestants if "times what is predicted of rounding" in c.verdict]
    assert off and all("fp16" in c.formats and not c.adopted for c in off)


# Functions of users -----------------------------------------------------------------------------------------------


def of_backward(name: str, back: Callable[[Any, Tensor], Any]) -> Callable[[Middle, Tensor, Tensor], Tensor]:
    def forward(ctx: Any, h: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(h, mask)
        return h * 1.0

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return back(ctx, g), None

    made = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    return lambda s, h, x: made.apply(torch.tanh(h), x.sum(-1, keepdim=True) > 0)  # type: ignore[attr-defined]


PROPORTIONAL = {
    "Same": lambda ctx, g: g,
    "Times": lambda ctx, g: g * ctx.saved_tensors[0] * 2.0,
    "Minus": lambda ctx, g: -g + g / 3.0,
    "Where": lambda ctx, g: torch.where(ctx.saved_tensors[1], g, 0.0),
    "Filled": lambda ctx, g: g.masked_fill(ctx.saved_tensors[1], 0.0),
    "Rectified": lambda ctx, g: F.relu(g),
}
OTHERS = {
    "Clipped": lambda ctx, g: g.clamp(-1e-4, 1e-4),
    "Signed": lambda ctx, g: g.sign(),
    "Squared": lambda ctx, g: g * g,
    "Added": lambda ctx, g: g + 1e-3,
    "Over": lambda ctx, g: ctx.saved_tensors[0] / (g + g),
    "Filled with more": lambda ctx, g: g.masked_fill(ctx.saved_tensors[1], 1e-3),
    "Constant": lambda ctx, g: ctx.saved_tensors[0] * 1.0,
}


@pytest.mark.parametrize("name", [*PROPORTIONAL, *OTHERS])
def test_only_gradients_that_are_proportional_may_carry_a_scale(name: str) -> None:
    body = of_backward(name, (PROPORTIONAL | OTHERS)[name])
    model = autoprec.compile(Middle(body), plan=Plan(assignments=()), events=None)
    gradients(model)
    (op,) = [o for o in autoprec.session(model).bindings[0].ops if "function" in o.kind]
    assert (op.op_class is OpClass.POINTWISE) is (name in PROPORTIONAL)
    torch._dynamo.reset()
    plan = Plan(assignments=(given(op.id, "fp16"),), regions=(Region(ops=(op.id,), scale_log2=10, reason=""),))
    again = autoprec.compile(Middle(body), plan=plan, events=None)
    if name in PROPORTIONAL:
        assert apart(gradients(again), gradients(Middle(body))) <= 2e-3
    else:
        with pytest.raises(PlanError, match="takes none"):
            gradients(again)


# Products that change memory --------------------------------------------------------------------------------------


def out_of(product: Callable[..., Tensor]) -> Callable[[Middle, Tensor, Tensor], Tensor]:
    def body(s: Middle, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.empty(len(x), 16)
            product(x, s.w, out=z)
        return h + z

    return body


IN_PLACE = {
    "addmm_": lambda s, h, x: h + torch.zeros(len(x), 16).addmm_(x, s.w),
    "addmm_ into what a product made": lambda s, h, x: h.addmm_(x, s.w),
    "baddbmm_": lambda s, h, x: h + torch.zeros(1, len(x), 16).baddbmm_(x[None], s.w[None])[0],
    "addbmm_": lambda s, h, x: h + torch.zeros(len(x), 16).addbmm_(x[None], s.w[None]),
    "matmul out": out_of(torch.matmul),
    "mm out": out_of(torch.mm),
    "leaky_relu_": lambda s, h, x: F.leaky_relu_(h, 0.1),
    "elu_": lambda s, h, x: F.elu_(h),
    "hardtanh_": lambda s, h, x: F.hardtanh_(h),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_memory_is_planned_around(name: str) -> None:
    body = IN_PLACE[name]
    policy = Policy(name="p", formats=("fp32", "bf16"), objective="bytes", noise={"gradient": 10.0, "loss": 10.0})
    model = planned(body, policy)
    plan = autoprec.session(model).plan
    assert plan is not None and not any("failed" in c.verdict for c in plan.contestants)
    assert apart(gradients(model), gradients(Middle(body))) <= 0.1  # at a kink as well


# Embeddings with sparse gradients, empty batches ------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a, self.b = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, i: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(self.table(i))))


def test_contestants_run_with_sparse_gradients() -> None:
    data = [torch.randint(50, (64,)) for _ in range(3)]
    model = autoprec.compile(Sparse(), policy="memory", batches=data, loss_fn=loss, events=None)
    plan = autoprec.session(model).plan
    assert plan is not None and not any("failed" in c.verdict for c in plan.contestants)
    loss(model, data[0]).backward()
    assert model.table.weight.grad.is_sparse


@pytest.mark.parametrize("dims", [1, 2])
def test_a_batch_may_be_empty(dims: int) -> None:
    torch.manual_seed(0)
    make = (nn.Conv1d, nn.Conv2d)[dims - 1]
    model = nn.Sequential(make(2, 4, 3), nn.ReLU(), make(4, 3, 3))
    data = [torch.randn(n, 2, *(9,) * dims) for n in (4, 0, 4)]
    autoprec.compile(model, policy="balanced", batches=data, loss_fn=lambda m, x: m(x).square().sum(), events=None)
    assert autoprec.session(model).plan is not None


# Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("layer-1", "layer-2"), ("a b", "a c"), ("x:1", "x:2"), ("q#0", "q#1"), ("a@b", "a+b")]
)
def test_a_module_is_called_what_it_is_called(names: tuple[str, str]) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.ModuleDict({names[0]: nn.Linear(8, 16), names[1]: nn.Linear(16, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.d[names[1]](torch.tanh(self.d[names[0]](x)))

    rules = [Rule(match=f"d.{names[1]}", pin="fp32"), Rule(match="*", pin="bf16", optional=True)]
    policy = Policy(name="p", formats=("fp32", "bf16"), rules=rules, noise={"gradient": 1e3, "loss": 1e3})
    model = autoprec.compile(Named(), policy=policy, batches=[X, X], loss_fn=loss, events=None)
    plan = autoprec.session(model).plan
    assert plan is not None
    found = {op: f for (op, role), f in plan.format_of.items() if role is Role.OUTPUT and "linear" in op}
    assert found == {f"d.{names[0]}:linear#0": "bf16", f"d.{names[1]}:linear#0": "fp32"}


# Peaks ------------------------------------------------------------------------------------------------------------


def test_what_is_changed_in_place_has_a_gradient_of_its_own() -> None:
    """Beside the one that arrives: the peak was 0.78 of what is measured."""
    torch.manual_seed(0)
    model = Middle(lambda s, h, x: F.gelu(h).clone().relu_())
    model.a, model.b = nn.Linear(8, 256), nn.Linear(256, 4)
    policy = Policy(name="p", formats=("fp32",), objective="bytes", storage={"formats": (), "recompute": False})
    data = [torch.randn(4096, 8) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=data, loss_fn=loss, events=None, budget="1GiB")
    plan = autoprec.session(model).plan
    assert plan is not None
    measured = [c for c in plan.contestants if c.measured is not None and not c.measured.failure]
    assert measured
    for c in measured:
        assert c.measured is not None and c.predicted.peak_bytes == pytest.approx(c.measured.peak_bytes, rel=0.01)
