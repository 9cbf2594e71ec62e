"""Gated units: an activation times another tensor, into a product. What the first products made is all that is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.graphs import Role
from autoprec.planning.evaluator import evaluate
from autoprec.planning.milp import Program
from autoprec.planning.neighbours import Neighbours
from autoprec.planning.planner import ask, propose
from autoprec.planning.polish import flips, tied_groups
from autoprec.planning.proposals import Question
from autoprec.planning.solutions import Solution
from autoprec.planning.tabulate import Tabulated
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import RECOMPUTED, Assignment, Plan, Storage
from tests.planning.test_scale import disagreement
from tests.planning.test_solvers import program_says, random_choice
from tests.test_keeping import rounded
from tests.test_remaking import planned, remakings, step
from tests.test_tournament import tournament_of


class Gated(nn.Module):
    """An activation of one product times another, or parts of one, into a third."""

    def __init__(self, body: Callable[[Gated, Tensor], Tensor], width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.u, self.b, self.c = (
            nn.Parameter(torch.randn(n, m) / n**0.5) for n, m in ((6, width), (6, width), (width, 5), (6, 2 * width))
        )
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x) @ self.b


GATES: dict[str, tuple[Callable[[Gated, Tensor], Tensor], dict[str, tuple[str, ...]]]] = {
    "swiglu": (
        lambda s, x: F.silu(x @ s.a) * (x @ s.u),
        {":silu#0": (":matmul#0",), ":mul#0": (":matmul#0", ":matmul#1")},
    ),
    "geglu, the other way around": (
        lambda s, x: (x @ s.u) * F.gelu(x @ s.a),
        {":gelu#0": (":matmul#1",), ":mul#0": (":matmul#0", ":matmul#1")},
    ),
    "of two parts": (
        lambda s, x: (lambda g, u: F.silu(g) * u)(*(x @ s.c).chunk(2, -1)),
        {":silu#0": (":matmul#0",), ":mul#0": (":matmul#0",)},
    ),
    "ReLU": (lambda s, x: F.relu(x @ s.a) * (x @ s.u), {":mul#0": (":relu#0", ":matmul#1")}),
    "sigmoid": (lambda s, x: torch.sigmoid(x @ s.a) * (x @ s.u), {":mul#0": (":sigmoid#0", ":matmul#1")}),
    "a norm": (
        lambda s, x: F.layer_norm(x @ s.a, s.a.shape[1:]) * (x @ s.u),
        {":layer_norm#0": (":matmul#0",), ":mul#0": (":matmul#0", ":matmul#1")},
    ),
    "with itself": (lambda s, x: (lambda h: h * h)(x @ s.a), {":mul#0": (":matmul#0",)}),
    "a number": (lambda s, x: 0.5 * F.gelu(x @ s.a), {":mul#0": (":matmul#0",)}),
    "one row": (
        lambda s, x: F.silu(x @ s.a) * (x @ s.u)[:1],
        {":silu#0": (":matmul#0",), ":mul#0": (":matmul#0", ":matmul#1")},
    ),
    "three factors": (
        lambda s, x: F.silu(x @ s.a) * (x @ s.u) * F.gelu(x @ s.u),
        {":silu#0": (":matmul#0",), ":mul#0": (":matmul#0", ":matmul#1"), ":gelu#0": (":matmul#2",),
         ":mul#1": (":matmul#0", ":matmul#1", ":matmul#2")},
    ),
}  # fmt: skip


def gated(name: str, fmt: str, *, narrow: bool = False, recomputed: bool = True) -> tuple[Gated, Plan]:
    """Everything in a format, and what may be made again made again, or kept; of what it is made in E4M3, or as it
    is."""
    body, found = GATES[name]
    model = Gated(body)
    autoprec.compile(model, plan=Plan(assignments=()), events=None)
    model(torch.randn(4, 6))
    ops = autoprec.session(model).bindings[0].ops
    assignments = tuple(Assignment(op=op.id, role=r, format=fmt, reason="") for op in ops for r in op.roles
                        if op.kind not in ("chunk", "getitem"))  # fmt: skip
    sources = dict.fromkeys(source for some in found.values() for source in some if "matmul" in source)
    storages = tuple(Storage(tensor=t, format="fp8_e4m3", reason="") for t in sources) if narrow else ()
    if recomputed:
        storages += tuple(Storage(tensor=t, format=RECOMPUTED, made_from=s, reason="") for t, s in found.items())
    return autoprec.unwrap(model), Plan(assignments=assignments, storages=storages)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", GATES)
def test_of_a_gated_unit_what_the_products_made_is_kept_alone(name: str, fmt: str) -> None:
    """With the gradients that it has where all is kept: bitwise (products in FP32, which torch lays out another way, to
    their last bits)."""
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    found, kept = [], []
    for recomputed in (False, True):
        model, plan = gated(name, fmt, recomputed=recomputed)
        found.append(step(model, plan, x))
        kept.append(saved_bytes(lambda m=model: m(x).square().mean(), [*model.parameters(), x]))  # type: ignore[misc]
    for a, b in zip(*found, strict=True):
        if a is not None:
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6) if fmt == "fp32" else torch.equal(a, b)
    item = 4 if fmt == "fp32" else 2
    gone = len(GATES[name][1]) * 64 * 32 * item
    assert kept[1] <= kept[0] - gone + 64  # nothing is kept in place of what is made again


@pytest.mark.parametrize("name", GATES)
def test_a_gated_unit_is_read_as_its_rounded_sources_give_it(name: str) -> None:
    """Its last weight's gradient, against what the same function makes of rounded products."""
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    model, plan = gated(name, "fp32", narrow=True)
    out = step(model, plan, x)
    plain = Gated(GATES[name][0])
    upstream = 2.0 / (64 * 5) * (plain.body(plain, x) @ plain.b).detach()

    class Rounds:
        """In the place of the input: products with it are rounded as they are kept."""

        def __matmul__(self, weight: Tensor) -> Tensor:
            return rounded((x @ weight).detach(), "fp8_e4m3")

    with torch.no_grad():
        read = plain.body(plain, Rounds())  # type: ignore[arg-type]
    expected = read.t() @ upstream
    kept_as_it_is = [s for some in GATES[name][1].values() for s in some if "matmul" not in s]
    grad = model.b.grad
    assert grad is not None
    if not kept_as_it_is:  # else one factor is exact
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    exact = (plain.body(plain, x).t() @ upstream).detach()
    assert not torch.allclose(grad, exact, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(g).all() for g in out if g is not None)


@pytest.mark.parametrize("count", [5, 60])
def test_of_a_long_product_what_is_planned_is_what_can_be_made(count: int) -> None:
    """More factors in a row than are made again in a row, and as soon as of a short one: nothing is made of what is
    made again itself, which a rewritten graph would refuse."""

    def body(s: Gated, x: Tensor) -> Tensor:
        h = x @ s.a
        for k in range(count):
            h = h * torch.tanh(x @ s.u * (k + 1.0) / count)
        return h

    session = planned(Gated(body), objective="bytes", storage={"formats": ("fp8_e4m3",)})
    again = remakings(session)
    assert again and not {s for made_from in again.values() for s in made_from} & set(again)
    assert session.plan is not None and "recomputed" in {s.format for s in session.plan.storages}


def test_second_derivatives_through_a_factor_that_is_made_again() -> None:
    """What a hook gives back is a part of the graph again: as without it."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for recomputed in (False, True):
        model, plan = gated("swiglu", "fp32")
        storages = tuple(s for s in plan.storages if recomputed and s.tensor == ":silu#0")
        autoprec.compile(model, plan=Plan(assignments=(), storages=storages), events=None)
        (first,) = torch.autograd.grad(model(x).square().mean(), model.u, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [model.a, model.u, model.b]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradients_of_both_factors_are_made_with_rounded_sources() -> None:
    """By hand, in FP32: of u with silu(g), of g with u and silu'(g)."""
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    model, plan = gated("swiglu", "fp32", narrow=True)
    step(model, plan, x)
    with torch.no_grad():
        g, u = x @ model.a, x @ model.u
        upstream = 2.0 / (64 * 5) * (F.silu(g) * u @ model.b) @ model.b.t()
        g, u = rounded(g, "fp8_e4m3"), rounded(u, "fp8_e4m3")
        s = torch.sigmoid(g)
        of_u, of_g = x.t() @ (upstream * g * s), x.t() @ (upstream * u * s * (1 + g * (1 - s)))
    torch.testing.assert_close(model.u.grad, of_u, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.a.grad, of_g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["swiglu", "of two parts", "a norm"])
def test_compiled_too_the_sources_are_kept_alone(name: str) -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    model, plan = gated(name, "bf16", narrow=True)
    eager = step(model, plan, x)
    again, _ = gated(name, "bf16", narrow=True)
    autoprec.compile(again, plan=plan, events=None, backend="inductor")
    loss = again(x).square().mean()
    loss.backward()
    for a, b in zip(eager, [loss.detach(), *(p.grad for p in again.parameters())], strict=True):
        if a is not None and b is not None:
            assert float((a - b).norm()) <= 2.0**-6 * float(a.norm())
    (made,) = autoprec.session(again).lowering.compiled
    large = {t.tensor for t in made.kept if t.bytes >= 64 * 32}
    assert large == {s.tensor for s in plan.storages if s.format == "fp8_e4m3"}


@pytest.mark.parametrize("storage", [(), ("fp8_e4m3",)])
@pytest.mark.parametrize("name", GATES)
def test_gated_units_are_candidates(name: str, storage: tuple[str, ...]) -> None:
    session = planned(Gated(GATES[name][0]), objective="bytes", storage={"formats": storage})
    assert remakings(session) == GATES[name][1]


def calibrated(name: str, data: list[Tensor], width: int = 32, formats: Sequence[str] = ("fp32",)) -> autoprec.Session:
    """Of a gated unit, with storages in E4M3 and room for all noise."""
    policy = autoprec.Policy(name="p", formats=formats, objective="bytes", noise={"gradient": 1e3, "loss": 1e3},
                             storage={"formats": ("fp8_e4m3",)})  # fmt: skip
    model = Gated(GATES[name][0], width=width)
    autoprec.compile(model, policy=policy, batches=data, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    return autoprec.session(model)


def asked(session: autoprec.Session) -> Question:
    return ask(session.graph, session.profile, session.device, session.policy)


@pytest.mark.parametrize("again", [":silu#0", ":mul#0"])
def test_the_error_of_what_is_made_again_is_about_what_is_predicted(again: str) -> None:
    """Of the weight that is multiplied by it or by what it is a factor of, where both sources are kept in E4M3, beyond
    what these add themselves."""
    torch.manual_seed(2)
    data = [torch.randn(64, 6) for _ in range(4)]
    proposals = propose(asked(calibrated("swiglu", data)))
    problem, weight = proposals.problem, {":silu#0": "u", ":mul#0": "b"}[again]
    sources = uniform_choice(problem, "fp32").keeping(problem.tensor_index[":matmul#0"], "fp8_e4m3")
    if again == ":mul#0":
        sources = sources.keeping(problem.tensor_index[":matmul#1"], "fp8_e4m3")
    choice = sources.keeping(problem.tensor_index[again], RECOMPUTED)
    row = next(k for k, r in enumerate(problem.rows) if r.weight == weight)
    predicted = evaluate(problem, choice).rows[row] - evaluate(problem, sources).rows[row]
    plan = proposals.decisions(Solution(choice=choice, evaluation=evaluate(problem, choice), bound=0.0))
    error, plain, narrow = 0.0, Gated(GATES["swiglu"][0]), Gated(GATES["swiglu"][0])
    autoprec.compile(narrow, plan=plan, events=None)
    for x in data:
        found = []
        for own in (plain, narrow):
            own.zero_grad()
            own(x).square().mean().backward()
            found.append(dict(own.named_parameters())[weight].grad)
        error += float((found[0] - found[1]).square().sum()) / len(data)
    assert error > 0.0 and 0.3 <= predicted / error <= 10.0


@pytest.mark.parametrize("formats", [("fp32",), ("fp32", "bf16")])
@pytest.mark.parametrize(
    "name", ["swiglu", "of two parts", "ReLU", "a norm", "with itself", "a number", "three factors"]
)
def test_the_peak_of_a_gated_unit_is_predicted(name: str, formats: tuple[str, ...]) -> None:
    data = [torch.randn(2048, 6) for _ in range(2)]
    policy = autoprec.Policy(name="p", formats=formats, objective="bytes", noise={"gradient": 10.0, "loss": 10.0},
                             storage={"formats": ("fp8_e4m3",)})  # fmt: skip
    model = Gated(GATES[name][0], width=256)
    autoprec.compile(model, policy=policy, batches=data, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    plan = autoprec.session(model).plan
    assert plan is not None
    (mine,) = [c for c in plan.contestants if c.name == "solver"]
    assert mine.measured is not None and "recomputed" in mine.formats
    assert mine.predicted.peak_bytes == pytest.approx(mine.measured.peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["swiglu", "three factors"])
def test_however_factors_are_kept_the_peak_is_as_predicted(name: str) -> None:
    """What a recipe reads is held as it is kept, and not until the recipe is opened."""
    data = [torch.randn(2048, 6) for _ in range(2)]
    session = calibrated(name, data, width=256)
    proposals = propose(asked(session))
    problem, tournament = proposals.problem, tournament_of(session)
    ways = [[(i, f) for f in ("", *problem.tensors[i].storages)] for i in problem.storable]
    chance = random.Random(0)
    for picked in [[w[-1] for w in ways], *([chance.choice(w) for w in ways] for _ in range(30))]:
        choice = uniform_choice(problem, "fp32")
        for i, f in picked:
            choice = choice.keeping(i, f) if f else choice
        evaluation = evaluate(problem, choice)
        plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
        predicted, measured = evaluation.peak_bytes - problem.fixed_bytes, tournament.peak_of(plan)
        assert measured is not None and measured <= 1.005 * predicted, picked
        kept = {problem.tensors[i].id: f for i, f in picked if f}
        sources = {
            s
            for t, f in kept.items()
            if f == RECOMPUTED
            for s in problem.tensors[problem.tensor_index[t]].remaking.made_from
        }  # type: ignore[union-attr]
        if sources <= kept.keys():  # others count as if they were decoded
            assert predicted == pytest.approx(measured, rel=0.005), picked


@pytest.mark.parametrize("name", GATES)
def test_in_whatever_formats_the_peak_is_as_predicted(name: str) -> None:
    """All that may be is made again, each step of that in a format of its own: what one reads and makes is there, what
    it was cast from is not."""
    data = [torch.randn(2048, 6) for _ in range(2)]
    session = calibrated(name, data, width=256, formats=("fp32", "bf16"))
    proposals = propose(asked(session))
    problem, tournament, chance = proposals.problem, tournament_of(session), random.Random(0)
    tied = tied_groups(problem)
    for _ in range(25):
        choice = uniform_choice(problem, "fp32")
        for unit in range(len(problem.units)):
            choice = chance.choice([choice, *(changed for _, changed in flips(problem, choice, tied, unit))])
        for i in problem.storable:
            choice = choice.keeping(i, problem.tensors[i].storages[-1])
        evaluation = evaluate(problem, choice)
        plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
        predicted, measured = evaluation.peak_bytes - problem.fixed_bytes, tournament.peak_of(plan)
        assert predicted == pytest.approx(measured, rel=0.005), plan.assignments


class Parts(nn.Module):
    """One product in three parts: a gate, what it gates, and a factor of the result, transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(*s) / s[0] ** 0.5) for s in ((6, 96), (32, 5)))

    def forward(self, x: Tensor) -> Tensor:
        g, u, v = (x @ self.a).chunk(3, -1)
        return (F.silu(g) * u * v.unflatten(-1, (4, 8)).transpose(0, 1).transpose(0, 1).flatten(1)) @ self.b


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3"])
def test_parts_of_one_memory_are_compiled_as_they_are(storage: str, fmt: str) -> None:
    """A compiler gives a part a memory of its own; what lies around it there is not the rest of the tensor."""
    x = torch.randn(64, 6)
    ops = (":matmul#0", ":silu#0", ":mul#0", ":mul#1", ":matmul#1")
    roles = {o: tuple(Role) if "matmul" in o else (Role.OUTPUT,) for o in ops}
    plan = Plan(
        assignments=tuple(Assignment(op=o, role=r, format=fmt, reason="") for o in ops for r in roles[o]),
        storages=(Storage(tensor=":matmul#0", format=storage, reason=""),),
    )
    found = []
    for backend in ("eager", "inductor"):
        model = autoprec.compile(Parts(), plan=plan, events=None, backend=backend)  # type: ignore[arg-type]
        model(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for eager, compiled in zip(*found, strict=True):
        assert float((eager - compiled).norm()) <= 2.0**-6 * float(eager.norm())


@pytest.mark.parametrize("again", [":silu#0", ":mul#0"])
def test_what_is_made_of_tensors_that_are_kept_as_they_are_has_no_error(again: str) -> None:
    """Neither predicted nor found."""
    torch.manual_seed(2)
    data = [torch.randn(64, 6) for _ in range(2)]
    proposals = propose(asked(calibrated("swiglu", data)))
    problem, plain = proposals.problem, uniform_choice(proposals.problem, "fp32")
    choice = plain.keeping(problem.tensor_index[again], RECOMPUTED)
    assert evaluate(problem, choice).rows == evaluate(problem, plain).rows
    plan = proposals.decisions(Solution(choice=choice, evaluation=evaluate(problem, choice), bound=0.0))
    found = []
    for own in (Gated(GATES["swiglu"][0]), Gated(GATES["swiglu"][0])):
        if found:
            autoprec.compile(own, plan=plan, events=None)
        own(data[0]).square().mean().backward()
        found.append({n: p.grad for n, p in own.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        # Products whose input is made again add up in another order than torch's own.
        torch.testing.assert_close(found[1][name], gradient, rtol=0.0, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("again", [":silu#0", ":mul#0"])
def test_the_program_and_neighbours_count_the_noise_of_sources(again: str) -> None:
    """A limit between the noise of the sources and that with what is made of them: the program's rows forbid it."""
    torch.manual_seed(2)
    problem = asked(calibrated("swiglu", [torch.randn(64, 6) for _ in range(2)])).problem
    sources = uniform_choice(problem, "fp32").keeping(problem.tensor_index[":matmul#0"], "fp8_e4m3")
    choice = sources.keeping(problem.tensor_index[again], RECOMPUTED)
    less, more = evaluate(problem, sources).rows, evaluate(problem, choice).rows
    tight = replace(problem, rows=tuple(
        replace(row, limit=(a + b) / 2) if b > a else row for row, a, b in zip(problem.rows, less, more, strict=True)
    ))  # fmt: skip
    assert more != less and program_says(tight, sources) is not None and program_says(tight, choice) is None
    alone = uniform_choice(problem, "fp32").keeping(problem.tensor_index[again], RECOMPUTED)
    assert Neighbours(problem, alone).evaluate(choice).rows == pytest.approx(more)


@pytest.mark.parametrize("planted", [False, True])
def test_tables_count_the_noise_of_sources(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say what the evaluator says of random plans, and would not without it."""
    torch.manual_seed(2)
    problem = asked(calibrated("swiglu", [torch.randn(64, 6) for _ in range(2)])).problem
    if planted:
        monkeypatch.setattr(Tabulated, "_inheriting", lambda *_: None)
    assert bool(disagreement(problem, np.random.default_rng(0))) is planted


@pytest.mark.parametrize("forgotten", ["", "tables", "program", "neighbours"])
@pytest.mark.parametrize("name", ["swiglu", "three factors"])
def test_what_is_there_while_a_tensor_is_made_again_all_count_alike(
    name: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, the program and neighbours as the evaluator: in random formats, and with random storages."""
    torch.manual_seed(2)
    data = [torch.randn(64, 6) for _ in range(2)]
    problem = asked(calibrated(name, data, formats=("fp32", "bf16"))).problem
    centre, rng, wrong = uniform_choice(problem, "fp32"), np.random.default_rng(0), set[str]()
    if forgotten in ("tables", "program"):
        monkeypatch.setattr({"tables": Tabulated, "program": Program}[forgotten], "_open", lambda *_: None)
    if any(disagreement(problem, rng) for _ in range(10)):
        wrong.add("tables")
    neighbours = Neighbours(problem, centre)
    if forgotten == "neighbours":
        monkeypatch.setattr(Neighbours, "_part", lambda self, step, key: self._parts[key])
    for _ in range(50):
        choice = random_choice(problem, rng)
        for i in problem.storable:
            if rng.random() < 0.7:
                choice = choice.keeping(i, problem.tensors[i].storages[-1])
        said = evaluate(problem, choice)
        if neighbours.evaluate(choice).bytes_at != said.bytes_at:
            wrong.add("neighbours")
        told = program_says(problem, choice)
        if told is None or [problem.fixed_bytes + size for size in told[1]] != pytest.approx(said.bytes_at, rel=1e-6):
            wrong.add("program")
    assert wrong == ({forgotten} if forgotten else set())
