"""What is known to be finite because its maker looked, and that nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution import guard
from autoprec.numerics import elements, looked_at
from autoprec.numerics.looked_at import is_known, widened

pytestmark = pytest.mark.skipif(not elements.is_installed(), reason="numba is not installed")

EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def known() -> Tensor:
    made = widened(torch.randn(64, 32).bfloat16(), torch.float32)
    assert is_known(made)
    return made


def test_the_bits_are_those_of_a_cast() -> None:
    made = widened(EVERY_BF16, torch.float32)
    assert torch.equal(made.view(torch.int32), EVERY_BF16.float().view(torch.int32)) and not is_known(made)
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
    assert is_known(widened(x, torch.float32))
    x.view(-1)[at] = bad
    assert not is_known(widened(x, torch.float32))


def test_other_casts_are_torchs() -> None:
    x = torch.randn(8, 8)
    assert widened(x, torch.float32) is x and not is_known(x)
    for given, dtype in [(x, torch.bfloat16), (x.half(), torch.float32), (x.bfloat16(), torch.float64)]:
        assert torch.equal(widened(given, dtype), given.to(dtype)) and not is_known(widened(given, dtype))
    part = x.bfloat16().t()  # not as memory is
    assert torch.equal(widened(part, torch.float32), part.float()) and not is_known(widened(part, torch.float32))


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
    made = known()
    change(made)
    assert not is_known(made)


def leaf_with(grad: Tensor) -> Tensor:
    leaf = torch.zeros_like(grad, requires_grad=True)
    leaf.grad = grad
    return leaf


def test_what_shares_the_memory_is_known_and_copies_are_not() -> None:
    made = known()
    assert all(map(is_known, (made.detach(), made.t(), made.view(-1), made[3:5])))
    assert not any(
        map(is_known, (made.clone(), made + 0.0, made.to_sparse(), made.double(), made.reshape(-1)[::2] * 1))
    )


def test_memory_that_is_used_again_is_not_known() -> None:
    places = set()
    for _ in range(50):
        made = known()
        places.add(made.data_ptr())
        del made
        other = torch.full((64, 32), math.nan)
        assert not is_known(other)
        places.add(other.data_ptr())
        del other
    assert len(places) < 100  # it is used again


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Training:
    """Under BF16. `looked`: names of the gradients that the guard has read in the last step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model = autoprec.compile(Net(), policy="bf16", events=None)
        self.session = autoprec.session(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.looked, norm_of = list[int](), guard.norm_of
        monkeypatch.setattr(guard, "norm_of", lambda g: (self.looked.append(g.data_ptr()), norm_of(g))[1])
        while self.session.calibrating:
            self.step()

    def backward(self, scale: float = 1.0) -> None:
        self.looked.clear()
        self.model(torch.randn(64, 16)).square().mean().mul(scale).backward()

    def step(self, scale: float = 1.0) -> list[str]:
        self.optimizer.zero_grad()
        self.backward(scale)
        return self.end()

    def end(self) -> list[str]:
        """The names of what was read."""
        looked = [
            n for n, p in self.model.named_parameters() if p.grad is not None and p.grad.data_ptr() in self.looked
        ]
        self.optimizer.step()
        return looked


def test_the_guard_reads_no_gradient_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    assert run.step() == []
    run.backward()  # added to those that are there
    assert len(run.end()) == 4
    monkeypatch.setattr(looked_at, "_MOST_THREADS", 0)
    assert len(run.step()) == 4


def test_what_is_not_finite_is_read_and_vetoed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    before = {n: x.clone() for n, x in run.model.state_dict().items()}
    assert len(run.step(math.inf)) == 4
    assert run.session.step_was_skipped
    assert all(torch.equal(x, before[n]) for n, x in run.model.state_dict().items())
    assert run.step() == [] and not run.session.step_was_skipped


def spoil(g: Tensor) -> None:
    """Where no version tells."""
    g.data[0] = math.inf


@pytest.mark.parametrize("hook", ["tensor", "accumulated", "returned"])
def test_a_gradient_that_somebody_else_may_have_written_to_is_read(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    torch.manual_seed(0)
    model = Net()
    if hook == "tensor":
        model.last.weight.register_hook(spoil)
    elif hook == "returned":
        model.last.weight.register_hook(lambda g: g * math.inf)
    else:
        model.last.weight.register_post_accumulate_grad_hook(lambda p: spoil(p.grad))
    autoprec.compile(model, policy="bf16", plan=autoprec.Plan(assignments=bf16()), events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(64, 16)).square().mean().backward()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    optimizer.step()
    assert autoprec.session(model).step_was_skipped
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def bf16() -> tuple[autoprec.Assignment, ...]:
    ops = ("first:linear#0", "last:linear#0")
    return tuple(
        autoprec.Assignment(op=op, role=role, format="bf16", reason="test") for op in ops for role in autoprec.Role
    )


def test_gradients_are_not_held_beyond_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(monkeypatch)
    run.step()
    watch = run.session._guard.watch
    assert watch._held == []
    run.backward()
    assert len(watch._held) == 4
    run.optimizer.zero_grad()
    run.model(torch.randn(64, 16))  # that backward pass was given up
    assert watch._held == []


def test_gradients_that_somebody_frees_as_they_arrive_are_not_held() -> None:
    """As an optimizer does that steps inside of the backward pass."""
    torch.manual_seed(0)
    model, gone = Net(), list[bool]()
    autoprec.compile(model, plan=autoprec.Plan(assignments=bf16()), events=None)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model.last.bias.register_post_accumulate_grad_hook(lambda p: gone.append(bool(watch._held)))
    watch = autoprec.session(model)._guard.watch
    model(torch.randn(64, 16)).square().mean().backward()
    assert gone == [False] and watch._held == []
