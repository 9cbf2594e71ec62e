"""What ops do to noise, against noise put into the ops themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.formats import BF16, FP8_E4M3
from autoprec.graphs import OpClass, OpGraph, Role, TensorKind
from autoprec.planning.gains import Gains
from autoprec.planning.kinks import KINK_FACTORS, flipped, switched
from autoprec.planning.noise import relative_error
from autoprec.planning.pricing import Prices
from autoprec.planning.problem import build_problem
from autoprec.planning.roots import resolve_roots
from autoprec.planning.values import GradientNode, Problem
from autoprec.profiles import Profile
from tests.planning.maker import Maker, histogram
from tests.planning.planning_cases import modelled_device, policy, with_tensor

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
    return float(error.detach().square().sum() / of.detach().square().sum())


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


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "abs": torch.abs,
}


@pytest.mark.parametrize("sigma", [0.001, 0.03, 0.3])
@pytest.mark.parametrize("kind", KINKS)
def test_as_many_elements_cross_a_kink_as_noise_carries_over(kind: str, sigma: float) -> None:
    """Energy of the error of torch's gradient, by trying."""
    generator = torch.Generator().manual_seed(0)
    x, g, noise = torch.randn(3, 400_000, generator=generator, dtype=torch.float64)

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(KINKS[kind](x), x, g)[0]

    exact = gradient(x)
    expected = relative(gradient(x + sigma * noise) - exact, exact)
    weighted = histogram(x.numpy(), exact.square().numpy())
    assert KINK_FACTORS[kind] * flipped(weighted, sigma) == pytest.approx(expected, rel=0.1)


def test_where_nothing_is_near_a_kink_nothing_crosses_it() -> None:
    x = np.random.default_rng(0).normal(size=1000)
    assert flipped(histogram(np.zeros(8)), 0.1) == flipped(histogram(x), 0.0) == 0.0
    assert flipped(histogram(x + 100.0), 0.1) == 0.0


@pytest.mark.parametrize("window", [2, 4, 9])
def test_as_many_windows_have_another_maximum_as_noise_makes(window: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400_000, window))
    for sigma in (0.003, 0.03):
        moved = x.argmax(1) != (x + sigma * rng.normal(size=x.shape)).argmax(1)
        assert switched(window, sigma) == pytest.approx(2.0 * float(moved.mean()), rel=0.1)
    assert switched(1, 0.1) == 0.0


def behind_a_product(kind: str) -> tuple[OpGraph, Profile, Problem]:
    make = Maker(np.random.default_rng(0), calm=True)
    h = make.linear(make.tensor("input:x", (64, 32), kind=TensorKind.INPUT, grad=False), 32, fqn="a")
    h = make.op(kind, OpClass.POINTWISE, (h,), (64, 32), saves_output=True)
    graph = make.graph(make.linear(h, 32, fqn="b"))
    x, g = np.random.default_rng(1).normal(size=(2, 100_000))
    profile = make.profile(graph)
    own = profile.tensor_by_id["a:linear#0"].values
    x *= (own.energy / own.total_weight) ** 0.5
    profile = with_tensor(profile, "a:linear#0", values=histogram(x), loss=histogram(x, g**2))
    allowed = policy(("fp32", "bf16", "fp8_e4m3"))
    return graph, profile, build_problem(graph, profile, modelled_device(graph), allowed)


def jumps(graph: OpGraph, problem: Problem) -> list[GradientNode]:
    gradients = problem.variances // 2
    return [n for n in problem.nodes if n.moment >= len(graph.ops) and n.inputs[0][0] < gradients]


def test_jumps_by_hand() -> None:
    """By the format of the product before: FP8's beside that of its results, which are BF16. Some sixteen times the
    energy of BF16's, where roundings have 256 times as much."""
    graph, profile, problem = behind_a_product("relu")
    (node,) = jumps(graph, problem)
    assert node.units == (problem.unit_index["a:linear#0", Role.OUTPUT],)
    x, w, y = (profile.tensor_by_id[t] for t in ("input:x", "param:a.weight", "a:linear#0"))
    squares = [t.values.energy / t.values.total_weight for t in (x, w, y)]
    gain = 32 * squares[0] * squares[1] / squares[2]
    assert gain < 1.0 and y.loss is not None
    before = {f.name: gain * (relative_error(x.values, f) + relative_error(w.values, f)) for f in (BF16, FP8_E4M3)}
    bf16 = flipped(y.loss, (before["bf16"] * squares[2]) ** 0.5)
    both = flipped(y.loss, ((before["bf16"] + before["fp8_e4m3"]) * squares[2]) ** 0.5)
    found = dict(node.local)
    assert found["bf16"] == pytest.approx(bf16, rel=1e-6)
    assert found["fp8_e4m3"] == pytest.approx(both - bf16, rel=1e-6)
    assert 10.0 < both / bf16 < 25.0
    assert jumps(graph, behind_a_product("gelu")[2]) == []


def test_sums_pass_their_gradients_energy_and_the_rest_is_for_the_others() -> None:
    make = Maker(np.random.default_rng(1), calm=True)
    x = make.linear(make.tensor("input:x", (64, 32), kind=TensorKind.INPUT, grad=False), 32, fqn="a")
    h = make.linear(make.norm(x), 32, fqn="b")
    y = make.op("add", OpClass.POINTWISE, (x, h), (64, 32))
    graph = make.graph(y)
    profile = make.profile(graph)
    problem = build_problem(graph, profile, modelled_device(graph), policy(("fp32", "bf16")))
    gradient = {t.id: t.gradients.energy for t in profile.tensors if t.gradients is not None}
    share = {n.moment: dict(n.inputs) for n in problem.nodes if n.moment < len(graph.ops)}
    (number,) = share[1]  # the norm reads nothing else
    assert share[3][number] == pytest.approx(gradient[y] / gradient[x]) and share[3][number] < 1.0
    assert share[1][number] == pytest.approx(1.0 - gradient[y] / gradient[x])
