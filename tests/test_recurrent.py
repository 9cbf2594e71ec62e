"""LSTMs with a format: casts by hand, states, random numbers, noise, and formats that are not offered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.devices import Datasheet
from autoprec.numerics.dtypes import native_formats
from autoprec.planning.planner import ask, propose
from autoprec.planning.roofline import modelled_device
from autoprec.plans import Assignment, Plan, Region
from autoprec.serial import load_device
from tests.bench.measure import calibrate, one_thread
from tests.bench.recurrent import narrowed
from tests.bench.workloads import WORKLOADS


def plan_of(fmt: str, *regions: Region, op: str = "lstm:lstm#0") -> Plan:
    return Plan(assignments=(Assignment(op=op, role="output", format=fmt, reason="test"),), regions=regions)


class Carrying(nn.Module):
    """Two layers, both directions, dropout between them; takes and gives its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.25, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x, state)
        return y, state


class Headed(nn.Module):
    """One layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def by_hand(model: Carrying, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Two calls, the second with the state of the first, parameters cast in each; outputs, states, gradients."""
    params = [p.detach().clone().requires_grad_() for p in model.lstm._flat_weights]
    state = (torch.zeros(4, len(x), 16), torch.zeros(4, len(x), 16))
    y = torch.zeros(())
    for _ in range(2):
        narrow = [p.to(dtype) for p in params]
        hidden = tuple(s.to(dtype) for s in state)
        y, h, c = torch.lstm(x.to(dtype), hidden, narrow, True, 2, 0.25, True, True, True)
        y, state = y.float(), (h.float(), c.float())
    (y.square().mean() + state[1].mean()).backward()
    return [y.detach(), *(s.detach() for s in state), *(p.grad for p in params)]


def by_plan(model: Carrying, x: Tensor, plan: Plan | None) -> list[Tensor]:
    model = copy.deepcopy(model)
    if plan is not None:
        autoprec.compile(model, plan=plan, events=None)
    torch.manual_seed(0)
    _, state = model(x)
    y, state = model(x, state)
    (y.square().mean() + state[1].mean()).backward()
    return [y.detach(), *(s.detach() for s in state), *(p.grad for p in model.lstm._flat_weights)]


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_an_lstm_equals_casts_by_hand(fmt: str) -> None:
    """Bitwise, state and dropout's masks included; in FP16 with a region's scale, which is a power of two."""
    torch.manual_seed(1)
    model, x = Carrying(), torch.randn(3, 5, 8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    torch.manual_seed(0)
    expected = by_hand(model, x, dtype)
    found = by_plan(model, x, plan_of(fmt))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(t.dtype is torch.float32 for t in found)
    plain = by_plan(model, x, None)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)) == (fmt == "fp32")


def test_a_region_keeps_gradients_that_fp16_cannot_hold() -> None:
    torch.manual_seed(1)
    model, x = Headed(), torch.randn(3, 5, 8)
    plain = copy.deepcopy(model)
    (plain(x).mean() * 1e-7).backward()
    scaled = copy.deepcopy(model)
    autoprec.compile(scaled, plan=plan_of("fp16", Region(ops=("lstm:lstm#0",), scale_log2=24, reason="test")))
    (scaled(x).mean() * 1e-7).backward()
    for (name, p), q in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.02 * p.grad.norm(), name
    autoprec.compile(model, plan=plan_of("fp16"), events=None)
    (model(x).mean() * 1e-7).backward()
    lost = [
        float((p.grad - q.grad).norm() / p.grad.norm())
        for p, q in zip(plain.parameters(), model.parameters(), strict=True)
    ]
    assert max(lost) > 0.1


def test_noise_of_an_lstm_is_predicted() -> None:
    """Over eight batches that calibration did not see: loss change, and error of its weight gradients. Where
    torch has no fused kernel, and would round every step, BF16 is not offered."""
    with one_thread():
        calibrated = calibrate(WORKLOADS["recurrent"])
        if "bf16" not in native_formats("cpu"):
            lacking = calibrated.device.no_kernel_by_key
            keys = {op.timing_key for op in calibrated.session.graph.ops if op.kind == "lstm"}
            assert keys and all("fused LSTM" in lacking[key, "bf16"] for key in keys)
            return
        found = list(narrowed(calibrated, 8))
    assert len(found) == 3
    for r in found:
        assert 0.4 < r.loss_predicted / r.loss_measured < 2.5
        assert 0.6 < r.gradient_predicted / r.gradient_measured < 1.8


def test_the_gradient_limit_speaks_of_its_matrices() -> None:
    torch.manual_seed(0)

    def formats(limit: float) -> dict[str, str]:
        """On a device that has LSTMs in BF16."""
        model = Headed()
        policy = autoprec.Policy(
            name="test",
            formats=("fp32", "bf16"),
            objective="bytes",
            storage={"formats": ()},
            noise={"gradient": limit, "loss": 1e6},
        )
        batches = [torch.randn(64, 24, 8) for _ in range(4)]
        autoprec.compile(model, policy=policy, events=None)
        session = autoprec.session(model)
        session.calibrate(batches, lambda m, x: m(x).square().mean())
        sheet = load_device("h100")
        assert isinstance(sheet, Datasheet)
        device = modelled_device(sheet, session.graph)
        proposals = propose(ask(session.graph, session.profile, device, policy))
        plan = proposals.decisions(proposals.best.solution)
        return {a.op: a.format for a in plan.assignments if a.role == "output"}

    assert formats(1.0)["lstm:lstm#0"] == "bf16"
    assert formats(1e-4)["lstm:lstm#0"] == "fp32"


def test_fp16_is_not_offered_on_a_cpu() -> None:
    model = nn.LSTM(8, 16, batch_first=True)
    policy = autoprec.Policy(name="test", formats=("fp32", "fp16"))
    batches = [torch.randn(4, 6, 8) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x)[0].mean(), events=None)
    session = autoprec.session(model)
    (key,) = {op.timing_key for op in session.graph.ops if op.kind == "lstm"}
    assert "fused LSTM" in session.device.no_kernel_by_key[key, "fp16"]


def test_an_lstm_with_a_projection_keeps_fp32() -> None:
    """torch has no fused kernel for it."""
    model = nn.LSTM(8, 16, batch_first=True, proj_size=4)
    batches = [torch.randn(4, 6, 8) for _ in range(2)]
    autoprec.compile(model, policy="bf16", batches=batches, loss_fn=lambda m, x: m(x)[0].mean(), events=None)
    assert "lstm#0" not in {a.op.partition(":")[2] for a in autoprec.session(model).plan.assignments}
