"""Networks for images as people write them: the predicted peak is the allocator's, and nothing is copied that need not
be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.numerics.lean import relu_keeping_bits
from autoprec.numerics.operands import channel_sums
from autoprec.planning.problem import fixed_bytes

CPU = torch.device("cpu")

#: Bytes of scales, of sums and of numbers for people.
SMALL = 1 << 13


def biased() -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 8, 3))


def upsampled() -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 16, 2, 2))


def channels_last() -> nn.Module:
    return upsampled().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def activated(norm: Callable[[], nn.Module], act: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        blocks = [(nn.Conv2d(n, 32, 3, padding=1), norm(), act()) for n in (3, 32)]
        return nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv2d(32, 2, 1))

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "biases": (biased, (16, 3, 32, 32)),
    "upsampled": (upsampled, (8, 3, 64, 64)),
    "channels last": (channels_last, (8, 3, 64, 64)),
    "silu in place": (activated(nn.Identity, lambda: nn.SiLU(inplace=True)), (12, 3, 48, 48)),
    "mish in place, normed": (activated(lambda: nn.GroupNorm(4, 32), lambda: nn.Mish(inplace=True)), (12, 3, 48, 48)),
    "relu in place, normed": (activated(lambda: nn.BatchNorm2d(32), lambda: nn.ReLU(inplace=True)), (12, 3, 48, 48)),
}


@pytest.mark.parametrize("policy", ["bf16", "memory"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_predicted(name: str, policy: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, batches = make(), [torch.randn(shape) for _ in range(2)]
    if name == "channels last":
        batches = [x.contiguous(memory_format=torch.channels_last) for x in batches]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(model)
    assert session.plan is not None and session.plan.predicted is not None and session.graph is not None

    def step() -> None:
        model(batches[0]).square().mean().backward()

    for _ in range(2):
        step()
        session.step()
    measured = peak_bytes(step, CPU)
    predicted = session.plan.predicted.peak_bytes - fixed_bytes(session.graph)
    assert abs(predicted / measured - 1.0) <= 0.02, (predicted, measured)


@pytest.mark.parametrize("policy", ["bf16", "memory"])
def test_in_place_or_not_is_the_same_step(policy: str) -> None:
    """What would be kept of it in place is a copy of what it changes."""
    found = []
    for inplace in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = activated(lambda: nn.GroupNorm(4, 32), lambda i=inplace: nn.SiLU(inplace=i))()
        batches = [torch.randn(4, 3, 24, 24) for _ in range(2)]
        autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
        plan = autoprec.session(model).plan
        again = plan if not found else found[0][0]
        autoprec.unwrap(model)
        autoprec.compile(model, plan=again, events=None)
        model(batches[0]).square().mean().backward()
        found.append((again, plan.storages, [p.grad for p in model.parameters()]))
    (_, storages, gradients), (_, others, same) = found
    assert {s.tensor for s in storages} == {s.tensor for s in others}
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


def test_sums_of_a_bias_copy_a_few_images_at_a_time() -> None:
    grad = torch.randn(32, 32, 32, 32).bfloat16()
    for g in (grad, grad.contiguous(memory_format=torch.channels_last)):
        assert peak_bytes(lambda g=g: channel_sums(g, "bf16"), CPU) <= (4 << 18) + SMALL
        torch.testing.assert_close(channel_sums(g, "bf16").float(), grad.float().sum([0, 2, 3]), rtol=8e-3, atol=1.0)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_bits_are_in_the_order_of_memory(order: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 32, 32, 32).contiguous(memory_format=order).requires_grad_()
    grad = torch.randn(8, 32, 32, 32).contiguous(memory_format=order)
    bits = x.numel() // 8
    made: list[Tensor] = []
    assert peak_bytes(lambda: made.append(relu_keeping_bits(x)), CPU) <= x.nbytes + bits + SMALL
    (y,) = made
    assert y.is_contiguous(memory_format=order) and torch.equal(y, torch.relu(x))
    for g in (grad, grad.contiguous(), grad.contiguous(memory_format=torch.channels_last)):
        (found,) = torch.autograd.grad(y, x, g, retain_graph=True)
        assert torch.equal(found, torch.where(x > 0, g, 0.0))
    assert peak_bytes(lambda: torch.autograd.grad(y, x, grad, retain_graph=True), CPU) <= x.nbytes + SMALL


@pytest.mark.parametrize("policy", ["bf16", "memory", "balanced"])
def test_what_a_plan_is_compared_with_is_the_model_as_it_was_written(policy: str) -> None:
    """Also where the policy has no FP32."""
    torch.manual_seed(0)
    model, batches = biased(), [torch.randn(4, 3, 16, 16) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    plan = autoprec.session(model).plan
    assert plan is not None and plan.predicted is not None and plan.predicted_fp32 is not None
    assert sum(h.plan for h in plan.memory) == plan.predicted.peak_bytes
    assert sum(h.fp32 for h in plan.memory) == plan.predicted_fp32.peak_bytes
    assert not any(h.fp32 for h in plan.memory if h.kind == "activations, bf16")
