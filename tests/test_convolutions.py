"""Convolutions of a few images at a time, against all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autoprec.execution.measuring import peak_bytes
from autoprec.numerics import convolutions
from autoprec.numerics.convolutions import ConvOptions, compiled_kernels, conv
from autoprec.numerics.packing import encode
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.specs import conv_options
from tests.test_numerics import CONVOLUTIONS

#: Of the output role, the gradient roles, and what the input is kept in, if not as it is read.
FORMATS = [
    ("fp32", "fp32", None),
    ("fp32", "fp32", "fp8_e4m3"),
    ("bf16", "bf16", "fp8_e4m3"),
    ("bf16", "fp16", None),
    ("fp8_e4m3", "fp8_e5m2", None),
    ("int8", "bf16", None),
]


def spec_of(output: str, gradients: str) -> GemmSpec:
    shift = 6 if gradients == "fp16" else 0
    return GemmSpec(
        output=output, grad_input=gradients, grad_weight=gradients, native=("fp32",), local_scale_log2=shift
    )


def run(x: Tensor, w: Tensor, spec: GemmSpec, how: Any, kept_as: str | None, grad: Tensor | None) -> list[Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    kept = None if kept_as is None else encode(x.detach(), kept_as)
    y = conv(x, w, None, kept, spec, how)
    g = torch.ones_like(y) if grad is None else grad.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def in_pieces(numel: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of that many elements; how many there were, call by call."""
    monkeypatch.setattr(convolutions, "_CONVOLVED_AT_ONCE", dict.fromkeys((2, 4, 8), numel))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    counts: list[int] = []
    few = convolutions._few

    def counted(*args: Any) -> Any:
        found = few(*args)
        counts.append(len(found))
        return found

    monkeypatch.setattr(convolutions, "_few", counted)
    return counts


@pytest.mark.parametrize(("output", "gradients", "kept_as"), FORMATS)
@pytest.mark.parametrize(("kind", "x_shape", "w_shape", "options"), CONVOLUTIONS)
@pytest.mark.parametrize("order", ["as it is", "channels last"])
def test_in_pieces_they_are_those_at_once(
    kind: str, x_shape: Any, w_shape: Any, options: dict[str, Any], output: str, gradients: str, kept_as: str | None,
    order: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """But for the order in which a kernel adds up, which may depend on how many images there are, and for the rounding
    of sums to the product's format."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory = orders.get(len(x_shape), torch.contiguous_format) if order == "channels last" else torch.contiguous_format
    torch.manual_seed(0)
    x = torch.randn(5, *x_shape[1:]).contiguous(memory_format=memory)
    w, how, spec = torch.randn(w_shape), conv_options(kind, options), spec_of(output, gradients)
    grad = torch.randn_like(run(x, w, spec, how, kept_as, None)[0])
    once = run(x, w, spec, how, kept_as, grad)
    counts = in_pieces(1, monkeypatch)
    apart = run(x, w, spec, how, kept_as, grad)
    # The weight's gradient always; the others where something is cast, or the kernel's copies are the larger tensors.
    assert set(counts) == {2} and (len(counts) == 3 or output == "fp32")
    sums = run(x.abs(), w.abs(), spec, how, kept_as, grad.abs())  # of the magnitudes that are added up
    for a, b, most in zip(once, apart, sums, strict=True):
        assert a.dtype is b.dtype
        assert a.is_contiguous(memory_format=memory) == b.is_contiguous(memory_format=memory)
        narrow = a.dtype is torch.bfloat16 or spec.grad_weight != "fp32"
        error = (a.double() - b.double()).abs()
        assert bool((error <= (2.0**-7 if narrow else 2.0**-20) * most.double()).all())


def test_their_second_derivatives_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    how = conv_options("conv2d", {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 1})
    x, w = torch.randn(5, 4, 9, 8, requires_grad=True), torch.randn(6, 4, 3, 2, requires_grad=True)

    def second() -> tuple[Tensor, ...]:
        y = conv(x, w, None, None, spec_of("fp32", "fp32"), how).sin().sum()
        first = torch.autograd.grad(y, (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))

    once = second()
    counts = in_pieces(1, monkeypatch)
    apart = second()
    assert set(counts) == {2}
    torch.testing.assert_close(apart, once, rtol=1e-4, atol=1e-4)


def test_what_kernels_take_is_that_of_a_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a decoded operand, and of what a kernel reads and writes in layouts of its own."""
    torch.manual_seed(0)
    how = conv_options("conv2d", {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1})
    x = torch.randn(32, 16, 28, 28).bfloat16().requires_grad_()
    w = torch.randn(16, 16, 3, 3, requires_grad=True)
    spec = spec_of("bf16", "bf16")  # emulated, so that every pass upcasts

    def peaks() -> list[int]:
        kept = encode(x.detach(), "fp8_e4m3")
        forward = peak_bytes(lambda: conv(x, w, None, kept, spec, how), x.device)
        y = conv(x, w, None, kept, spec, how)
        grad = torch.randn_like(y)
        found = [peak_bytes(lambda t=t: torch.autograd.grad(y, t, grad, retain_graph=True), x.device) for t in (x, w)]
        return [forward, *found]

    once = peaks()
    in_pieces(x.numel() // 8, monkeypatch)
    results = [2 * x.numel(), 2 * x.numel(), 0]
    for few, all_, result in zip(peaks(), once, results, strict=True):
        assert few - result <= (all_ - result) / 2


#: Bytes of scales and sizes, and what alignment takes.
SMALL = 4096


def gradient_peak(x: Tensor, w: Tensor, spec: GemmSpec, how: Any, *wanted: str) -> int:
    """Of these, and no others are made."""
    x, w = (t.detach().requires_grad_(name in wanted) for name, t in (("x", x), ("w", w)))
    y = conv(x, w, None, None, spec, how)
    grad, leaves = torch.randn_like(y), [t for t in (x, w) if t.requires_grad]
    return peak_bytes(lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True), x.device)


def test_nothing_of_some_images_is_there_beside_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the input's gradient: all of it, and what a piece alone takes."""
    how = conv_options("conv2d", {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1})
    x, w = torch.randn(16, 16, 16, 16).bfloat16().requires_grad_(), torch.randn(16, 16, 3, 3, requires_grad=True)
    spec = GemmSpec(output="bf16", grad_input="fp32", grad_weight="fp32", native=("fp32",))
    in_pieces(x.numel() // 4, monkeypatch)
    some = x.detach()[:4].clone()
    alone = gradient_peak(some, w, spec, how, "x")
    assert gradient_peak(x, w, spec, how, "x") <= x.nbytes + alone + SMALL


def test_the_gradient_that_arrives_is_not_there_beside_two_of_the_result() -> None:
    how = conv_options("conv2d", {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": 1})
    x, w = torch.randn(8, 16, 32, 32, requires_grad=True), torch.randn(32, 16, 1, 1, requires_grad=True)
    spec = GemmSpec(output="fp32", grad_input="bf16", grad_weight="fp32", native=("fp32", "bf16"))
    assert gradient_peak(x, w, spec, how, "x") <= x.nbytes + x.nbytes // 2 + SMALL


def test_a_narrow_gradient_of_the_weight_is_not_there_beside_that_of_the_input() -> None:
    """It is cast to FP32 before."""
    how = conv_options("conv2d", {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1})
    x, w = torch.randn(2, 64, 4, 4, requires_grad=True), torch.randn(256, 64, 3, 3, requires_grad=True)
    spec = GemmSpec(output="fp32", grad_input="fp32", grad_weight="bf16", native=("fp32", "bf16"))
    of_weight, of_input = (gradient_peak(x, w, spec, how, name) for name in ("w", "x"))
    assert gradient_peak(x, w, spec, how, "x", "w") <= max(of_weight, w.nbytes + of_input) + SMALL


@pytest.mark.parametrize("native", ["fp32", "bf16"])
def test_pieces_are_larger_where_the_kernel_computes_in_bf16(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where BF16 is emulated."""
    how = conv_options("conv2d", {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1})
    x = torch.randn(8, 4, 16, 16).bfloat16().requires_grad_()
    w = torch.randn(4, 4, 3, 3, requires_grad=True)
    spec = GemmSpec(output="bf16", grad_input="bf16", grad_weight="bf16", native=("fp32", native))
    counts = in_pieces(1, monkeypatch)
    monkeypatch.setitem(convolutions._CONVOLVED_AT_ONCE, 2, x.numel() // 2)
    conv(x, w, None, encode(x.detach(), "fp8_e4m3"), spec, how).float().sum().backward()
    expected = 2 if native == "bf16" else 4
    assert [n for n in counts if n > 1] == [expected] * (1 if native == "bf16" else 3)


@pytest.mark.parametrize("numel", [1, 500, 2000, 10**6])
@pytest.mark.parametrize(("kind", "x_shape", "w_shape", "options"), CONVOLUTIONS)
def test_how_much_of_a_batch_is_there_at_a_time(
    kind: str, x_shape: Any, w_shape: Any, options: dict[str, Any], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whoever predicts a peak: the larger pieces, where something is copied for both gradients."""
    in_pieces(numel, monkeypatch)
    few, shares = convolutions._few, list[float]()

    def noted(x: Tensor, *told: Any) -> Any:
        found = few(x, *told)
        sizes = [x.shape[0] if s is None else s.stop - s.start for s in found]
        shares.append(max(sizes) / x.shape[0])
        return found

    how, spec = (
        conv_options(kind, options),
        GemmSpec(output="bf16", grad_input="fp32", grad_weight="fp32", native=("fp32",)),
    )
    x, w = torch.randn(5, *x_shape[1:]).bfloat16().requires_grad_(), torch.randn(w_shape).requires_grad_()
    y = conv(x, w, None, None, spec, how)
    monkeypatch.setattr(convolutions, "_few", noted)
    torch.autograd.grad(y, (x, w), torch.randn_like(y))
    of_weight, of_input = shares
    assert convolutions.piece_fracs(how, x, y, w, torch.float32) == (of_input, of_weight)


def test_a_compiler_sees_one_convolution() -> None:
    with FakeTensorMode():
        x = torch.empty(64, 64, 64, 64)
        assert convolutions._few(x, x.dtype, x.shape) == [None]
    assert len(convolutions._few(torch.empty(64, 64, 64, 64, device="meta"), x.dtype, x.shape)) == 1
    assert len(convolutions._few(torch.empty(1, device="cpu").expand(64, 64, 64, 64), x.dtype, x.shape)) > 1


@pytest.mark.parametrize(
    ("shape", "out", "kernel", "options"),
    [
        ((4, 3, 9, 8), 8, 3, {}),
        ((4, 1, 9, 8), 8, 3, {"padding": (1, 1)}),
        ((4, 8, 9, 8), 8, 1, {"stride": (2, 2)}),
        ((4, 8, 9, 8), 8, 3, {"stride": (2, 2), "padding": (1, 1), "groups": 4}),
        ((4, 8, 9, 8), 8, 3, {"dilation": (2, 1), "groups": 8}),
    ],
)
def test_what_compiled_code_is_measured_by_is_the_convolution(
    shape: tuple[int, ...], out: int, kernel: int, options: dict[str, Any]
) -> None:
    o = ConvOptions(**{"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options})
    x = torch.randn(shape, requires_grad=True)
    w = torch.randn(out, shape[1] // o.groups, kernel, kernel, requires_grad=True)
    y = torch.convolution(x, w, None, o.stride, o.padding, o.dilation, *o.last)
    g = torch.randn_like(y)
    of_input, of_weight = torch.autograd.grad(y, (x, w), g)
    with torch.no_grad():
        made = [run() for run in compiled_kernels(o, x, w, g)]
    if kernel == 1:
        of_input = of_input[..., ::2, ::2]  # the rest is zero, and made by what reads it
    for own, theirs in zip(made, (y, of_input, of_weight), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
