"""What is known to be finite because its maker looked, and that nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution import guard
from autoprec.numerics import elements, looked_at
from autoprec.numerics.looked_at import is_known, leaf, widened

EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)

#: Outside of a backward pass.
NO_TASK = -1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Numba has earned its import; one thread; nothing is known yet."""
    monkeypatch.setattr(looked_at, "_ENOUGH", -1)
    monkeypatch.setattr(looked_at, "_seen", looked_at._Seen())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def given(x: Tensor) -> tuple[nn.Parameter, Tensor]:
    """A parameter, and what its gradient `x` is in FP32."""
    p = nn.Parameter(torch.zeros(x.shape))
    return p, widened(x, torch.float32, leaf(p))


def knows(p: Tensor, g: Tensor) -> bool:
    return is_known(p, g, NO_TASK)


def test_the_bits_are_those_of_a_cast() -> None:
    p, made = given(EVERY_BF16)
    assert torch.equal(made.view(torch.int32), EVERY_BF16.float().view(torch.int32)) and not knows(p, made)
    for rows in EVERY_BF16.view(-1, 64):
        found, largest = elements.widened(rows)
        assert torch.equal(found.view(torch.int32), rows.float().view(torch.int32))
        wanted = float(rows.float().abs().max())
        assert largest == wanted or (math.isnan(largest) and math.isnan(wanted))
    assert elements.widened(torch.empty(0, 3, dtype=torch.bfloat16))[1] == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan, 2.0**40, -(2.0**41), 3e38])
@pytest.mark.parametrize("at", [0, 777, -1])
def test_what_is_not_finite_or_has_squares_that_may_not_be_is_not_known(bad: float, at: int) -> None:
    x = torch.randn(40, 50).bfloat16()
    assert knows(*given(x))
    x.view(-1)[at] = bad
    assert not knows(*given(x))


def test_other_casts_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 8)
    p = nn.Parameter(x.clone())
    assert widened(x, torch.float32, leaf(p)) is x and not knows(p, x)
    narrow = x.bfloat16()
    for source, dtype, parameter in [
        (x, torch.bfloat16, p),
        (x.half(), torch.float32, p),
        (narrow, torch.float64, p),
        (narrow.t(), torch.float32, p),  # not as memory is
        (narrow, torch.float32, None),
    ]:
        made = widened(source, dtype, leaf(parameter))
        assert torch.equal(made, source.to(dtype)) and not knows(p, made)
    assert leaf(p * 2.0) is None  # no parameter, but computed
    monkeypatch.setattr(looked_at, "_MOST_THREADS", 0)
    assert not knows(p, widened(narrow, torch.float32, leaf(p)))


def test_numba_is_imported_only_once_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = False
    monkeypatch.setattr(elements, "is_loaded", lambda: loaded)
    monkeypatch.setattr(looked_at, "_ENOUGH", 2500)
    monkeypatch.setattr(looked_at, "_seen", looked_at._Seen())
    x = torch.randn(40, 25).bfloat16()
    assert [knows(*given(x)) for _ in range(4)] == [False, False, True, True]
    loaded = True
    monkeypatch.setattr(looked_at, "_seen", looked_at._Seen())
    assert knows(*given(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2.0),
        lambda x: x.zero_(),
        lambda x: x.detach().add_(1.0),
        lambda x: x.view(-1)[3:5].fill_(math.inf),
        lambda x: x.clamp_(-1.0, 1.0),
        lambda x: torch._foreach_mul_([x], 0.5),
        lambda x: x.copy_(torch.full_like(x, math.nan)),
        lambda x: nn.utils.clip_grads_with_norm_(leaf_with(x), 1.0, torch.tensor(5.0)),
    ],
)
def test_what_was_changed_is_not_known(change: Callable[[Tensor], object]) -> None:
    p, made = given(torch.randn(64, 32).bfloat16())
    assert knows(p, made) and knows(p, made.detach())
    change(made)
    assert not knows(p, made) and not knows(p, made.detach())


def leaf_with(grad: Tensor) -> Tensor:
    made = torch.zeros_like(grad, requires_grad=True)
    made.grad = grad
    return made


def test_copies_other_parameters_and_other_passes_are_not_known() -> None:
    p, made = given(torch.randn(64, 32).bfloat16())
    assert not any(knows(p, x) for x in (made.clone(), made + 0.0, made.double()))
    assert not knows(nn.Parameter(torch.zeros(64, 32)), made)
    assert not is_known(p, made, NO_TASK + 1)


class Twice(nn.Module):
    """A weight that two products read, and another op."""

    def __init__(self, *, also: bool = False) -> None:
        super().__init__()
        self.weight, self.also = nn.Parameter(torch.randn(32, 32) / 8.0), also

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(torch.relu(nn.functional.linear(x, self.weight)), self.weight)
        return y * self.weight.mean() if self.also else y


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 8, 3), nn.Conv1d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x[:, None])))


class Training:
    """Under BF16. A step says which gradients the guard has read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None, width: int = 16) -> None:
        torch.manual_seed(0)
        self.model = autoprec.compile(net() if model is None else model, policy="bf16", events=None)
        self.session, self.width = autoprec.session(self.model), width
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.looked, norm_of = list[int](), guard.norm_of
        monkeypatch.setattr(guard, "norm_of", lambda g: (self.looked.append(g.data_ptr()), norm_of(g))[1])
        while self.session.calibrating:
            self.step()

    def backward(self, scale: float = 1.0) -> None:
        self.looked.clear()
        self.model(torch.randn(64, self.width)).square().mean().mul(scale).backward()

    def step(self, scale: float = 1.0) -> list[str]:
        self.optimizer.zero_grad()
        self.backward(scale)
        return self.end()

    def end(self) -> list[str]:
        self.optimizer.step()
        named = self.model.named_parameters()
        return [n for n, p in named if p.grad is not None and p.grad.data_ptr() in self.looked]


@pytest.mark.parametrize("build", [net, Convolutions])
def test_the_guard_reads_no_gradient_that_is_known(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]
) -> None:
    run = Training(monkeypatch, build())
    assert run.step() == []
    assert run.session.executed_formats()
    run.optimizer.zero_grad()
    run.backward()
    assert run.session._guard.watch.fresh == {n for n, _ in run.model.named_parameters()}
    assert run.end() == []
    run.backward()  # added to those that are there
    assert len(run.end()) == 4
    assert run.step() == []
    monkeypatch.setattr(looked_at, "_MOST_THREADS", 0)
    assert len(run.step()) == 4


@pytest.mark.parametrize("also", [False, True])
def test_the_sum_of_two_gradients_is_read(monkeypatch: pytest.MonkeyPatch, also: bool) -> None:
    run = Training(monkeypatch, Twice(also=also), 32)
    assert run.step() == ["weight"]
    assert run.step(math.inf) == ["weight"] and run.session.step_was_skipped


def test_a_backward_pass_that_died_leaves_nothing_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    x = torch.randn(64, 16, requires_grad=True)

    def dies(_: Tensor) -> None:
        raise RuntimeError("a hook's own error")

    x.register_hook(dies)
    run.optimizer.zero_grad()
    run.looked.clear()
    with pytest.raises(RuntimeError, match="own"):
        run.model(x).square().mean().backward()
    assert len(run.end()) == 4


def test_what_is_not_finite_is_read_and_vetoed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    before = {n: x.clone() for n, x in run.model.state_dict().items()}
    assert len(run.step(math.inf)) == 4
    assert run.session.step_was_skipped
    assert all(torch.equal(x, before[n]) for n, x in run.model.state_dict().items())
    assert run.step() == [] and not run.session.step_was_skipped


def test_beside_other_processes_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they send is written where no version tells."""
    run = Training(monkeypatch)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert len(run.step()) == 4
    finally:
        torch.distributed.destroy_process_group()
    assert run.step() == []


def spoil(g: Tensor) -> None:
    """Where no version tells."""
    g.data[0] = math.inf


@pytest.mark.parametrize("hook", ["tensor", "accumulated", "accumulated last", "returned"])
def test_a_gradient_that_somebody_else_may_have_written_to_is_read(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    model = net()
    if hook == "tensor":
        model[-1].weight.register_hook(spoil)
    elif hook == "returned":
        model[-1].weight.register_hook(lambda g: g * math.inf)
    elif hook == "accumulated":
        model[-1].weight.register_post_accumulate_grad_hook(lambda p: spoil(p.grad))
    autoprec.compile(model, policy="bf16", plan=autoprec.Plan(assignments=bf16()), events=None)
    if hook == "accumulated last":  # behind the guard's
        model[-1].weight.register_post_accumulate_grad_hook(lambda p: spoil(p.grad))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(64, 16)).square().mean().backward()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def bf16() -> tuple[autoprec.Assignment, ...]:
    ops = ("0:linear#0", "2:linear#0")
    return tuple(
        autoprec.Assignment(op=op, role=role, format="bf16", reason="test") for op in ops for role in autoprec.Role
    )


def test_batches_of_gradients_have_no_memory_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    x, parameters = torch.randn(64, 16), list(run.model.parameters())
    batched = torch.autograd.grad(run.model(x).mean(0), parameters, torch.eye(4), is_grads_batched=True)
    single = [torch.autograd.grad(run.model(x).mean(0)[k], parameters) for k in range(4)]
    for many, one in zip(batched, zip(*single, strict=True), strict=True):
        assert torch.allclose(many, torch.stack(one), rtol=0.02, atol=0.02)
