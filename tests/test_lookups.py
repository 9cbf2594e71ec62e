"""Embeddings: rows of a table that stays FP32, made in the plan's format; their gradients are added up in FP32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.graphs import Role
from autoprec.plans import Assignment, Plan, Region
from autoprec.serial import load_policy

ROWS, WIDTH = 40, 16

Lookup = Callable[[Tensor, Tensor], Tensor]
#: As functional calls of (indices, table).
LOOKUPS: dict[str, Lookup] = {
    "plain": F.embedding,
    "a row without a gradient": lambda i, w: F.embedding(i, w, padding_idx=3),
    "by frequency": lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
    "sparse": lambda i, w: F.embedding(i, w, sparse=True),
    "bags": lambda i, w: F.embedding_bag(i, w, mode="sum"),
}


class Model(nn.Module):
    def __init__(self, lookup: Lookup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.lookup = lookup

    def forward(self, indices: Tensor) -> Tensor:
        return torch.tanh(self.lookup(indices, self.table)).float().square().mean()


class Squares(nn.Module):
    """What BF16 rows save is kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, indices: Tensor) -> Tensor:
        return torch.tanh(F.embedding(indices, self.table)).square().mean()


def indices() -> Tensor:
    return torch.randint(0, ROWS, (12, 8), generator=torch.Generator().manual_seed(1))


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None and gradient.dtype is torch.float32
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_is_a_lookup_and_a_cast_by_hand(name: str, fmt: str) -> None:
    """Bitwise: rows are cast and not the table, and gradients are FP32 before they are added up."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    lookup = LOOKUPS[name]
    by_hand, model = Model(lambda i, w: lookup(i, w).to(dtype)), Model(lookup)
    expected = by_hand(indices())
    expected.backward()
    kind = "embedding_bag" if name == "bags" else "embedding"
    ops = (f":{kind}#0", ":tanh#0")
    planned = tuple(Assignment(op=op, role=Role.OUTPUT, format=fmt, reason="so be it") for op in ops)
    autoprec.compile(model, plan=Plan(assignments=planned), events=None)
    found = model(indices())
    found.backward()
    assert torch.equal(found, expected)
    assert torch.equal(whole(model.table.grad), whole(by_hand.table.grad))
    assert autoprec.session(model).executed_formats()[ops[0]] == fmt
    if name == "a row without a gradient":
        assert not whole(model.table.grad)[3].any() and whole(model.table.grad)[4].any()


def test_tiny_gradients_of_a_table_come_through_an_fp16_region() -> None:
    model, wide = Model(F.embedding), Model(F.embedding)
    (1e-9 * wide(indices())).backward()
    planned = tuple(
        Assignment(op=op, role=Role.OUTPUT, format="fp16", reason="so be it") for op in (":embedding#0", ":tanh#0")
    )
    for scale_log2, lost in ((36, False), (0, True)):
        torch._dynamo.reset()
        region = Region(ops=(":embedding#0", ":tanh#0"), scale_log2=scale_log2, reason="so be it")
        autoprec.compile(model, plan=Plan(assignments=planned, regions=(region,)), events=None)
        model.zero_grad()
        (1e-9 * model(indices())).backward()
        found, exact = whole(model.table.grad), whole(wide.table.grad)
        assert torch.allclose(found, exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max())) is not lost
        autoprec.unwrap(model)


def test_a_table_is_judged_by_the_gradient_noise() -> None:
    """BF16 rows where the limit allows their gradients, FP32 where it does not."""
    found = []
    for limit in (10.0, 1e-6):
        torch._dynamo.reset()
        model = Squares()
        policy = load_policy("memory").replaced(
            objective="bytes", noise={"gradient": limit, "loss": 10.0}, storage={"formats": []}
        )
        batches = [torch.randint(0, ROWS, (12, 8)) for _ in range(8)]
        autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b), events=None)
        session = autoprec.session(model)
        assert {t.format for t in session.device.timings if t.timing_key.startswith("embedding")} == {"fp32", "bf16"}
        assert session.plan is not None
        found.append({a.op: a.format for a in session.plan.assignments})
        autoprec.unwrap(model)
    assert [f[":tanh#0"] for f in found] == ["bf16", "fp32"]
    assert found[1][":embedding#0"] == "fp32"


def test_what_changes_rows_in_place_goes_on_in_their_format() -> None:
    model = Model(lambda i, w: F.embedding(i, w).mul_(2.0))
    by_hand = Model(lambda i, w: F.embedding(i, w).bfloat16().mul_(2.0))
    by_hand(indices()).backward()
    ops = (":embedding#0", ":mul_#0", ":mul#0", ":tanh#0")
    batches = [indices(), indices()]
    autoprec.compile(model, policy=load_policy("bf16"), batches=batches, loss_fn=lambda m, b: m(b), events=None)
    plan = autoprec.session(model).plan
    assert plan is not None and {a.format for a in plan.assignments if a.op in ops} == {"bf16"}
    model(indices()).backward()
    assert torch.equal(whole(model.table.grad), whole(by_hand.table.grad))
