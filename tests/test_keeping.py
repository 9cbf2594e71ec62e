"""What ops keep for their backward pass, kept in a narrow format: against autograd on tensors rounded by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.graphs import Role
from autoprec.numerics.casts import cast
from autoprec.numerics.keeping import cast_of_kept, keep_in, keeping, open_cell
from autoprec.numerics.packing import decode
from autoprec.plans import Assignment, Plan, Region, Storage

Body = Callable[[Tensor, Tensor], Tensor]


class Ops(nn.Module):
    """A function of two products with a parameter."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 8))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.a
        return self.body(h, h.detach() * 0.5 + 1.0)


def rounded(x: Tensor, storage: str) -> Tensor:
    """By hand: to BF16, or to E4M3 under the largest power of two that amax allows."""
    if storage == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    scale = 2.0 ** torch.floor(torch.log2(448.0 / x.abs().max().float()))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def plan_of(storage: str, *tensors: str, formats: dict[str, str] | None = None) -> Plan:
    return Plan(
        assignments=tuple(
            Assignment(op=op, role=role, format=f, reason="test") for op, f in (formats or {}).items() for role in Role
        ),
        storages=tuple(Storage(tensor=t, format=storage, reason="test") for t in tensors),
    )


def gradient(model: nn.Module, x: Tensor, body: Body | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    y = model(x) if body is None else body(model, x)
    y.square().sum().backward()
    return y.detach(), model.a.grad.clone()


class Rounded(torch.autograd.Function):
    """An op whose derivative is evaluated at the rounded tensor, written out."""

    @staticmethod
    def forward(ctx, h, forward, derivative, kept):
        y = forward(h)
        ctx.slope = derivative(kept(h, y))
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope, None, None, None


def derivative_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def slope(s: Tensor) -> Tensor:
        s = s.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(function(s).sum(), s)[0]

    return slope


INPUTS = {
    "gelu": (F.gelu, derivative_of(F.gelu)),
    "silu": (F.silu, derivative_of(F.silu)),
    "mish": (F.mish, derivative_of(F.mish)),
    "softplus": (F.softplus, derivative_of(F.softplus)),
    "sin": (torch.sin, torch.cos),
    "cos": (torch.cos, lambda s: -torch.sin(s)),
    "square": (torch.square, lambda s: 2 * s),
}
RESULTS = {
    "exp": (torch.exp, lambda y: y),
    "tanh": (torch.tanh, lambda y: 1 - y * y),
    "sigmoid": (torch.sigmoid, lambda y: (1 - y) * y),
}


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", [*INPUTS, *RESULTS])
def test_a_pointwise_op_differentiates_at_what_was_kept(kind: str, storage: str) -> None:
    function, slope = {**INPUTS, **RESULTS}[kind]
    model, x = Ops(lambda h, _: function(h)), torch.randn(16, 6)
    result = kind in RESULTS

    def by_hand(m: nn.Module, x: Tensor) -> Tensor:
        return Rounded.apply(x @ m.a, function, slope, lambda h, y: rounded(y if result else h, storage))

    expected = gradient(model, x, by_hand)
    kept = f":{kind}#0" if result else ":matmul#0"
    autoprec.compile(model, plan=plan_of(storage, kept), events=None)
    found = gradient(model, x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
    autoprec.unwrap(model)
    assert not torch.allclose(gradient(model, x)[1], found[1], rtol=1e-5, atol=1e-6)  # the storage is seen


class Attention(nn.Module):
    """Queries, keys and values from one product, and what attention makes of them in another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(6, 48)), nn.Parameter(torch.randn(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.a).view(3, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(3, 7, 16) @ self.b


@pytest.mark.parametrize(
    "kept", [(":matmul#0",), (":scaled_dot_product_attention#0",), (":matmul#0", ":scaled_dot_product_attention#0")]
)
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_attention_differentiates_at_what_was_kept(fmt: str, kept: tuple[str, ...]) -> None:
    """Bitwise torch's own backward kernel, given the rounded tensors."""
    model, x, dtype = Attention(), torch.randn(3, 7, 6), {"fp32": torch.float32, "bf16": torch.bfloat16}[fmt]
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    qkv = x @ model.a
    parts = [t.to(dtype) for t in qkv.view(3, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)]
    read = parts
    if ":matmul#0" in kept and fmt == "bf16":  # each part is a cast of its own
        read = [rounded(t, "fp8_e4m3") for t in parts]
    elif ":matmul#0" in kept:
        read = list(rounded(qkv, "fp8_e4m3").view(3, 7, 3, 2, 8).permute(2, 0, 3, 1, 4))
    out, logsumexp = forward(*parts, 0.0, True)
    wide = out.transpose(1, 2).reshape(3, 7, 16).float()
    y = wide @ model.b
    expected = wide if len(kept) == 1 and ":matmul#0" in kept else rounded(wide.to(dtype), "fp8_e4m3").float()
    g = 2 * y.detach()
    of_b = expected.reshape(-1, 16).t() @ g.reshape(-1, 5)
    arriving = (g @ model.b.t()).view(3, 7, 2, 8).transpose(1, 2).to(dtype)
    kept_out = out if len(kept) == 1 and ":matmul#0" in kept else rounded(out, "fp8_e4m3")
    grads = backward(arriving, *read, kept_out, logsumexp, 0.0, True)
    of_qkv = torch.stack(grads).permute(1, 3, 0, 2, 4).reshape(21, 48).float()
    of_a = x.reshape(21, 6).t() @ of_qkv
    op = ":scaled_dot_product_attention#0"
    chosen = tuple(Assignment(op=op, role=r, format=fmt, reason="test") for r in (Role.OUTPUT, Role.GRAD_INPUT))
    plan = plan_of("fp8_e4m3", *kept)
    autoprec.compile(model, plan=Plan(assignments=chosen, storages=plan.storages), events=None)
    found = model(x)
    found.square().sum().backward()
    assert torch.equal(found.detach(), y.detach())
    # The gradients of the weights, sums of 21 products in FP32, are added up in another order.
    torch.testing.assert_close(model.b.grad, of_b, rtol=42 * 2.0**-24, atol=1e-5)
    torch.testing.assert_close(model.a.grad, of_a, rtol=42 * 2.0**-24, atol=1e-5)


def storage_of(model: nn.Module, x: Tensor) -> int:
    """Bytes kept for backward, parameters and input apart."""
    return saved_bytes(lambda: model(x).square().sum(), [*model.parameters(), x])


def test_readers_of_one_tensor_and_of_its_views_share_one_copy() -> None:
    """A product with slices of the tensor, one with its transpose, and an exponential that keeps its own result."""

    def body(h: Tensor, c: Tensor) -> Tensor:
        y = torch.exp(h * 0.1)
        parts = [y[:, i] * c[:, i] for i in range(8)]
        return torch.stack(parts, 1) + (y.t() * c.t()).t() + y[:, None, :].expand(-1, 3, -1).mul(c[:, None, :]).sum(1)

    model, x = Ops(body), torch.randn(16, 6)
    plain = storage_of(model, x), gradient(model, x)
    autoprec.compile(model, plan=plan_of("bf16", ":exp#0"), events=None)
    assert plain[0] - storage_of(model, x) == 16 * 8 * 2
    found = gradient(model, x)
    assert torch.equal(found[0], plain[1][0])
    torch.testing.assert_close(found[1], plain[1][1], rtol=0.02, atol=0.02)


def test_a_product_of_two_factors_keeps_both_narrow() -> None:
    """grad_a = g·b and grad_b = g·a at the rounded factors, bitwise."""
    model, x = Ops(lambda h, _: torch.sin(h) * torch.cos(h)), torch.randn(16, 6)
    h = (x @ model.a).detach()
    a, b = h.sin().requires_grad_(), h.cos().requires_grad_()
    y = a * b
    g = 2 * y.detach()
    grad_h = g * rounded(b.detach(), "fp8_e4m3") * h.cos() - g * rounded(a.detach(), "fp8_e4m3") * h.sin()
    autoprec.compile(model, plan=plan_of("fp8_e4m3", ":sin#0", ":cos#0"), events=None)
    torch.testing.assert_close(gradient(model, x)[1], x.t() @ grad_h)


def test_a_linear_and_a_pointwise_op_share_what_they_keep() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 8))
            self.lin = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(x @ self.a)
            return self.lin(h) * h

    model, x = Both(), torch.randn(16, 6)
    plain = storage_of(model, x)
    h = torch.sin(x @ model.a).detach()
    kept, w = rounded(h, "fp8_e4m3"), model.lin.weight.detach()
    g = 2 * (h @ w.t()) * h
    expected = (g * kept).t() @ kept
    autoprec.compile(model, plan=plan_of("fp8_e4m3", ":sin#0", formats={"lin:linear#0": "fp32"}), events=None)
    assert plain - storage_of(model, x) == 16 * 8 * 3 - 4  # one copy with its scale in place of one tensor
    gradient(model, x)
    torch.testing.assert_close(model.lin.weight.grad, expected * 1.0)


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_norms_and_products_of_activations(storage: str) -> None:
    """Against torch's own backward formulas on the rounded tensor."""
    model, x = Ops(lambda h, _: F.layer_norm(h, (8,))), torch.randn(16, 6)
    h = (x @ model.a).detach()
    y, mean, rstd = torch.native_layer_norm(h, (8,), None, None, 1e-5)
    kept = rounded(h, storage)
    grad_h = torch.ops.aten.native_layer_norm_backward(2 * y, kept, (8,), mean, rstd, None, None, [True, False, False])
    expected = x.t() @ grad_h[0]
    autoprec.compile(model, plan=plan_of(storage, ":matmul#0"), events=None)
    torch.testing.assert_close(gradient(model, x)[1], expected, rtol=1e-5, atol=1e-5)

    model = Ops(lambda h, _: h.sin() @ h.cos().t())
    h = (x @ model.a).detach()
    a, b = h.sin(), h.cos()
    g = 2 * (a @ b.t())
    grad_h = (g @ rounded(b, storage)) * b - (g.t() @ rounded(a, storage)) * a
    autoprec.compile(model, plan=plan_of(storage, ":sin#0", ":cos#0"), events=None)
    torch.testing.assert_close(gradient(model, x)[1], x.t() @ grad_h, rtol=1e-4, atol=1e-4)


def test_a_second_derivative_sees_the_rounded_tensor() -> None:
    model, x = Ops(lambda h, _: torch.sin(h) * torch.cos(h)), torch.randn(16, 6)
    autoprec.compile(model, plan=plan_of("bf16", ":sin#0", ":cos#0"), events=None)
    (first,) = torch.autograd.grad(model(x).square().sum(), model.a, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), model.a)
    autoprec.unwrap(model)
    (first,) = torch.autograd.grad(model(x).square().sum(), model.a, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), model.a)
    torch.testing.assert_close(second, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_the_users_own_hooks_see_what_is_kept() -> None:
    """As `save_on_cpu` does, which moves what is kept elsewhere and back."""
    model, x = Ops(lambda h, _: torch.tanh(h)), torch.randn(16, 6)
    autoprec.compile(model, plan=plan_of("bf16", ":tanh#0"), events=None)
    plain = gradient(model, x)
    seen: list[Tensor] = []

    def away(t: Tensor) -> Tensor:
        seen.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(away, lambda t: t):
        found = gradient(model, x)
    assert torch.equal(found[1], plain[1])
    assert torch.bfloat16 in {t.dtype for t in seen}


def test_nothing_is_kept_without_a_backward_pass() -> None:
    model, x = Ops(lambda h, _: torch.tanh(h) * h), torch.randn(16, 6)
    expected = model(x).detach()
    autoprec.compile(model, plan=plan_of("bf16", ":tanh#0", ":matmul#0"), events=None)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    model.eval()
    assert torch.equal(model(x).detach(), expected)


def test_batches_of_other_sizes_and_of_none() -> None:
    model = Ops(lambda h, _: torch.exp(h * 0.1) * torch.sin(h))
    autoprec.compile(model, plan=plan_of("fp8_e4m3", ":exp#0", ":sin#0"), events=None)
    for rows in (16, 3, 1, 0, 7):
        x = torch.randn(rows, 6)
        y, found = gradient(model, x)
        assert y.shape == (rows, 8)
        h = (x @ model.a).detach().requires_grad_()
        (torch.exp(h * 0.1) * torch.sin(h)).square().sum().backward()
        torch.testing.assert_close(found, x.t() @ h.grad, rtol=0.3, atol=0.5)


def test_inf_and_nan_are_not_lost() -> None:
    """A tensor that cannot be kept says so in every gradient, as it would have as it was."""
    for bad in (float("nan"), float("inf")):
        model, x = Ops(lambda h, _: h * h), torch.randn(16, 6)
        x[3, 2] = bad
        autoprec.compile(model, plan=plan_of("fp8_e4m3", ":matmul#0"), events=None)
        assert not gradient(model, x)[1].isfinite().all()


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_a_copy_lives_as_long_as_its_readers(storage: str) -> None:
    """Once whoever keeps a tensor is done, its narrow copy is gone, though the op that made it is still to come."""
    cell = open_cell(None, storage)
    y = keeping(cell, [], [], (torch.randn(4, 8, requires_grad=True),), {}, F.gelu)
    packed = keep_in(cell, y, storage)
    assert packed is not None
    alive = StorageWeakRef(packed.payload.untyped_storage())
    other = keeping(None, [cell], [y], (torch.randn(4, 8, requires_grad=True),), {}, F.gelu)  # does not keep it
    del packed, cell
    assert alive.expired() and y.grad_fn is not None and other.grad_fn is not None


class Penalised(nn.Module):
    """Ops whose second derivatives go through what they kept, after a product that keeps nothing narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.a)
        return F.gelu(h * h) + torch.softmax(h, -1)


def penalty(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of Σ‖∂Σy²/∂x‖²: of the input and of the weight."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    (of_x,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    of_x.square().sum().backward()
    assert x.grad is not None
    return x.grad, model.a.grad.clone()


def test_second_derivatives_go_through_what_is_kept_narrow() -> None:
    """They are those at the rounded tensors: as far from the exact ones as BF16 and E4M3 round, and no term is lost
    (without the way back through the tensors that were kept they would be off by the whole)."""
    torch.manual_seed(0)
    model, x = Penalised(), torch.randn(40, 6)
    exact = penalty(model, x)
    off = {}
    for storage in ("bf16", "fp8_e4m3"):
        torch._dynamo.reset()
        narrow = Penalised()
        narrow.load_state_dict(model.state_dict())
        kept = plan_of(storage, ":tanh#0", ":mul#0", ":softmax#0")
        autoprec.compile(narrow, plan=kept, events=None)
        pairs = list(zip(penalty(narrow, x), exact, strict=True))
        assert all(not torch.equal(a, b) for a, b in pairs)
        off[storage] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    assert off["bf16"] < 2.0**-5 and off["bf16"] < off["fp8_e4m3"] < 16 * 2.0**-5


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_a_tensor_and_its_cast_are_kept_once(storage: str) -> None:
    """Whoever keeps it first; a cast of a part, in another order, or of what the tensor was before it changed, is not
    its cast."""
    x = torch.randn(4, 8, requires_grad=True)
    cell = open_cell(x, storage)
    y = cast_of_kept(x, cell, cast, torch.bfloat16)
    mine, of_cast = cell.part(x), cell.part(y.t())
    assert mine is not None and of_cast is not None and of_cast.payload.data_ptr() == mine.payload.data_ptr()
    assert torch.equal(decode(of_cast, torch.float32), decode(mine, torch.float32).t())
    transposed = cast_of_kept(x.t(), cell, cast, torch.float16)
    assert keep_in(cell, transposed, storage).payload.data_ptr() == mine.payload.data_ptr()
    for other in (x[:2].to(torch.bfloat16), x.t().contiguous(), cast_of_kept(x[:, :4], cell, cast, torch.bfloat16)):
        assert cell.part(other).payload.data_ptr() != mine.payload.data_ptr()
    changing = torch.randn(4, 8)
    cell = open_cell(changing, storage)
    before = keep_in(cell, cast_of_kept(changing, cell, cast, torch.bfloat16), storage)
    changing.mul_(2.0)
    after = keep_in(cell, changing, storage)
    assert torch.equal(decode(after, torch.bfloat16), 2.0 * decode(before, torch.bfloat16))


@pytest.mark.parametrize("size", [1e-7, 1e6])
@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_a_narrow_copy_is_of_the_tensor_and_not_of_what_fp16_leaves_of_it(storage: str, size: float) -> None:
    x = (size * torch.randn(4, 8)).requires_grad_()
    cell = open_cell(x, storage)
    kept = keep_in(cell, cast_of_kept(x, cell, cast, torch.float16), storage)
    assert kept is not None and torch.equal(decode(kept, torch.float32), rounded(x.detach(), storage))


@pytest.mark.parametrize(
    "narrow", [{":matmul#1": "bf16"}, {":gelu#0": "fp16"}, {":matmul#0": "fp16", ":gelu#0": "fp16"}]
)
@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_what_ops_in_two_formats_keep_is_kept_once(storage: str, narrow: dict[str, str]) -> None:
    """A product and pointwise ops read one tensor, some of them a cast of it, into an FP16 region with a gradient scale
    or out of one among others; beside it nothing of its size is held."""
    model = Ops(lambda h, _: F.gelu(h) + F.silu(h) + h @ torch.ones(8, 1))
    x = torch.randn(512, 6)
    formats = dict.fromkeys((":gelu#0", ":silu#0", ":matmul#0", ":matmul#1", ":add#0", ":add#1"), "fp32") | narrow
    inside = tuple(op for op, fmt in narrow.items() if fmt == "fp16")
    regions = (Region(ops=inside, scale_log2=8, reason="test"),) if inside else ()
    plan = replace(plan_of(storage, ":matmul#0", formats=formats), regions=regions)
    autoprec.compile(model, plan=plan, events=None)
    model(x)
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.numel() == 512 * 8:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert list(seen.values()) == [512 * 8 * (2 if storage == "bf16" else 1)]
    y.sum().backward()
