"""Products with a parameter, in whatever spelling, are linears: the same bits, roles, statistics and storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.graphs import Role
from autoprec.numerics.dtypes import native_formats
from autoprec.plans import Assignment, Plan, Region, Storage


class Spelled(nn.Module):
    """x @ W + b, with W of shape (in, out)."""

    def __init__(self, product: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.product(self, torch.tanh(x))).square().mean()


class Linear(Spelled):
    def __init__(self) -> None:
        super().__init__(lambda m, x: m.linear(x))
        self.linear = nn.Linear(8, 6)
        with torch.no_grad():
            self.linear.weight.copy_(self.weight.t())
            self.linear.bias.copy_(self.bias)
        del self.weight, self.bias


SPELLINGS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight),
    "addmm by name": lambda m, x: torch.addmm(input=m.bias, mat1=x, mat2=m.weight),
    "mm": lambda m, x: torch.mm(x, m.weight) + m.bias,
    "matmul": lambda m, x: x @ m.weight + m.bias,
    "matmul by name": lambda m, x: torch.matmul(x, other=m.weight) + m.bias,
    "F.linear of the transpose": lambda m, x: F.linear(x, m.weight.t(), m.bias),
    "einsum": lambda m, x: torch.einsum("bi,io->bo", x, m.weight) + m.bias,
    "einsum of the transpose": lambda m, x: torch.einsum("bi, oi -> bo", x, m.weight.t()) + m.bias,
}


def gradients(model: nn.Module, plan: Plan | None) -> list[Tensor]:
    """Loss, weight gradient as (in, out), bias gradient; under a plan, or as it is."""
    if plan is not None:
        autoprec.compile(model, plan=plan, events=None)
    torch.manual_seed(1)
    loss = model(torch.randn(5, 8))
    loss.backward()
    weight, bias = (p.grad for p in model.parameters())
    return [loss.detach(), weight.t() if isinstance(model, Linear) else weight, bias]


def plan_for(op: str, formats: dict[Role, str], narrow: bool) -> Plan:
    return Plan(
        assignments=tuple(Assignment(op=op, role=r, format=f, reason="so be it") for r, f in formats.items()),
        storages=(Storage(tensor=":tanh#0", format="fp8_e4m3", reason="so be it"),) if narrow else (),
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("formats", ["bf16 bf16 bf16", "bf16 fp16 fp32", "fp32 fp32 fp32"])
@pytest.mark.parametrize("name", ["addmm", "addmm by name"])
def test_addmm_is_a_linear(name: str, formats: str, narrow: bool) -> None:
    chosen = dict(zip(Role, formats.split(), strict=True))
    expected = gradients(Linear(), plan_for("linear:linear#0", chosen, narrow))
    found = gradients(Spelled(SPELLINGS[name]), plan_for(":addmm#0", chosen, narrow))
    if formats.startswith("fp32"):  # FP32 products of another layout add up in another order
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(expected, found, strict=True))
    else:
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_calibrated_planned_and_trained(name: str) -> None:
    reference, model = Linear(), Spelled(SPELLINGS[name])
    plain = [gradients(m, None) for m in (Linear(), Spelled(SPELLINGS[name]))]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*plain, strict=True))
    profiles = []
    for m in (reference, model):
        torch.manual_seed(2)
        batches = [torch.randn(16, 8) for _ in range(3)]
        policy = autoprec.Policy(name="p", formats=["fp32", "bf16"], objective="bytes")
        autoprec.compile(m, policy=policy, batches=batches, loss_fn=lambda net, x: net(x), events=None)
        profiles.append(autoprec.session(m).profile)
    ops = {op.kind: op for op in autoprec.session(model).graph.ops}
    op = ops.get(name.split()[0]) or ops["linear"]
    assert op.weights[0] == "weight" and len(op.roles) == 3
    assert op.inputs[:2] == (":tanh#0", ":t#0" if name.endswith("transpose") else "param:weight")
    assert op.flops == 2 * 16 * 8 * 6
    linear = profiles[0].tensor_by_id["linear:linear#0"]
    found = profiles[1].tensor_by_id[op.outputs[0]]
    for field in ("input_weight_grad", "gradient_weight_grad"):
        a, b = getattr(linear, field), getattr(found, field)
        assert b.energy == pytest.approx(a.energy, rel=1e-4)
    assert torch.isfinite(model(torch.randn(16, 8)))


def test_a_parameter_on_the_left_is_a_product_of_two_activations() -> None:
    model = Spelled(lambda m, x: m.weight @ x[:6, :6])
    autoprec.compile(model, policy="bf16", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.requires_grad_(False)
    for _ in range(10):
        model(torch.randn(6, 8)).backward()
        optimizer.step()
    session = autoprec.session(model)
    op = next(o for o in session.graph.ops if o.kind == "matmul")
    assert op.weights == () and op.roles == (Role.OUTPUT, Role.GRAD_INPUT)
    assert session.executed_formats()[op.id] == "bf16"


class Squared(nn.Module):
    """A product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.gain * x).mT


def of_squared(**formats: str) -> tuple[Tensor, Tensor]:
    """The result and the gradient of `Squared` with the formats by role."""
    model = Squared()
    roles = tuple(Assignment(op=":matmul#0", role=Role(r), format=f, reason="") for r, f in formats.items())
    regions = (Region(ops=(":matmul#0",), scale_log2=40, reason=""),) if formats["grad_input"] == "fp16" else ()
    autoprec.compile(model, plan=Plan(assignments=roles, regions=regions), events=None)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = model(x)
    y.backward(1e-9 * torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    assert x.grad is not None
    return y.detach(), x.grad


def test_gradients_of_a_product_of_activations_have_a_format_of_their_own() -> None:
    y, gradient = of_squared(output="fp32", grad_input="fp32")
    for fmt, most in (("bf16", 2**-7), ("fp16", 2**-9)):  # gradients of 1e-9 are 0 in FP16 without their scale
        found_y, found = of_squared(output="fp32", grad_input=fmt)
        assert torch.equal(found_y, y)
        assert 0.0 < float((found - gradient).norm() / gradient.norm()) < most
    found_y, found = of_squared(output="bf16", grad_input="fp32")
    assert 0.0 < float((found_y - y).norm() / y.norm()) < 2**-7


@torch.library.custom_op("autoprec_tests::grouped_mm_fallback", mutates_args=())
def grouped(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Dynamo takes torch's own grouped_mm in BF16 only; what libraries register for FP32 looks like this."""
    y, begin = x.new_zeros(len(x), weight.shape[2]), 0
    for w, end in zip(weight, offs.tolist(), strict=True):
        y[begin:end] = x[begin:end] @ w
        begin = end
    return y


@grouped.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[2])


def keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def grouped_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, offs = ctx.saved_tensors
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        ends = offs.tolist()
        parts = [x[a:b] @ w for w, a, b in zip(weight, [0, *ends], ends, strict=False)]
        grads = torch.autograd.grad(torch.cat(parts), (x, weight), g)
    return (*grads, None)


grouped.register_autograd(grouped_backward, setup_context=keep_operands)


class Experts(nn.Module):
    """Rows sorted by expert, each with its expert's weight; (experts, out, in) and transposed for the product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([4, 4, 16], dtype=torch.int32)
        h = grouped(torch.tanh(x), self.weight.transpose(-2, -1), offs)
        return self.head(h).square().mean()


class ExpertsByHand(Experts):
    """The same as one linear per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        with torch.no_grad():
            for i, expert in enumerate(self.experts):
                expert.weight.copy_(self.weight[i])
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        parts = [self.experts[i](x[a:b]) for i, (a, b) in enumerate(((0, 4), (4, 4), (4, 16)))]
        return self.head(torch.cat(parts)).square().mean()


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("narrow", [False, True])
def test_experts_are_linears(fmt: str, narrow: bool) -> None:
    """One expert has no row at all."""
    found = []
    for model, ops in (
        (Experts(), [":grouped_mm_fallback#0"]),
        (ExpertsByHand(), [f"experts.{i}:linear#0" for i in range(3)]),
    ):
        plan = Plan(
            assignments=tuple(Assignment(op=o, role=r, format=fmt, reason="so be it") for o in ops for r in Role),
            storages=(Storage(tensor=":tanh#0", format="fp8_e4m3", reason="so be it"),)
            if narrow and isinstance(model, Experts) and not isinstance(model, ExpertsByHand)
            else (),
        )
        autoprec.compile(model, plan=plan, events=None)
        torch.manual_seed(1)
        loss = model(torch.randn(16, 8))
        loss.backward()
        if isinstance(model, ExpertsByHand):
            grads = [torch.zeros(8, 8) if e.weight.grad is None else e.weight.grad for e in model.experts]
            found.append((loss.detach(), torch.stack(grads)))
        else:
            found.append((loss.detach(), model.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    if narrow:  # the gradient of each weight sees the input through E4M3: at most half an ulp of three mantissa bits
        error = (found[0][1] - found[1][1]).norm() / found[1][1].norm()
        assert 0 < error < 2.0**-4
    else:
        assert torch.allclose(found[0][1], found[1][1], rtol=1e-6)


def test_experts_are_calibrated_and_planned() -> None:
    model = Experts()
    torch.manual_seed(2)
    batches = [torch.randn(16, 8) for _ in range(4)]
    policy = autoprec.Policy(
        name="p", formats=["fp32", "bf16"], objective="bytes", noise={"gradient": 1.0, "loss": 1.0}
    )
    plain = float(model(batches[0]).detach())
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x), events=None)
    session = autoprec.session(model)
    assert session.graph is not None and session.profile is not None and session.plan is not None
    op = session.graph.op_by_id[":grouped_mm_fallback#0"]
    assert op.weights == ("weight",) and len(op.roles) == 3 and op.flops == 2 * 16 * 8 * 8
    assert session.profile.tensor_by_id[op.id].input_weight_grad is not None
    assert session.plan.format_of[op.id, Role.OUTPUT] == "bf16"
    assert float(model(batches[0]).detach()) == pytest.approx(plain, rel=0.02)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "einsum": lambda a, b, c: torch.einsum("bik,bjk->bij", a, b) + c,
    "einsum with an ellipsis": lambda a, b, c: torch.einsum("...ik,...jk->...ij", a, b) + c,
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b.mT, beta=0.5, alpha=2.0),
    "baddbmm by method": lambda a, b, c: c.baddbmm(a, b.mT),
    "addbmm": lambda a, b, c: torch.addbmm(c[0], a, b.mT),
}


class Scores(nn.Module):
    """A product of two activations, and a third that is added to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.query, self.key, self.bias = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.query(x), self.key(x), self.bias(x)
        if self.narrow:
            a, b, c = a.bfloat16(), b.bfloat16(), c.bfloat16()
        return PRODUCTS[self.name](a, b, c).float().square().mean()

    narrow = False


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_inside_kernels_have_one_format(name: str) -> None:
    """Bitwise the same as casting their operands by hand."""
    x = torch.randn(3, 5, 8)
    by_hand = Scores(name)
    by_hand.narrow = True
    loss = by_hand(x)
    loss.backward()
    model = Scores(name)
    kind = name.split()[0]
    ops = [f":{kind}#0", ":add#0"] if kind == "einsum" else [f":{kind}#0"]
    plan = Plan(assignments=tuple(Assignment(op=op, role=Role.OUTPUT, format="bf16", reason="so be it") for op in ops))
    autoprec.compile(model, plan=plan, events=None)
    found = model(x)
    found.backward()
    assert torch.equal(found, loss)
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    session = autoprec.session(model)
    (op,) = (op for op in session.bindings[0].op_of.values() if op.kind == kind)
    assert session.executed_formats()[op.id] == "bf16"


def test_a_transposed_convolution_has_roles() -> None:
    """Planned, priced and bitwise the same as casting by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GELU(),
                          nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1))  # fmt: skip
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    planned = [Assignment(op="2:conv_transpose2d#0", role=r, format="bf16", reason="so be it") for r in Role]
    by_hand = nn.Sequential(model[0], model[1])
    h = by_hand(batches[0]).detach().requires_grad_()
    up = model[2]
    computed = torch.bfloat16 if "bf16" in native_formats("cpu") else torch.float32
    w, b = (p.detach().bfloat16().to(computed).requires_grad_() for p in (up.weight, up.bias))
    y = F.conv_transpose2d(h.bfloat16().to(computed), w, b, stride=2, padding=1, output_padding=1).bfloat16()
    y.float().square().mean().backward()
    autoprec.compile(model, plan=Plan(assignments=tuple(planned)), events=None)
    loss_fn(model, batches[0]).backward()
    assert torch.equal(up.weight.grad, w.grad.float())
    torch.testing.assert_close(up.bias.grad, b.grad.float(), rtol=2**-6, atol=1e-4)  # ours is summed in FP32
    autoprec.unwrap(model)
    model.zero_grad()
    autoprec.compile(model, policy="memory", batches=batches, loss_fn=loss_fn, events=None)
    session = autoprec.session(model)
    assert ("2:conv_transpose2d#0", Role.GRAD_WEIGHT) in session.plan.format_of
    seen = session.profile.tensor_by_id["2:conv_transpose2d#0"]
    assert seen.input_weight_grad is not None and seen.gradient_weight_grad is not None
    op = session.graph.op_by_id["2:conv_transpose2d#0"]
    assert op.flops == 2 * (2 * 8 * 4 * 4) * (4 * 3 * 3) and op.weights == ("2.weight", "2.bias")
