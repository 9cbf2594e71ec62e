"""What autoprec looks at, runs again and tries out is let go of: a run of weeks holds no more than its first steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.execution.slots import Slot
from autoprec.numerics.convolutions import ConvOptions, conv
from autoprec.numerics.gemm import GemmSpec, linear
from autoprec.numerics.keeping import keep_in, open_cell
from autoprec.serial import load_policy
from tests.models import Transformer, language_loss
from tests.test_lowering import plan_of
from tests.test_tournament import observed, plans_of, tournament_of

SPEC = GemmSpec(output="fp32", grad_input="bf16", grad_weight="bf16", native=("fp32", "bf16"))


def alive_bytes() -> int:
    """Of the tensors that Python knows."""
    gc.collect()  # what is left now is never let go of: torch's hooks are not seen by it
    found = (t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


@pytest.mark.parametrize("pieces", [False, True])
def test_a_replay_lets_go_of_everything(pieces: bool) -> None:
    """Each holds gradients, and outputs that other pieces read."""
    model = Transformer(width=32, depth=2, vocabulary=64, graph_break=pieces)
    session = observed(model, [torch.randint(0, 64, (4, 33)) for _ in range(2)], language_loss)
    assert (len(session._calls) > 1) == pieces
    plans = plans_of(session)
    before = alive_bytes()
    found = tournament_of(session).run(plans)
    assert all(len(outcome.gradients) > 0 for outcome in found.values())
    samples = sum(g.untyped_storage().nbytes() for outcome in found.values() for g in outcome.gradients.values())
    assert alive_bytes() - before == samples


@pytest.mark.parametrize("pieces", [False, True])
def test_bad_steps_and_observed_ones_hold_nothing(pieces: bool) -> None:
    """A bad step is looked at op by op, in a replay."""
    model = Transformer(width=32, depth=1, vocabulary=64, graph_break=pieces)
    batches = [torch.randint(0, 64, (4, 33)) for _ in range(2)]
    policy = load_policy("balanced").replaced(monitor={"window_steps": 4, "interval_steps": 2})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=language_loss, events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weight, held = next(model.parameters()), list[int]()
    for step in range(16):
        hook = weight.register_hook(lambda g: g * torch.inf) if step % 4 == 3 else None
        language_loss(model, batches[step % 2]).backward()
        if hook is not None:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 7:
            held.append(alive_bytes())
    assert len([e for e in autoprec.session(model).events if e.kind == "bad_step"]) == 4
    assert held[0] == held[1]


class KeepsResults(nn.Module):
    """Ops that keep their own results, and read a tensor that the plan keeps narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q = x.unflatten(-1, (4, 16)).transpose(0, 1)
        attended = nn.functional.scaled_dot_product_attention(q, q, q).transpose(0, 1).flatten(1)
        return self.last(torch.tanh(x) + x.softmax(-1) + attended)


@pytest.mark.parametrize("storage", ["fp8_e4m3", "as_is"])
def test_what_nobody_goes_back_through_is_let_go_of(storage: str) -> None:
    """A forward pass whose result is dropped, as where somebody evaluates without no_grad()."""
    model, x = KeepsResults(), torch.randn(256, 64)
    autoprec.compile(model, plan=plan_of({}, {"first:linear#0": storage}), events=None)
    held = list[int]()
    for _ in range(3):
        model(x)
        model(x).sum().backward()
        autoprec.session(model).step()
        held.append(alive_bytes())
    assert held[1] == held[2]


class AlsoLoss(nn.Module):
    """Gives scores and a loss; either may be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y.square().mean(), y


@pytest.mark.parametrize("which", [0, 1])
def test_a_good_micro_batch_is_let_go_of_before_the_next_runs(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients that came to its outputs: of scores they are as large as all of a step."""
    model, held = AlsoLoss(), list[int]()
    autoprec.compile(model, policy="observe", plan=plan_of({}), events=None)
    runs = Slot.run

    def run(self: Slot, arguments: Sequence[Any]) -> Any:
        held.append(sum(batch() is not None for batch in batches) + sum(g() is not None for g in gradients))
        return runs(self, arguments)

    monkeypatch.setattr(Slot, "run", run)
    batches, gradients = list[weakref.ref[Tensor]](), list[weakref.ref[Tensor]]()
    for _ in range(3):
        x = torch.randn(256, 64)
        y = model(x)[which]
        y.register_hook(lambda g: gradients.append(weakref.ref(g)))
        batches.append(weakref.ref(x))
        del x
        y.sum().backward()
        del y
    assert held == [0, 0, 0] and len(batches) == len(gradients) == 3
    autoprec.session(model).step()


@pytest.mark.parametrize("pieces", [False, True])
def test_a_model_that_is_gone_leaves_nothing(pieces: bool) -> None:
    """One of several in a process, planned and trained; what timing its ops made is no longer there either."""

    def train() -> None:
        model = Transformer(width=32, depth=1, vocabulary=64, graph_break=pieces)
        batches = [torch.randint(0, 64, (4, 33)) for _ in range(2)]
        autoprec.compile(model, batches=batches, loss_fn=language_loss, events=None)
        language_loss(model, batches[0]).backward()

    train()  # what is made once for all: tables of numbers
    before = alive_bytes()
    train()
    assert alive_bytes() == before


def test_what_was_foreseen_leaves_nothing() -> None:
    """Of tensors without memory as many as torch's own compiler leaves of a captured graph."""

    def train(compiled: bool) -> None:
        model = Transformer(width=32, depth=1, vocabulary=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if compiled:  # under a budget an FP32 step is foreseen before there is one
            autoprec.compile(model, budget=10**7, events=None)
        run = model if compiled else torch.compile(model, backend="aot_eager")
        for _ in range(3):
            language_loss(run, torch.randint(0, 64, (4, 33))).backward()
            optimizer.step()
        if compiled:
            assert autoprec.session(model).calibrating

    def grows(compiled: bool) -> int:
        """From one model to the next of its kind: a first one also ends what others left unfinished."""
        counts = list[int]()
        for _ in range(2):
            train(compiled)
            torch._dynamo.reset()
            gc.collect()
            counts.append(sum(isinstance(x, FakeTensor) for x in gc.get_objects()))
        return counts[1] - counts[0]

    assert grows(compiled=True) <= grows(compiled=False)


def _linear(x: Tensor, storage: str | None) -> Tensor:
    cell = open_cell(x, storage) if storage else None
    kept = None if cell is None or storage is None else keep_in(cell, x, storage)
    spec = SPEC if storage else replace(SPEC, output="bf16")  # kept as it is
    return linear(x, nn.Parameter(torch.randn(64, 64)), None, kept, spec)


def _convolution(x: Tensor, storage: str | None) -> Tensor:
    x, weight = x.view(16, 64, 32, -1), nn.Parameter(torch.randn(64, 64, 3, 3))
    cell = open_cell(x, storage) if storage else None
    kept = None if cell is None or storage is None else keep_in(cell, x, storage)
    options = ConvOptions(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    return conv(x, weight, None, kept, SPEC, options)


@pytest.mark.parametrize(
    ("op", "storage", "width"),
    [
        (_linear, None, 2),
        (_linear, "bf16", 2),
        (_linear, "fp8_e4m3", 1),
        (_convolution, "fp8_e4m3", 1),
    ],
)
def test_what_a_product_keeps_is_gone_before_it_makes_its_inputs_gradient(
    op: Callable[[Tensor, str | None], Tensor], storage: str | None, width: int
) -> None:
    """Unless the graph is retained, and then a second pass gives the same."""
    leaf = torch.randn(32768, 64).to(torch.float32 if storage else torch.bfloat16).requires_grad_()

    def run(retain: bool, passes: int = 1) -> list[Tensor]:
        torch.manual_seed(0)
        y = op(leaf.clone(), storage)
        arriving = torch.ones_like(y)
        return [torch.autograd.grad(y, leaf, arriving, retain_graph=retain)[0] for _ in range(passes)]

    first, *others = run(False) + run(True, 2)
    assert all(torch.equal(first, g) for g in others)
    once, retained = (peak_bytes(lambda: run(retain), torch.device("cpu")) for retain in (False, True))  # noqa: B023
    assert retained - once == pytest.approx(width * leaf.numel(), rel=0.02)
