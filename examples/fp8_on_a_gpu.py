"""FP8 on a GPU: are its casts right, are its products (and those in TF32) what they should be, what is it worth?

    python examples/fp8_on_a_gpu.py             # on a Hopper GPU or later: a few minutes
    python examples/fp8_on_a_gpu.py --small     # the same code in small, on a CPU: a minute

Four parts, each a table. FP8 products on a CPU are those of `scaled_mm` or emulated, and slow either way: there the
figures show that the code runs, and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.formats import format_named
from autoprec.numerics.dtypes import dtype_of, native_formats
from autoprec.numerics.packing import decode, encode
from autoprec.numerics.products import GemmSpec, rows_times_rows, scaled_product
from autoprec.numerics.rounding import rounded


def synchronised(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], device: str, repeats: int = 20) -> float:
    """Median over repeats, after three that do not count."""
    taken = []
    for i in range(repeats + 3):
        synchronised(device)
        begin = time.perf_counter()
        run()
        synchronised(device)
        if i >= 3:
            taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


# 1. Casts -------------------------------------------------------------------------------------------------------------


def casts(device: str) -> None:
    """All 65,536 BF16 patterns into each format, by this device's own casts against integer arithmetic on the CPU."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    print("format     wrong of finite patterns")
    for name in ("fp16", "fp8_e5m2", "fp8_e4m3"):
        fmt = format_named(name)
        x = finite.to(device)
        inside = x.clamp(-fmt.max_value, fmt.max_value) if fmt.scaled else x
        found = inside.to(dtype_of(name)).float().cpu()
        wrong = int((found.view(torch.int32) != rounded(finite.float(), fmt).view(torch.int32)).sum())
        print(f"{name:10} {wrong} of {len(finite)}")
        assert wrong == 0, f"{name}: this device casts otherwise"
    for name in ("fp8_e5m2", "fp8_e4m3"):
        bad = encode(patterns.to(device), name)
        assert bool(decode(bad, torch.float32).isnan().all()), f"{name}: inf and NaN among the patterns went unseen"


# 2. Products ----------------------------------------------------------------------------------------------------------


def products(device: str, sizes: list[tuple[int, int, int]]) -> None:
    """The device's own FP8 product against upcast operands, in FP32 sums."""
    print("\nM, K, N                 left       scales      largest difference / Σ|a||b|   allowed")
    for m, k, n in sizes:
        x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        for left in ("fp8_e4m3", "fp8_e5m2"):
            for rowwise in (False, True):
                a, b = encode(x, left, rowwise=rowwise), encode(w, "fp8_e4m3", rowwise=rowwise)
                own = scaled_product(a, b, torch.bfloat16 if rowwise else torch.float32).double()
                wide, other = decode(a, torch.float32).double(), decode(b, torch.float32).double()
                most = float(((own - wide @ other.t()).abs() / (wide.abs() @ other.abs().t())).max())
                # Hopper's tensor cores add 32 products at a time and keep 14 bits of the sum (DeepSeek-V3's report,
                # arXiv:2412.19437); without "fast accumulation" every fourth goes to FP32. BF16 rounds once more.
                allowed = 2.0**-8 if rowwise else 4 * 2.0**-13
                scales = "by row" if rowwise else "one"
                print(f"{m:6}, {k:6}, {n:6}  {left:10} {scales:10} {most:12.2e} {allowed:28.2e}")
                assert most <= allowed, "the device's FP8 product is not the emulated one"


def tf32_products(device: str, sizes: list[tuple[int, int, int]]) -> None:
    """Products in TF32 against FP64, beside FP32's: how the device rounds is its affair, that it does is ours."""
    native = native_formats(device)
    print(f"\nM, K, N                 ms: fp32    tf32 ({'native' if 'tf32' in native else 'emulated'})"
          "   largest difference / Σ|a||b|: fp32       tf32    allowed")  # fmt: skip
    for m, k, n in sizes:
        x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        exact, scale = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
        taken, off = [], []
        for name in ("fp32", "tf32"):
            spec = GemmSpec(output=name, grad_input=name, grad_weight=name, native=native)

            def run(name: str = name, spec: GemmSpec = spec, x: Tensor = x, w: Tensor = w) -> Tensor:
                return rows_times_rows(x, w, name, spec, torch.float32)

            taken.append(milliseconds(run, device))
            off.append(float(((run().double() - exact).abs() / scale).max()))
        allowed = 2 * 2.0**-10 + 2.0**-13  # both operands cut off after ten bits, and the sum
        print(f"{m:6}, {k:6}, {n:6} {taken[0]:12.3f} {taken[1]:17.3f} {off[0]:43.2e} {off[1]:10.2e} {allowed:10.2e}")
        assert 2.0**-20 < off[1] <= allowed, "this is no product in TF32"


# 3. What a product costs ----------------------------------------------------------------------------------------------


def table(device: str, sizes: list[tuple[int, int, int]]) -> None:
    """Forward and both gradients of a linear, casts of all operands included, BF16 in and out."""
    native = native_formats(device)
    own = "fp8_e4m3" in native
    print(f"\nM, K, N                 ms: bf16   fp8 ({'native' if own else 'emulated'})   bf16 / fp8")
    for m, k, n in sizes:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        g = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=device)

        def step(
            formats: tuple[str, str, str], x: Tensor = x, g: Tensor = g, w: Tensor = w, operand: bool = False
        ) -> None:
            spec = GemmSpec(output=formats[0], grad_input=formats[1], grad_weight=formats[2], native=native)
            rows_times_rows(x, w, spec.output, spec, torch.bfloat16)
            rows_times_rows(g, w.t(), spec.grad_input, spec, torch.bfloat16)
            rows_times_rows(g.t(), x.t(), spec.grad_weight, spec, torch.float32)

        narrow = milliseconds(lambda step=step: step(("bf16", "bf16", "bf16")), device)  # type: ignore[misc]
        eight = milliseconds(lambda step=step: step(("fp8_e4m3", "fp8_e5m2", "fp8_e5m2")), device)  # type: ignore[misc]
        print(f"{m:6}, {k:6}, {n:6} {narrow:12.3f} {eight:16.3f} {narrow / eight:12.2f}")


# 4. A stack of Llama-like blocks --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor, wanted: Tensor) -> Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), wanted.flatten())


def batches(device: str, rows: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of Python's own standard library, the same for everyone."""
    found = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in found)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
        rows_of_text = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).to(device)
        yield rows_of_text[:, :-1], rows_of_text[:, 1:]


def trained(name: str, device: str, shape: tuple[int, ...], rows: int, length: int, steps: int) -> str:
    """One row: step time, peak, loss. The first steps (calibration, compilation) are not timed."""
    torch.manual_seed(0)
    model = Stack(*shape, length).to(device)
    run: Callable[..., Tensor] = model
    if name == "autocast bf16 + torch.compile":
        compiled = torch.compile(model)

        def run(*batch: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return compiled(*batch)  # type: ignore[no-any-return]

    elif name == "torchao float8 + torch.compile":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda m, fqn: fqn != "lm_head")
        compiled = torch.compile(model)

        def run(*batch: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return compiled(*batch)  # type: ignore[no-any-return]

    elif name != "fp32":
        autoprec.compile(model, policy=name.removeprefix("autoprec "), events=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    data = batches(device, rows, length)
    taken, losses, peak = [], [], 0
    for step in range(steps):
        batch = next(data)
        if device == "cuda" and step == steps // 2:
            torch.cuda.reset_peak_memory_stats()
        synchronised(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        synchronised(device)
        if step >= steps // 2:
            taken.append(1e3 * (time.perf_counter() - begin))
        losses.append(loss.detach())
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    formats = ""
    if name.startswith("autoprec"):
        plan = autoprec.session(model).plan
        formats = "" if plan is None else ", ".join(plan.formats_used())
        autoprec.unwrap(model)
    final = float(torch.stack(losses[-10:]).mean())
    median = statistics.median(taken)
    return f"{name:32} {median:9.1f} {rows * length / median * 1e3:11.0f} {peak / 2**30:9.2f} {final:10.4f}   {formats}"


def stack(device: str, shape: tuple[int, ...], rows: int, length: int, steps: int) -> None:
    print(f"\n{'':32} {'ms/step':>9} {'tokens/s':>11} {'peak GiB':>9} {'loss':>10}   formats")
    names = ["fp32", "autocast bf16 + torch.compile", "autoprec bf16", "autoprec fp8-hopper"]
    try:
        import torchao.float8  # noqa: F401

        if "fp8_e4m3" in native_formats(device):
            names.insert(2, "torchao float8 + torch.compile")
    except ImportError:
        print("torchao is not installed: no row for it")
    for name in names:
        print(trained(name, device, shape, rows, length, steps))
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small sizes; without a GPU there is no other way")
    parser.add_argument("--steps", type=int, default=0, help="of each run of the stack; 200, or 16 in small")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = chosen.small or device == "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    print(f"{name}, torch {torch.__version__}, native: {', '.join(native_formats(device))}\n")
    casts(device)
    if small:
        products(device, [(64, 96, 48), (33, 40, 24)])
        tf32_products(device, [(64, 96, 48), (33, 40, 24)])
        table(device, [(256, 256, 256)])
        stack(device, (64, 4, 128, 2), 4, 64, chosen.steps or 16)
    else:
        products(device, [(512, 1024, 768), (2048, 4096, 4096), (333, 1000, 777)])
        tf32_products(device, [(512, 1024, 768), (2048, 4096, 4096), (333, 1000, 777)])
        table(device, [(m, k, n) for m in (1024, 4096, 16384) for k, n in ((1024, 1024), (4096, 4096), (4096, 14336))])
        stack(device, (4096, 32, 14336, 8), 4, 2048, chosen.steps or 200)


if __name__ == "__main__":
    main()
