"""Products in formats with a scale: each role against arithmetic written down here, and the device's own FP8 product
against the emulation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.errors import UnsupportedError
from autoprec.formats import TF32, format_named, is_scaled
from autoprec.numerics import products
from autoprec.numerics.convolutions import ConvOptions, conv
from autoprec.numerics.dtypes import native_formats
from autoprec.numerics.experts import batched_linear, grouped_linear
from autoprec.numerics.gemm import linear, matmul
from autoprec.numerics.packing import encode
from autoprec.numerics.products import GemmSpec, scaled_product
from tests.test_casts import by_table, sqnr_db

FORMATS = ["fp32", "bf16", "fp8_e5m2", "fp8_e4m3", "fp8_e3m4", "int8"]
WITH_TF32 = ["fp32", "tf32", "bf16", "fp8_e5m2"]
NATIVE = native_formats("cpu")


def by_hand(x: Tensor, fmt: str, *, by_row: bool = False) -> Tensor:
    """`x` rounded to a format by the table of its numbers, with the largest power-of-two scale that fits, in the dtype
    in which this device multiplies it."""
    if fmt == "tf32":
        return torch.from_numpy(by_table(x.float().numpy(), TF32)).float()
    if not is_scaled(fmt):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[fmt]
        return x.to(dtype) if fmt in NATIVE else x.to(dtype).float()
    found, values = format_named(fmt), x.double().numpy()
    amax = np.abs(values).max(axis=-1, keepdims=True) if by_row else np.abs(values).max()
    scale = 2.0 ** np.floor(np.log2(found.max_value / np.where(amax > 0, amax, found.max_value)))
    rounded = by_table((values * scale).astype(np.float32), found) / scale
    return torch.from_numpy(rounded).to(torch.bfloat16 if "bf16" in NATIVE else torch.float32)


def beside(fmt: str) -> str:
    return "fp8_e4m3" if fmt == "fp8_e5m2" else fmt


def leaves_of(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The first in the dtype that the op is given, the others masters."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(s, generator=generator) for s in shapes]
    return [t.to(dtype if i == 0 else torch.float32).requires_grad_() for i, t in enumerate(found)]


def given(output: str) -> torch.dtype:
    return torch.float32 if output in ("fp32", "tf32") else torch.bfloat16


def products_of(count: int) -> list[tuple[str, ...]]:
    """Formats of so many roles, TF32 beside a few of the others."""
    some = itertools.product(WITH_TF32, repeat=count)
    return [*itertools.product(FORMATS, repeat=count), *(r for r in some if "tf32" in r)]


def spec_of(roles: tuple[str, str, str], *, rowwise: bool = False) -> GemmSpec:
    return GemmSpec(output=roles[0], grad_input=roles[1], grad_weight=roles[2], native=NATIVE, rowwise=rowwise)


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("roles", products_of(3), ids="-".join)
def test_a_linear_is_three_products_by_hand(roles: tuple[str, str, str], rowwise: bool) -> None:
    """Bitwise: operands rounded by a table, multiplied by torch in the same dtype, the result rounded once."""
    output, grad_input, grad_weight = roles
    dtype = given(output)
    x, w, b = leaves_of(dtype, (2, 5, 24), (12, 24), (12,))
    y = linear(x, w, b, None, spec_of(roles, rowwise=rowwise))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(g)
    rows, flat = x.detach().reshape(-1, 24), g.reshape(-1, 12)
    with torch.no_grad():
        first, second = by_hand(rows, output, by_row=rowwise), by_hand(w, beside(output), by_row=rowwise)
        bias = b.to(dtype).to(first.dtype)
        assert torch.equal(y, F.linear(first.view(2, 5, 24), second, bias).to(dtype))
        first = by_hand(flat, grad_input, by_row=rowwise)
        second = by_hand(w.t().contiguous(), beside(grad_input), by_row=rowwise)
        assert torch.equal(x.grad, (first @ second.t()).to(dtype).view(2, 5, 24))
        # What was read for the output is what was kept.
        kept = by_hand(rows, output, by_row=rowwise).float() if is_scaled(output) else rows
        first = by_hand(flat.t().contiguous(), grad_weight, by_row=rowwise)
        same = is_scaled(output) and beside(grad_weight) == output and not rowwise
        second = (
            kept.to(first.dtype) if same else by_hand(kept.t().contiguous(), beside(grad_weight), by_row=rowwise).t()
        )
        assert torch.equal(w.grad, (first @ second).float())
        exact = flat.double().sum(0)
        once = 0.0 if dtype is torch.float32 or grad_weight == "fp32" else 2.0**-8  # rounded to BF16
        assert torch.allclose(b.grad.double(), exact, rtol=once + 1e-6, atol=1e-5)


ROLES = [
    ("fp8_e4m3", "fp8_e5m2", "bf16"),
    ("fp8_e4m3",) * 3,
    ("bf16", "fp8_e5m2", "fp8_e4m3"),
    ("int8", "fp32", "int8"),
    ("tf32", "bf16", "tf32"),
    ("bf16", "tf32", "tf32"),
]


@pytest.mark.parametrize("roles", ROLES, ids="-".join)
def test_a_convolution_is_three_products_by_hand(roles: tuple[str, str, str]) -> None:
    output, grad_input, grad_weight = roles
    dtype = given(output)
    x, w, b = leaves_of(dtype, (2, 4, 9, 8), (6, 4, 3, 3), (6,))
    options = ConvOptions(stride=(2, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    y = conv(x, w, b, None, spec_of(roles), options)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(g)

    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv2d(x, w, b, stride=(2, 1), padding=(1, 1))

    with torch.no_grad():
        first, second = by_hand(x, output), by_hand(w, beside(output))
        assert torch.equal(y, product(first, second, b.to(dtype).to(first.dtype)).to(dtype))
        kept = (by_hand(x, output).float() if is_scaled(output) else x).clone()
    for role, leaf, found in ((grad_input, 0, x.grad), (grad_weight, 1, w.grad)):
        arriving, other = by_hand(g, role), beside(role)
        operands = [by_hand(t.detach().clone(), other) for t in (kept, w)]
        operands = [t.to(arriving.dtype).requires_grad_(i == leaf) for i, t in enumerate(operands)]
        (expected,) = torch.autograd.grad(product(*operands, None), operands[leaf], arriving)
        assert torch.equal(found, expected.to(found.dtype))


#: (stride, padding, dilation, groups, transposed, output padding), shapes of the input and of the weight.
CONVOLUTIONS = {
    "strided": (((2, 3), (1, 2), (1, 2), 2, False, ()), (3, 4, 10, 17), (6, 2, 3, 3)),
    "1 × 1": (((2, 2), (0, 0), (1, 1), 1, False, ()), (3, 4, 7, 6), (6, 4, 1, 1)),
    "of one dimension": (((3,), (2,), (2,), 1, False, ()), (3, 4, 20), (6, 4, 3)),
    "transposed": (((2, 3), (1, 0), (1, 2), 2, True, (1, 1)), (3, 4, 5, 6), (4, 3, 3, 2)),
    "transposed, cut off": (((1,), (2,), (3,), 1, True, (2,)), (3, 4, 9), (4, 5, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_an_input_gradient_in_another_format_needs_no_copy_of_the_input(name: str) -> None:
    """In FP32 where the input is BF16: that of torch, to FP32's rounding."""
    given, shape, size = CONVOLUTIONS[name]
    names = ("stride", "padding", "dilation", "groups", "transposed", "output_padding")
    options = ConvOptions(**dict(zip(names, given, strict=True)))
    x, w = leaves_of(torch.bfloat16, shape, size)
    y = conv(x, w, None, None, spec_of(("bf16", "fp32", "bf16")), options)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(g)
    o, wide = options, x.detach().double().requires_grad_()
    exact = torch.convolution(wide, w.detach().double(), None, o.stride, o.padding, o.dilation, *o.last)
    (expected,) = torch.autograd.grad(exact, wide, g.double())
    assert x.grad.shape == x.shape and expected.abs().max() > 0.1
    assert torch.allclose(x.grad.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e3m4", "bf16"])
def test_a_product_of_activations_by_hand(fmt: str) -> None:
    a, b = (t.detach().bfloat16().requires_grad_() for t in leaves_of(torch.bfloat16, (3, 1, 4, 24), (2, 24, 6)))
    y = matmul(a, b, spec_of((fmt, fmt, fmt)))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(g)
    with torch.no_grad():
        left, right, arriving = by_hand(a, fmt), by_hand(b, fmt), by_hand(g, fmt)
        assert torch.equal(y, (left @ right).bfloat16())
        for found, expected in ((a.grad, arriving @ right.mT), (b.grad, left.mT @ arriving)):
            expected = expected.float().sum_to_size(found.shape)
            # Ours sums over the broadcast dimensions before it rounds, this after it: a BF16 rounding for each term.
            torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@pytest.mark.parametrize(("output", "grad_input"), products_of(2))
def test_a_product_of_activations_by_role(output: str, grad_input: str) -> None:
    """Bitwise: what was read for the output is read again for the gradients, rounded to their format."""
    a, b = (t.detach().to(given(output)).requires_grad_() for t in leaves_of(torch.float32, (3, 4, 24), (3, 24, 6)))
    y = matmul(a, b, spec_of((output, grad_input, output)))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    y.backward(g)
    with torch.no_grad():
        left, right = (by_hand(t, output) for t in (a, b))
        assert torch.equal(y, (left @ right).to(given(output)))
        kept = [t.float() for t in (left, right)] if is_scaled(output) else [a.detach(), b.detach()]
        left, right = (t if is_scaled(output) and beside(grad_input) == output else by_hand(t, beside(grad_input))
                       for t in kept)  # fmt: skip
        arriving = by_hand(g, grad_input)
        assert torch.equal(a.grad, (arriving @ right.to(arriving.dtype).mT).to(a.dtype))
        assert torch.equal(b.grad, (left.to(arriving.dtype).mT @ arriving).to(b.dtype))


def test_experts_in_fp8_are_linears_in_fp8() -> None:
    """With one scale for all experts, as one copy of the rows has."""
    roles = ("fp8_e4m3", "fp8_e5m2", "bf16")
    x, w = leaves_of(torch.bfloat16, (10, 24), (3, 24, 12))
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    y = grouped_linear(x, w, offs, None, spec_of(roles))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(g)
    with torch.no_grad():
        first, second = by_hand(x, "fp8_e4m3"), by_hand(w, "fp8_e4m3")
        arriving = by_hand(g, "fp8_e5m2")
        for i, rows in enumerate((slice(0, 4), slice(4, 4), slice(4, 9))):
            assert torch.equal(y[rows], (first[rows] @ second[i]).bfloat16())
            assert torch.equal(x.grad[rows], (arriving[rows] @ second[i].t()).bfloat16())
            assert torch.equal(w.grad[i], (first[rows].t() @ g[rows].to(first.dtype)).float())
        assert not y[9:].any() and not x.grad[9:].any()


@pytest.mark.parametrize("roles", [*ROLES, ("fp32", "bf16", "fp8_e4m3"), ("tf32", "tf32", "tf32")], ids="-".join)
def test_a_weight_for_each_of_a_batch_by_role(roles: tuple[str, str, str]) -> None:
    """Bitwise three products by hand, whose operands have one scale for the whole batch."""
    output, grad_input, grad_weight = roles
    dtype = given(output)
    x, w = leaves_of(dtype, (3, 5, 24), (3, 24, 12))
    y = batched_linear(x, w, None, None, spec_of(roles))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(g)
    with torch.no_grad():
        assert torch.equal(y, (by_hand(x, output) @ by_hand(w, beside(output))).to(dtype))
        arriving = by_hand(g, grad_input)
        assert torch.equal(x.grad, (arriving @ by_hand(w, beside(grad_input)).to(arriving.dtype).mT).to(dtype))
        kept = by_hand(x, output).float() if is_scaled(output) else x.detach()
        arriving = by_hand(g, grad_weight)
        same = is_scaled(output) and beside(grad_weight) == output
        read = (kept if same else by_hand(kept, beside(grad_weight))).to(arriving.dtype)
        assert torch.equal(w.grad, (read.mT @ arriving).float())


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("left", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(16, 32, 48), (33, 40, 24), (1, 16, 5), (7, 3, 1)], ids=str)
def test_the_devices_own_product_is_the_emulated_one(
    shape: tuple[int, int, int], left: str, rowwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scaled_mm`, padded where its kernels ask for it, against upcast operands. The two add in different orders: FP32
    sums of K products differ by at most K·2⁻²³ of the sum of magnitudes, and BF16 by one rounding more."""
    m, k, n = shape
    x, w, bias = (t.detach() for t in leaves_of(torch.float32, (m, k), (n, k), (n,)))
    a, b = encode(x, left, rowwise=rowwise), encode(w, "fp8_e4m3", rowwise=rowwise)
    left_wide, right_wide = by_hand(x, left, by_row=rowwise).double(), by_hand(w, "fp8_e4m3", by_row=rowwise).double()
    exact = left_wide @ right_wide.t() + bias.double()
    magnitude = left_wide.abs() @ right_wide.abs().t() + bias.abs()
    asked, own = [], F.scaled_mm

    def asking(left: Tensor, right: Tensor, *rest: Any, **more: Any) -> Tensor:
        asked.append((left.shape[1], *right.shape))
        return own(left, right, *rest, **more)

    monkeypatch.setattr(F, "scaled_mm", asking)
    for dtype in (torch.float32, torch.bfloat16):
        found = scaled_product(a, b, dtype, bias)
        assert found.shape == (m, n) and found.dtype is dtype
        once = 2.0**-8 * exact.abs() + 2.0**-8 * bias.abs() if dtype is torch.bfloat16 or rowwise else 0.0
        assert bool(((found.double() - exact).abs() <= k * 2.0**-23 * magnitude + once).all())
    assert len(asked) == 2 and not any(size % 16 for sizes in asked for size in sizes)  # what CUDA's kernels take


def test_the_devices_own_product_is_used_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small twin of what runs on a GPU: the CPU's FP8 product is slow, and it is there."""
    used: list[tuple[str, str]] = []
    own = products.scaled_product

    def counted(a: Any, b: Any, *rest: Any) -> Tensor:
        used.append((a.format, b.format))
        return own(a, b, *rest)

    monkeypatch.setattr(products, "scaled_product", counted)
    roles = ("fp8_e4m3", "fp8_e5m2", "fp8_e5m2")
    results = []
    for native in (NATIVE, (*NATIVE, "fp8_e4m3", "fp8_e5m2")):
        x, w, b = leaves_of(torch.bfloat16, (2, 5, 24), (12, 24), (12,))
        spec = GemmSpec(output=roles[0], grad_input=roles[1], grad_weight=roles[2], native=native)
        y = linear(x, w, b, None, spec)
        y.add_(1)  # a result that may be changed in place
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, w.grad, b.grad])
    assert used == [("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3")]
    for emulated, native_result in zip(*results, strict=True):
        torch.testing.assert_close(native_result.float(), emulated.float(), rtol=2**-7, atol=2**-7)


def test_signal_to_noise_of_products() -> None:
    """Of normal data: √2 of a cast's noise for two operands, so 3 dB below it; E5M2 gradients are 6 dB coarser."""
    x, w = leaves_of(torch.float32, (512, 256), (128, 256))
    y = linear(x, w, None, None, spec_of(("fp8_e4m3", "fp8_e5m2", "fp8_e5m2")))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(g.bfloat16())
    with torch.no_grad():
        assert sqnr_db(x @ w.t(), y) >= 25.0
        assert sqnr_db(g.t() @ x, w.grad) >= 23.0
        assert sqnr_db(g @ w, x.grad) >= 23.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_never_hidden(bad: float) -> None:
    """torch's E4M3 casts make 448 of inf: then nobody would veto the step."""
    x, w = leaves_of(torch.bfloat16, (4, 16), (8, 16))
    spec = spec_of(("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"))
    with torch.no_grad():
        x[1, 3] = bad
    y = linear(x, w, None, None, spec)
    assert not bool(y[1].isfinite().any())
    y = linear(torch.ones_like(x).requires_grad_(), w, None, None, spec)
    y.backward(torch.full_like(y, bad))
    assert not bool(w.grad.isfinite().any())


def test_zeros_go_through() -> None:
    """All-zero rows, as LoRA begins with: amax 0 is a scale of 1, not 0/0."""
    x, w = (torch.zeros_like(t).requires_grad_() for t in leaves_of(torch.bfloat16, (4, 16), (8, 16)))
    w = w.detach().float().requires_grad_()
    for rowwise in (False, True):
        y = linear(x, w, None, None, spec_of(("fp8_e4m3", "fp8_e5m2", "fp8_e5m2"), rowwise=rowwise))
        y.backward(torch.zeros_like(y))
        assert not y.any() and not x.grad.any() and not w.grad.any()


def test_a_second_derivative_through_fp8_is_refused() -> None:
    x, w = leaves_of(torch.bfloat16, (4, 16), (8, 16))
    for roles in (("fp8_e4m3", "bf16", "bf16"), ("bf16", "fp8_e5m2", "bf16"), ("bf16", "bf16", "fp8_e5m2")):
        y = linear(x, w, None, None, spec_of(roles))
        with pytest.raises(UnsupportedError, match="FP8|narrow format"):
            torch.autograd.grad(y.float().sum(), [x, w], create_graph=True)
