"""The noise of a plan as a whole, under the ranges of a window, against what the policy allows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec import scheduling
from autoprec.floors import Ban
from autoprec.formats import FP16
from autoprec.monitoring import budgets
from autoprec.monitoring.budgets import NoiseJudge
from autoprec.monitoring.renewing import renewed
from autoprec.numerics.histograms import histogram, sample
from autoprec.planning.noise import relative_error
from autoprec.planning.problem import build_problem
from autoprec.profiles import Profile, RangeHistogram, TensorProfile
from autoprec.sessions import Session

Data = Callable[[int], Tensor]


def ordinary(seed: int) -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(seed))


def heavy(seed: int) -> Tensor:
    """Tails of a log-normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(256, 32, generator=generator) * torch.exp(1.5 * torch.randn(256, 32, generator=generator))


def small(seed: int) -> Tensor:
    """All of it among the subnormal numbers of FP16, where calibration saw none."""
    return ordinary(seed) * 2.0**-18


def policy(gradient: float = 10.0, storages: tuple[str, ...] = ()) -> autoprec.Policy:
    return autoprec.Policy(
        name="narrow",
        formats=("fp32", "fp16"),
        objective="bytes",
        storage={"formats": storages},
        rules=[{"match": "*", "kinds": ["linear"], "pin": "fp16", "optional": True}],
        calibration={"steps": 8},
        noise={"gradient": gradient, "loss": 1e9},
        monitor={"window_steps": 4, "interval_steps": 1, "cooldown_windows": 1, "sqnr_drop_db": 30.0},
    )


def compiled(data: Data, chosen: autoprec.Policy) -> Session:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    batches = [data(k) for k in range(8)]
    autoprec.compile(
        model, policy=chosen, batches=batches, loss_fn=lambda m, x: (m(x) - 1.0).square().mean(), events=None
    )
    return autoprec.session(model)


@cache
def calibrated(data: Data) -> Session:
    return compiled(data, policy(storages=("fp8_e4m3",)))


def judge(session: Session, window: Session) -> NoiseJudge:
    assert session.plan and session.graph and session.device and session.profile and window.profile
    return NoiseJudge(
        session.plan,
        session.graph,
        session.device,
        session.policy,
        known=session.profile,
        window=window.profile,
    )


def test_the_noise_is_that_of_the_plan() -> None:
    session = calibrated(ordinary)
    assert session.plan and session.plan.predicted
    [*ratios] = (math.sqrt(level) * 10.0 for level in judge(session, session)._usual.values())
    assert max(ratios) == pytest.approx(session.plan.predicted.gradient_ratio, rel=1e-9)
    assert session.plan.format_of and set(session.plan.storage_of.values()) & {"fp8_e4m3", "recomputed"}


def test_a_window_like_calibration_changes_nothing() -> None:
    session = calibrated(ordinary)
    found = judge(session, session)
    assert found._levels(frozenset()) == pytest.approx(found._usual, rel=0.01)
    assert found.verdicts() == ()


@pytest.mark.parametrize(("before", "after"), [(ordinary, heavy), (heavy, ordinary)])
def test_ranges_alone_tell_what_calibration_would(before: Data, after: Data) -> None:
    """The window's ranges with calibration's sensitivities, against sensitivities that were measured again."""
    session, other = calibrated(before), calibrated(after)
    assert session.plan and other.graph and other.profile and session.device
    problem = build_problem(other.graph, other.profile, session.device, session.policy)
    now, measured = judge(session, other)._levels(frozenset()), budgets._levels(problem, session.plan)
    for name in ("0.weight", "2.weight", "4.weight"):
        assert 0.8 <= now[name] / measured[name] <= 1.25, name


@pytest.mark.parametrize("octaves", [-3, 5])
def test_what_grows_as_a_whole_is_no_noise(octaves: int) -> None:
    """In formats whose steps grow with the numbers; BF16's range is FP32's."""
    session = calibrated(ordinary)
    assert session.profile and session.graph

    def moved(h: RangeHistogram | None) -> RangeHistogram | None:
        return None if h is None else h.shifted(octaves)

    tensors = session.profile.tensors
    shifted = (TensorProfile(id=t.id, values=t.values.shifted(octaves), gradients=moved(t.gradients)) for t in tensors)
    window = Profile(graph_fingerprint="", steps=1, tensors=tuple(shifted))
    there = {
        t.id: t.gradients.bins
        for t in renewed(session.profile, window, session.graph, lambda _: octaves).tensors
        if t.gradients
    }
    assert all((there[t.id] == t.gradients.bins).all() for t in tensors if t.gradients)  # without what they carried
    again = renewed(session.profile, window, session.graph, lambda _: 0)
    for was, now in zip(session.profile.tensors, again.tensors, strict=True):
        for name in ("values", "loss", "gradients", "input_weight_grad", "gradient_weight_grad"):
            a, b = getattr(was, name), getattr(now, name)
            if a is not None and a.energy > 0.0:
                assert b.energy == pytest.approx(a.energy, rel=1e-9)
                assert relative_error(b, autoprec.formats.BF16) == pytest.approx(
                    relative_error(a, autoprec.formats.BF16), rel=0.1
                ), (was.id, name)


class TwoInputs(nn.Module):
    """Of which one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) + self.second(y)


def test_a_window_like_calibration_allows_what_runs_and_no_more_than_the_budget() -> None:
    session = calibrated(ordinary)
    assert session.plan and session.profile
    [(op, fmt), *_] = [(op, f) for (op, _), f in session.plan.format_of.items() if f == "fp16"]
    assert judge(session, session).allows(Ban(op=op, format=fmt, trigger="noise_budget", changed=0))
    tight = copy.copy(judge(session, session))
    tight.policy = session.policy.replaced(noise={"gradient": 1e-6, "loss": 1e9})
    coarser = Ban(op=op, format="fp8_e5m2", trigger="noise_budget", changed=0)
    assert not tight.allows(coarser)


class Run:
    """Under a plan that uses nine tenths of the noise that is allowed."""

    def __init__(self) -> None:
        used = self._session(policy()).plan
        assert used is not None and used.predicted is not None
        self.session = self._session(policy(used.predicted.gradient_ratio / 0.95))
        assert self.session.plan is not None and self.session.plan.format_of == used.format_of
        self.optimizer = torch.optim.SGD(self.session.model.parameters(), lr=1e-9)
        self.taken = 0

    @staticmethod
    def _session(chosen: autoprec.Policy) -> Session:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = TwoInputs()
        batches = [(ordinary(k), ordinary(1000 + k)) for k in range(8)]
        autoprec.compile(model, policy=chosen, batches=batches, loss_fn=lambda m, b: Run.loss(m, *b), events=None)
        return autoprec.session(model)

    @staticmethod
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * x[:, :8].sign()).mean()  # type: ignore[no-any-return]

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x, y) * x[:, :8].sign()).mean()  # type: ignore[no-any-return]

    def steps(self, count: int, data: Data) -> None:
        for _ in range(count):
            self.taken += 1
            self.optimizer.zero_grad()
            self.loss(self.session.model, data(100 + self.taken), ordinary(2000 + self.taken)).backward()
            self.optimizer.step()

    def told(self, kind: str) -> list[autoprec.Event]:
        return [e for e in self.session.events if e.kind == kind]


def test_noise_beyond_the_budget_promotes_before_a_tensor_is_judged() -> None:
    drop = 10.0 * math.log10(
        relative_error(histogram(sample(small(0))), FP16) / relative_error(histogram(sample(ordinary(0))), FP16)
    )
    assert 25.0 < drop < 30.0  # no verdict on the tensor itself
    run = Run()
    run.steps(12, ordinary)
    assert not run.told("promoted")
    run.steps(4, small)
    assert not run.told("promoted")  # once may be an accident
    model = TwoInputs()
    rest = autoprec.session(autoprec.compile(model, policy=run.session.policy, events=None))
    assert not rest._stability.was_noisy
    rest.load_state_dict(run.session.state_dict())
    assert rest._stability.was_noisy
    run.steps(4, small)
    events = run.told("promoted")
    assert events and {e.trigger for e in events} == {"noise_budget"} and events[0].op == "first:linear#0"
    assert "of what the policy allows" in events[0].evidence and "the gradient of first.weight" in events[0].evidence
    assert run.session.plan is not None and "fp16" not in run.session.plan.format_of["first:linear#0", "output"]  # type: ignore[index]
    run.steps(12, small)
    assert len(run.told("promoted")) == len(events) and not run.told("demoted")
    run.steps(12, ordinary)
    assert {(e.op, e.trigger) for e in run.told("demoted")} >= {("first:linear#0", "quiet")}
    assert run.session.skipped_steps == 0


# What tensors are kept in -------------------------------------------------------------------------------------------


def outlying(seed: int) -> Tensor:
    """With a row that is far from all others: of a format without exponents there is less left for those."""
    return ordinary(seed) * torch.where(torch.arange(256) == 7, 40.0, 1.0).unsqueeze(1)


class Kept(Run):
    """What the second layer reads is kept in eight bits without an exponent."""

    @staticmethod
    def _session(chosen: autoprec.Policy) -> Session:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8))
        chosen = chosen.replaced(formats=("fp32",), rules=(), storage={"formats": ("int8",), "recompute": False})
        batches = [ordinary(k) for k in range(8)]
        autoprec.compile(model, policy=chosen, batches=batches, loss_fn=Run.loss_of, events=None)
        return autoprec.session(model)

    def steps(self, count: int, data: Data) -> None:
        for _ in range(count):
            self.taken += 1
            self.optimizer.zero_grad()
            self.loss_of(self.session.model, data(100 + self.taken)).backward()
            self.optimizer.step()


def test_a_tensor_that_is_kept_too_coarsely_is_kept_otherwise() -> None:
    run = Kept()
    assert run.session.plan is not None and run.session.plan.storage_of["1:relu#0"] == "int8"
    run.steps(8, ordinary)
    assert not run.told("promoted")
    run.steps(8, outlying)
    [event] = run.told("promoted")
    assert (event.op, event.role, event.was, event.now) == ("1:relu#0", "kept", "int8", "as_is")
    assert event.trigger == "noise_budget" and "without keeping it in int8 here" in event.evidence
    assert run.session.plan.storage_of.get("1:relu#0", "as_is") == "as_is"
    run.steps(8, outlying)
    assert len(run.told("promoted")) == 1 and not run.told("demoted")
    run.steps(12, ordinary)
    [event] = run.told("demoted")
    assert (event.op, event.role, event.was, event.now) == ("1:relu#0", "kept", "as_is", "int8")
    assert run.session.plan.storage_of["1:relu#0"] == "int8"


def test_a_noisy_window_of_another_plan_does_not_count() -> None:
    run = Run()
    run.steps(12, ordinary)
    run.steps(4, small)
    assert run.session._stability.was_noisy and run.session.plan is not None
    run.session.adopt(run.session.plan)
    run.steps(4, small)
    assert run.session._stability.was_noisy and not run.told("promoted")


def test_formats_with_steps_in_proportion_are_not_looked_at() -> None:
    """Nor is a second problem made for them."""
    session = calibrated(ordinary)
    assert session.plan is not None
    bf16 = replace(
        session.plan, storages=(), assignments=tuple(replace(a, format="bf16") for a in session.plan.assignments)
    )
    found = judge(session, session)
    found.plan = bf16
    assert found.verdicts() == () and "_now" not in vars(found)
    found.plan = session.plan
    assert found.verdicts() == () and "_now" in vars(found)


def test_where_no_plan_keeps_the_budgets_the_tensor_alone_is_kept_otherwise() -> None:
    plan = Kept().session.plan
    assert plan is not None
    after = scheduling._without(plan, frozenset({("1:relu#0", "int8", "kept"), ("2:linear#0", "int8")}))
    assert after.storage_of == {**plan.storage_of, "1:relu#0": "as_is"} and after.format_of == plan.format_of
    assert scheduling._without(plan, frozenset({("1:relu#0", "int8"), ("1:relu#0", "bf16", "kept")})) == plan


def test_what_is_banned_is_no_choice() -> None:
    session = Kept().session
    assert session.graph and session.profile and session.device

    def storages(*banned: tuple[str, ...]) -> tuple[str, ...]:
        problem = build_problem(
            session.graph, session.profile, session.device, session.policy, banned=frozenset(banned)
        )
        return problem.tensors[problem.tensor_index["1:relu#0"]].storages

    assert storages() == storages(("1:relu#0", "bf16", "kept"), ("0:linear#0", "int8", "kept")) == ("int8",)
    assert storages(("1:relu#0", "int8", "kept")) == ()
