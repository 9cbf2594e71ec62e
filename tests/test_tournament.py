"""Before a plan is adopted, its rivals run on a replayed step; replay leaves no trace."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.devices import Device
from autoprec.errors import PlanError
from autoprec.execution.measuring import peak_bytes
from autoprec.execution.replay import CallRecord
from autoprec.execution.tournament import Tournament, margin_of
from autoprec.graphs import Role
from autoprec.numerics import gemm
from autoprec.planning.contest import runners
from autoprec.planning.planner import ask, propose
from autoprec.planning.proposals import SOLVER
from autoprec.plans import Assignment, Plan
from autoprec.serial import load_policy
from tests.models import Transformer, language_loss

CPU = torch.device("cpu")


class Stateful(nn.Module):
    """Everything that a forward pass may change: statistics, random state, a counter, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.down.weight.clamp_(-0.2, 0.2)
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.1, self.training))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def observed(model: nn.Module, batches: list[Tensor], loss=loss_of, policy="balanced", **changes):
    """A session with its last calibration step recorded, and no plan yet."""
    autoprec.compile(model, policy=load_policy(policy).replaced(**changes), events=None)
    session = autoprec.session(model)
    session.calibrate(batches, loss)
    return session


def tournament_of(session) -> Tournament:
    return Tournament(session._calls, session._guard.buffers.values(), "cpu", session.lowering)


def plans_of(session, **changes) -> dict[str, Plan]:
    policy = session.policy.replaced(noise={"gradient": 1e3, "loss": 1e3}, **changes)
    proposals = propose(ask(session.graph, session.profile, session.measure_device(), policy))
    return runners(proposals)


def everything(model: nn.Module) -> dict[str, Tensor]:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state |= {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return state | {"random": torch.get_rng_state()}


def test_replay_leaves_no_trace() -> None:
    model = Stateful()
    session = observed(model, [torch.randn(32, 16) for _ in range(3)])
    loss_of(model, torch.randn(32, 16)).backward()
    with torch.no_grad():
        model.down.weight.fill_(0.5)  # the clamp of the forward pass would change it
    before, objects = everything(model), {n: id(p.grad) for n, p in model.named_parameters()}
    plans = plans_of(session)
    assert len(plans) >= 3
    outcomes = tournament_of(session).run(plans)
    assert all(not o.failure and o.seconds > 0.0 and o.peak_bytes > 0 for o in outcomes.values())
    after = everything(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert objects == {n: id(p.grad) for n, p in model.named_parameters()}


def test_the_replayed_step_is_the_step() -> None:
    """Gradients of the identity, bitwise those of the plain model at the same random state."""
    torch.manual_seed(0)
    model = Stateful()
    plain = copy.deepcopy(model)
    batches = [torch.randn(32, 16) for _ in range(2)]
    session = observed(model, batches)
    tournament = tournament_of(session)
    torch.set_rng_state(tournament._calls[0].rng)
    plain.load_state_dict(model.state_dict())
    loss_of(plain, batches[-1]).backward()
    outcome = tournament.run({"fp32": plans_of(session)["fp32"]})["fp32"]
    for name, p in plain.named_parameters():
        assert torch.equal(outcome.gradients[name], p.grad.flatten()), name


@pytest.mark.parametrize("pieces", [False, True])
def test_the_replayed_peak_is_that_of_a_step(pieces: bool) -> None:
    model = Transformer(width=64, depth=2, vocabulary=64, graph_break=pieces)
    batches = [torch.randint(0, 64, (4, 33)) for _ in range(3)]
    session = observed(model, batches, language_loss)
    plans = plans_of(session)
    outcomes = tournament_of(session).run(plans)
    for name, plan in plans.items():
        live = copy.deepcopy(model)
        autoprec.compile(live, plan=plan, events=None)

        def step(live: nn.Module = live) -> None:
            language_loss(live, batches[-1]).backward()
            autoprec.session(live).step()

        step()
        step()
        assert outcomes[name].peak_bytes == pytest.approx(peak_bytes(step, CPU), rel=0.05 if pieces else 0.02), name


def test_a_replay_holds_no_outputs_while_it_goes_back() -> None:
    """As a step whose loss has no use for them any more. The peak is in the backward pass here, and an output a fifth
    of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64))
    batches = [torch.randn(4096, 8) for _ in range(3)]

    def mean(live: nn.Module, x: Tensor) -> Tensor:
        return live(x).mean()

    session = observed(model, batches, mean)
    replayed = tournament_of(session).run({"fp32": plans_of(session)["fp32"]})["fp32"].peak_bytes

    def step() -> None:
        mean(model, batches[-1]).backward()
        model.zero_grad()

    autoprec.unwrap(model)
    step()
    assert replayed == pytest.approx(peak_bytes(step, CPU), rel=0.05)


def test_change_of_loss_and_gradients() -> None:
    """For a model that returns its loss, the change is the loss's own."""
    model = Transformer(width=64, depth=1, vocabulary=64)
    model.drop = None
    model.eval().train()
    for block in model.blocks:
        block.drop.p = 0.0
    batches = [torch.randint(0, 64, (4, 33)) for _ in range(3)]
    plain, narrow = copy.deepcopy(model), copy.deepcopy(model)
    session = observed(model, batches, language_loss)
    plans = plans_of(session)
    outcomes = tournament_of(session).run(plans)
    autoprec.compile(narrow, plan=plans["bf16"], events=None)
    losses = [language_loss(m, batches[-1]) for m in (plain, narrow)]
    for loss in losses:
        loss.backward()
    change = outcomes["bf16"].output - outcomes["fp32"].output
    assert change == pytest.approx((losses[1].double() - losses[0].double()).item(), abs=1e-6)
    assert change != 0.0
    a, b = outcomes["bf16"].gradients["blocks.0.up.weight"], narrow.blocks[0].up.weight.grad
    assert torch.equal(a, b.flatten()[:: -(-b.numel() // (1 << 14))])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_micro_batches_replay_the_last_and_pieces_replay_together(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of good micro-batches nothing is kept but the last, also where the host asks a device for the verdict."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: on_cpu))
    model = Stateful()
    autoprec.compile(model, policy=load_policy("balanced").replaced(calibration={"steps": 2}), events=None)
    session = autoprec.session(model)
    calls = []
    for _ in range(3):
        loss_of(model, torch.randn(8, 16)).backward()
        assert len(session._calls) == 1
        calls += session._calls
    tournament = Tournament(calls, session._guard.buffers.values(), "cpu", session.lowering)
    assert tournament._calls == calls[-1:]

    broken = Transformer(width=32, depth=2, vocabulary=64, graph_break=True)
    session = observed(broken, [torch.randint(0, 64, (4, 33)) for _ in range(2)], language_loss)
    tournament = tournament_of(session)
    assert len(tournament._calls) > 1
    gradients = tournament.run({"fp32": Plan(assignments=())})["fp32"].gradients
    assert set(gradients) == {n for n, _ in broken.named_parameters()}


def test_what_overflows_is_not_adopted() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    session = observed(model, [torch.randn(4, 8) for _ in range(2)], policy="bf16")
    fp16 = Plan(
        assignments=tuple(
            Assignment(op=f"{i}:linear#0", role=role, format="fp16", reason="by hand") for i in "01" for role in Role
        )
    )
    found = tournament_of(session).run({"fp32": Plan(assignments=()), "fp16": fp16})
    assert not found["fp32"].failure
    assert "not finite" in found["fp16"].failure


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), PlanError("it cannot be written")])
def test_a_solved_plan_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Another is adopted, and the run goes on."""
    made = Tournament._contestant

    def refusing(self: Tournament, plan: Plan) -> Any:
        if not plan.is_identity:
            raise error
        return made(self, plan)

    monkeypatch.setattr(Tournament, "_contestant", refusing)
    batches = [torch.randn(32, 16) for _ in range(2)]
    session = observed(Stateful(), batches, objective="bytes", formats=["fp32"], storage={"formats": ["fp8_e4m3"]})
    plan = session.make_plan()
    assert plan.adopted is not None and plan.adopted.name == "fp32" and plan.is_identity
    (told,) = [e for e in session.events if e.kind == "warning" and e.trigger == "contest"]
    assert str(error) in told.evidence and "fp32 was adopted" in told.evidence


@pytest.mark.parametrize("n", range(9, 15))
def test_the_margin_of_a_median_is_the_narrowest_that_is_sure_enough(n: int) -> None:
    """Of order statistics: the true median is between two of them unless too many values fell on one side of it."""

    def sure(left_out: int) -> float:
        below = [sum(sides) for sides in itertools.product((0, 1), repeat=n)]
        return sum(left_out < b < n - left_out for b in below) / len(below)

    left_out = round((n - 1) / 2 - margin_of([1.0 + k for k in range(n)][::-1]))
    assert sure(left_out) >= 0.95 > sure(left_out + 1)


@pytest.mark.parametrize("n", [4, 5, 8, 12])
def test_one_slow_round_leaves_nothing_open(n: int) -> None:
    assert margin_of([0.5] * (n - 1) + [1.6]) == 0.0
    assert margin_of([0.5, 0.6, 0.7, 9.0]) == pytest.approx(0.05) and margin_of([1.0, 2.0, 9.0]) == 0.0


@pytest.mark.parametrize("loop", ["up front", "in the loop"])
def test_compile_adopts_what_was_fastest(loop: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1))
    policy = load_policy("balanced").replaced(calibration={"steps": 2}, noise={"gradient": 1e3, "loss": 1e3})
    batches = [torch.randn(8, 4) for _ in range(2)]
    if loop == "up front":
        autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    else:
        autoprec.compile(model, policy=policy, events=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    plan = autoprec.session(model).plan
    assert plan is not None and len(plan.contestants) >= 2
    own = {c.name: c.measured for c in plan.contestants if c.measured is not None}
    assert "fp32" in own and own["fp32"].ratio == 1.0 and own["fp32"].gradient_ratio == 0.0
    assert plan.adopted is not None
    assert own[plan.adopted.name].ratio <= 1.10 * min(m.ratio for m in own.values())
    assert all((m.ratio_margin > 0.0) == (name != "fp32") for name, m in own.items())


def test_a_peak_that_was_predicted_too_low_is_found_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what is known of workspace the plan for a budget breaks it; measured, it is made again for less."""
    monkeypatch.setattr(Device, "workspace_by_key", {})
    made: list[Plan] = []
    plain = Tournament.run

    def counted(self: Tournament, plans):
        made.append(plans[SOLVER])
        return plain(self, plans)

    monkeypatch.setattr(Tournament, "run", counted)
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 10))
    batches = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(3)]
    policy = load_policy("balanced").replaced(calibration={"steps": 3}, noise={"gradient": 1e3, "loss": 1e3})
    autoprec.compile(
        model, policy=policy, budget="48%", batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        events=None,
    )  # fmt: skip
    plan = autoprec.session(model).plan
    assert plan is not None and plan.budget_bytes is not None
    own = plan.adopted
    assert own is not None and own.measured is not None and own.measured.peak_bytes <= 1.02 * plan.budget_bytes
    peaks = [plan.predicted.peak_bytes for plan in made]
    assert len(peaks) > 1 and peaks == sorted(set(peaks), reverse=True) and peaks[-1] == own.predicted.peak_bytes
    assert own.predicted.peak_bytes < own.measured.peak_bytes


class Between(nn.Module):
    """Gives back what it goes on with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return h, self.second(h), h


def test_a_replay_is_given_the_gradients_that_came_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the graph goes on with, not those that it sent itself: they would count twice; none where none came."""
    given: list[dict[int, Tensor]] = []

    class Looking(Tournament):
        def __init__(self, calls: Iterable[CallRecord], *args: Any) -> None:
            calls = list(calls)
            given.extend(c.output_gradients for c in calls)
            super().__init__(calls, *args)

    monkeypatch.setattr("autoprec.budgeting.Tournament", Looking)
    for used in (0.0, 2.0):
        torch._dynamo.reset()
        model, batches = Between(), [torch.randn(4, 8) for _ in range(2)]

        def loss_of(m: nn.Module, x: Tensor, used: float = used) -> Tensor:
            h, y, _ = m(x)
            return y.square().sum() + (used * h.sum() if used else 0.0)

        policy = load_policy("balanced").replaced(calibration={"steps": 2})
        autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_of, events=None)
        assert sorted(given[-1]) == ([0, 1] if used else [1])
        if used:
            torch.testing.assert_close(given[-1][0], torch.full((4, 8), used), atol=1e-5, rtol=0.0)
        unused = [t.id for t in autoprec.session(model).graph.tensors if t.is_unused]
        assert unused == ([] if used else [":tanh#0"])


def test_what_a_graph_gives_back_and_goes_on_with_can_be_differentiated_by() -> None:
    """As a penalty on the gradients of features does: it is the tensor itself, while the model is FP32."""
    model, batches = Between(), [torch.randn(4, 8) for _ in range(2)]

    def loss_of(m: nn.Module, x: Tensor) -> Tensor:
        h, y, _ = m(x)
        (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        return y.sum() + g.square().sum()

    expected = copy.deepcopy(model)
    policy = load_policy("safe").replaced(calibration={"steps": 2})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_of, events=None)
    for m in (model, expected):
        loss_of(m, batches[0]).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("wrong", ["of another row", "twice as large"])
def test_a_gradient_that_is_no_rounded_one_is_not_adopted(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite, and as large as it should be, or nearly: what a kernel gives that computes something else."""
    torch.manual_seed(0)
    own = gemm._weight_gradient

    def other(*args: Any) -> Tensor:
        return own(*args).roll(1, 0) if wrong == "of another row" else own(*args) * 2

    monkeypatch.setattr(gemm, "_weight_gradient", other)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    room = {"gradient": 10.0, "loss": 10.0}
    policy = autoprec.Policy(name="narrow", formats=("fp32", "bf16"), objective="bytes", noise=room)
    batches = [torch.randn(64, 16) for _ in range(4)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(model)
    found = {c.name: c.measured for c in session.plan.contestants if c.measured is not None}
    assert session.plan.is_identity and not found["fp32"].failure
    assert all("of itself" in own.failure for name, own in found.items() if name != "fp32") and len(found) > 1
    (told,) = [e.evidence for e in session.events if e.trigger == "contest"]
    assert "the solver's plan failed: the gradient of " in told
