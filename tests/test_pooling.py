"""Max pooling that keeps a byte per result: torch's bits forward and backward, at a fraction of the bytes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.numerics import pooling

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
OURS = {1: pooling.max_pool1d, 2: pooling.max_pool2d, 3: pooling.max_pool3d}
LAYOUTS = {2: torch.channels_last, 3: torch.channels_last_3d}


@st.composite
def windows(draw: Any) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Dimensions, a shape, and arguments that torch takes."""
    n = draw(st.integers(1, 3))
    kernel = draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    dilation = draw(st.lists(st.integers(1, 2), min_size=n, max_size=n))
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    plane = [(k - 1) * d + 1 + draw(st.integers(0, 6)) for k, d in zip(kernel, dilation, strict=True)]
    batch = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    stride = draw(st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=n, max_size=n)))
    return n, (*batch, *plane), {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation,
                                 "ceil_mode": draw(st.booleans())}  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, special: bool) -> Tensor:
    """Few different numbers, so that many maxima are there twice; and a NaN, an inf and a zero of each sign."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if special:
        x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])[: x.numel()].to(dtype)
    return x


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


@given(windows(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(), st.booleans(),
       st.integers(0, 99))  # fmt: skip
def test_the_bits_are_torchs(
    case: tuple[int, tuple[int, ...], dict[str, Any]], dtype: torch.dtype, last: bool, special: bool, seed: int
) -> None:
    n, shape, arguments = case
    x = values(shape, dtype, seed, special)
    if last and n in LAYOUTS and x.dim() == n + 2:
        x = x.contiguous(memory_format=LAYOUTS[n])
    found = []
    for pool in (POOLS[n], OURS[n]):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, **arguments)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        (grad,) = torch.autograd.grad(y, leaf, g)
        found.append((y, grad))
    (y, grad), (own_y, own_grad) = found
    assert torch.equal(bits(y), bits(own_y)) and own_y.stride() == y.stride()
    assert torch.equal(bits(grad), bits(own_grad)) and own_grad.stride() == grad.stride()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_second_derivatives(n: int) -> None:
    x = torch.randperm(2 * 6**n).double().view(1, 2, *[6] * n).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: OURS[n](x, 3, 2, 1), x)
    assert torch.autograd.gradgradcheck(lambda x: OURS[n](x, 3, 2, 1), x)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_byte_is_kept(n: int) -> None:
    x = torch.randn(2, 3, *[8] * n, requires_grad=True)
    y = OURS[n](x, 2)
    assert saved_bytes(lambda: OURS[n](x, 2), []) == y.numel()
    assert saved_bytes(lambda: POOLS[n](x, 2), []) == 8 * y.numel() + 4 * x.numel()


def test_windows_that_a_byte_does_not_tell_apart() -> None:
    """More places than 256, or a window wider than the plane."""
    wide = torch.arange(1600.0).view(1, 1, 40, 40).requires_grad_()  # the last of each window is its maximum
    narrow = torch.arange(16.0).view(1, 1, 8, 2).requires_grad_()
    for x, arguments in ((wide, {"kernel_size": 17}), (narrow, {"kernel_size": 4, "padding": 2})):
        found = [torch.autograd.grad(pool(x, **arguments).square().sum(), x)[0] for pool in (F.max_pool2d, OURS[2])]
        assert torch.equal(*found)
    assert saved_bytes(lambda: OURS[2](wide, 16, 8), []) == 16


def test_who_asks_for_indices_gets_torchs() -> None:
    for args, kwargs in (((2,), {"return_indices": True}), ((2, None, 0, 1, False, True), {})):
        x = torch.randn(1, 1, 4, 4)
        assert pooling.pooling_of(F.max_pool2d, (x, *args), kwargs) is F.max_pool2d
    assert pooling.pooling_of(torch.max_pool2d, (x, 2), {}) is OURS[2]
    assert pooling.pooling_of("view", (x, 2), {}) == "view"


def test_a_compiler_sees_torchs() -> None:
    """Which it packs into a byte itself."""
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    traced = make_fx(lambda x: OURS[2](x, 2))(x).graph
    assert [n.target for n in traced.nodes if n.op == "call_function"] == [
        torch.ops.aten.max_pool2d_with_indices.default, operator.getitem, operator.getitem]  # fmt: skip


def test_transforms_see_through_it() -> None:
    x = torch.randn(3, 2, 6, 6)
    found = [torch.func.vmap(torch.func.grad(lambda x, pool=pool: pool(x, 2).square().sum()))(x)
             for pool in (F.max_pool2d, OURS[2])]  # fmt: skip
    assert torch.equal(*found)


#: Elements of what is pooled below; what tanh keeps is what torch's pooling keeps too.
POOLED = 4 * 8 * 8 * 8


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.up, self.head = (
            nn.Conv2d(3, 8, 3),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.pool(torch.tanh(self.conv(x)))).mean((2, 3)))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_model_keeps_a_byte(backend: str) -> None:
    """What a step keeps is what the plan says, whether FP32 or BF16; the bits are the model's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = Pooled(), [torch.randn(4, 3, 18, 18) for _ in range(3)]
    model(batches[0]).square().mean().backward()
    plain = saved_bytes(lambda: model(batches[0]), [*model.parameters(), batches[0]])
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    policy = autoprec.Policy.model_validate({
        "name": "test", "formats": ("fp32",), "storage": {"formats": ()}, "calibration": {"steps": 2},
        "noise": {"gradient": 1.0, "loss": 1.0},
    })  # fmt: skip
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b).square().mean(), events=None,
                     backend=backend)  # fmt: skip
    session = autoprec.session(model)
    model(batches[0]).square().mean().backward()
    session.step()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(wanted)
    if backend == "inductor":
        assert all(torch.allclose(g, w, atol=1e-6) for g, w in zip(found, wanted, strict=True))
        return
    assert all(torch.equal(g, w) for g, w in zip(found, wanted, strict=True))
    assert session.plan is not None and session.plan.predicted is not None
    kept = saved_bytes(lambda: model(batches[0]), [*model.parameters(), batches[0]])
    assert session.plan.predicted.saved_bytes == kept == plain - 7 * POOLED
