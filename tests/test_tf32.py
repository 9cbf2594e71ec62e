"""TF32: FP32 tensors whose products round their operands to ten mantissa bits. Emulated on a CPU; on CUDA torch's
switches are set around each product, which is tested here by looking at them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoprec
from autoprec.devices import Device, OpTiming
from autoprec.errors import DeviceError, PlanError, UnsupportedError
from autoprec.execution.measuring import saved_bytes
from autoprec.formats import TF32, format_named, held_as, is_storage, result_format
from autoprec.graphs import Role
from autoprec.numerics import specs
from autoprec.numerics.convolutions import ConvOptions, conv
from autoprec.numerics.experts import grouped_linear
from autoprec.numerics.gemm import linear, matmul
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.rounding import rounded
from autoprec.numerics.switches import fp32_arithmetic, tf32_products
from autoprec.planning.planner import ask, make_plan, propose
from autoprec.plans import Assignment, Plan
from autoprec.policies import Policy
from autoprec.scheduling import _measured
from autoprec.serial.values import read_device, write_device
from tests.test_tournament import tournament_of

MATMUL, CONV = torch.backends.cuda.matmul, torch.backends.cudnn.conv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.first, self.second = nn.Linear(64, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(1)
        y = torch.relu(self.first(y.view(-1, 64)))
        return self.second(y)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(count: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 2, 4, 16, generator=generator) for _ in range(count)]


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def pinned(*rules: dict[str, Any], formats: tuple[str, ...] = ("fp32", "tf32", "bf16")) -> Policy:
    return Policy.model_validate({"name": "test", "formats": formats, "rules": rules})


PRODUCTS = {"kinds": ["linear", "conv2d"], "pin": "tf32"}


def compiled(net: nn.Module, policy: Policy) -> Any:
    autoprec.compile(net, policy=policy, batches=batches(), loss_fn=loss_of, events=None)
    return autoprec.session(net)


def everything_in(net: nn.Module, fmt: str, roles: tuple[Role, ...] = tuple(Role)) -> Any:
    """The model under a plan written by hand."""
    ops = ("conv:conv2d#0", "first:linear#0", "second:linear#0")
    plan = Plan(assignments=tuple(
        Assignment(op=op, role=role, format=fmt if role in roles else "fp32", reason="") for op in ops for role in Role
    ))  # fmt: skip
    autoprec.compile(net, plan=plan, events=None)
    return autoprec.session(net)


def test_what_the_format_is() -> None:
    assert (TF32.bits, TF32.bytes, TF32.scaled, TF32.operands_only) == (19, 4, False, True)
    assert format_named("tf32") is TF32 and not is_storage("tf32")
    assert held_as("tf32") == result_format("tf32") == "fp32"
    x = torch.randn(1000)
    y = rounded(x, TF32)
    assert not (y.view(torch.int32) & ((1 << 13) - 1)).any() and torch.equal(rounded(y, TF32), y)
    assert float(((y - x) / x).abs().max()) <= 2.0**-11


def test_a_model_in_tf32_is_fp32_with_rounded_operands() -> None:
    """Bitwise, forward and backward, against a network whose products round for themselves."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return nn.functional.linear(rounded(x, TF32), rounded(w, TF32), b)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
            x, w = ctx.saved_tensors
            r = rounded(g, TF32)
            return r @ rounded(w, TF32), r.t() @ rounded(x, TF32), g.sum(0)

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
    plain = copy.deepcopy(ours)
    plan = Plan(assignments=tuple(
        Assignment(op=op, role=role, format="tf32", reason="") for op in ("0:linear#0", "2:linear#0") for role in Role
    ))  # fmt: skip
    autoprec.compile(ours, plan=plan, events=None)
    x = torch.randn(16, 64)
    loss = ours(x).square().mean()
    hidden = torch.relu(Product.apply(x, plain[0].weight, plain[0].bias))
    expected = Product.apply(hidden, plain[2].weight, plain[2].bias).square().mean()
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_tensors_stay_fp32_and_nothing_more_is_kept() -> None:
    net, plain = model(), model()
    everything_in(net, "tf32")
    x = batches(1)[0]
    assert net(x).dtype is torch.float32
    assert saved_bytes(lambda: net(x), list(net.parameters())) == saved_bytes(
        lambda: plain(x), list(plain.parameters())
    )


def elsewhere(device: Device) -> Device:
    """A device that is not here: ops take a millisecond, products in TF32 a quarter of that, those in BF16 a fifth."""
    fast = {"tf32": 0.25, "bf16": 0.2}
    ops = {(t.timing_key, t.role) for t in device.timings if t.format == "fp32"}
    timings = tuple(
        OpTiming(timing_key=key, role=role, format=f, seconds=1e-3 * fast.get(f, 1.0))
        for key, role in sorted(ops)
        for f in ("fp32", *fast)
    )
    native = ("fp32", "tf32", "bf16")
    return Device(name="there", type="cuda", native=native, timings=timings, casts=device.casts)


def test_the_planner_takes_it_where_the_device_has_it_and_only_for_products() -> None:
    """Seconds of a device that is not here: TF32 four times as fast as FP32, and noise that BF16 would break."""
    net = model()
    session = compiled(net, pinned(PRODUCTS))
    found = session.plan.format_of
    assert {f for (op, _), f in found.items() if "linear" in op or "conv" in op} == {"tf32"}
    assert found["relu#0" if ("relu#0", Role.OUTPUT) in found else ":relu#0", Role.OUTPUT] != "tf32"
    dropped = {d.format: d.why for a in session.plan.assignments if a.op == ":relu#0" for d in a.dropped}
    assert dropped["tf32"] == "products alone are computed in it"
    assert "tf32" not in compiled(model(), pinned()).plan.formats_used()  # it would be emulated here

    there = elsewhere(session.device)
    policy = pinned().replaced(noise={"gradient": 2e-3, "loss": 1e-3})
    plan = make_plan(session.graph, session.profile, there, policy)
    assert "tf32" in plan.formats_used()
    assert plan.predicted.seconds < 0.5 * plan.predicted_fp32.seconds
    assert plan.predicted.gradient_ratio <= 2e-3
    alone = make_plan(session.graph, session.profile, there, policy.replaced(formats=("fp32", "tf32")))
    assert "tf32" in alone.formats_used()
    assert alone.predicted.peak_bytes <= alone.predicted_fp32.peak_bytes  # no copies


def test_its_noise_is_what_is_measured() -> None:
    """Of every product in TF32, on a replayed step: within a factor of two, as of other formats. No ReLU, of whose
    elements hardly one changes its side with so little noise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 48), nn.GELU(), nn.Linear(48, 8))
    session = compiled(net, pinned())
    policy = pinned(formats=("fp32", "tf32")).replaced(noise={"gradient": 1.0, "loss": 1.0})
    proposals = propose(ask(session.graph, session.profile, elsewhere(session.device), policy))
    (uniform,) = [p for p in proposals.all if set(proposals.decisions(p.solution).formats_used()) == {"fp32", "tf32"}]
    plans = {"fp32": Plan(assignments=()), "tf32": proposals.decisions(uniform.solution)}
    measured = _measured(proposals, outcomes := tournament_of(session).run(plans), outcomes["fp32"])[
        "tf32"
    ].gradient_ratio
    predicted = uniform.solution.evaluation.gradient_ratio
    assert measured is not None and 0.5 <= measured / predicted <= 2.0 and 0.0 < predicted < 0.01


def test_the_peak_is_predicted() -> None:
    """Emulated: rounded copies of both operands are workspace."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    policy = pinned({"kinds": ["linear"], "pin": "tf32"})
    data = [torch.randn(512, 256) for _ in range(3)]
    autoprec.compile(net, policy=policy, batches=data, loss_fn=loss_of, events=None)
    own = autoprec.session(net).plan.adopted
    assert own is not None and own.measured is not None
    assert own.measured.peak_bytes == pytest.approx(own.predicted.peak_bytes, rel=0.05)


# The device's own products


class Looked(TorchDispatchMode):
    """The switch at every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "convolution", "convolution_backward"):
            switch = CONV if "conv" in name else MATMUL
            self.seen.append((name, switch.fp32_precision))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def forbidden() -> Iterator[None]:
    """Switches that forbid TF32, as the user left them."""
    before = MATMUL.fp32_precision, CONV.fp32_precision
    MATMUL.fp32_precision = CONV.fp32_precision = "ieee"
    yield
    assert (MATMUL.fp32_precision, CONV.fp32_precision) == ("ieee", "ieee")
    MATMUL.fp32_precision, CONV.fp32_precision = before


def run_linear(spec: GemmSpec) -> Tensor:
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((6, 8), (4, 8), (4,)))
    return linear(x, w, b, None, spec)


def run_conv(spec: GemmSpec) -> Tensor:
    x, w = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    options = ConvOptions(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    return conv(x, w, None, None, spec, options)


def run_matmul(spec: GemmSpec) -> Tensor:
    return matmul(torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True), spec)


def run_experts(spec: GemmSpec) -> Tensor:
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 4, requires_grad=True)
    return grouped_linear(x, w, torch.tensor([2, 6], dtype=torch.int32), None, spec)


@pytest.mark.usefixtures("forbidden")
@pytest.mark.parametrize("run", [run_linear, run_conv, run_matmul, run_experts])
@pytest.mark.parametrize("role", list(Role))
def test_the_switch_is_on_for_the_role_alone(role: Role, run: Callable[[GemmSpec], Tensor]) -> None:
    """Where the device has TF32 the operands are left to it."""
    formats = {r: "tf32" if r is role else "fp32" for r in Role}
    spec = GemmSpec(**{str(r): f for r, f in formats.items()}, native=("fp32", "tf32"))
    with Looked() as forward:
        y = run(spec)
    with Looked() as backward:
        y.sum().backward()
    assert {s for _, s in forward.seen} == {"tf32" if role is Role.OUTPUT else "ieee"}
    only_input = run is run_matmul  # both gradients of a product of activations are its grad_input
    on = {Role.OUTPUT: {"ieee"}, Role.GRAD_WEIGHT: {"ieee"} if only_input else {"ieee", "tf32"}}
    assert {s for _, s in backward.seen} == on.get(role, {"tf32"} if only_input else {"ieee", "tf32"})


def test_a_device_that_has_it_multiplies_fp32_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that is FP32, bit for bit."""
    monkeypatch.setattr(specs, "native_formats", lambda device_type: ("fp32", "tf32"))
    net, plain = model(), model()
    everything_in(net, "tf32")
    x = batches(1)[0]
    ours, theirs = loss_of(net, x), loss_of(plain, x)
    assert torch.equal(ours, theirs)
    ours.backward()
    theirs.backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-8)


def test_switches_are_put_back() -> None:
    before = MATMUL.fp32_precision, CONV.fp32_precision
    with pytest.raises(ValueError, match="inside"), tf32_products():
        assert fp32_arithmetic("cuda") == "matmul: tf32, conv: tf32"
        raise ValueError("inside")
    assert (MATMUL.fp32_precision, CONV.fp32_precision) == before
    assert not MATMUL.allow_tf32  # torch refuses to answer where its two kinds of switches contradict each other
    try:
        MATMUL.fp32_precision = "tf32"
        with tf32_products():
            pass
        assert MATMUL.fp32_precision == "tf32"  # the user's own
    finally:
        MATMUL.fp32_precision = before[0]


# What cannot be


def test_no_op_but_a_product_takes_it() -> None:
    net = model()
    plan = Plan(assignments=(Assignment(op=":relu#0", role=Role.OUTPUT, format="tf32", reason=""),))
    autoprec.compile(net, plan=plan, events=None)
    with pytest.raises(PlanError, match=r"gives :relu#0 tf32, in which products alone are computed"):
        net(batches(1)[0])


def test_second_derivatives_are_refused() -> None:
    net = nn.Sequential(nn.Linear(8, 4))
    plan = Plan(assignments=tuple(Assignment(op="0:linear#0", role=role, format="tf32", reason="") for role in Role))
    autoprec.compile(net, plan=plan, events=None)
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="TF32"):
        torch.autograd.grad(net(x).square().sum(), x, create_graph=True)[0].sum().backward()


def test_a_device_timed_under_other_switches_is_refused() -> None:
    net = model()
    device = compiled(net, pinned()).device
    assert device.fp32_products == "ieee"
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with pytest.raises(DeviceError, match=r"fp32 products in ieee, and torch computes them in matmul: bf16 here"):
            autoprec.compile(model(), policy=pinned(), batches=batches(), loss_fn=loss_of, device=device, events=None)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_a_device_file_from_before_switches_were_noted_is_taken_as_it_is(tmp_path: Path) -> None:
    """On CUDA torch's default is TF32 for convolutions, so nothing can be said of what is not noted."""
    net = model()
    device = compiled(net, pinned()).device
    write_device(path := tmp_path / "device.json", device)
    path.write_text(re.sub(r'.*"fp32_products".*\n', "", path.read_text()))
    old = read_device(path)
    assert old.fp32_products == "" and old == replace(device, fp32_products="")
    again = model()
    autoprec.compile(again, policy=pinned(), batches=batches(), loss_fn=loss_of, device=old, events=None)
    assert autoprec.session(again).device.fp32_products == ""
