"""Tensors that are made again in the backward pass: against keeping them, and against products by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import autoprec
from autoprec.errors import PlanError, UnsupportedError
from autoprec.execution.measuring import saved_bytes
from autoprec.graphs import Role
from autoprec.numerics import convolutions, gemm, remaking
from autoprec.numerics.keeping import Cell
from autoprec.planning.evaluator import evaluate
from autoprec.planning.planner import ask, make_plan, propose
from autoprec.planning.solutions import Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import RECOMPUTED, Assignment, Plan, Storage
from autoprec.rewriting import storing
from autoprec.serial.values import read_plan, write_plan
from tests import storage_study
from tests.planning.planning_cases import random_case
from tests.test_keeping import rounded


class Chain(nn.Module):
    """A product, ops that may be made again, and products that read them."""

    def __init__(self, body: Callable[[Tensor], Tensor], *layers: nn.Module, heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(6, 8))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(8, 5)) for _ in range(heads))
        self.layers = nn.ModuleList(layers)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x @ self.a) if not self.layers else self.layers[0](x @ self.a)
        for layer in self.layers[1:]:
            h = layer(h)
        return sum(h @ b for b in self.b)


CHAINS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gelu": (lambda: Chain(F.gelu), ":gelu#0"),
    "tanh's gelu": (lambda: Chain(lambda h: F.gelu(h, approximate="tanh")), ":gelu#0"),
    "silu": (lambda: Chain(F.silu), ":silu#0"),
    "mish": (lambda: Chain(F.mish), ":mish#0"),
    "layer norm": (lambda: Chain(F.relu, nn.LayerNorm(8)), "layers.0:layer_norm#0"),
    "RMS norm": (lambda: Chain(F.relu, nn.RMSNorm(8)), "layers.0:rms_norm#0"),
    "group norm": (lambda: Chain(F.relu, nn.GroupNorm(2, 8)), "layers.0:group_norm#0"),
    "batch norm": (lambda: Chain(F.relu, nn.BatchNorm1d(8)), "layers.0:batch_norm#0"),
    "batch norm and ReLU": (lambda: Chain(F.relu, nn.BatchNorm1d(8), nn.ReLU()), "layers.1:relu#0"),
    "norm and GELU": (lambda: Chain(F.relu, nn.LayerNorm(8), nn.GELU()), "layers.1:gelu#0"),
}


def plan_of(made: str, fmt: str, *, narrow: bool = False, recomputed: bool = True, ops: tuple[str, ...] = ()) -> Plan:
    """Everything in a format; what a tensor is made of in E4M3, and the tensor made again, or in neither."""
    roles = {o: (tuple(Role) if ":matmul" in o else (Role.OUTPUT,)) for o in (":matmul#0", ":matmul#1", *ops)}
    assignments = (Assignment(op=o, role=r, format=fmt, reason="") for o, some in roles.items() for r in some)
    storages = (Storage(tensor=":matmul#0", format="fp8_e4m3", reason=""),) if narrow else ()
    if recomputed:
        storages += (Storage(tensor=made, format=RECOMPUTED, made_from=(":matmul#0",), reason=""),)
    return Plan(assignments=tuple(assignments), storages=storages)


def step(model: nn.Module, plan: Plan | None, x: Tensor) -> list[Tensor]:
    """The loss, all gradients and buffers of one step."""
    if plan is not None:
        autoprec.compile(model, plan=plan, events=None)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def ops_of(name: str) -> tuple[str, ...]:
    model, made = CHAINS[name][0](), CHAINS[name][1]
    autoprec.compile(model, plan=Plan(assignments=()), events=None)
    model(torch.randn(16, 6))
    return tuple(
        op.id for op in autoprec.session(model).bindings[0].op_of.values() if op.kind in made or "norm" in op.kind
    )


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CHAINS)
def test_what_is_made_again_is_what_it_was(name: str, fmt: str) -> None:
    """Bitwise, where what it is made of is kept as it is (products in FP32, which torch lays out another way, to their
    last bits); and it is not kept."""
    build, made = CHAINS[name]
    x, ops = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), ops_of(name)
    kept, again = (plan_of(made, fmt, ops=ops, recomputed=r) for r in (False, True))
    for a, b in zip(step(build(), kept, x), step(build(), again, x), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6) if fmt == "fp32" else torch.equal(a, b)
    bytes_of = []
    for plan in (kept, again):
        model = build()
        autoprec.compile(model, plan=plan, events=None)
        bytes_of.append(saved_bytes(lambda m=model: m(x).square().mean(), [*model.parameters(), x]))  # type: ignore[misc]
    # torch's RMS norm keeps FP32 of its own on a CPU, not what it reads in BF16.
    assert bytes_of[1] < bytes_of[0] or (name == "RMS norm" and fmt != "fp32" and bytes_of[1] == bytes_of[0])


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CHAINS)
def test_the_weights_gradient_is_made_with_what_the_rounded_source_gives(name: str, fmt: str) -> None:
    build, made = CHAINS[name]
    model, x = build(), torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[fmt]
    step(model, plan_of(made, fmt, ops=ops_of(name), narrow=True), x)
    again = build()
    with torch.no_grad():

        def layers(h: Tensor) -> Tensor:
            h = again.layers[0](h) if again.layers else again.body(h)
            for layer in again.layers[1:]:
                h = layer(h)
            return h

        product = (x.to(dtype).float() @ again.a.to(dtype).float()).to(dtype)
        y = layers(copy.deepcopy(product)).float()
        read = layers(rounded(product, "fp8_e4m3")).to(dtype).float()
        g = (2.0 / (16 * 5) * (y.to(dtype).float() @ again.b[0].to(dtype).float()).to(dtype).float()).to(dtype).float()
        expected = read.t() @ g
    torch.testing.assert_close(model.b[0].grad, expected, rtol=2**-7 if fmt == "bf16" else 1e-5, atol=1e-3)
    plain = build()
    step(plain, plan_of(made, fmt, ops=ops_of(name), recomputed=False), x)
    assert not torch.allclose(model.b[0].grad, plain.b[0].grad, rtol=2**-7, atol=1e-3)  # the rounding is seen


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StorageWeakRef]]:
    """Every tensor that is made again."""
    found: list[StorageWeakRef] = []
    run = remaking._Making._run

    def noted(self: remaking._Making, values: list[Tensor]) -> Tensor:
        result = run(self, values)
        found.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(remaking._Making, "_run", noted)
    yield found


def test_it_is_made_once_for_all_who_read_it(made: list[StorageWeakRef]) -> None:
    """Then it is gone; and once more in a second pass through the same graph."""
    x, models = torch.randn(16, 6), [Chain(F.gelu, heads=3) for _ in range(2)]
    roles = [(f":matmul#{i}", r) for i in range(4) for r in Role]
    assignments = tuple(Assignment(op=o, role=r, format="bf16", reason="") for o, r in roles)
    again = Storage(tensor=":gelu#0", format=RECOMPUTED, made_from=(":matmul#0",), reason="")
    found = []
    for model, storages in zip(models, ((), (again,)), strict=True):
        autoprec.compile(model, plan=Plan(assignments=assignments, storages=storages), events=None)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(made) == 2 and all(r.expired() for r in made)
    assert loss.grad_fn is not None  # the graph is still there


@pytest.mark.parametrize(
    ("layer", "kind", "products"),
    [(nn.Linear, "linear", gemm), (partial(nn.Conv1d, kernel_size=1), "conv1d", convolutions)],
)
def test_it_is_gone_before_the_gradient_of_the_input(
    layer: Callable[[int, int], nn.Module],
    kind: str,
    products: ModuleType,
    made: list[StorageWeakRef],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is made after that of the weight, and does not read it."""
    model, gone = nn.Sequential(layer(8, 8), nn.GELU(), layer(8, 8)), []
    first, second = (f"{i}:{kind}#0" for i in (0, 2))
    roles = [*((op, r) for op in (first, second) for r in Role), ("1:gelu#0", Role.OUTPUT)]
    assignments = tuple(Assignment(op=op, role=r, format="bf16", reason="") for op, r in roles)
    again = Storage(tensor="1:gelu#0", format=RECOMPUTED, made_from=(first,), reason="")
    make = products._input_gradient

    def watched(*args: Any) -> Tensor:
        gone.append([r.expired() for r in made])
        return make(*args)

    monkeypatch.setattr(products, "_input_gradient", watched)
    autoprec.compile(model, plan=Plan(assignments=assignments, storages=(again,)), events=None)
    model(torch.randn(4, 8, 8)).square().mean().backward()
    assert gone == [[True]]


def test_nothing_is_held_once_the_backward_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the loss, and with it autograd's graph, lives on. What it is made of is not held for its readers."""
    model = Chain(F.gelu)
    autoprec.compile(model, plan=plan_of(":gelu#0", "fp32", narrow=True), events=None)
    kept, values = list[StorageWeakRef](), list[StorageWeakRef]()
    part = remaking.Recipe.part

    def hold_watched(cell: Cell, value: Tensor) -> remaking.Held | None:
        values.append(StorageWeakRef(value.untyped_storage()))
        return remaking.hold(cell, value)

    def watched(self: remaking.Recipe, x: Tensor) -> remaking.Remade | None:
        found = part(self, x)
        assert found is not None and all(r.expired() for r in values)
        kept.extend(StorageWeakRef(t.untyped_storage()) for t in found.tensors)
        return found

    monkeypatch.setattr(remaking.Recipe, "part", watched)
    monkeypatch.setattr(storing, "hold", hold_watched)
    loss = model(torch.randn(16, 6)).square().mean()
    assert len(kept) == len(values) == 1
    loss.backward()
    assert all(r.expired() for r in kept) and loss.grad_fn is not None


def test_running_statistics_see_each_batch_once() -> None:
    name = "batch norm and ReLU"
    model, plain, x = CHAINS[name][0](), CHAINS[name][0](), torch.randn(16, 6)
    autoprec.compile(model, plan=plan_of(CHAINS[name][1], "fp32", narrow=True), events=None)
    for _ in range(3):
        for m in (model, plain):
            m(x).square().mean().backward()
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)
    model.eval(), plain.eval()
    for m in (model, plain):
        m.zero_grad()
        m(x).square().mean().backward()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_other_batches_and_no_gradients_at_all() -> None:
    model, plain = Chain(F.gelu), Chain(F.gelu)
    autoprec.compile(model, plan=plan_of(":gelu#0", "fp32"), events=None)
    for rows in (16, 7, 1, 33):
        x = torch.randn(rows, 6)
        for m in (model, plain):
            m.zero_grad()
            m(x).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_refused() -> None:
    model = Chain(F.gelu)
    autoprec.compile(model, plan=plan_of(":gelu#0", "bf16"), events=None)
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(UnsupportedError, match="made again for its backward pass"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].sum().backward()


# Plans


def test_a_plan_says_what_it_is_made_of(tmp_path: object) -> None:
    with pytest.raises(PlanError, match="is recomputed from nothing"):
        Storage(tensor="t", format=RECOMPUTED, reason="")
    with pytest.raises(PlanError, match="is kept in bf16: made_from names"):
        Storage(tensor="t", format="bf16", made_from=("u",), reason="")
    plan = plan_of(":gelu#0", "bf16", narrow=True)
    write_plan(path := f"{tmp_path}/plan.yaml", plan)
    assert read_plan(path) == plan
    assert plan.fingerprint != plan_of(":gelu#0", "bf16", narrow=True, recomputed=False).fingerprint
    assert plan.formats_used() == ("bf16", "fp8_e4m3 storage", "recomputed")


@pytest.mark.parametrize(
    ("body", "made", "source", "told"),
    [
        (lambda h: F.dropout(h, 0.5), ":dropout#0", ":matmul#0", "is made by dropout"),
        (F.gelu, ":gelu#0", "input:/matmul/0.l_x_", ":matmul#0 is made by no op that may run again"),
        (F.gelu, ":matmul#0", "input:/matmul/0.l_x_", "is made by no op that may run again"),
    ],
)
def test_what_cannot_be_made_of_that_is_refused(
    body: Callable[[Tensor], Tensor], made: str, source: str, told: str
) -> None:
    again = Storage(tensor=made, format=RECOMPUTED, made_from=(source,), reason="")
    roles = tuple(Assignment(op=o, role=r, format="bf16", reason="") for o in (":matmul#0", ":matmul#1") for r in Role)
    model = Chain(lambda h: body(torch.tanh(h)) if made == ":matmul#0" else body(h))
    if made == ":matmul#0":
        model.body = lambda h: h
    autoprec.compile(model, plan=Plan(assignments=roles, storages=(again,)), events=None)
    with pytest.raises(PlanError, match=told):
        model(torch.randn(4, 6))


def test_nothing_is_made_of_what_is_made_again_itself() -> None:
    storages = (
        Storage(tensor="layers.0:layer_norm#0", format=RECOMPUTED, made_from=(":matmul#0",), reason=""),
        Storage(tensor="layers.1:gelu#0", format=RECOMPUTED, made_from=("layers.0:layer_norm#0",), reason=""),
    )
    model = CHAINS["norm and GELU"][0]()
    roles = tuple(Assignment(op=":matmul#1", role=r, format="bf16", reason="") for r in Role)
    autoprec.compile(model, plan=Plan(assignments=roles, storages=storages), events=None)
    with pytest.raises(PlanError, match="which is recomputed itself"):
        model(torch.randn(4, 6))


# Planning


def planned(model: nn.Module, **policy: object) -> autoprec.Session:
    torch.manual_seed(2)
    data = [torch.randn(64, 6) for _ in range(4)]
    chosen = autoprec.Policy(name="p", formats=["fp32", "bf16"], noise={"gradient": 10.0, "loss": 10.0}, **policy)
    autoprec.compile(model, policy=chosen, batches=data, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    return autoprec.session(model)


@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_is_planned_where_bytes_count(name: str) -> None:
    build, made = CHAINS[name]
    session = planned(build(), objective="bytes")
    plan = make_plan(session.graph, session.profile, session.device, session.policy)
    found = {s.tensor: s for s in plan.storages}[made]
    source = "layers.0:layer_norm#0" if name == "norm and GELU" else ":matmul#0"  # GELU keeps what the norm makes
    assert found.format == RECOMPUTED and found.made_from == (source,)
    without = session.policy.replaced(storage={"recompute": False})
    plan = make_plan(session.graph, session.profile, session.device, without)
    assert RECOMPUTED not in {s.format for s in plan.storages}
    assert RECOMPUTED not in {a.format for s in plan.storages for a in s.alternatives or ()}


def remakings(session: autoprec.Session) -> dict[str, tuple[str, ...]]:
    """What may be made again, and of what."""
    problem = ask(session.graph, session.profile, session.device, session.policy).problem
    return {t.id: t.remaking.made_from for t in problem.tensors if t.remaking is not None}


def test_what_keeps_more_than_it_reads_is_no_candidate() -> None:
    """Random numbers, results that the op keeps itself, and readers that are no products."""
    for body in (lambda h: F.dropout(h, 0.1), torch.tanh, lambda h: h + 1.0, lambda h: torch.exp(0.1 * torch.tanh(h))):
        assert not remakings(planned(Chain(body), objective="bytes"))
    found = remakings(planned(Chain(lambda h: torch.exp(0.1 * F.gelu(h)) + F.gelu(h)), objective="bytes"))
    assert not found  # a sum keeps nothing, and the exponential its own result
    two = remakings(planned(Chain(lambda h: F.gelu(h) * torch.tanh(F.gelu(h)) + h), objective="bytes"))
    assert ":gelu#1" not in two


def test_random_problems_have_such_tensors() -> None:
    """So that what brute force says of them is said of these, too: of the input of a product, and of one factor."""
    found = [t for seed in range(120) for t in random_case(seed).problem().tensors if t.remaking is not None]
    assert sum(bool(t.gemms) for t in found) >= 4
    assert sum(bool(t.others) for t in found) >= 4


def test_the_backward_pass_holds_nothing_that_it_is_done_with() -> None:
    """Each source is read when its first step is, and gone behind its last."""
    alive: list[int] = []

    def watching(*given: Tensor) -> Tensor:
        alive.append(sum(not ref.expired() for ref in read))
        return given[0] + 1.0

    read: list[StorageWeakRef] = []

    def source(place: int) -> Tensor:
        made = torch.full((4,), float(place))
        read.append(StorageWeakRef(made.untyped_storage()))
        return made

    steps = [
        remaking.Step(watching, (remaking.Value(0),), {}),
        remaking.Step(watching, (remaking.MadeBefore(0, torch.float32), remaking.Value(1)), {}),
        remaking.Step(watching, (remaking.MadeBefore(1, torch.float32), remaking.Value(2)), {}),
    ]
    made = remaking._Making(steps, torch.empty(0), torch.Size([4]), (1,))
    made.uses = 1
    assert torch.equal(made.result(source), torch.full((4,), 3.0))
    assert alive == [1, 1, 1] and len(read) == 3


def test_the_error_is_about_what_is_predicted() -> None:
    """Of each weight's gradient whose input is made again from E4M3, in a small trained language model."""
    study = storage_study.language_study(steps=100, batches=4)
    policy = autoprec.Policy(name="study", formats=("fp32",), storage={"formats": ("fp8_e4m3",)})
    model = copy.deepcopy(study.model)
    autoprec.compile(model, policy=policy.replaced(calibration={"steps": 4}), events=None)
    session = autoprec.session(model)
    session.calibrate(study.batches, study.loss)
    session.make_plan()
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem, exact = proposals.problem, storage_study.gradients(study, copy.deepcopy(study.model))
    ratios = []
    for i, t in enumerate(problem.tensors):
        if t.remaking is None:
            continue
        choice = uniform_choice(problem, "fp32")
        for s in t.remaking.made_from:
            choice = choice.keeping(problem.tensor_index[s], "fp8_e4m3")
        of_sources = evaluate(problem, choice).rows
        choice = choice.keeping(i, RECOMPUTED)
        predicted = [a - b for a, b in zip(evaluate(problem, choice).rows, of_sources, strict=True)]
        plan = proposals.decisions(Solution(choice=choice, evaluation=evaluate(problem, choice), bound=0.0))
        narrow = copy.deepcopy(study.model)
        autoprec.compile(narrow, plan=plan, events=None)
        found = storage_study.gradients(study, narrow)
        for row, value in zip(problem.rows, predicted, strict=True):
            if value > 0.0 and row.gemms and problem.gemms[row.gemms[0]].x == i:
                error = sum(
                    float((a[row.weight] - b[row.weight]).square().sum()) for a, b in zip(found, exact, strict=True)
                )
                ratios.append(value / (error / 4))
    assert len(ratios) >= 8
    assert min(ratios) >= 0.3 and max(ratios) <= 10.0
    assert 0.5 <= sorted(ratios)[len(ratios) // 2] <= 3.0
