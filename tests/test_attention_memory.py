"""What attention without one kernel for both passes, written out, and other products of activations keep and take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.numerics.dtypes import native_formats
from autoprec.numerics.keeping import keeping, open_cell
from autoprec.numerics.lean import attention
from autoprec.planning.planner import ask, propose
from autoprec.planning.uniform import uniform_choice
from autoprec.serial import load_policy
from tests.memory_study import PLANS, Attends, peak_of, peaks_under, predicted_and_measured
from tests.test_keeping import Ops, gradient, plan_of, rounded
from tests.views_study import Masked, QueriesOfOne, ratios

#: As in `test_memory_prediction`.
SLACK = 0.05 if "bf16" in native_formats("cpu") else 0.08


@pytest.mark.parametrize("plan", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [True, False])
def test_what_attention_with_dropout_keeps_is_known(fused: bool, plan: str) -> None:
    """In a narrow format what it is given, once where that is one tensor; in FP32 copies of it."""
    batches = [torch.randn(16, 48, 64) for _ in range(3)]
    predicted, measured = predicted_and_measured(Attends(fused), batches, lambda m, x: m(x), plan)
    assert abs(predicted / measured - 1.0) <= (0.005 if plan == "fp32" else SLACK), (predicted, measured)


def test_copies_that_attention_keeps_are_beside_what_they_are_made_of() -> None:
    """What a mask for every sequence is added to; in FP32, and in BF16, which keeps what it is given."""
    found = ratios("mask_of_the_batch", 0)
    assert max(abs(ratio - 1.0) for ratio in found) <= 0.005, found


def test_attention_is_made_again_whichever_of_its_inputs_is_kept_narrow() -> None:
    """Queries, keys and values are three tensors, of which mixtures keep one or two."""
    found = ratios("dropout_of_three", 2)
    assert max(abs(ratio - 1.0) for ratio in found) <= 0.05, found


@pytest.mark.parametrize(
    ("make", "kept"),
    [(lambda: Masked(16), ""), (lambda: Masked(1), ""), (QueriesOfOne, ""), (QueriesOfOne, ":mul#")],
)
def test_unfused_attention_in_fp32_keeps_copies_whatever_storage_its_inputs_have(
    make: Callable[[], nn.Module], kept: str
) -> None:
    """Of queries that are a part of a tensor, too: the rest of the tensor goes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = make(), [torch.randn(16, 48, 64) for _ in range(2)]
    policy = load_policy("memory").replaced(calibration={"steps": 2}, formats=("fp32",), rules=(), noise={"loss": 1e6})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b), events=None)
    session = autoprec.session(model)
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem = proposals.problem
    choice = uniform_choice(problem, "fp32")
    for tensor in problem.storable:
        if "bf16" in problem.tensors[tensor].storages and problem.tensors[tensor].id.startswith(kept):
            choice = choice.keeping(tensor, "bf16")
    assert choice.stored
    measured, predicted = peaks_under(model, proposals, choice, batches[0])
    assert abs(predicted / measured - 1.0) <= 0.05, (predicted, measured)


@pytest.mark.parametrize("own", ["", "bf16"])
def test_queries_that_are_kept_in_a_copy_give_the_same_bits(own: str) -> None:
    """Keys in BF16, queries and values as they are, of which the queries are a part of a larger memory: gradients are
    those of torch's attention on the rounded keys, under the same random numbers. `own`: how the result is kept, by
    whoever reads it."""
    torch.manual_seed(0)
    made, k, v, g = torch.randn(4, 48, 192), *(torch.randn(4, 4, 48, 16) for _ in range(3))

    def gradients(attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (made, k, v)]
        q = leaves[0][..., :64].unflatten(-1, (4, 16)).transpose(1, 2)
        torch.manual_seed(1)
        return [*torch.autograd.grad(attend(q, *leaves[1:]), leaves, g)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cell = open_cell(None, own) if own else None
        y: Tensor = keeping(cell, (open_cell(k, "bf16"),), (k,), (q, k, v), {"dropout_p": 0.3}, attention)
        kept = {t.untyped_storage().nbytes() for t in y.grad_fn.saved_tensors if t is not None}  # type: ignore[union-attr]
        assert 4 * made.numel() not in kept and 4 * q.numel() in kept
        return y

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    expected, found = gradients(lambda q, k, v: torchs(q, k + (k.bfloat16().float() - k).detach(), v)), gradients(ours)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_peak_of_attention_with_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow, and in FP32, where torch's own runs if what it is given is kept as it is."""
    policy = tmp_path / "wide.yaml"
    policy.write_text("version: 1\nname: wide\nformats: [fp32]\nobjective: peak\nstorage: {formats: [fp8_e4m3]}\n")
    monkeypatch.setitem(PLANS, "wide", (str(policy), None))
    found = {plan: peak_of("dropout", plan) for plan in ("fp32", "wide", "bf16", "lowest")}
    for p in found.values():
        assert p.ratio is not None and abs(p.ratio - 1.0) <= 0.05, p
    bytes_of = {plan: p.measured or 0 for plan, p in found.items()}
    assert bytes_of["lowest"] < bytes_of["bf16"] and bytes_of["wide"] < 0.8 * bytes_of["fp32"]


def heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, -1)).transpose(1, 2)


class Product(torch.autograd.Function):
    """q · kᵀ, whose gradients are of rounded operands."""

    @staticmethod
    def forward(ctx, q, k, storage):
        ctx.kept = rounded(q, storage), rounded(k, storage)
        return q @ k.mT

    @staticmethod
    def backward(ctx, g):
        q, k = ctx.kept
        return g @ k, g.mT @ q, None


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_operands_of_a_product_are_kept_as_they_are_stored_in_any_order(storage: str) -> None:
    """Of two activations in FP32, of which torch's own product keeps contiguous copies."""

    torch.manual_seed(0)
    model = Ops(lambda h, _: heads(h) @ heads(h * 3.0).transpose(-2, -1))
    x = torch.randn(5, 7, 6)
    _, expected = gradient(model, x, lambda m, x: Product.apply(heads(x @ m.a), heads(x @ m.a * 3.0), storage))
    autoprec.compile(model, plan=plan_of(storage, ":matmul#0", ":mul#1"), events=None)
    kept = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        model(x)
    assert not [t.shape for t in kept if t.dtype is torch.float32 and t.numel() == 5 * 7 * 8]
    _, found = gradient(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.01)


class Multiplied(nn.Module):
    """Two results of linear layers, and a product of them."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.product = nn.Linear(64, 64), nn.Linear(64, 64), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.a(x), self.b(x))


@pytest.mark.parametrize("plan", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        lambda a, b: torch.einsum("bid,bjd->bij", a, b),
        lambda a, b: a @ a + b,  # by itself
        lambda a, b: a @ a.transpose(-2, -1) + b,
        lambda a, b: a @ b[0].transpose(-2, -1),  # summed over the batch
        lambda a, b: a @ b.detach(),  # one gradient
    ],
)
def test_peaks_of_products_of_two_activations(product: Callable[[Tensor, Tensor], Tensor], plan: str) -> None:
    batches = [torch.randn(16, 64, 64) for _ in range(3)]
    predicted, measured = predicted_and_measured(Multiplied(product), batches, lambda m, x: m(x).square().mean(), plan)
    assert abs(predicted / measured - 1.0) <= SLACK, (predicted, measured)


def test_our_fp32_product_copies_heads_for_a_moment() -> None:
    """torch's own, all in FP32, has kept the copies: what ours takes is measured by itself."""
    model = Multiplied(lambda a, b: heads(a) @ heads(b).transpose(-2, -1))
    autoprec.compile(model, policy=load_policy("balanced").replaced(calibration={"steps": 2}), events=None)
    session = autoprec.session(model)
    session.calibrate([torch.randn(16, 48, 64) for _ in range(2)], lambda m, x: m(x).square().mean())
    (found,) = (t for t in session.measure_device().timings
                if "matmul" in t.timing_key and t.role == "grad_input" and t.format == "fp32")  # fmt: skip
    assert found.mixed_workspace_bytes is not None and found.workspace_bytes is not None
    assert found.mixed_workspace_bytes >= found.workspace_bytes + 4 * 16 * 48 * 64


def _of_kind(kind: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Queries, keys and values that torch has no kernel for on a CPU, and the other arguments."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 48, 16) for _ in range(3))
    if kind == "a mask for each head":
        return [q, k, v], {"attn_mask": torch.randn(4, 48, 48)}
    return ([q, k, v[..., :8]], {"is_causal": True}) if kind == "narrower values" else ([q[0], k[0], v[0]], {})


@pytest.mark.parametrize("kind", ["a mask for each head", "narrower values", "three dimensions"])
def test_attention_that_torch_runs_op_by_op_keeps_what_it_is_given(kind: str) -> None:
    """Whatever the reason, and gives the same bits; what torch has a kernel for is torch's."""
    tensors, options = _of_kind(kind)
    g = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1])

    def gradients(attend: Callable[..., Tensor]) -> tuple[list[Tensor], int]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        given = [x * 1 for x in leaves]
        y = attend(*given, **options)
        held = saved_bytes(lambda: attend(*given, **options), [*given, *filter(torch.is_tensor, options.values())])
        return [y.detach(), *torch.autograd.grad(y, leaves, g)], held

    (found, held), (expected, more) = gradients(attention), gradients(F.scaled_dot_product_attention)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert held < 0.5 * more
    plain = torch.randn(2, 4, 48, 16, requires_grad=True)
    assert type(attention(plain, plain, plain).grad_fn) is type(F.scaled_dot_product_attention(*[plain] * 3).grad_fn)
