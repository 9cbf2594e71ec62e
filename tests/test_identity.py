"""The first law: the identity plan is bitwise the model, and it did capture it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autoprec
from autoprec.plans import Assignment, Plan
from tests.models import CASES, Block, Case, ConvNet, Transformer, class_loss, language_loss

pytestmark = pytest.mark.filterwarnings("ignore")


def policy(**changes: Any) -> autoprec.Policy:
    return autoprec.Policy(name="identity", formats=("fp32",), storage={"formats": ()}, **changes)


def train(model: nn.Module, case: Case, steps: int) -> list[list[Tensor]]:
    """Loss, every gradient, and in between an evaluation without gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches, seen = case.batches(), []
    for i in range(steps):
        torch.manual_seed(100 + i)
        optimizer.zero_grad()
        loss = case.loss(model, batches[i % len(batches)])
        loss.backward()
        seen.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen[-1].append(case.loss(model, batches[0]))
        model.train()
        seen[-1] += [b.clone() for b in model.buffers()]
    return seen


def equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(
        len(x) == len(y) and all(torch.equal(s, t) for s, t in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_identity_is_bitwise_and_captured(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = case.model()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    # Two observed steps, then the plan (all FP32): both states must be the model.
    assert autoprec.compile(model, policy=policy(calibration={"steps": 3})) is model
    expected = train(plain, case, 7)
    found = train(model, case, 7)
    session = autoprec.session(model)
    assert equal(expected, found)
    assert session.plan is not None and session.plan.is_identity
    assert list(model.state_dict()) == names

    counter = FlopCounterMode(display=False)
    # Without oneDNN an LSTM is made of the products that the counter knows.
    with counter, torch.backends.mkldnn.flags(enabled=False):
        case.loss(copy.deepcopy(plain), case.batches()[0])
    captured = sum(op.flops * op.calls for op in session.graph.ops)
    share = captured / counter.get_total_flops()
    with capsys.disabled():
        print(f"\n  {case.name}: {len(session.graph.ops)} ops captured, {share:.1%} of the FLOPs, bitwise", end="")
    assert len(session.graph.ops) > 0
    assert 0.95 <= share <= 1.05


def test_observe_changes_nothing_while_it_observes() -> None:
    case = CASES[0]
    torch.manual_seed(1)
    model = case.model()
    plain = copy.deepcopy(model)
    autoprec.compile(model, policy="observe")
    assert equal(train(plain, case, 12), train(model, case, 12))


def test_a_planted_change_is_seen() -> None:
    """The law can fail: one BF16 linear is not the model."""
    case = CASES[3]
    torch.manual_seed(1)
    model = case.model()
    plain = copy.deepcopy(model)
    plan = Plan(assignments=(Assignment(op="0:linear#0", role=autoprec.Role.OUTPUT, format="bf16", reason="planted"),))
    autoprec.compile(model, plan=plan)
    assert not equal(train(plain, case, 1), train(model, case, 1))


def test_forward_called_directly_is_refused() -> None:
    model = autoprec.compile(Transformer(), policy=policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 100, (2, 9))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    model.forward(tokens[:, :-1], tokens[:, 1:]).backward()
    with pytest.raises(autoprec.NotCapturedError, match=r"model\(x\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_submodule_called_directly_is_refused() -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), policy=policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.randn(2, 4)).sum().backward()
    with pytest.raises(autoprec.NotCapturedError, match="modules: 0"):
        optimizer.step()


def test_twenty_instances_of_one_class_run_their_own() -> None:
    models = [autoprec.compile(ConvNet(), policy=policy(calibration={"steps": 2})) for _ in range(20)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    for i in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(i)
            optimizer.zero_grad()
            class_loss(model, (torch.randn(4, 1, 12, 12), torch.randint(0, 10, (4,)))).backward()
            optimizer.step()
    calls = [list(autoprec.session(m).executed_calls().values()) for m in models]
    assert calls == [[3]] * 20
    assert all(autoprec.session(m).plan is not None for m in models)


class Stack(nn.Module):
    """Twelve identical blocks, each captured as the same template because of the graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, graph_break=True) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_twelve_identical_blocks_with_twelve_plans_run_their_own() -> None:
    """Block i has i+1 of its 12 (op, block) choices in BF16; what runs is counted in the executed graphs."""
    torch.manual_seed(0)
    model = Stack()
    linears = ["query", "key", "value", "out", "up", "down"]
    chosen = {
        f"blocks.{i}.{name}:linear#0": "bf16" if (i + 1) >> k & 1 else "fp32"
        for i in range(12)
        for k, name in enumerate(linears)
    }
    plan = Plan(
        assignments=tuple(
            Assignment(op=op, role=autoprec.Role.OUTPUT, format=f, reason="test") for op, f in chosen.items()
        )
    )
    autoprec.compile(model, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(2, 5, 16)).square().mean().backward()
        optimizer.step()
    executed = autoprec.session(model).executed_formats()
    assert {op: executed[op] for op in chosen} == chosen
    blocks = {tuple(executed[f"blocks.{i}.{n}:linear#0"] for n in linears) for i in range(12)}
    assert len(blocks) == 12


def test_unwrap_gives_the_plain_model_back() -> None:
    model = Transformer()
    plain = copy.deepcopy(model)
    autoprec.compile(model, policy="bf16")
    copied = copy.deepcopy(model)
    with pytest.raises(autoprec.InputError, match="deepcopy"):
        autoprec.session(copied)
    autoprec.unwrap(model)
    with pytest.raises(autoprec.InputError):
        autoprec.session(model)
    tokens = torch.randint(0, 100, (2, 9))
    torch.manual_seed(5)
    a = language_loss(plain, tokens)
    torch.manual_seed(5)
    b = language_loss(model, tokens)
    assert torch.equal(a, b)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    autoprec.compile(model, policy="bf16")  # may be compiled again
