"""A model that has other graphs than those that were calibrated, and steps that do not read all of its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.errors import PlanError
from autoprec.execution.lowering import Backend
from autoprec.plans import RECOMPUTED, Plan, Storage
from autoprec.serial import read_plan, write_plan


class Block(nn.Module):
    """With noise while training, before what is made again."""

    def __init__(self, width: int, noise: float) -> None:
        super().__init__()
        self.norm, self.noise = nn.LayerNorm(width), noise
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.norm(x))
        if self.training and self.noise:
            h = h + self.noise * torch.randn_like(h)
        return x + self.b(F.silu(h))


def blocks(noise: float = 0.01) -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.Sequential(nn.Linear(16, 32), Block(32, noise), Block(32, noise), nn.Linear(32, 4))


def train(model: nn.Module, steps: int, first: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for k in range(first, first + steps):
        optimizer.zero_grad()
        model(torch.randn(64, 16, generator=torch.Generator().manual_seed(k))).square().mean().backward()
        optimizer.step()


def recomputed(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [s.tensor for s in plan.storages if s.format == RECOMPUTED]


@pytest.mark.parametrize("early", [False, True])
def test_what_a_graph_cannot_make_again_it_keeps(early: bool) -> None:
    """An evaluation, whose ops have other names and make other things, ended the run, or left it without a plan."""
    model = autoprec.compile(blocks(), policy="memory", events=None)
    for k in range(3):
        train(model, 4, 4 * k)
        if early or k == 2:
            model.eval()
            with torch.no_grad():
                found = model(torch.ones(8, 16))
            model.train()
    session = autoprec.session(model)
    assert recomputed(session.plan) and session.skipped_steps == 0
    plain = blocks()
    plain.load_state_dict(model.state_dict())
    expected = plain.eval()(torch.ones(8, 16))
    assert float((found - expected).norm()) <= 0.05 * float(expected.norm())


def test_a_branch_that_trains_another_way_is_told_and_right() -> None:
    model = autoprec.compile(blocks(), policy="memory", events=None)
    train(model, 12)
    session = autoprec.session(model)
    assert recomputed(session.plan)
    for part in model.modules():
        if isinstance(part, Block):
            part.noise = 0.0
    plain = blocks(0.0)
    plain.load_state_dict(model.state_dict())
    for own in (model, plain):
        own.zero_grad()
        own(torch.ones(8, 16)).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert float((p.grad - q.grad).norm()) <= 0.1 * float(q.grad.norm()) + 1e-6
    told = [e for e in session.events if e.kind == "warning" and e.trigger == "kept"]
    assert told and all("in that graph it is kept as it is" in e.evidence for e in told)
    assert len(told) == len({e.evidence for e in told})


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_plan_from_a_file_may_first_be_evaluated(tmp_path: Path, backend: Backend) -> None:
    made = autoprec.compile(blocks(), policy="memory", events=None)
    train(made, 12)
    plan = autoprec.session(made).plan
    assert recomputed(plan) and plan is not None
    write_plan(tmp_path / "plan.yaml", plan)
    model = autoprec.compile(blocks(), plan=tmp_path / "plan.yaml", events=None, backend=backend)
    model.eval()
    with torch.no_grad():
        assert bool(model(torch.ones(8, 16)).isfinite().all())
    train(model.train(), 2)
    for part in model.modules():
        if isinstance(part, Block):
            part.noise = 0.0
    train(model, 2)
    assert autoprec.session(model).steps == 4 and read_plan(tmp_path / "plan.yaml").storages == plan.storages


def test_what_somebody_wrote_that_cannot_be_is_refused() -> None:
    model = blocks()
    wrong = Storage(tensor="1:silu#0", format=RECOMPUTED, made_from=("0:linear#0",), reason="")
    autoprec.compile(model, plan=Plan(assignments=(), storages=(wrong,)), events=None)
    with pytest.raises(PlanError, match="as it is"):
        train(model, 1)


# Outputs that nobody reads ----------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.a(h), self.b(h)


@pytest.mark.parametrize("pattern", ["333333333131", "121212121212", "111111112222"])
def test_a_head_that_is_not_read_has_no_gradient(pattern: str) -> None:
    """Compiled code gives it zeros, and AdamW moved it, but in observed steps, which are not compiled. Digits: which
    heads a step reads, 1 the first, 2 the second."""
    policy = autoprec.Policy(
        name="p", formats=("fp32", "bf16"), rules=[autoprec.Rule(match="*", pin="bf16", optional=True)],
        calibration={"steps": 2}, monitor={"interval_steps": 4, "window_steps": 100, "takeover_steps": 0},
        storage={"formats": ()}, noise={"gradient": 1e3, "loss": 1e3},
    )  # fmt: skip
    found = []
    for backend in ("", "eager", "inductor"):
        torch._dynamo.reset()
        model = Heads()
        if backend:
            autoprec.compile(model, policy=policy, events=None, backend=backend)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        generator, seen = torch.Generator().manual_seed(0), ""
        for digit in pattern:
            optimizer.zero_grad()
            outputs = model(torch.randn(8, 16, generator=generator))
            read = [y.square().mean() for k, y in enumerate(outputs) if int(digit) >> k & 1]
            sum(read).backward()  # type: ignore[union-attr]
            seen += "".join("-" if p.weight.grad is None else "g" for p in (model.a, model.b))
            optimizer.step()
        found.append(seen)
        assert not backend or autoprec.session(model).plan is not None
    assert found[1:] == [found[0]] * 2 and "-" in found[0]


def test_a_dependence_that_the_graph_does_not_show_is_kept() -> None:
    """What an output is changed by in place is read by nobody there: its gradient is none of the zeros."""

    class Added(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            h = torch.tanh(self.trunk(x))
            total = torch.zeros(len(x), 4)
            total.add_(self.b(h))
            return self.a(h), total, h

    found = []
    for backend in ("", "inductor"):
        torch._dynamo.reset()
        model = Added()
        if backend:
            autoprec.compile(model, plan=Plan(assignments=()), events=None, backend=backend)  # type: ignore[arg-type]
        first, second, _ = model(torch.ones(8, 16))
        (first.square().mean() + second.square().mean()).backward()
        found.append([p.grad for p in model.parameters()])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain)
