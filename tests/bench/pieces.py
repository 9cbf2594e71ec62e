"""How many elements at a time? `python -m tests.bench.pieces`: packing to E4M3 and sums over channels, on this CPU.
And what the backward pass of ReLU and dropout is made of, by torch's own comparisons and by bits; and max pooling that
keeps a byte; and convolutions of a few images at a time.

One thread; sizes take turns, round by round; medians. Both make FP32 or BF16 tensors on the way, piece by piece; a
piece of all elements is what one call of torch would do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from autoprec.execution.measuring import workspace_bytes
from autoprec.numerics import casts, convolutions, elements, lean, norms, operands, packing, pooling
from autoprec.numerics.convolutions import ConvOptions, conv
from autoprec.numerics.dtypes import dtype_of, native_formats
from autoprec.numerics.products import GemmSpec
from tests.bench.measure import one_thread

ROUNDS = 31
#: log2 of the elements of a piece; the last holds all of them.
SIZES = range(12, 23, 2)


def times(
    call: Callable[[], object], use: Callable[[int], None], sizes: Sequence[int] = SIZES
) -> dict[int, tuple[float, float, float]]:
    """Size → seconds of a call with such pieces: lower quartile, median, upper quartile."""
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size in sizes:
            use(size)
            begin = time.perf_counter()
            call()
            taken[size].append(time.perf_counter() - begin)
    quartiles = {size: statistics.quantiles(t[1:], n=4) for size, t in taken.items()}
    return {size: (q[0], q[1], q[2]) for size, q in quartiles.items()}


def by_whom() -> None:
    """Each by numba's single pass and by torch's passes."""
    x = torch.randn(1 << SIZES[-1])
    for dtype in (torch.bfloat16, torch.float32):
        y = x.to(dtype)
        packed, bits = packing.encode(y, "fp8_e4m3"), lean._bits(torch.relu(y))
        calls: dict[str, Callable[[], object]] = {
            "to E4M3": partial(packing.encode, y, "fp8_e4m3"),
            "from E4M3": partial(packing.decode, packed, dtype),
            "bits of": partial(lean._bits, y),
            "masked": torch.no_grad()(partial(lean._masked, y, bits)),
        }
        for name, call in calls.items():
            told = f"{name} {str(dtype).removeprefix('torch.')}"
            for who, most in (("numba", 4), ("torch", 0)):
                elements.MOST_THREADS = most
                a, m, b = next(iter(times(call, lambda size: None).values()))
                print(f"{told:26} {who:17} {m * 1e3:6.2f} ({a * 1e3:.2f}-{b * 1e3:.2f})", flush=True)


def pack_in(size: int) -> None:
    packing._CPU_PIECE = 1 << size


def sum_in(size: int) -> None:
    operands._SUMMED_AT_ONCE = 1 << size


def by_bits(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    y, g = torch.relu(x), x.flip(0)
    mask, bits = y > 0, packing.pack_bits(y > 0)
    leaf = x.clone().requires_grad_()
    plain, lean_one = torch.relu(leaf), lean.relu_keeping_bits(leaf)
    return {
        "y <= 0": lambda: y <= 0,
        "neither 0 nor -0, as integers": lambda: lean._is_not_zero(y),
        "torch.where(mask, g, 0)": lambda: torch.where(mask, g, g.new_zeros(())),
        "mask as bits and g's bits": lambda: lean._masked(g, bits),
        "torch's relu, forward": lambda: torch.relu(leaf),
        "relu that keeps bits, forward": lambda: lean.relu_keeping_bits(leaf),
        "torch's relu, backward": lambda: torch.autograd.grad(plain, leaf, g, retain_graph=True),
        "relu that keeps bits, backward": lambda: torch.autograd.grad(lean_one, leaf, g, retain_graph=True),
    }


def pools(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Max pooling of a (batch, channels, height, width) tensor, forward and backward, with windows of 2×2 and 3×3."""
    leaf, found = x.clone().requires_grad_(), dict[str, Callable[[], object]]()
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1)):
        for who, pool in (("torch's", F.max_pool2d), ("ours", pooling.max_pool2d)):
            y = pool(leaf, kernel, stride, padding)
            g, name = torch.ones_like(y), f"max pool {kernel}×{kernel}, {who}"
            found[f"{name}, forward"] = partial(pool, leaf, kernel, stride, padding)
            found[f"{name}, backward"] = partial(torch.autograd.grad, y, leaf, g, retain_graph=True)
    return found


def layer_norms(count: int) -> None:
    """Gradients of a layer norm's weight and bias over so many rows of 256 BF16 numbers, by torch's kernel and by ours:
    how much they are off FP32's on the same numbers, and the seconds of a backward pass."""
    x, g = torch.randn(count, 256).bfloat16(), torch.randn(count, 256).bfloat16()
    weight, bias = torch.randn(256), torch.randn(256)

    def made(run: Callable[..., torch.Tensor], wide: bool) -> tuple[Callable[[], object], list[torch.Tensor]]:
        leaves = [(t.float() if wide else t).clone().requires_grad_() for t in (x, weight, bias)]
        y, arriving = run(leaves[0], (256,), *leaves[1:]), g.float() if wide else g

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(y, leaves, arriving, retain_graph=True)

        return backward, list(backward())

    _, exact = made(F.layer_norm, True)
    calls = {"torch": made(F.layer_norm, False), "ours": made(norms.layer_norm, False)}
    for name, (call, found) in calls.items():
        off = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found[1:], exact[1:], strict=True)]
        a, m, b = next(iter(times(call, lambda size: None).values()))
        told = f"layer norm of {count} rows, backward, {name}"
        print(f"{told:44} {m * 1e3:6.2f} ({a * 1e3:.2f}-{b * 1e3:.2f})  off by {off[0]:.1e}, {off[1]:.1e}", flush=True)


def scaled_casts(numel: int) -> None:
    """FP32 times a power of two in FP16, by pieces: the whole, or a quarter at a time."""
    x = torch.randn(numel)
    calls: dict[str, Callable[[], object]] = {
        "torch's cast, not scaled": lambda: x.to(torch.float16),
        "at once": lambda: (x * 2.0**7).to(torch.float16),
        "by quarters": lambda: casts.scaled_cast(x, 7, torch.float16),
    }
    for name, call in calls.items():
        a, m, b = next(iter(times(torch.no_grad()(call), lambda size: None).values()))
        print(f"scaled cast of {numel:9,}, {name:26} {m * 1e6:6.0f} ({a * 1e6:.0f}-{b * 1e6:.0f})", flush=True)


def convolved() -> None:
    """Passes of convolutions of images that are kept in E4M3, by elements of a piece, and what a pass takes beside its
    result."""
    sizes = (16, 17, 18, 19, 20, 30)
    print(f"{'':50}" + "".join(f"{1 << size:>15,}" if size < 30 else f"{'all':>15}" for size in sizes), flush=True)
    for fmt in ("fp32", "bf16") if "bf16" in native_formats("cpu") else ("fp32",):
        for n, channels, out, side, stride in ((32, 32, 32, 28, 1), (32, 32, 64, 28, 2), (8, 64, 64, 112, 1)):
            spec = GemmSpec(output=fmt, grad_input=fmt, grad_weight=fmt, native=native_formats("cpu"))
            x = torch.randn(n, channels, side, side, dtype=dtype_of(fmt), requires_grad=True)
            w = torch.randn(out, channels, 3, 3, requires_grad=True)
            how = ConvOptions(stride=(stride,) * 2, padding=(1, 1), dilation=(1, 1), groups=1)
            run = partial(conv, x, w, None, packing.encode(x.detach(), "fp8_e4m3"), spec, how)
            grad = torch.randn_like(run())
            for name, wanted in (("forward", []), ("weight's gradient", [w]), ("input's gradient", [x])):
                for leaf in (x, w):
                    leaf.requires_grad_(not wanted or leaf is wanted[0])
                y = run()
                call = partial(torch.autograd.grad, y, wanted, grad, retain_graph=True) if wanted else run
                told = f"{fmt} {n}x{channels}x{side}x{side} to {out}, stride {stride}, {name}"
                seconds = times(call, convolve_in, sizes)
                taken = {size: workspace(call, size) for size in sizes}
                cells = (f"{m * 1e3:.1f} ms {taken[size] / 1e6:.1f} MB" for size, (_, m, _) in seconds.items())
                print(f"{told:50}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def convolve_in(size: int) -> None:
    convolutions._CONVOLVED_AT_ONCE = dict.fromkeys((2, 4, 8), 1 << size)


def workspace(call: Callable[[], object], size: int) -> int:
    convolve_in(size)
    return workspace_bytes(call, torch.device("cpu"))


def main() -> None:
    torch.manual_seed(0)
    wide = torch.randn(1 << SIZES[-1])
    narrow, channels = wide.bfloat16(), wide.bfloat16().view(64, 64, 32, 32)
    rows = narrow.view(-1, 1024)
    packed = packing.encode(wide, "fp8_e4m3")
    cases: list[tuple[str, Callable[[], object], Callable[[int], None]]] = [
        ("FP32 to E4M3", lambda: packing.encode(wide, "fp8_e4m3"), pack_in),
        ("BF16 to E4M3", lambda: packing.encode(narrow, "fp8_e4m3"), pack_in),
        ("E4M3 to FP32", lambda: packing.decode(packed, torch.float32), pack_in),
        ("sums over channels, BF16", lambda: operands.channel_sums(channels, "fp32"), sum_in),
        ("sums over rows, BF16", lambda: operands.channel_sums(rows, "fp32"), sum_in),
        ("the same, rounded to BF16", lambda: operands.channel_sums(rows, "bf16"), sum_in),
    ]
    print(f"{wide.numel()} elements; milliseconds, median (quartiles)")
    with one_thread():
        by_whom()
    print("\nby torch, by elements of a piece")
    print(f"{'':26}" + "".join(f"{1 << size:>20,}" for size in SIZES), flush=True)
    with one_thread():
        for name, call, use in cases:
            cells = (f"{m * 1e3:.1f} ({a * 1e3:.1f}-{b * 1e3:.1f})" for a, m, b in times(call, use).values())
            print(f"{name:26}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
        print("\nthe same elements at once, BF16")
        for name, call in by_bits(narrow).items():
            a, m, b = next(iter(times(call, lambda size: None).values()))
            print(f"{name:44} {m * 1e3:6.2f} ({a * 1e3:.2f}-{b * 1e3:.2f})", flush=True)
        for name, call in pools(channels).items():
            a, m, b = next(iter(times(call, lambda size: None).values()))
            print(f"{name:44} {m * 1e3:6.2f} ({a * 1e3:.2f}-{b * 1e3:.2f})", flush=True)
        print("\ngradients of a BF16 layer norm's weight and bias")
        layer_norms(1 << 10)
        layer_norms(1 << 14)
        print("\nconvolutions, median, and workspace")
        convolved()
        print("\nFP32 to FP16 times 2^7; microseconds")
        for size in (12, 14, 16, 18, 20):
            scaled_casts(1 << size)


if __name__ == "__main__":
    main()
