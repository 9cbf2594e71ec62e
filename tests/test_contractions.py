"""Einsum and batches with a weight for each, as products with a parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.calibration.rows import row_weights
from autoprec.graphs import Role
from autoprec.numerics.contractions import contract, einsum_contraction
from autoprec.numerics.experts import batched_linear
from autoprec.numerics.gemm import linear
from autoprec.numerics.histograms import sample
from autoprec.numerics.packing import encode
from autoprec.numerics.specs import gemm_spec
from autoprec.planning.planner import ask, make_plan, propose, uniform_plan
from autoprec.planning.roofline import modelled_device
from autoprec.plans import Assignment, Plan, Storage
from autoprec.scheduling import _measured
from autoprec.serial.values import load_device
from tests.test_tournament import tournament_of

#: Equation, dimensions of both operands, what becomes of the letters: batch, rows, summed, columns.
EQUATIONS = [
    ("bsd,dhk->bshk", 3, 3, ("", "bs", "d", "hk")),
    ("bshk,hkd->bsd", 4, 3, ("", "bs", "hk", "d")),
    ("bsd, hkd -> bshk", 3, 3, ("", "bs", "d", "hk")),
    ("bi,io->ob", 2, 2, ("", "b", "i", "o")),
    ("bhsk,khd->bsd", 4, 3, ("", "bs", "hk", "d")),
    ("bid,dk->ibk", 3, 2, ("", "bi", "d", "k")),
    ("ebi,eio->ebo", 3, 3, ("e", "b", "i", "o")),
    ("bei,eoi->boe", 3, 3, ("e", "b", "i", "o")),
    ("bghi,hgoi->bhgo", 4, 4, ("gh", "b", "i", "o")),
    ("ei,eio->eo", 2, 3, ("e", "", "i", "o")),
    ("...i,io->...o", 4, 2, ("", "abc", "i", "o")),
    ("a...i,io->o...a", 4, 2, ("", "abc", "i", "o")),
    ("bi,io", 2, 2, ("", "b", "i", "o")),
    ("...a,ab", 3, 2, ("", "cd", "a", "b")),
]


@pytest.mark.parametrize(("equation", "x_dims", "weight_dims", "groups"), EQUATIONS)
def test_which_dimensions_meet(equation: str, x_dims: int, weight_dims: int, groups: tuple[str, ...]) -> None:
    """And the product is einsum's, forward and backward; a row's weight is what a unit error does to the gradient."""
    how = einsum_contraction(equation, x_dims, weight_dims)
    assert how is not None and (how.batch, how.rows, how.summed, how.columns) == groups
    torch.manual_seed(0)
    size = {c: n for n, c in enumerate(sorted(set(how.x + how.weight)), start=2)}
    x, w = (torch.randn([size[c] for c in letters], requires_grad=True) for letters in (how.x, how.weight))
    y, ours = torch.einsum(equation, x, w), contract(x, w, None, None, gemm_spec({Role.OUTPUT: "fp32"}, "cpu"), how)
    g = torch.randn_like(y)
    assert ours.shape == y.shape
    expected, found = (torch.autograd.grad(t, (x, w), g) for t in (y, ours))
    for a, b in zip((y, *expected), (ours, *found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    rows = row_weights(how, w, x.detach(), y.shape)
    of_x, of_g = rows.for_input(g, sample(x.detach(), 1 << 30)), rows.for_gradient(sample(g, 1 << 30))
    for i in range(0, x.numel(), 1 + x.numel() // 7):
        one = torch.zeros(x.numel()).index_fill(0, torch.tensor(i), 1.0).view(x.shape)
        (change,) = torch.autograd.grad(torch.einsum(equation, one, w), w, g)
        assert float(of_x[i]) == pytest.approx(float(change.square().sum()), rel=1e-5)
    for i in range(0, g.numel(), 1 + g.numel() // 7):
        one = torch.zeros(g.numel()).index_fill(0, torch.tensor(i), 1.0).view(g.shape)
        (change,) = torch.autograd.grad(torch.einsum(equation, x.detach(), w), w, one)
        assert float(of_g[i]) == pytest.approx(float(change.square().sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("equation", "x_dims", "weight_dims"),
    [
        ("bii,io->bo", 3, 2),  # a diagonal
        ("bij,io->bo", 3, 2),  # j is summed over in the input alone
        ("bi,ioj->bo", 2, 3),
        ("bi,i->b", 2, 1),
        ("bi,bo->bio", 2, 2),  # nothing is summed over
        ("...i,...io->...o", 3, 3),
        ("...i,io->o", 3, 2),
        ("bi,io,o->bo", 2, 2),
        ("bi->b", 2, 2),
        ("bi,io->bo", 3, 2),
        (None, 2, 2),
    ],
)
def test_which_einsum_is_no_product_with_a_parameter(equation: str | None, x_dims: int, weight_dims: int) -> None:
    assert einsum_contraction(equation, x_dims, weight_dims) is None


class Heads(nn.Module):
    """To heads and back, by einsum or by linears."""

    def __init__(self, by_einsum: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = (8, 2, 6) if by_einsum else (8, 12)
        self.up, self.down = (nn.Parameter(torch.randn(8, 2, 6).view(shape)) for _ in range(2))
        self.by_einsum = by_einsum

    def forward(self, x: Tensor) -> Tensor:
        x = 2.0 * x
        if self.by_einsum:
            h = 0.5 * torch.einsum("bsd,dhk->bshk", x, self.up)
            return torch.tanh(torch.einsum("bshk,dhk->bsd", h, self.down)).square().mean()
        return torch.tanh(F.linear(0.5 * (x @ self.up), self.down)).square().mean()


ROLES_OF_HEADS = ["bf16 bf16 bf16", "bf16 fp16 fp32", "fp8_e4m3 fp8_e5m2 bf16", "tf32 tf32 tf32", "bf16 fp32 fp8_e4m3"]


@pytest.mark.parametrize("storage", [None, "fp8_e4m3", "bf16"])
@pytest.mark.parametrize("formats", ROLES_OF_HEADS)
def test_an_einsum_with_a_parameter_is_a_linear(formats: str, storage: str | None) -> None:
    """Bitwise, several dimensions summed over, and several made, in one: forward, gradients and what is kept."""
    chosen = dict(zip(Role, formats.split(), strict=True))
    found = []
    for by_einsum in (True, False):
        model = Heads(by_einsum)
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
        spec = gemm_spec(chosen, "cpu")
        if by_einsum:
            stored = (":mul#0", ":mul#1") if storage else ()
            plan = Plan(
                assignments=tuple(
                    Assignment(op=f":einsum#{i}", role=r, format=f, reason="")
                    for i in (0, 1)
                    for r, f in chosen.items()
                ),
                storages=tuple(Storage(tensor=t, format=storage or "", reason="") for t in stored),
            )
            autoprec.compile(model, plan=plan, events=None)
            loss = model(x)
        else:
            pack = (lambda t: encode(t, storage)) if storage else (lambda t: None)
            given = (2.0 * x).to(spec.result)
            h = linear(given, model.up.t(), None, pack(given), spec).float()
            given = (0.5 * h).to(spec.result)
            y = linear(given, model.down, None, pack(given), spec).float()
            loss = torch.tanh(y).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        found.append([loss.detach(), model.up.grad.flatten(), model.down.grad.flatten()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_einsum_is_calibrated_as_its_linear() -> None:
    profiles = []
    for by_einsum in (True, False):
        model = Heads(by_einsum)
        torch.manual_seed(2)
        batches = [torch.randn(3, 5, 8) for _ in range(3)]
        policy = autoprec.Policy(name="p", formats=["fp32", "bf16"], objective="bytes")
        autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda net, x: net(x), events=None)
        session = autoprec.session(model)
        products = [op for op in session.graph.ops if len(op.roles) == 3]
        assert [op.weights for op in products] == [("up",), ("down",)]
        assert {op.id for op in products} == {a.op for a in session.plan.assignments if a.role is Role.GRAD_WEIGHT}
        profiles.append([session.profile.tensor_by_id[op.outputs[0]] for op in products])
    for a, b in zip(*profiles, strict=True):
        for field in ("input_weight_grad", "gradient_weight_grad"):
            assert getattr(a, field).energy == pytest.approx(getattr(b, field).energy, rel=1e-4)


class Batched(nn.Module):
    """A weight for each of a batch, in the place of a weight or as an operand like any other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 24) / 4), nn.Parameter(torch.randn(4, 24, 8) / 5)
        self.shift = nn.Parameter(torch.zeros(4, 32 if kind == "baddbmm of a matrix" else 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bmm":
            h = torch.bmm(x, self.up) + self.shift
        elif self.kind.startswith("baddbmm"):
            h = torch.baddbmm(self.shift, x, self.up)
        elif self.kind == "einsum":
            h = torch.einsum("ebi,eio->ebo", x, self.up) + self.shift
        else:
            h = x @ self.up.view(4, 16, 24) + self.shift
        return torch.bmm(F.gelu(h), self.down).square().mean()


@pytest.mark.parametrize("kind", ["bmm", "baddbmm", "baddbmm of a matrix", "einsum", "matmul of a view"])
def test_weights_that_are_operands_like_any_other_are_judged(kind: str) -> None:
    """What everything in BF16 does to their gradients: predicted, and measured on a replayed step; and the limit."""
    model = Batched(kind)
    torch.manual_seed(1)
    batches = [torch.randn(4, 32, 16) for _ in range(6)]
    policy = autoprec.Policy(name="p", formats=["fp32", "bf16"], noise={"gradient": 1e3, "loss": 1e3})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda net, x: net(x), events=None)
    session = autoprec.session(model)
    question = ask(session.graph, session.profile, session.device, policy)
    narrow = uniform_plan(question, "bf16")
    assert {row.weight for row in question.problem.rows} >= {"up", "down"}
    plans = {"fp32": Plan(assignments=()), "bf16": narrow}
    measured = _measured(propose(question), (outcomes := tournament_of(session).run(plans)), outcomes["fp32"])[
        "bf16"
    ].gradient_ratio
    assert narrow.predicted is not None and measured is not None
    assert 0.5 <= measured / narrow.predicted.gradient_ratio <= 2.0
    tight = policy.replaced(noise={"gradient": 0.1 * narrow.predicted.gradient_ratio, "loss": 1e3})
    plan = make_plan(session.graph, session.profile, session.device, tight)
    products = [a for a in plan.assignments if plan_kind(a.op) in ("bmm", "baddbmm", "einsum", "matmul")]
    assert products and {a.format for a in products} == {"fp32"}
    roles = [len(op.roles) for op in session.graph.ops if op.kind == kind.split()[0]]
    assert roles[0] == (2 if " " in kind else 3)  # a bias for each row, or a view of a parameter: no weight


@pytest.mark.parametrize("kind", ["bmm", "baddbmm", "einsum"])
@pytest.mark.parametrize("formats", ["bf16 bf16 bf16", "fp8_e4m3 fp8_e5m2 bf16", "bf16 fp32 fp8_e4m3"])
def test_a_weight_for_each_of_a_batch_runs_as_planned(kind: str, formats: str) -> None:
    """Bitwise against the product itself."""
    chosen = dict(zip(Role, formats.split(), strict=True))
    model, x = Batched(kind), torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.shift.normal_(generator=torch.Generator().manual_seed(2))
    ops = [":bmm#0", ":bmm#1"] if kind == "bmm" else [f":{kind}#0", ":bmm#0"]
    plan = Plan(
        assignments=tuple(Assignment(op=o, role=r, format=f, reason="") for o in ops for r, f in chosen.items())
    )
    autoprec.compile(model, plan=plan, events=None)
    loss = model(x)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    again, spec = Batched(kind), gemm_spec(chosen, "cpu")
    again.shift.data.copy_(model.shift.data)
    bias = again.shift if kind == "baddbmm" else None
    h = batched_linear(x.to(spec.result), again.up, bias, None, spec).float()
    h = h if kind == "baddbmm" else h + again.shift
    expected = batched_linear(F.gelu(h).to(spec.result), again.down, None, None, spec).float().square().mean()
    expected.backward()
    assert all(torch.equal(a, b) for a, b in zip(found, [expected, *(p.grad for p in again.parameters())], strict=True))


def test_a_bias_for_each_weight_of_a_batch() -> None:
    """Against baddbmm with operands cast by hand, whose bias is added before the result is rounded."""
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 5, 8).bfloat16(), torch.randn(3, 8, 6), torch.randn(3, 1, 6)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    spec = gemm_spec({Role.OUTPUT: "bf16"}, "cpu")
    y = batched_linear(*leaves, None, spec)
    g = torch.randn_like(y)
    y.backward(g)
    wide = torch.promote_types(spec.operand(w, "bf16").dtype, torch.bfloat16)
    assert torch.equal(y, torch.baddbmm(b.bfloat16().to(wide), x.to(wide), w.bfloat16().to(wide)).bfloat16())
    assert torch.equal(leaves[2].grad, g.float().sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("equation", "shape", "has_it"), [("bsd,dhk->bshk", (8, 2, 6), True), ("ebi,eio->ebo", (3, 8, 4), False)]
)
def test_fp8_is_the_devices_own_for_one_weight_alone(equation: str, shape: tuple[int, ...], has_it: bool) -> None:
    """Where there is a weight for each of a batch, FP8 is emulated on every device, and the plan says so."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(equation, 2.0 * x, self.weight).square().mean()

    model = Net()
    autoprec.compile(model, policy="observe", events=None)
    for _ in range(2):
        model(torch.randn(3, 5, 8)).backward()
        autoprec.session(model).step()
    session = autoprec.session(model)
    policy = autoprec.Policy(name="p", formats=["fp32", "fp8_e4m3", "fp8_e5m2"])
    plan = make_plan(session.graph, session.profile, modelled_device(load_device("h100"), session.graph), policy)
    (of_output,) = (a for a in plan.assignments if a.op == ":einsum#0" and a.role is Role.OUTPUT)
    emulated = [d for d in of_output.dropped if "would emulate it" in d.why]
    assert bool(emulated) is not has_it


def plan_kind(op: str) -> str:
    return op.partition(":")[2].partition("#")[0]
