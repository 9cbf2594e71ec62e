"""The second law: no bad step changes a parameter, a buffer or optimizer state, however the loop steps."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import autoprec
import autoprec.serial
from autoprec.execution.guard import GradientWatch
from tests.models import ConvNet

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Loop:
    """A training loop of one style. `step(batch)` is one optimizer step."""

    def __init__(self, model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer], style: str) -> None:
        self.model, self.style = model, style
        parameters = list(model.parameters())
        parts = [parameters[:4], parameters[4:]] if style == "two optimizers" else [parameters]
        self.optimizers = [make(p) for p in parts]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if style == "GradScaler" else None
        self.closes = style == "closure" or isinstance(self.optimizers[0], torch.optim.LBFGS)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        parts = [batch]
        if self.style == "accumulation":
            half = len(batch[0]) // 2
            parts = [(batch[0][:half], batch[1][:half]), (batch[0][half:], batch[1][half:])]
        for part in parts:
            loss = self.loss(part) / len(parts)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.style == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.style == "clip_grad_value_":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        return loss

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        if not self.closes:
            self.backward(batch)
        for optimizer in self.optimizers:
            if self.closes:
                optimizer.step(lambda: self.backward(batch))
            elif self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()

    def state(self) -> list[Any]:
        """Everything that a bad step must leave alone."""
        model = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        return [model, [copy.deepcopy(o.state_dict()) for o in self.optimizers]]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def batch(*, bad: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 1, 12, 12)
    if bad:
        x[1, 0, 3, 3] = float("nan")
    return x, torch.randint(0, 10, (8,))


STYLES = ["plain", "closure", "clip_grad_norm_", "clip_grad_value_", "accumulation", "GradScaler", "two optimizers"]
# torch itself refuses these: LBFGS needs a closure, GradScaler takes none.
IMPOSSIBLE = {("LBFGS", "plain"), ("LBFGS", "GradScaler")}
GRID = [pair for pair in itertools.product(OPTIMIZERS, STYLES) if pair not in IMPOSSIBLE]


@pytest.mark.parametrize(
    ("policy", "optimizer", "style"),
    [("observe", *pair) for pair in GRID] + [("bf16", "AdamW", s) for s in STYLES] + [("bf16", "LBFGS", "closure")],
)
def test_a_nan_batch_changes_nothing(policy: str, optimizer: str, style: str) -> None:
    torch.manual_seed(0)
    chosen = autoprec.serial.load_policy(policy).replaced(calibration={"steps": 2})
    model = autoprec.compile(ConvNet(), policy=chosen, events=None)
    session = autoprec.session(model)
    loop = Loop(model, OPTIMIZERS[optimizer], style)
    for _ in range(3):
        loop.step(batch())
    before, steps = loop.state(), session.steps
    loop.step(batch(bad=True))
    assert same(before, loop.state())
    assert session.step_was_skipped
    incidents = [e for e in session.events if e.kind == "bad_step"]
    # With closures every optimizer makes a step of its own: forward, backward, veto.
    assert [e.op for e in incidents] == ["conv1:conv2d#0"] * (len(loop.optimizers) if loop.closes else 1)
    assert "not finite already" in incidents[0].evidence  # it came with the data
    loop.step(batch())
    assert session.steps > steps
    assert not session.step_was_skipped
    assert not same(before[0], loop.state()[0])
    assert all(bool(t.isfinite().all()) for t in loop.state()[0])


def test_without_the_guard_the_same_batch_does_poison() -> None:
    """The test above can fail."""
    torch.manual_seed(0)
    model = ConvNet()
    loop = Loop(model, OPTIMIZERS["AdamW"], "plain")
    loop.step(batch())
    before = loop.state()
    loop.step(batch(bad=True))
    assert not same(before, loop.state())


def test_an_inf_that_clipping_would_launder_is_seen() -> None:
    """clip_grad_value_ turns an inf into a finite number before the optimizer looks."""
    model = autoprec.compile(nn.Sequential(nn.Linear(4, 4, bias=False)), policy="observe", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    (model(torch.full((2, 4), 1e30)) * 1e30).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert bool(model[0].weight.grad.isfinite().all())
    optimizer.step()
    assert torch.equal(before, model[0].weight)
    assert model[0].weight.grad is not None  # the gradients come back


def test_a_buffer_that_overflows_with_finite_gradients_is_a_bad_step() -> None:
    """The running variance becomes inf; batch norm divides it away, so no gradient shows it."""
    model = autoprec.compile(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), policy="observe", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model[0].weight.mul_(1e25)
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    model(torch.randn(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    session = autoprec.session(model)
    assert session.step_was_skipped
    assert same(before, [t.detach() for t in (*model.parameters(), *model.buffers())])
    assert [e.kind for e in session.events] == ["bad_step"]


def test_large_finite_gradients_are_not_bad() -> None:
    """Their sum overflows float32, none of them does."""
    model = autoprec.compile(nn.Sequential(nn.Linear(64, 64, bias=False)), policy="observe", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    (model(torch.ones(1, 64)) * 1e38).sum().backward()
    optimizer.step()
    session = autoprec.session(model)
    assert session.steps == 1 and session.skipped_steps == 0


def test_patience_ends_in_an_error_with_weights_intact() -> None:
    policy = autoprec.Policy(name="impatient", formats=("fp32",), guard={"patience_steps": 3})
    model = autoprec.compile(ConvNet(), policy=policy, events=None)
    loop = Loop(model, OPTIMIZERS["AdamW"], "plain")
    loop.step(batch())
    before = loop.state()
    with pytest.raises(autoprec.NonFiniteError, match=r"3 bad steps in a row.*conv1:conv2d#0"):
        for _ in range(5):
            loop.step(batch(bad=True))
    assert same(before, loop.state())


def test_guard_raise() -> None:
    policy = autoprec.Policy(name="strict", formats=("fp32",), guard={"nonfinite": "raise"})
    model = autoprec.compile(ConvNet(), policy=policy, events=None)
    loop = Loop(model, OPTIMIZERS["AdamW"], "plain")
    before = loop.state()
    with pytest.raises(autoprec.NonFiniteError, match="conv1:conv2d#0"):
        loop.step(batch(bad=True))
    assert same(before, loop.state())


def test_an_overflow_of_fp16_is_caught_named_and_promoted() -> None:
    """Weights grow until an activation passes 65504: no update, the layer leaves FP16, the run goes on."""
    torch.manual_seed(0)
    policy = autoprec.Policy(
        name="half", formats=("fp32", "fp16"), objective="bytes", storage={"formats": ()}, calibration={"steps": 2}
    )
    model = autoprec.compile(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)),
        policy=policy,
        budget="1GiB",  # bytes kept alone count, not the peak
        events="events.jsonl",
    )
    session = autoprec.session(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    changed_by_bad_steps = 0
    for i in range(14):
        with torch.no_grad():
            model[2].weight.mul_(6.0 if i > 3 else 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        (model(torch.randn(8, 16)).mean() * 1e-6).backward()
        optimizer.step()
        if session.step_was_skipped:
            changed_by_bad_steps += not same(before, list(model.parameters()))
    promoted = [e for e in session.events if e.kind == "promoted"]
    assert promoted and promoted[0].op.startswith("2:linear") and promoted[0].was == "fp16"
    assert promoted[0].trigger == "overflow" and promoted[0].now == "fp32"
    assert session.skipped_steps >= 1 and changed_by_bad_steps == 0
    assert not session.step_was_skipped and session.steps > 4
    lines = open("events.jsonl", encoding="utf-8").read().splitlines()
    assert [autoprec.serial.event_from_json_line(line) for line in lines if '"promoted"' in line] == promoted


def hundreds() -> nn.Sequential:
    """More gradients than are looked at together, small ones and large ones among them."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.Tanh())), nn.Linear(256, 3))


@pytest.mark.parametrize("at", ["0.weight", "0.bias", "12.bias", "24.weight", "24.bias"])
@pytest.mark.parametrize("how", ["clip", "zero", "hook", "late hook"])
def test_whoever_comes_after_the_gradient_cannot_hide_it(at: str, how: str) -> None:
    """An inf arrives at one parameter of many. The next line clips, or makes all gradients finite, or a hook of the
    user's does, as soon as the gradient is there."""
    model = autoprec.compile(hundreds(), policy="observe", events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=0.1)
    sick = dict(model.named_parameters())[at]
    poison = [False]

    def poisoned(g: Tensor) -> Tensor:
        return (
            torch.where(torch.arange(g.shape[0]).view(-1, *[1] * (g.dim() - 1)) == 1, torch.inf, g) if poison[0] else g
        )

    def healed(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.nan_to_num_(0.0, 0.0, 0.0)

    sick.register_hook(poisoned)
    if how == "hook":
        sick.register_post_accumulate_grad_hook(healed)
    for step in range(6):
        poison[0] = step == 5
        optimizer.zero_grad()
        loss = model(torch.randn(8, 256)).square().mean()
        if step == 5 and how == "late hook":
            sick.register_post_accumulate_grad_hook(healed)
        loss.backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if how == "zero":
            for p in model.parameters():
                healed(p)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    assert session.skipped_steps == 1 and session.step_was_skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_each_gradient_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a sparse one, and in a narrow dtype."""
    read: list[int] = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, **more: (read.append(x.numel()), norm(x, **more))[1])
    table, wide, half = nn.Embedding(300, 128, sparse=True), nn.Linear(128, 128), nn.Parameter(torch.ones(7).half())
    watch = GradientWatch({"table": table.weight, "wide": wide.weight, "half": half})
    (wide(table(torch.tensor([1, 2, 3]))).sum() + (60000.0 * half).float().sum()).backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert watch.verdict() and sorted(read) == [7, 3 * 128, 128 * 128] and watch.fresh == {"table", "wide", "half"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_backward_pass_that_dies_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, elsewhere: bool) -> None:
    """Its gradients are judged, if the user goes on with them, or adds to them and clips; and not, if they are thrown
    away."""
    if elsewhere:
        monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    for kept in ("all", "and more", ""):
        torch.manual_seed(0)
        model = autoprec.compile(hundreds(), policy="observe", events=None)
        session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=0.1)
        first = next(model.parameters())

        def dies(g: Tensor) -> Tensor:
            raise ValueError("a hook of the user's")

        for step in range(4):
            optimizer.zero_grad()
            handle = first.register_hook(dies) if step == 3 else None
            loss = model(torch.randn(8, 256)).square().mean() * (torch.inf if step == 3 else 1.0)
            if handle is None:
                loss.backward()
            else:
                with pytest.raises(ValueError, match="a hook"):
                    loss.backward()
                handle.remove()
            if step == 3 and not kept:
                optimizer.zero_grad()
                model(torch.randn(8, 256)).square().mean().backward()
            if step == 3 and kept == "and more":
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.zero_()
                (model(torch.randn(8, 256)).square().mean() * torch.inf).backward()
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
        assert session.skipped_steps == bool(kept) and all(bool(p.isfinite().all()) for p in model.parameters())


def test_buffers_of_a_module_that_came_later_are_guarded() -> None:
    """The tree of modules is known from step to step, until it changes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 1)
            self.norm: nn.Module = nn.BatchNorm1d(16, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.norm(self.up(x)))

    model = autoprec.compile(Net(), policy="observe", events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        if step == 5:
            model.norm = nn.BatchNorm1d(16, affine=False)
        before = {name: b.clone() for name, b in model.named_buffers()}
        optimizer.zero_grad()
        x = torch.randn(8, 16)
        model(x * torch.nan if step == 7 else x).sum().backward()
        optimizer.step()
    assert session.skipped_steps == 1 and before["norm.num_batches_tracked"] == 2
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "told"),
    [
        (torch.float16, 100.0, ""),  # the norm of 2^20 of them is beyond FP16
        (torch.bfloat16, 100.0, ""),
        (torch.float32, 1e20, "large"),
        (torch.float64, 1e40, ""),
        (torch.float64, 1e200, "large"),
        (torch.float16, torch.inf, "bad"),
        (torch.float64, torch.nan, "bad"),
    ],
)
def test_gradients_are_judged_in_their_own_range(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: float, told: str, elsewhere: bool
) -> None:
    """Sums of squares in FP32, or in FP64 where the gradients are."""
    p = nn.Parameter(torch.zeros(1 << 20, dtype=dtype))
    if elsewhere:
        monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    watch = GradientWatch({"p": p})
    (p * torch.full_like(p, size)).backward(torch.ones_like(p))
    assert watch.verdict() == (told != "bad")
    assert (watch.bad, watch.large) == ({"p"} if told == "bad" else set(), {"p"} if told == "large" else set())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("sizes", "bad", "large"), [
    ([1.5e19, 1.5e19], set(), set()),  # FP32 holds the sum of squares of each, and not of both
    ([1.5e19, 2e19], set(), {"1"}),
    ([torch.nan, 1.0], {"0"}, set()),
    ([1.0, torch.inf, 2e19], {"1"}, {"2"}),
])  # fmt: skip
def test_small_gradients_are_looked_at_together_and_told_apart(
    monkeypatch: pytest.MonkeyPatch, sizes: list[float], bad: set[str], large: set[str], elsewhere: bool
) -> None:
    if elsewhere:
        monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    parameters = [nn.Parameter(torch.zeros(1)) for _ in sizes]
    watch = GradientWatch({str(i): p for i, p in enumerate(parameters)})
    torch.autograd.backward(parameters, [torch.full_like(p, s) for p, s in zip(parameters, sizes, strict=True)])
    assert watch.verdict() == (not bad) and (watch.bad, watch.large) == (bad, large)
