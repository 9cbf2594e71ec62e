"""What ops do to noise, against noise put into the ops themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.graphs import OpClass, Role, TensorKind
from autoprec.planning.gains import Gains
from autoprec.planning.kinks import flipped, switched
from autoprec.planning.pricing import Prices
from autoprec.planning.problem import build_problem
from autoprec.planning.roots import resolve_roots
from tests.planning.planning_cases import Maker, histogram, modelled_device, policy, with_tensor

NOISE = 1e-3


class _Around(nn.Module):
    """A module with something trained before it, so that gradients reach its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.shift, self.inner = nn.Parameter(torch.zeros(())), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift)


class _Read(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def trained(module: nn.Module) -> nn.Module:
    """With weights of one sign for the most part, as where sums are larger than their terms make them by chance."""
    with torch.no_grad():
        module.weight += 0.5 * module.weight.std()  # type: ignore[operator, union-attr]
    return module


MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (trained(nn.Linear(48, 64)), (32, 48)),
    "conv1d": lambda: (trained(nn.Conv1d(8, 16, 3, bias=False)), (4, 8, 40)),
    "conv2d of groups": lambda: (trained(nn.Conv2d(8, 16, 2, stride=2, groups=2)), (4, 8, 12, 12)),
    "conv_transpose2d": lambda: (trained(nn.ConvTranspose2d(8, 12, 2, stride=2)), (4, 8, 6, 6)),
    "relu": lambda: (nn.ReLU(), (64, 64)),
    "mean": lambda: (_Read(lambda x: x.mean(1)), (256, 16)),
    "sum": lambda: (_Read(lambda x: x.sum(1)), (256, 16)),
    "avg_pool2d": lambda: (nn.AvgPool2d(2), (4, 8, 12, 12)),
}


def relative(error: Tensor, of: Tensor) -> float:
    return float(error.square().sum() / of.square().sum())


@pytest.mark.parametrize("name", MODULES)
def test_a_gain_is_what_noise_becomes(name: str) -> None:
    """Independent errors of all elements, through the op and back through it, in float64."""
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    model, x, slope = _Around(module), torch.randn(shape) + 0.3, None
    autoprec.compile(model, events=None)
    session = autoprec.session(model)
    slope = torch.randn_like(module(x)) + 0.3
    session.calibrate([x, x], lambda m, batch: (m(batch) * slope).sum())
    graph, profile = session.graph, session.profile
    op = next(o for o in reversed(graph.ops) if o.kind == name.split()[0])
    gains = Gains(graph, Prices(graph, resolve_roots(graph), profile, session.policy))

    exact = module.double()
    x, slope = x.double().requires_grad_(), slope.double()
    y = exact(x)
    (back,) = torch.autograd.grad(y, x, slope, retain_graph=True)
    forwards, backwards = [], []
    for _ in range(50):
        noise = NOISE * torch.randn_like(x) * x.detach().square().mean().sqrt()
        forwards.append(relative(exact(x + noise) - y, y) / relative(noise, x))
        wrong = NOISE * torch.randn_like(slope) * slope.square().mean().sqrt()
        backwards.append(
            relative(torch.autograd.grad(y, x, wrong, retain_graph=True)[0], back) / relative(wrong, slope)
        )
    assert 0.05 < np.mean(forwards)
    assert gains.forward(op) == pytest.approx(min(np.mean(forwards), 1.0) if op.weights else np.mean(forwards), rel=0.1)
    gain = gains.backward(op, op.inputs[0])
    if op.weights:
        assert gain == pytest.approx(np.mean(backwards), rel=0.1) and gain < 1.0
    else:
        assert gain is None


def test_what_was_not_observed_gains_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    autoprec.compile(model, events=None)
    session = autoprec.session(model)
    session.calibrate([torch.zeros(3, 4)] * 2, lambda m, batch: 0.0 * m(batch).sum())
    gains = Gains(session.graph, Prices(session.graph, resolve_roots(session.graph), session.profile, session.policy))
    for op in session.graph.ops:
        assert gains.forward(op) == 1.0 and gains.backward(op, op.inputs[0]) is None


@pytest.mark.parametrize("sigma", [0.001, 0.03, 0.3])
def test_as_many_elements_cross_a_kink_as_noise_carries_over(sigma: float) -> None:
    """Energy of the error of g·1[x > 0], by trying."""
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=400_000), rng.normal(size=400_000)
    above = x > 0.0
    wrong = above != (x + sigma * rng.normal(size=x.size) > 0.0)
    expected = float((g**2 * wrong).sum() / (g**2 * above).sum())
    assert flipped(histogram(x, np.where(above, g**2, 0.0)), sigma) == pytest.approx(expected, rel=0.1)
    assert flipped(histogram(np.zeros(8)), sigma) == flipped(histogram(x), 0.0) == 0.0


@pytest.mark.parametrize("window", [2, 4, 9])
def test_as_many_windows_have_another_maximum_as_noise_makes(window: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400_000, window))
    for sigma in (0.003, 0.03):
        moved = x.argmax(1) != (x + sigma * rng.normal(size=x.shape)).argmax(1)
        assert switched(window, sigma) == pytest.approx(2.0 * float(moved.mean()), rel=0.1)
    assert switched(1, 0.1) == 0.0


def jumps(kind: str) -> list[dict[str, float]]:
    """What kinks add by format, behind a product."""
    make = Maker(np.random.default_rng(0), calm=True)
    h = make.linear(make.tensor("input:x", (64, 32), kind=TensorKind.INPUT, grad=False), 32, fqn="a")
    h = make.op(kind, OpClass.POINTWISE, (h,), (64, 32), saves_output=True)
    graph = make.graph(make.linear(h, 32, fqn="b"))
    allowed = policy(("fp32", "bf16", "fp8_e4m3"))
    x, g = np.random.default_rng(1).normal(size=(2, 100_000))
    profile = with_tensor(make.profile(graph), "a:linear#0", values=histogram(x), loss=histogram(x, g**2))
    problem = build_problem(graph, profile, modelled_device(graph), allowed)
    gradients = problem.variances // 2
    nodes = [n for n in problem.nodes if n.moment >= len(graph.ops) and n.inputs[0][0] < gradients]
    assert all(n.units == (problem.unit_index["a:linear#0", Role.OUTPUT],) for n in nodes)
    return [dict(n.local) for n in nodes]


def test_relu_in_bf16_is_some_four_times_better_than_in_e4m3_not_sixteen() -> None:
    """Energies, so that 16 would be 256. FP8's is counted beside that of its results, which are BF16."""
    (relu,) = jumps("relu")
    assert 10.0 < (relu["bf16"] + relu["fp8_e4m3"]) / relu["bf16"] < 25.0
    assert jumps("gelu") == []
