"""Dropout and attention that keep less are torch's own, bit for bit, draws of the random generator included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.numerics.lean import attention, dropout, relu_keeping_bits
from autoprec.numerics.packing import decode, encode, piece_numel
from autoprec.plans import Plan, Storage
from tests.campaigns.ops import same
from tests.test_lowering import both, furthest, plan_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def outcome(function: Callable[..., Tensor], *given: Tensor, **options: Any) -> list[Tensor | None]:
    """Result, gradients, and the next random number."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    torch.manual_seed(5)
    y = function(*leaves, **options)
    generator = torch.Generator().manual_seed(6)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves), torch.rand(1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(33, 7), (4, 5, 64), (1,), (0, 3), ()])
def test_dropout_is_torchs(dtype: torch.dtype, p: float, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    assert same(outcome(F.dropout, x, p=p), outcome(dropout, x, p=p)) == ""
    if len(shape) > 1:  # random numbers are drawn in the order of memory
        x = x.detach().transpose(0, 1).requires_grad_()
        assert same(outcome(F.dropout, x, p=p), outcome(dropout, x, p=p)) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("mask", ["none", "causal", "trained", "additive", "boolean"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_is_torchs(dtype: torch.dtype, p: float, mask: str, heads: int) -> None:
    q, k, v = (torch.randn(2, h, 9, 8).to(dtype).requires_grad_() for h in (4, heads, heads))
    masks = {
        "trained": torch.randn(2, 1, 9, 9).to(dtype).requires_grad_(),
        "additive": torch.randn(9, 9).to(dtype),
        "boolean": torch.rand(2, 1, 9, 9) > 0.3,
    }
    given = [q, k, v, *([masks[mask]] if mask in masks else [])]
    options = {"dropout_p": p, "is_causal": mask == "causal", "enable_gqa": heads == 2, "scale": 0.3}
    expected = outcome(F.scaled_dot_product_attention, *given, **options)
    assert same(expected, outcome(attention, *given, **options)) == ""


def test_what_is_kept() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    kept = [saved_bytes(lambda f=f: f(x, 0.1), exclude=[x]) for f in (F.dropout, dropout)]
    assert kept == [64 * 64 * 4, 64 * 64 // 8]
    q, k, v = (torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(3))
    state = torch.get_rng_state().nbytes
    assert saved_bytes(lambda: attention(q, k, v, None, 0.1), exclude=[q, k, v]) == state
    probabilities = 2 * 4 * 64 * 64 * 4
    assert saved_bytes(lambda: F.scaled_dot_product_attention(q, k, v, None, 0.1), exclude=[q, k, v]) >= probabilities


def test_a_second_derivative_of_attention_is_refused() -> None:
    q, k, v = (torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3))
    y = attention(q, k, v, None, 0.5).sum()
    with pytest.raises(autoprec.UnsupportedError, match="create_graph=True goes through attention"):
        torch.autograd.grad(y, q, create_graph=True)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-3, -2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(-3, -2).flatten(-2)
        return F.dropout(self.out(y), 0.2)


class Rounded(torch.autograd.Function):
    """Attention of `Block`, whose gradient is that of the queries, keys and values rounded to E4M3."""

    @staticmethod
    def attention(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(-3, -2).flatten(-2)

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        ctx.save_for_backward(decode(encode(qkv, "fp8_e4m3"), qkv.dtype), torch.get_rng_state())
        return Rounded.attention(qkv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        qkv, state = ctx.saved_tensors
        with torch.enable_grad(), torch.random.fork_rng(devices=()):
            torch.set_rng_state(state)
            leaf = qkv.detach().requires_grad_()
            return torch.autograd.grad(Rounded.attention(leaf), leaf, grad)[0]


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_what_attention_is_given_is_kept_narrow(fmt: str) -> None:
    """Bit for bit, and nothing else of the attention is kept than a byte for each number and the state."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 32, 16)
    oracle = copy.deepcopy(model)
    op = ":scaled_dot_product_attention#0"
    roles = (autoprec.Role.OUTPUT, autoprec.Role.GRAD_INPUT)
    plan = Plan(
        assignments=tuple(autoprec.Assignment(op=op, role=r, format=fmt, reason="test") for r in roles),
        storages=(Storage(tensor="qkv:linear#0", format="fp8_e4m3", reason="test"),),
    )
    autoprec.compile(model, plan=plan, events=None)
    torch.manual_seed(1)
    y = model(x)
    torch.manual_seed(1)
    qkv = oracle.qkv(x).to(torch.float32 if fmt == "fp32" else torch.bfloat16)
    expected = F.dropout(oracle.out(Rounded.apply(qkv).float()), 0.2)
    assert torch.equal(y, expected)
    for z in (y, expected):
        z.square().mean().backward()
    for found, parameter in zip(model.parameters(), oracle.parameters(), strict=True):
        assert found.grad is not None and torch.equal(found.grad, parameter.grad)
    others = 2 * 4 * (4 * 32 * 16)  # what `out` reads, and the factors of the dropout behind it, in FP32
    held = saved_bytes(lambda: model(x), exclude=[x, *model.parameters()])
    assert held == 4 * 32 * 48 + torch.get_rng_state().nbytes + others


def test_a_plan_in_bf16_uses_them_and_draws_what_the_model_draws() -> None:
    model, x = Block(), torch.randn(4, 32, 16)
    torch.manual_seed(1)
    dropped = model(x) == 0
    autoprec.compile(model, plan=Plan(assignments=()), events=None)
    torch.manual_seed(1)
    model(x)
    session = autoprec.session(model)
    ops = [o for b in session.bindings for o in b.ops if o.op_class in ("gemm", "pointwise")]
    narrow = Plan(
        assignments=tuple(
            autoprec.Assignment(op=o.id, role=r, format="bf16", reason="test")
            for o in ops
            for r in (autoprec.Role if o.gemm is not None else (autoprec.Role.OUTPUT,))
        )
    )
    held = {}
    for name, plan in (("as written", Plan(assignments=())), ("bf16", narrow)):
        session.adopt(plan)
        torch.manual_seed(1)
        assert torch.equal(model(x) == 0, dropped)
        held[name] = saved_bytes(lambda: model(x), exclude=[x, *model.parameters()])
    assert held["bf16"] < 0.35 * held["as written"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [0, 4], ids=["torch", "numba"])
def test_bits_of_many_pieces_are_the_bits_of_all(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece, the last one neither whole nor full bytes: relu's gradient, and what dropout let through."""
    monkeypatch.setattr("autoprec.numerics.elements.MOST_THREADS", threads)
    numel = 2 * piece_numel(torch.empty(0)) + 1003
    x = torch.randn(numel, dtype=dtype).requires_grad_()
    g = torch.randn(numel, dtype=dtype)
    [found] = torch.autograd.grad(relu_keeping_bits(x), x, g)
    assert torch.equal(found, torch.where(x > 0, g, 0.0))
    y = dropout(x, 0.25)
    [found] = torch.autograd.grad(y, x, g)
    assert torch.equal(found != 0, (y != 0) & (g != 0))


class Attends(torch.nn.Module):
    """Attention of 4 heads, of which some share keys and values, with a mask that is trained, given, or none."""

    def __init__(self, p: float, mask: str, heads: int, causal: bool) -> None:
        super().__init__()
        # No bias of keys: softmax takes it away, and its gradient is what rounding leaves.
        self.made = torch.nn.ModuleList(torch.nn.Linear(32, 8 * h, bias=False) for h in (4, heads, heads))
        self.p, self.causal = p, causal
        self.trained = torch.nn.Parameter(torch.randn(4, 64, 64) * 0.1) if mask == "trained" else None
        self.register_buffer("given", torch.rand(64, 64) < 0.9 if mask == "given" else None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 8)).transpose(-3, -2) for m in self.made)
        mask = self.given if self.trained is None else self.trained * 1.0
        options = {"dropout_p": self.p, "is_causal": self.causal, "enable_gqa": k.shape != q.shape}
        return F.scaled_dot_product_attention(q, k, v, mask, **options).transpose(-3, -2).flatten(-2)


@pytest.mark.parametrize(
    ("fmt", "p", "mask", "heads", "causal"),
    [
        ("bf16", 0.1, "none", 4, True),
        ("fp32", 0.5, "given", 2, False),
        ("fp32", 0.0, "trained", 4, False),
        ("bf16", 0.2, "trained", 2, False),
    ],
)
def test_compiled_attention_keeps_what_it_is_given_and_one_bit_for_each_probability(
    fmt: str, p: float, mask: str, heads: int, causal: bool
) -> None:
    """The same random numbers as in eager mode: other ones would change results by as much as they are."""
    torch.manual_seed(0)
    model, x = Attends(p, mask, heads, causal), torch.randn(4, 64, 32)
    plan = plan_of({":scaled_dot_product_attention#0": fmt}, {f"made.{i}:linear#0": "fp8_e4m3" for i in range(3)})
    eager, compiled, run = both(model, plan, x)
    rounding = 2.0**-8 if fmt == "bf16" else 1e-5
    assert float((eager[0][0] - compiled[0][0]).norm() / eager[0][0].norm()) < rounding
    assert furthest(eager[0][1], compiled[0][1]) < rounding
    (made,) = autoprec.session(run).lowering.compiled
    bits = [t.bytes for t in made.kept if t.dtype == "uint8"]
    assert bits == ([4 * 4 * 64 * 64 // 8] if p else [])
    given = 4 * 64 * 8 * (4 + 2 * heads)
    assert sum(t.bytes for t in made.kept if t.planned and t.dtype == "float8_e4m3fn") == given
    rest = made.kept_bytes - given - sum(bits)
    # Scales; and a trained mask that was cast.
    assert rest <= 3 * 4 + (2 * 4 * 64 * 64 if (fmt, mask) == ("bf16", "trained") else 0)


def test_what_compiled_attention_makes_again_is_not_kept_where_it_equals_what_was_made_before() -> None:
    """Of BF16 that is kept in BF16."""
    torch.manual_seed(0)
    model, x = Attends(0.1, "none", 4, False), torch.randn(4, 64, 32)
    eager, compiled, run = both(model, plan_of({":scaled_dot_product_attention#0": "bf16"}), x)
    assert furthest(eager[0][1], compiled[0][1]) < 2.0**-8
    (made,) = autoprec.session(run).lowering.compiled
    assert made.kept_bytes == 4 * 4 * 64 * 64 // 8 + 3 * 2 * (4 * 64 * 32)
