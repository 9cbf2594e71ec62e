"""What holds on a CPU holds on a GPU: the same tests on both, the second where there is one."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.calibration.clocks import seconds_of
from autoprec.execution.measuring import peak_bytes
from autoprec.formats import FORMATS, is_scaled
from autoprec.numerics.dtypes import native_formats
from autoprec.numerics.packing import decode, encode, pack_bits, unpack_bits
from autoprec.numerics.products import GemmSpec, rows_times_rows
from autoprec.planning.problem import fixed_bytes
from autoprec.serial import load_policy
from tests.bench.llama import Stack
from tests.bench.workloads import next_byte_loss

#: Nobody can run the second without one; the first is its twin.
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]
on_each = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])  # held against the CPU, which agrees with itself
pytestmark = pytest.mark.filterwarnings("ignore")


class Images(nn.Module):
    """Batch norm, a mask, pooling and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(F.dropout(x.flatten(1), 0.2, self.training))


def stack(device: str, width: int = 64, length: int = 32, layers: int = 2) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = Stack(width=width, heads=max(1, width // 64), inner=2 * width, layers=layers, length=length)
    return model.to(device), [torch.randint(0, 256, (4, length + 1), device=device) for _ in range(3)]


def images(device: str) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    batches = [(torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))) for _ in range(3)]
    return Images().to(device), [(x.to(device), y.to(device)) for x, y in batches]


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


MODELS: dict[str, Any] = {"stack": (stack, next_byte_loss), "images": (images, image_loss)}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of everything that a bad step must leave alone."""
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *held)]


def trained(model: nn.Module, batches: list[Any], loss_fn: Any, steps: int = 6) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for k in range(steps):
        torch.manual_seed(k)
        optimizer.zero_grad()
        loss = loss_fn(model, batches[k % len(batches)])
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*seen, *state_of(model, optimizer)]


@on_each
@pytest.mark.parametrize("name", MODELS)
def test_identity_is_bitwise(name: str, device: str) -> None:
    make, loss_fn = MODELS[name]
    model, batches = make(device)
    plain = copy.deepcopy(model)
    policy = autoprec.Policy(name="identity", formats=("fp32",), storage={"formats": ()}, calibration={"steps": 2})
    autoprec.compile(model, policy=policy, events=None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, found = trained(plain, batches, loss_fn), trained(model, batches, loss_fn)
    finally:
        torch.use_deterministic_algorithms(False)
    session = autoprec.session(model)
    assert session.plan is not None and session.plan.is_identity and not session.skipped_steps
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [f.name for f in FORMATS if is_scaled(f.name)])
@pytest.mark.parametrize("rowwise", [False, True])
def test_casts_give_the_same_bits(name: str, rowwise: bool, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 48, generator=generator) * 2.0 ** torch.randint(-9, 9, (64, 48), generator=generator)
    here = encode(x.to(dtype), name, rowwise=rowwise)
    there = encode(x.to(dtype).to(device), name, rowwise=rowwise)
    assert torch.equal(here.payload, there.payload.cpu())
    assert here.inverse_scale is not None and there.inverse_scale is not None
    assert torch.equal(here.inverse_scale, there.inverse_scale.cpu())
    for wide in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(decode(here, wide), decode(there, wide).cpu())


@on_a_gpu
def test_bits_of_masks_are_the_same(device: str) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(2)) > 0
    assert torch.equal(pack_bits(x.to(device)).cpu(), pack_bits(x))
    assert torch.equal(unpack_bits(pack_bits(x.to(device)), x.shape).cpu().bool(), x)


@on_each
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(64, 96, 32), (33, 40, 24)])
def test_products_are_those_of_rounded_operands(shape: tuple[int, int, int], fmt: str, device: str) -> None:
    """In float64, on the CPU; the device adds up in FP32 (a tensor core in fewer bits), and its result is within a unit
    in the last place of the dtype that it is born in."""
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(n, k)
    spec = GemmSpec(output=fmt, grad_input=fmt, grad_weight=fmt, native=native_formats(device))
    found = rows_times_rows(a.to(device), b.to(device), fmt, spec, torch.float32).double().cpu()
    emulated = GemmSpec(output=fmt, grad_input=fmt, grad_weight=fmt, native=("fp32",))
    other = {"fp8_e5m2": "fp8_e4m3"}.get(fmt, fmt)
    left, right = emulated.operand(a, fmt).double(), emulated.operand(b, other).double()
    exact, size = left @ right.t(), left.abs() @ right.abs().t()
    adding = 2.0**-10 if fmt == "tf32" else 2.0**-13  # how a device rounds to TF32 is its own affair
    assert float(((found - exact).abs() / size).max()) < adding + 2.0 ** {"fp16": -11, "tf32": -24}.get(fmt, -8)


@pytest.mark.parametrize("policy", ["bf16", "memory", "balanced", "fp8-hopper"])
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "eager"), *(pytest.param("cuda", b, marks=DEVICES[1].marks) for b in ("eager", "inductor"))],  # type: ignore[union-attr]
)
def test_plans_train(policy: str, backend: Any, device: str) -> None:
    """Their gradients are FP32's but for what the noise budget allows, and the peak is what the plan says. (Compiled on
    a CPU: `tests/test_lowering.py`.)"""
    big = device == "cuda"
    model, batches = stack(device, *((512, 512, 3) if big else (64, 32, 1)))
    plain = copy.deepcopy(model)
    chosen = load_policy(policy).replaced(calibration={"steps": 3})
    autoprec.compile(model, policy=chosen, batches=batches, loss_fn=next_byte_loss, events=None, backend=backend)
    session = autoprec.session(model)
    assert session.plan is not None and session.plan.predicted is not None and session.graph is not None

    def step() -> None:
        next_byte_loss(model, batches[0]).backward()
        session.step()

    next_byte_loss(plain, batches[0]).backward()
    step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert float((p.grad - q.grad).norm() / q.grad.norm()) < 0.25, name
    if big or backend == "eager":
        step()
        predicted = session.plan.predicted.peak_bytes - fixed_bytes(session.graph)
        measured = peak_bytes(step, torch.device(device))
        print(
            f"\n  {policy} {backend} on {device}: {', '.join(session.plan.formats_used())}: {predicted / measured:.3f}"
        )
        assert predicted == pytest.approx(measured, rel=0.08)


@on_each
@pytest.mark.parametrize("which", ["AdamW", "SGD", "AdamW, fused"])
@pytest.mark.parametrize("how", ["forward", "gradient", "buffer"])
def test_a_bad_step_changes_nothing(how: str, which: str, device: str) -> None:
    """Before anybody asks: a GPU leaves the update out by itself, if the optimizer is fused."""
    model, batches = images(device)
    autoprec.compile(model, policy=load_policy("bf16").replaced(calibration={"steps": 2}), events=None)
    name, *fused = which.split(", ")
    made = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **dict.fromkeys(fused, True))
    session, optimizer = autoprec.session(model), made

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        image_loss(model, batch).backward()
        optimizer.step()

    for k in range(4):
        step(batches[k % 3])
    before = state_of(model, optimizer)
    x, y = batches[0]
    if how == "gradient":
        handle = model.head.weight.register_hook(lambda g: torch.full_like(g, math.nan))
        step((x, y))
        handle.remove()
    else:
        step((x * (math.inf if how == "forward" else 3e38), y))
    assert session._guard.owes == (device == "cuda" and bool(fused))
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))
    assert session.step_was_skipped and session.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))
    step(batches[1])
    assert not session.step_was_skipped and session.steps >= 5
    assert any("bad_step" == e.kind for e in session.events)


@on_each
def test_a_run_goes_on_where_it_was_saved(device: str) -> None:
    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Any, list[Any]]:
        model, batches = images(device)
        policy = load_policy("bf16").replaced(
            calibration={"steps": 2}, monitor={"window_steps": 4, "interval_steps": 2}
        )
        autoprec.compile(model, policy=policy, events=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, autoprec.session(model), batches

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: range) -> list[str]:
        losses = []
        for k in steps:
            torch.manual_seed(k)
            optimizer.zero_grad()
            loss = image_loss(model, batches[k % 3])
            loss.backward()
            optimizer.step()
            losses.append(repr(float(loss.detach())))
        return losses

    whole, wholes, session, batches = begin()
    expected = run(whole, wholes, batches, range(13))
    first, firsts, own, _ = begin()
    losses = run(first, firsts, batches, range(7))
    states = [copy.deepcopy(s.state_dict()) for s in (first, firsts, own)]
    second, seconds, other, _ = begin()
    for part, state in zip((second, seconds, other), states, strict=True):
        part.load_state_dict(state)
    assert losses + run(second, seconds, batches, range(7, 13)) == expected
    assert other.steps == session.steps and other.events == session.events
    assert all(torch.equal(a, b) for a, b in zip(state_of(second, seconds), state_of(whole, wholes), strict=True))


@on_each
def test_seconds_are_those_of_the_device(device: str) -> None:
    """Of many products as of one; and small ones take a GPU less than the host takes to ask for them."""
    x = torch.randn(1024, 1024, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            x @ x

    one, many = (seconds_of(lambda n=n: products(n), torch.device(device)) for n in (1, 16))
    assert 4.0 < many / one < 40.0
    if device == "cuda":
        small = torch.randn(8, device=device)
        begin = time.perf_counter()
        for _ in range(100):
            small.add_(1.0)
        assert seconds_of(lambda: [small.add_(1.0) for _ in range(100)], x.device) < time.perf_counter() - begin
