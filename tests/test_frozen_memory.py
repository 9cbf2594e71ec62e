"""What frozen parameters, and products with them, take: predicted, and at the allocator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoprec
from autoprec.execution.measuring import peak_bytes, saved_bytes
from autoprec.graphs import Role
from autoprec.numerics.frozen import NarrowParameter
from autoprec.planning.evaluator import evaluate
from autoprec.planning.planner import ask, propose
from autoprec.planning.polish import flips, tied_groups
from autoprec.planning.solutions import Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import RECOMPUTED, Assignment, Plan
from tests.adapters import NARROW, compiled, gradients, loss_of, made, narrow_of, policy_with
from tests.cpus import missed_without_bf16


@pytest.mark.parametrize("formats", ["fp32", pytest.param("fp32 bf16", marks=missed_without_bf16("0.94 is predicted"))])
def test_they_live_as_planned_and_the_prediction_knows(formats: str) -> None:
    model, batches = made(width=256, rows=8, length=65, layers=2)
    parameters = dict(model.named_parameters())
    wide = sum(p.numel() * 4 for p in parameters.values())
    compiled(model, batches, *NARROW, formats=tuple(formats.split()))
    session = autoprec.session(model)
    plan = session.plan
    assert narrow_of(model) == {t.removeprefix("param:"): f for t, f in plan.living.items()}
    bases = {f for f in parameters if "base.weight" in f}
    assert {"embedding.weight", "head.weight", *bases} == set(narrow_of(model))
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[f] for f, p in model.named_parameters())
    held = sum(p.packed.payload.nbytes for p in parameters.values() if isinstance(p, NarrowParameter))
    told = sum(h.plan for h in plan.memory if h.kind == "parameters")
    kept_wide = sum(p.numel() * 4 for p in parameters.values() if not isinstance(p, NarrowParameter))
    assert told == pytest.approx(held + kept_wide, abs=64) and told < 0.6 * wide  # the scales are 4 bytes each
    assert sum(h.fp32 for h in plan.memory if h.kind == "parameters") == wide
    own = next(c for c in plan.contestants if c.adopted)
    assert own.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
    [event] = [e for e in session.events if e.kind == "frozen"]
    assert "FP32 values are gone" in event.evidence


def test_whatever_format_a_product_has_the_prediction_knows() -> None:
    """Beside a frozen one in BF16, with all that may be made again made again."""
    model, batches = made(width=128, rows=8, length=33, layers=1)
    compiled(model, batches, "bf16", formats=("fp32", "bf16"), noise={"gradient": 1e6, "loss": 1e6})
    session = autoprec.session(model)
    policy = policy_with("bf16", formats=("fp32", "bf16"), noise={"gradient": 1e6, "loss": 1e6})
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem = proposals.problem
    base = uniform_choice(problem, "bf16")
    for tensor in problem.storable:
        storages = problem.tensors[tensor].storages
        base = base.keeping(tensor, RECOMPUTED if RECOMPUTED in storages else "fp8_e4m3")
    groups, found = tied_groups(problem), {}
    for unit, name in ((u, f"{o.op} {o.role}") for u, o in enumerate(problem.units) if ":linear#0" in o.op):
        for _, choice in flips(problem, base, groups, unit):
            evaluation = evaluate(problem, choice)
            plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
            other, _ = made(width=128, layers=1)
            autoprec.compile(other, plan=plan, events=None)
            for _ in range(2):
                gradients(other, batches[0])
            measured = peak_bytes(lambda m=other: loss_of(m, batches[0]).backward(), torch.device("cpu"))
            known = problem.fixed_bytes + problem.frozen_bytes(choice.options)
            found[name] = (evaluation.peak_bytes - known) / measured
    assert len(found) >= 10 and 0.97 <= min(found.values()) and max(found.values()) <= 1.12, found


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_a_product_keeps_nothing_of_its_input_for_a_weight_that_is_not_trained(kind: str, fmt: str) -> None:
    layer: nn.Module = nn.Linear(64, 8) if kind == "linear" else nn.Conv2d(64, 8, 3, padding=1)
    x = torch.randn(512, 64, requires_grad=True) if kind == "linear" else torch.randn(2, 64, 16, 16, requires_grad=True)
    model = nn.Sequential(layer.requires_grad_(False), nn.Linear(8 if kind == "linear" else 16, 4))
    roles = tuple(Assignment(op=f"0:{kind}{'' if kind == 'linear' else '2d'}#0", role=r, format=fmt, reason="")
                  for r in Role)  # fmt: skip
    plain = copy.deepcopy(model)
    autoprec.compile(model, plan=Plan(assignments=roles), events=None)
    model(x).square().mean().backward()
    own = [*model.parameters(), x]
    assert saved_bytes(lambda: model(x), own) <= saved_bytes(lambda: plain(x), own) < x.nbytes // 2
    [found] = torch.autograd.grad(model(x).square().mean(), x)
    [expected] = torch.autograd.grad(plain(x).square().mean(), x)
    assert (found - expected).norm() < 0.2 * expected.norm()
