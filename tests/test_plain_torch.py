"""Loops of plain torch as people write them: each is run as it is, under the identity plan, and by one added line."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import autoprec
from autoprec.plans import Plan
from autoprec.serial import load_policy

pytestmark = pytest.mark.filterwarnings("ignore")

Prepare = Callable[[nn.Module], nn.Module]
Loss = Callable[[nn.Module, int], Tensor]

CALIBRATED, STEPS = 3, 12


@dataclass
class Run:
    """What a loop saw: a loss per step, and everything else that must be the same bits."""

    losses: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def note(self, loss: Tensor, *models: nn.Module) -> None:
        self.losses.append(float(loss.detach()))
        for m in models:
            self.tensors += [p.grad.clone() for p in m.parameters() if p.grad is not None]
            self.tensors += [t.detach().clone() for t in (*m.parameters(), *m.buffers())]


Loop = Callable[[Prepare, int], Run]


def train(model: nn.Module, loss_of: Loss, steps: int, *, first: int = 0, run: Run | None = None) -> Run:
    run = Run() if run is None else run
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for i in range(first, first + steps):
        torch.manual_seed(100 + i)
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        run.note(loss, model)
    return run


def repeated(loop: Loop, steps: int, **options: Any) -> tuple[Run, list[autoprec.Session]]:
    """The loop from the same seed; with options, every model of it is compiled with them."""
    sessions: list[autoprec.Session] = []

    def prepare(model: nn.Module) -> nn.Module:
        if options:
            autoprec.compile(model, events=None, **options)
            sessions.append(autoprec.session(model))
        return model

    torch.manual_seed(0)
    return loop(prepare, steps), sessions


def same_bits_under_the_identity(loop: Loop, warned: list[str]) -> None:
    expected, _ = repeated(loop, 4)
    found, sessions = repeated(loop, 4, plan=Plan(assignments=()))
    assert found.losses == expected.losses
    assert len(found.tensors) == len(expected.tensors)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, expected.tensors, strict=True))
    for session in sessions:
        captured = {name for binding in session.bindings for name in binding.parameters.values()}
        assert captured == {name for name, _ in session.model.named_parameters()}
        assert session.steps == 4
        assert [e.trigger for e in session.events] == warned


def one_line_trains_as_fp32(loop: Loop, warned: list[str]) -> None:
    expected, _ = repeated(loop, STEPS)
    policy = load_policy("bf16").replaced(calibration={"steps": CALIBRATED})
    found, sessions = repeated(loop, STEPS, policy=policy)
    assert found.losses[:CALIBRATED] == expected.losses[:CALIBRATED]
    assert found.losses[-1] != expected.losses[-1]
    assert found.losses == pytest.approx(expected.losses, rel=0.05)
    assert statistics.mean(found.losses[-4:]) == pytest.approx(statistics.mean(expected.losses[-4:]), rel=0.02)
    for session in sessions:
        assert session.plan is not None
        assert session.steps == STEPS and session.skipped_steps == 0
        assert [e.trigger or e.kind for e in session.events] == [*warned, "planned"]
        executed = session.executed_formats()
        layers = {op.id for b in session.bindings for op in b.ops if op.kind in ("linear", "conv2d") and op.weights}
        assert layers and all(executed[op] == "bf16" for op in layers)


def teacher(x: Tensor) -> Tensor:
    return torch.tanh(x.sum(-1, keepdim=True))


def regression(model: nn.Module, i: int) -> Tensor:
    x = torch.randn(16, 8)
    return F.mse_loss(model(x), teacher(x))


def mlp(width: int = 16, inputs: int = 8, outputs: int = 1) -> nn.Sequential:
    layers = nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    return nn.Sequential(*layers)


def generator_and_discriminator(prepare: Prepare, steps: int, *, freeze: bool = False) -> Run:
    generator, discriminator = prepare(mlp(16, 4, 8)), prepare(mlp(16, 8, 1))
    g, d = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for m in (generator, discriminator))
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    bce, run = F.binary_cross_entropy_with_logits, Run()
    for i in range(steps):
        torch.manual_seed(i)
        fake = generator(torch.randn(16, 4))
        d.zero_grad()
        loss_d = bce(discriminator(torch.randn(16, 8) + 1), ones) + bce(discriminator(fake.detach()), zeros)
        loss_d.backward()
        d.step()
        discriminator.requires_grad_(not freeze)
        g.zero_grad()
        loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        g.step()
        discriminator.requires_grad_(True)
        run.losses.append(float(loss_d.detach()))
        run.note(loss_g, generator, discriminator)
    return run


def frozen_discriminator(prepare: Prepare, steps: int) -> Run:
    return generator_and_discriminator(prepare, steps, freeze=True)


def two_towers_with_one_loss(prepare: Prepare, steps: int) -> Run:
    towers = [prepare(mlp(16, 8, 8)), prepare(mlp(16, 4, 8))]
    optimizers = [torch.optim.AdamW(t.parameters(), lr=2e-3) for t in towers]
    run = Run()
    for i in range(steps):
        torch.manual_seed(i)
        x = torch.randn(16, 8)
        for optimizer in optimizers:
            optimizer.zero_grad()
        a, b = (F.normalize(t(v), dim=-1) for t, v in zip(towers, (x, x[:, :4]), strict=True))
        loss = F.cross_entropy(a @ b.t() / 0.2, torch.arange(16))
        loss.backward()
        nn.utils.clip_grad_norm_([p for t in towers for p in t.parameters()], 1.0)
        for optimizer in optimizers:
            optimizer.step()
        run.note(loss, *towers)
    return run


def accumulates_over_micro_batches(prepare: Prepare, steps: int) -> Run:
    model = prepare(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run = Run()
    for i in range(3 * steps):
        torch.manual_seed(i)
        x = torch.randn(1 if i == 3 * steps - 1 else 16, 8)
        loss = F.mse_loss(model(x), teacher(x)) / 3
        loss.backward()
        if i % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.note(loss, model)
            optimizer.zero_grad()
    return run


def evaluates_between_steps(prepare: Prepare, steps: int) -> Run:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    model, run = prepare(nn.Sequential(*layers)), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x = torch.randn(16, 8)
    for i in range(steps):
        torch.manual_seed(i)
        model.eval()
        with torch.no_grad() if i % 2 else torch.inference_mode():
            evaluated = F.mse_loss(model(x), teacher(x))
        model.train()
        optimizer.zero_grad()
        regression(model, i).backward()
        optimizer.step()
        run.note(evaluated, model)
    return run


def follows_itself_with_an_average(prepare: Prepare, steps: int) -> Run:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    ema = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)]
    prepare(model)
    ema += [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True), AveragedModel(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, run = torch.randn(16, 8), Run()
    for i in range(steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = regression(model, i)
        loss.backward()
        optimizer.step()
        for e in ema:
            e.update_parameters(model)
        run.note(loss, model)
    update_bn([x, x + 1], ema[2])
    with torch.no_grad():
        found = [e.eval()(x) for e in ema]
    assert torch.equal(found[0], found[1])
    run.tensors += found
    return run


def unfreezes_the_backbone(prepare: Prepare, steps: int) -> Run:
    backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
    model = nn.Sequential(backbone, nn.ReLU(), nn.Linear(16, 1))
    backbone.requires_grad_(False)
    frozen = copy.deepcopy(list(backbone.parameters()))
    prepare(model)
    run = train(model, regression, steps // 2)
    assert all(torch.equal(a, b) for a, b in zip(frozen, backbone.parameters(), strict=True))
    backbone.requires_grad_(True)
    train(model, regression, steps - steps // 2, first=steps // 2, run=run)
    assert not any(torch.equal(a, b) for a, b in zip(frozen, backbone.parameters(), strict=True))
    return run


LOOPS: list[Loop] = [
    generator_and_discriminator,
    frozen_discriminator,
    two_towers_with_one_loss,
    accumulates_over_micro_batches,
    evaluates_between_steps,
    follows_itself_with_an_average,
    unfreezes_the_backbone,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_the_identity_is_bitwise(loop: Loop) -> None:
    same_bits_under_the_identity(loop, [])


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_one_line_trains_as_fp32_does(loop: Loop) -> None:
    one_line_trains_as_fp32(loop, [])


# Double backward ---------------------------------------------------------------------------------------------------

CRITICS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linears and tanh": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), (16, 8)),
    "linears and relu": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), (16, 8)),
    "two linears": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), (16, 8)),
    "one linear": (lambda: nn.Sequential(nn.Linear(8, 1)), (16, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 1)), (8, 1, 8, 8)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)), (16, 8)),
}


def penalised(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + 10 * (g.flatten(1).norm(dim=1) - 2).square().mean()


def gradient_penalty(prepare: Prepare, steps: int, *, critic: str) -> Run:
    make, shape = CRITICS[critic]
    return train(prepare(make()), lambda m, i: penalised(m, shape), steps)


@pytest.mark.parametrize("critic", CRITICS)
def test_a_gradient_penalty_under_the_identity_is_bitwise(critic: str) -> None:
    same_bits_under_the_identity(functools.partial(gradient_penalty, critic=critic), ["memory"])  # of no peak


@pytest.mark.parametrize("policy", ["bf16", "memory"])
@pytest.mark.parametrize("critic", CRITICS)
def test_a_gradient_penalty_through_a_plan_is_right_or_refused(critic: str, policy: str) -> None:
    make, shape = CRITICS[critic]
    short = load_policy(policy).replaced(calibration={"steps": CALIBRATED})
    model = autoprec.compile(make(), policy=short, events=None)
    train(model, lambda m, i: (m(torch.randn(shape)) - 1).square().mean(), CALIBRATED)
    assert autoprec.session(model).plan is not None
    model.zero_grad()
    found: list[Tensor] = []
    for m in (copy.deepcopy(model), model):
        torch.manual_seed(1)
        try:
            penalised(m, shape).backward()
        except (RuntimeError, autoprec.AutoprecError) as refusal:
            assert m is model and "create_graph" in str(refusal) and "fp32" in str(refusal)
            return
        found.append(torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]))
        m.zero_grad()
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.05


# torch.func --------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


def called_with_its_own_parameters(model: nn.Module, x: Tensor) -> Tensor:
    return functional_call(model, dict(model.named_parameters()), (x,)).detach()


def called_with_other_values(model: nn.Module, x: Tensor) -> Tensor:
    given = {k: (v * 1.5).requires_grad_() for k, v in values(model).items()}
    loss = functional_call(model, given, (x,)).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(given.values()))])


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(model)(x).detach()


def differentiated(model: nn.Module, x: Tensor) -> Tensor:
    return flat(grad(lambda p: functional_call(model, p, (x,)).square().mean())(values(model)))


def differentiated_for_each_sample(model: nn.Module, x: Tensor) -> Tensor:
    def loss(p: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, p, (sample[None],)).square().mean()

    return flat(vmap(grad(loss), in_dims=(None, 0))(values(model), x))


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    return jacrev(lambda t: model(t).sum())(x).detach()


TRANSFORMS: list[Callable[[nn.Module, Tensor], Tensor]] = [
    called_with_its_own_parameters,
    called_with_other_values,
    mapped,
    differentiated,
    differentiated_for_each_sample,
    jacobian,
]


@pytest.mark.parametrize("planned", [False, True], ids=["while calibrating", "planned"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_torch_func_over_the_model(transform: Callable[[nn.Module, Tensor], Tensor], planned: bool) -> None:
    """It gives what the model gives, and the steps after it are captured as those before it."""
    model = Scaled()
    policy = load_policy("bf16").replaced(calibration={"steps": CALIBRATED if planned else 100})
    session = autoprec.session(autoprec.compile(model, policy=policy, events=None))
    train(model, regression, 4)
    x, before = torch.randn(5, 8), [e.kind for e in session.events]
    torch.testing.assert_close(transform(model, x), transform(copy.deepcopy(model), x), rtol=0.05, atol=0.02)
    train(model, regression, 4)
    assert session.steps == 8
    assert [e.kind for e in session.events] == before


def test_parameters_of_a_functional_call_are_strangers() -> None:
    model = autoprec.compile(mlp(), policy="bf16", events=None)
    others: dict[str, Tensor] = {k: nn.Parameter(v) for k, v in values(model).items()}
    with pytest.raises(autoprec.NotCapturedError, match="0.weight.* was put into the model after autoprec.compile"):
        functional_call(model, others, (torch.randn(4, 8),))


@pytest.mark.parametrize("bad", [torch.randn(4, 9), "no tensor"], ids=["shape", "type"])
def test_a_call_that_failed_leaves_the_next_ones_captured(bad: Any) -> None:
    model = Scaled()
    session = autoprec.session(autoprec.compile(model, policy="bf16", events=None))
    with pytest.raises((RuntimeError, TypeError)):
        model(bad)
    train(model, regression, 4)
    assert session.steps == 4
    assert session.events == []
