"""Values that are not float32, and odd parameters: identity bitwise, and BF16 plans that leave them alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

import autoprec
from autoprec.plans import Plan
from autoprec.serial import load_policy


class Body(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def changed_through_views(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.view(2, 2, 8)[0].mul_(2)
    h[:, ::2].add_(1)
    h.t()[3].zero_()
    return m.b(torch.tanh(h))


def half(m: Any, x: Tensor) -> Tensor:
    return m.b(F.linear(m.a(x).half(), m.fixed).float())


@torch.library.custom_op("autoprec_tests::real", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3.0 * x


thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda ctx, g: 3.0 * g)


@dataclass(frozen=True)
class Case:
    """A model, its input, the dtype of its output, and ops that a BF16 plan runs in BF16."""

    name: str
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor] = lambda: torch.randn(4, 8)
    dtype: torch.dtype = torch.float32
    narrow: tuple[str, ...] = ("a:linear#0", "b:linear#0")


def a(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(8, 8, dtype=dtype)


def b(width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(width, 2, dtype=dtype)


F64, C64 = torch.float64, torch.complex64
CASES = [
    Case(
        "float64",
        lambda: Body(lambda m, x: m.b(torch.tanh(m.a(x))), a=a(F64), b=b(8, F64)),
        lambda: torch.randn(4, 8, dtype=F64), dtype=F64, narrow=(),
    ),
    Case(
        "float64 in a part",
        lambda: Body(lambda m, x: m.b(torch.tanh(m.a(x)).double()), a=a(), b=b(8, F64)),
        dtype=F64, narrow=("a:linear#0",),
    ),
    Case("complex64", lambda: a(C64), lambda: torch.randn(4, 8, dtype=C64), dtype=C64, narrow=()),
    Case("complex in the middle", lambda: Body(lambda m, x: m.b(torch.fft.rfft(m.a(x)).abs()), a=a(), b=b(5))),
    Case("float16 that is not trained",
         lambda: Body(half, a=a(), b=b(), fixed=nn.Parameter(torch.randn(8, 8).half(), requires_grad=False))),
    Case("integers in", lambda: Body(lambda m, x: m.b(m.a(x.float())), a=a(), b=b()),
         lambda: torch.randint(0, 5, (4, 8))),
    Case("numbers of no dimension",
         lambda: Body(lambda m, x: m.a(x) * m.t + m.t.exp() * x.mean(), a=a(), t=nn.Parameter(torch.tensor(0.5))),
         narrow=("a:linear#0", ":mul#0")),
    Case("a sum in float64",
         lambda: Body(lambda m, x: m.b(m.a(x).sum(-1, keepdim=True, dtype=F64).float().expand(4, 8)), a=a(), b=b())),
    Case("a parameter without a gradient", lambda: Body(lambda m, x: m.a(x), a=a(), b=b()), narrow=("a:linear#0",)),
    Case("a parameter of no elements",
         lambda: Body(lambda m, x: m.b(m.a(x)) + m.none.sum(), a=a(), b=b(), none=nn.Parameter(torch.zeros(0, 3)))),
    Case("a detached branch", lambda: Body(lambda m, x: m.a(x) + m.b(x).detach().sum(), a=a(), b=b())),
    Case("a batch of nothing", lambda: Body(lambda m, x: m.b(m.a(x)).sum(), a=a(), b=b()), lambda: torch.randn(0, 8)),
    Case("float16 beside float32", lambda: Body(lambda m, x: m.b((2 * (y := m.a(x)).half()).add(y)), a=a(), b=b())),
    Case("float8",
         lambda: Body(lambda m, x: m.b((y := m.a(x)).to(torch.float8_e4m3fn).float() * 0.01 + y), a=a(), b=b())),
    Case("a user's op with the name of torch's", lambda: Body(lambda m, x: m.b(thrice(m.a(x))), a=a(), b=b())),
    Case("a jacobian",
         lambda: Body(lambda m, x: m.b(torch.func.jacrev(lambda t: t.cumsum(-1).sin())(m.a(x)[0])), a=a(), b=b())),
    Case("a scan",
         lambda: Body(lambda m, x: m.b(associative_scan(torch.add, m.a(x), 0, combine_mode="generic")), a=a(), b=b())),
    Case("in-place ops on views", lambda: Body(changed_through_views, a=a(), b=b()), narrow=("b:linear#0",)),
]  # fmt: skip


def trained(case: Case, model: nn.Module, steps: int) -> tuple[list[float], nn.Module]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        y = model(case.x())
        assert y.dtype is case.dtype
        loss = y.abs().square().mean() if y.dim() else y
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_identity_and_a_bf16_plan(case: Case) -> None:
    torch.manual_seed(0)
    model = case.make()
    expected, plain = trained(case, copy.deepcopy(model), 10)
    same, _ = trained(case, autoprec.compile(copy.deepcopy(model), plan=Plan(assignments=()), events=None), 10)
    assert same == expected
    policy = load_policy("bf16").replaced(calibration={"steps": 3})
    found, compiled = trained(case, autoprec.compile(copy.deepcopy(model), policy=policy, events=None), 10)
    session = autoprec.session(compiled)
    assert [e.kind for e in session.events] == ["planned"]
    assert found[:3] == expected[:3] and found == pytest.approx(expected, rel=0.03)
    executed = session.executed_formats()
    assert {op: executed[op] for op in case.narrow} == dict.fromkeys(case.narrow, "bf16")
    for (name, p), q in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert p.dtype is q.dtype and (p.grad is None) == (q.grad is None), name
    if not case.narrow:
        assert executed == {} or set(executed.values()) == {"fp32"}
        assert "nothing to decide" in session.plan.binding


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_as_it_was_after_a_bad_step(layout: torch.layout) -> None:
    """Dynamo does not capture what reads it."""

    def make() -> nn.Module:  # torch copies no model with such a buffer
        torch.manual_seed(0)
        model = Body(lambda m, x: m.b(torch.sparse.mm(m.graph, m.a(x))), a=a(), b=b())
        model.register_buffer("graph", torch.eye(4).to_sparse(layout=layout))
        return model

    case, model = Case("a sparse buffer", make), make()
    expected, _ = trained(case, make(), 6)
    policy = load_policy("bf16").replaced(calibration={"steps": 3})
    autoprec.compile(model, policy=policy, events=None)
    assert trained(case, model, 6)[0] == pytest.approx(expected, rel=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = {n: p.clone() for n, p in model.named_parameters()}
    model(torch.full((4, 8), 1e30)).square().sum().backward()
    model.graph.values().fill_(float("nan")) if layout is torch.sparse_csr else model.graph._values().fill_(
        float("nan")
    )
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert torch.equal(model.graph.to_dense(), torch.eye(4))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(autoprec.InputError, match="Body has no parameters: there is nothing to schedule"):
        autoprec.compile(Body(lambda m, x: x * 2))


def test_a_model_of_integers_runs() -> None:
    model = nn.Embedding(4, 3)
    model.weight = nn.Parameter(torch.arange(12).view(4, 3), requires_grad=False)
    rows = torch.tensor([3, 1])
    expected = model(rows)
    assert torch.equal(autoprec.compile(model, events=None)(rows), expected)
