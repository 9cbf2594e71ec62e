"""Casts, packings, GEMMs and row weights against independent computations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoprec.calibration.rows import row_weights
from autoprec.errors import UnsupportedError
from autoprec.execution.measuring import peak_bytes
from autoprec.formats import FORMATS, TF32
from autoprec.numerics import dtypes
from autoprec.numerics.casts import enter_region, leave_region, saturating_cast
from autoprec.numerics.contractions import einsum_contraction
from autoprec.numerics.convolutions import conv
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.experts import grouped_linear
from autoprec.numerics.gemm import GemmSpec, linear, matmul
from autoprec.numerics.histograms import sample
from autoprec.numerics.lean import relu_keeping_bits
from autoprec.numerics.norms import layer_norm
from autoprec.numerics.packing import Packed, decode, encode, pack_bits, unpack_bits
from autoprec.numerics.specs import conv_options

FP32_SPEC = GemmSpec(output="fp32", grad_input="fp32", grad_weight="fp32", native=("fp32",))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f is not TF32], ids=lambda f: f.name)
def test_formats_are_those_of_torch(fmt: Any) -> None:
    info = torch.finfo(dtype_of(fmt.name))
    assert (fmt.max_value, fmt.min_normal, fmt.bytes * 8) == (info.max, info.smallest_normal, info.bits)
    assert 2.0**-fmt.mantissa_bits == info.eps
    tiny = torch.tensor(fmt.min_subnormal).to(dtype_of(fmt.name)).float()
    assert float(tiny) == fmt.min_subnormal  # the smallest subnormal is representable
    assert float(torch.tensor(fmt.min_subnormal * 0.49).to(dtype_of(fmt.name)).float()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_e4m3_patterns_decode_exactly(dtype: torch.dtype) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    expected = patterns.view(torch.float8_e4m3fn).to(dtype)
    found = decode(Packed(patterns, torch.ones(()), "fp8_e4m3"), dtype)
    finite = ~expected.isnan()
    assert int(finite.sum()) == 254
    assert torch.equal(found[finite], expected[finite])
    assert torch.equal(found[finite].signbit(), expected[finite].signbit())


@pytest.mark.parametrize("log2", [-126, -40, 0, 7, 8, 60, 118, 126])
def test_e4m3_decodes_under_every_scale(log2: int) -> None:
    """One factor where BF16 has it, else two; what leaves BF16 is inf or 0 as in a cast."""
    patterns = torch.arange(256, dtype=torch.uint8)
    patterns = patterns[(patterns & 0x7F) != 0x7F]
    exact = patterns.view(torch.float8_e4m3fn).double() * 2.0**log2
    found = decode(Packed(patterns, torch.tensor(2.0**log2), "fp8_e4m3"), torch.bfloat16)
    assert torch.equal(found, exact.float().bfloat16())
    assert decode(Packed(patterns, torch.tensor(math.nan), "fp8_e4m3"), torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_piece_by_piece_is_packing_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    for x in (images, images.to(memory_format=torch.channels_last), images.expand(2, 2, 3, 5, 7), images[:, 1]):
        at_once = encode(x, "fp8_e4m3")
        with monkeypatch.context() as patch:
            patch.setattr("autoprec.numerics.packing._CPU_PIECE", 11)
            patch.setattr("autoprec.numerics.elements.MOST_THREADS", 0)
            pieces = encode(x, "fp8_e4m3")
            assert torch.equal(pieces.payload, at_once.payload) and pieces.payload.stride() == at_once.payload.stride()
            found = decode(pieces, dtype)
        assert torch.equal(found, decode(at_once, dtype)) and found.dtype is dtype


@pytest.mark.parametrize("shape", [(1,), (8,), (13,), (3, 5, 7), (0,)])
def test_bits_come_back(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    packed = pack_bits(mask)
    assert packed.numel() == math.ceil(mask.numel() / 8)
    assert torch.equal(unpack_bits(packed, mask.shape), mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_relu_keeping_bits_is_relu(dtype: torch.dtype) -> None:
    """Bitwise, of NaN, infinities and zeros of both signs, for gradients of any kind, and differentiated twice."""
    x, g = torch.randn(5, 7, 9).to(dtype), torch.randn(5, 7, 9).to(dtype)
    x[0, 0, :6] = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf])
    g[0, 1, :3] = g[0, 2, 3:6] = torch.tensor([math.nan, math.inf, -0.0])
    for layout in (lambda t: t, lambda t: t.mT, lambda t: t[:, ::2]):
        found = []
        for f in (torch.relu, relu_keeping_bits):
            leaf, arriving = x.clone().requires_grad_(), g.clone().requires_grad_()
            y = f(layout(leaf))
            (first,) = torch.autograd.grad(y, leaf, layout(arriving), create_graph=True)
            (second,) = torch.autograd.grad(first, arriving, torch.ones_like(first))
            found.append([y.detach(), first.detach(), second])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, rtol=0.0, atol=0.0, equal_nan=True)


def test_saturating_cast_keeps_infinities() -> None:
    x = torch.tensor([1e6, -1e6, float("inf"), -float("inf"), 2.0])
    assert saturating_cast(x, torch.float16).tolist() == [65504.0, -65504.0, math.inf, -math.inf, 2.0]


def gradients(f: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    copies = [t.clone().requires_grad_() for t in leaves]
    y = f(*copies)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), *(t.grad for t in copies)]


def test_a_linear_is_torchs_in_fp32() -> None:
    x, w, b = torch.randn(2, 5, 8), torch.randn(6, 8), torch.randn(6)
    for a, c in zip(
        gradients(F.linear, x, w, b), gradients(lambda *t: linear(*t, None, FP32_SPEC), x, w, b), strict=True
    ):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize(
    ("p_shape", "q_shape"),
    [
        ((4, 5), (5, 6)),
        ((2, 3, 4, 5), (5, 6)),
        ((4, 5), (3, 5, 6)),
        ((3, 1, 4, 5), (2, 5, 6)),
        ((1, 3, 4, 5), (2, 1, 5, 6)),
        ((2, 1, 4, 5), (2, 3, 5, 6)),
        ((0, 4, 5), (5, 6)),
        ((2, 3, 4, 0), (0, 6)),
    ],
)
def test_products_with_broadcast_leading_dimensions_are_torchs_in_fp32(p_shape: Any, q_shape: Any) -> None:
    p, q = torch.randn(p_shape), torch.randn(q_shape)
    for a, c in zip(gradients(torch.matmul, p, q), gradients(lambda *t: matmul(*t, FP32_SPEC), p, q), strict=True):
        torch.testing.assert_close(a, c)


def test_a_gradient_summed_over_leading_dimensions_is_rounded_once() -> None:
    narrow, bf16 = torch.bfloat16, "bf16"
    spec = GemmSpec(output=bf16, grad_input=bf16, grad_weight=bf16, native=(bf16,))
    a = torch.ones(1, 1, dtype=narrow, requires_grad=True)
    b = torch.tensor([1 + 2**-7, -1 - 2**-6], dtype=narrow).view(2, 1, 1)
    g = torch.tensor([1 + 2**-7, 1], dtype=narrow).view(2, 1, 1)
    matmul(a, b, spec).backward(g)
    assert a.grad is not None and a.grad.item() == 2.0**-14  # of products that are rounded apart nothing remains


CONVOLUTIONS = [
    ("conv1d", (2, 4, 11), (6, 2, 3), {"stride": (2,), "padding": (1,), "dilation": (1,), "groups": 2}),
    ("conv2d", (2, 4, 9, 8), (6, 4, 3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 1}),
    ("conv2d", (2, 4, 7, 7), (4, 1, 3, 3), {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 4}),
    ("conv2d", (3, 4, 9, 8), (6, 4, 1, 1), {"stride": (2, 3), "padding": (0, 0), "dilation": (1, 1), "groups": 1}),
    ("conv2d", (3, 4, 9, 8), (6, 2, 1, 1), {"stride": (1, 2), "padding": (0, 0), "dilation": (3, 1), "groups": 2}),
    ("conv1d", (2, 4, 8), (6, 4, 1), {"stride": (2,), "padding": (1,), "dilation": (1,), "groups": 1}),
    ("conv_transpose1d", (2, 4, 7), (4, 3, 3), {"stride": (2,), "padding": (1,), "dilation": (1,), "groups": 2,
                                                "output_padding": (1,)}),
    ("conv_transpose2d", (2, 4, 5, 6), (4, 6, 3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2),
                                                      "groups": 1}),
    ("conv_transpose3d", (1, 2, 3, 3, 4), (2, 3, 3, 3, 3), {"stride": (2,) * 3, "padding": (1,) * 3,
                                                            "dilation": (1,) * 3, "groups": 1}),
    ("conv3d", (1, 2, 5, 5, 5), (3, 2, 3, 3, 3), {"stride": (1,) * 3, "padding": (1,) * 3, "dilation": (1,) * 3,
                                                  "groups": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "x_shape", "w_shape", "options"), CONVOLUTIONS)
def test_convolutions_are_torchs_in_fp32(kind: str, x_shape: Any, w_shape: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    outputs = w_shape[1] * options["groups"] if "transpose" in kind else w_shape[0]
    x, w, b = torch.randn(x_shape), torch.randn(w_shape), torch.randn(outputs)
    plain = gradients(lambda *t: getattr(F, kind)(*t, **options), x, w, b)
    ours = gradients(lambda *t: conv(*t, None, FP32_SPEC, conv_options(kind, options)), x, w, b)
    for a, c in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


def test_a_convolution_decodes_the_places_that_it_reads() -> None:
    """Of a kernel of one place with a stride: a quarter of what is kept, for the weight's gradient."""
    x, w = torch.randn(8, 16, 64, 64).bfloat16(), torch.randn(4, 16, 1, 1, requires_grad=True)
    spec = GemmSpec(output="bf16", grad_input="bf16", grad_weight="bf16", native=("bf16",))
    options = {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    y = conv(x, w, None, packed := encode(x, "fp8_e4m3"), spec, conv_options("conv2d", options))
    grad = torch.randn_like(y)
    peak = peak_bytes(lambda: torch.autograd.grad(y, w, grad, retain_graph=True), torch.device("cpu"))
    assert peak < 2 * x.numel()  # a copy of a quarter, and what decoding and the product take; all of it is 2.4 MB
    (found,) = torch.autograd.grad(y, w, grad)
    want = torch.einsum("noij,ncij->oc", grad.double(), decode(packed, torch.float32)[..., ::2, ::2].double())
    assert float((found[..., 0, 0].double() - want).norm() / want.norm()) < 2.0**-8


@pytest.mark.parametrize(("kind", "x_shape", "w_shape", "options"), CONVOLUTIONS)
def test_row_weights_are_what_a_unit_error_does_to_the_weight_gradient(
    kind: str, x_shape: Any, w_shape: Any, options: dict[str, Any]
) -> None:
    """Σ over weights of (∂∇W/∂x_i)², by brute force: ∇W is linear in x and in g."""
    torch.manual_seed(0)
    x, w = torch.randn(x_shape, dtype=torch.float64), torch.randn(w_shape, dtype=torch.float64)
    y = getattr(F, kind)(x, w, None, **options)
    g = torch.randn_like(y)
    how = conv_options(kind, options) if "conv" in kind else einsum_contraction("...i,oi->...o", x.dim(), 2)
    rows = row_weights(how, w, x, y.shape)
    for_x = rows.for_input(g, sample(x, 1 << 30))
    for_g = rows.for_gradient(sample(g, 1 << 30))

    def weight_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        leaf = w.clone().requires_grad_()
        getattr(F, kind)(x, leaf, None, **options).backward(g)
        return leaf.grad

    def unit(like: torch.Tensor, i: int) -> torch.Tensor:
        one = torch.zeros(like.numel(), dtype=torch.float64)
        one[i] = 1.0
        return one.view(like.shape)

    for i in range(0, x.numel(), 7):
        assert float(for_x[i]) == pytest.approx(float(weight_gradient(unit(x, i), g).square().sum()), rel=1e-9)
    for i in range(0, g.numel(), 7):
        assert float(for_g[i]) == pytest.approx(float(weight_gradient(x, unit(g, i)).square().sum()), rel=1e-9)


def test_a_second_derivative_through_a_gradient_scale_is_refused() -> None:
    """It would reach the values inside by ways that do not carry the scale, and vanish in the division."""
    for scale_log2 in (0, 8):
        x = torch.randn(4, 8, requires_grad=True)
        y = leave_region(torch.tanh(enter_region(x, torch.float16, scale_log2)), torch.float32, scale_log2)
        if scale_log2:
            with pytest.raises(UnsupportedError, match="an FP16 region with a gradient scale"):
                torch.autograd.grad(y.sum(), x, create_graph=True)
            continue
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.square().sum().backward()
        z = x.detach().clone().requires_grad_()
        (1 - torch.tanh(z).square()).square().sum().backward()
        torch.testing.assert_close(x.grad, z.grad, rtol=0.02, atol=0.02)


def test_gradients_may_be_vectorised() -> None:
    spec = GemmSpec(output="bf16", grad_input="bf16", grad_weight="bf16", native=())
    x, w = torch.randn(3, 4, 8).bfloat16().requires_grad_(), torch.randn(5, 8, requires_grad=True)
    y = linear(x, w, None, None, spec)
    directions = torch.randn(2, *y.shape).bfloat16()
    (together,) = torch.autograd.grad(y, w, directions, retain_graph=True, is_grads_batched=True)
    for i, direction in enumerate(directions):
        (one,) = torch.autograd.grad(y, w, direction, retain_graph=True)
        torch.testing.assert_close(together[i], one)


@pytest.mark.parametrize("what", ["linear", "matmul", "experts", *(c[0] for c in CONVOLUTIONS)])
def test_gradients_are_derivatives(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FP32 path in float64, against finite differences: first derivatives, and second ones where there are any."""
    monkeypatch.setitem(dtypes._DTYPES, "fp32", torch.float64)
    torch.manual_seed(0)

    def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    if what == "linear":
        inputs, f = leaves((2, 3, 5), (4, 5), (4,)), lambda x, w, b: linear(x, w, b, None, FP32_SPEC)
    elif what == "matmul":
        inputs, f = leaves((2, 1, 3, 4), (3, 4, 2)), lambda a, b: matmul(a, b, FP32_SPEC)
    elif what == "experts":
        offs = torch.tensor([2, 2, 5], dtype=torch.int32)
        inputs, f = leaves((6, 3), (3, 3, 4)), lambda x, w: grouped_linear(x, w, offs, None, FP32_SPEC)
    else:
        x_shape, w_shape, options = next(c[1:] for c in CONVOLUTIONS if c[0] == what)
        outputs = w_shape[1] * options["groups"] if "transpose" in what else w_shape[0]
        x_shape = (1, *x_shape[1:2], *(min(n, 4) for n in x_shape[2:]))
        inputs = leaves(x_shape, w_shape, (outputs,))
        f = lambda x, w, b: conv(x, w, b, None, FP32_SPEC, conv_options(what, options))  # noqa: E731
    assert torch.autograd.gradcheck(f, inputs)
    if what != "experts":
        assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("shape", [(1500, 256), (3, 500, 16, 16), (7, 6)])
def test_layer_norms_in_bf16_add_up_their_weights_gradients_in_fp32(shape: tuple[int, ...]) -> None:
    """Against FP32 on the same rounded tensors. torch's own kernel is off by some percent on the first."""
    torch.manual_seed(0)
    dims = shape[-2:] if len(shape) == 4 else shape[-1:]
    x, g = torch.randn(shape).bfloat16(), (torch.randn(shape) + 0.1).bfloat16()
    weight, bias = torch.randn(dims), torch.randn(dims)

    def gradients(
        run: Callable[..., torch.Tensor], x: torch.Tensor, g: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = run(leaves[0], dims, *leaves[1:])
        y.backward(g)
        return y.detach(), [t.grad for t in leaves]  # type: ignore[misc]

    y, found = gradients(layer_norm, x, g)
    theirs, _ = gradients(F.layer_norm, x, g)
    _, exact = gradients(F.layer_norm, x.float(), g.float())
    assert torch.equal(y, theirs)
    # The mean and deviation are those that the forward pass took of the same numbers.
    for mine, wide in zip(found[1:], exact[1:], strict=True):
        assert mine.dtype is torch.float32
        assert float((mine - wide).norm() / wide.norm()) < 1e-5
    assert float((found[0].float() - exact[0]).norm() / exact[0].norm()) < 2.0**-8


def test_layer_norms_in_bf16_differentiate_twice() -> None:
    """As torch's own do, whose sums are in BF16."""
    x, weight, bias = torch.randn(9, 6).bfloat16(), torch.randn(6), torch.randn(6)

    def penalty(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        (of_x,) = torch.autograd.grad(run(leaves[0], (6,), *leaves[1:]).square().sum(), leaves[0], create_graph=True)
        of_x.square().sum().backward()
        return [t.grad for t in leaves[:2]]  # type: ignore[misc]

    (of_x, of_weight), (their_x, their_weight) = penalty(layer_norm), penalty(F.layer_norm)
    assert torch.equal(of_x, their_x)
    torch.testing.assert_close(of_weight, their_weight, rtol=9 * 2.0**-8, atol=9 * 2.0**-8)  # sums of 9 in BF16
