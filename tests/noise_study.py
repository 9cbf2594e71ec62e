"""Predicted against measured effect of rounding, on trained models. `python -m tests.noise_study` prints the tables.

Measured without any of our code: a float64 copy of the model, one tensor rounded by torch's own casts with a per-tensor
power-of-two scale, the loss difference over held-out batches. Predicted from one FP32 profile.
"""

from __future__ import annotations

import copy
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

import autoprec
from autoprec.formats import format_named
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.planning.pricing import ROOM_LOG2
from tests.models import Transformer, language_loss

FORMATS = ("fp8_e4m3", "fp8_e5m2", "bf16", "fp16")
DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def rounded(x: Tensor, fmt: str) -> Tensor:
    """x rounded by torch's cast; FP8 after multiplication by the largest power of two that fits its amax."""
    scale = 1.0
    if fmt.startswith("fp8"):
        scale = 2.0 ** math.floor(math.log2(torch.finfo(DTYPES[fmt]).max / float(x.abs().max())))
    return (x.float() * scale).to(DTYPES[fmt]).to(x.dtype) / scale


class Digits(nn.Module):
    """A small batch-norm network on 8×8 digits, in eval mode when measured so that a batch is a sum of its images."""

    def __init__(self) -> None:
        super().__init__()
        channels = [1, 16, 16, 32, 32, 32, 48]
        strides = [1, 1, 2, 1, 1, 2]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, s, 1, bias=False) for a, b, s in zip(channels[:-1], channels[1:], strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels[1:])
        self.fc1, self.fc2 = nn.Linear(48, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return F.cross_entropy(self.fc2(F.relu(self.fc1(x.mean((2, 3))))), labels, reduction=reduction)


def text() -> Tensor:
    """Bytes of a fixed part of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{name}.py" for name in ("argparse", "tarfile", "typing", "inspect", "subprocess", "doctest")]
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


@dataclass
class Study:
    """A trained model, held-out batches, its loss, and the loss of each batch from one pass over all of them."""

    name: str
    model: nn.Module
    batches: list[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    losses: Callable[[nn.Module], Tensor]


def language_study(*, steps: int = 500, batches: int = 64) -> Study:
    torch.manual_seed(0)
    data = text()
    model = Transformer(width=48, depth=3, vocabulary=256, tied=False)

    def batch(low: int, high: int) -> Tensor:
        at = torch.randint(low, high - 33, (4,))
        return torch.stack([data[i : i + 33] for i in at.tolist()]).long()

    split = len(data) * 9 // 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        language_loss(model, batch(0, split)).backward()
        optimizer.step()
    held_out = [batch(split, len(data)) for _ in range(batches)]
    everything = torch.cat(held_out)

    def losses(m: nn.Module) -> Tensor:
        logits = m(everything[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), everything[:, 1:], reduction="none").view(batches, -1).mean(1)

    return Study("language model", model.eval(), held_out, language_loss, losses)


def digits_study(*, seed: int = 0, steps: int = 150, batches: int = 128) -> Study:
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels))
    train, test = order[:1200], order[1200:]
    model = Digits().double()  # so that every machine trains the same networks
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        pick = train[torch.randint(0, len(train), (64,))]
        optimizer.zero_grad()
        model(images[pick].double(), labels[pick]).backward()
        optimizer.step()
    # An image that is in a batch twice would be rounded alike twice: no loader does that.
    picks = torch.stack([torch.randperm(len(test))[:32] for _ in range(batches)])
    held_out = [(images[test[pick]], labels[test[pick]]) for pick in picks]

    def losses(m: nn.Module) -> Tensor:
        each: Tensor = m(images[test].to(m.fc1.weight.dtype), labels[test], "none")
        return each[picks].mean(1)

    return Study("digits", model.float().eval(), held_out, lambda m, b: m(*b), losses)


def profiled(study: Study) -> tuple[autoprec.Profile, autoprec.OpGraph]:
    model = copy.deepcopy(study.model)
    policy = autoprec.Policy(name="study", formats=("fp32",), calibration={"steps": len(study.batches)})
    autoprec.compile(model, policy=policy, events=None)
    session = autoprec.session(model)
    session.calibrate(study.batches, study.loss)
    return session.profile, session.graph


def doubled(batch: Any) -> Any:
    if isinstance(batch, tuple):
        return tuple(doubled(b) for b in batch)
    return batch.double() if batch.is_floating_point() else batch


@contextmanager
def rounding_input(modules: list[nn.Module], fmt: str) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(lambda _, a: (rounded(a[0], fmt), *a[1:])) for m in modules]
    yield
    for h in handles:
        h.remove()


@contextmanager
def rounding_weight(module: nn.Module, fmt: str) -> Iterator[None]:
    kept = module.weight.data
    module.weight.data = rounded(kept, fmt)
    yield
    module.weight.data = kept


@dataclass(frozen=True)
class Pair:
    """One rounding: predicted and measured RMS loss change over the batches."""

    study: str
    what: str
    name: str
    fmt: str
    predicted: float
    measured: float


def loss_pairs(study: Study) -> list[Pair]:
    """Every input and every weight of every linear and convolution, in four formats."""
    profile, graph = profiled(study)
    model = copy.deepcopy(study.model).double()
    with torch.no_grad():
        reference = study.losses(model)
    readers: dict[str, list[nn.Module]] = {}
    found: list[Pair] = []

    def measure(what: str, tensor: str, name: str, rounding: Callable[[str], Any]) -> None:
        seen = profile.tensor_by_id[tensor]
        for fmt_name in FORMATS:
            fmt = format_named(fmt_name)
            energy = error_energy(seen.loss, fmt, current_scale_log2(fmt, seen.values.amax)) / profile.steps
            with torch.no_grad(), rounding(fmt_name):
                rms = float((study.losses(model) - reference).square().mean().sqrt())
            found.append(Pair(study.name, what, name, fmt_name, math.sqrt(energy), rms))

    for op in graph.ops:
        if op.weights and op.op_class == "gemm":
            module = model.get_submodule(op.fqn)
            readers.setdefault(op.inputs[0], []).append(module)
            measure("weight", f"param:{op.weights[0]}", op.id, lambda f, m=module: rounding_weight(m, f))
    for tensor, modules in readers.items():
        if profile.tensor_by_id[tensor].loss is not None:  # the images themselves get no gradient
            measure("input", tensor, tensor, lambda f, m=modules: rounding_input(m, f))
    return found


@dataclass(frozen=True)
class GradientPair:
    """One rounding inside a weight gradient: predicted and measured E‖δ∇W‖²."""

    study: str
    what: str
    name: str
    fmt: str
    predicted: float
    measured: float


def gradient_pairs(study: Study, *, batches: int = 16) -> list[GradientPair]:
    """The input, or the output's gradient, rounded inside the weight-gradient product."""
    few = replace(study, batches=study.batches[:batches])
    profile, graph = profiled(few)
    model = copy.deepcopy(study.model).double()
    sums: dict[tuple[str, str, str], float] = {}
    ops = [op for op in graph.ops if op.weights and op.op_class == "gemm"]
    for batch in few.batches:
        inputs, grads = operands(model, {op.id: op.fqn for op in ops}, lambda b=batch: study.loss(model, doubled(b)))
        for op in ops:
            module, x, g = model.get_submodule(op.fqn), inputs[op.id], grads[op.id]
            for fmt in FORMATS:
                key = (op.id, fmt)
                dx = weight_gradient(module, rounded(x, fmt) - x, g).square().sum()
                dg = weight_gradient(module, x, rounded_gradient(g, fmt) - g).square().sum()
                sums[("input", *key)] = sums.get(("input", *key), 0.0) + float(dx)
                sums[("gradient", *key)] = sums.get(("gradient", *key), 0.0) + float(dg)
    found = []
    for (what, op_id, fmt_name), total in sums.items():
        op, fmt = graph.op_by_id[op_id], format_named(fmt_name)
        out = profile.tensor_by_id[op.outputs[0]]
        if what == "input":
            histogram, amax = out.input_weight_grad, profile.tensor_by_id[op.inputs[0]].values.amax
            scale = current_scale_log2(fmt, amax)
        else:
            histogram, amax = out.gradient_weight_grad, out.gradients.amax
            scale = math.floor(math.log2(fmt.max_value / amax)) - 3 if fmt_name == "fp16" else 0
            scale = current_scale_log2(fmt, amax) if fmt.scaled else scale
        predicted = error_energy(histogram, fmt, scale) / profile.steps
        found.append(GradientPair(study.name, what, op_id, fmt_name, predicted, total / len(few.batches)))
    return found


def operands(
    model: nn.Module, modules: dict[str, str], loss: Callable[[], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Input and output gradient of each named module in one forward and backward pass."""
    inputs: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}

    def note(op_id: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[op_id] = arguments[0].detach()
            y.register_hook(lambda g: grads.__setitem__(op_id, g.detach()))

        return hook

    handles = [model.get_submodule(fqn).register_forward_hook(note(op_id)) for op_id, fqn in modules.items()]
    loss().backward()
    for h in handles:
        h.remove()
    return inputs, grads


def rounded_gradient(g: Tensor, fmt: str) -> Tensor:
    """Gradients in FP16 are scaled, some powers of two below the largest value, as regions do."""
    if fmt != "fp16":
        return rounded(g, fmt)
    scale = 2.0 ** (math.floor(math.log2(65504.0 / float(g.abs().max()))) - ROOM_LOG2)
    return rounded(g * scale, fmt) / scale


def weight_gradient(module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return torch.nn.grad.conv2d_weight(x, module.weight.shape, g, module.stride, module.padding)


def within_format(pairs: list[Pair]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Spearman's ρ and the number of pairs within each (study, inputs or weights, format)."""
    keys = sorted({(p.study, p.what, p.fmt) for p in pairs})
    result = {}
    for key in keys:
        chosen = [p for p in pairs if (p.study, p.what, p.fmt) == key]
        rho = spearmanr([p.predicted for p in chosen], [p.measured for p in chosen]).statistic
        result[key] = (float(rho), len(chosen))
    return result


def format_only(pairs: list[Pair]) -> float:
    """ρ over all pairs of a predictor that knows nothing but the format (its median measured change)."""
    medians = {f: float(np.median([p.measured for p in pairs if p.fmt == f])) for f in FORMATS}
    return float(spearmanr([medians[p.fmt] for p in pairs], [p.measured for p in pairs]).statistic)


#: The digits network has eight layers: ranks of eight say little, so several trained networks are pooled.
SEEDS = range(4)


@dataclass(frozen=True)
class Result:
    """Everything measured on the networks of one kind."""

    name: str
    batches: int
    pairs: list[Pair]
    gradients: list[GradientPair]


def results(seeds: Iterable[int] = SEEDS, *, text_batches: int = 64, digit_batches: int = 128) -> list[Result]:
    """All studies, on one thread: sums in another order train another network."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = []
        digits = [digits_study(seed=seed, batches=digit_batches) for seed in seeds]
        for studies in ([language_study(batches=text_batches)], digits):
            pairs = [p for s in studies for p in loss_pairs(s)]
            gradients = [g for s in studies for g in gradient_pairs(s) if g.measured > 0]
            found.append(Result(studies[0].name, len(studies[0].batches), pairs, gradients))
        return found
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    for result in results():
        pairs = result.pairs
        ratios = np.array([p.predicted / p.measured for p in pairs])
        print(f"{result.name}: {len(pairs)} pairs over {result.batches} batches each")
        print(
            f"  predicted/measured σ(L): median {np.median(ratios):.3f}, 2.5–97.5 % "
            f"{np.quantile(ratios, 0.025):.2f}–{np.quantile(ratios, 0.975):.2f}"
        )
        rho = spearmanr([p.predicted for p in pairs], [p.measured for p in pairs]).statistic
        print(f"  Spearman over all {rho:.3f}; knowing only the format {format_only(pairs):.3f}")
        for key, (r, n) in within_format(pairs).items():
            print(f"  within {key[2]:9} {key[1]:6} n={n:3}  ρ={r:.3f}")
        for what in ("input", "gradient"):
            g = [p for p in result.gradients if p.what == what]
            q = np.array([p.predicted / p.measured for p in g])
            print(
                f"  E‖δ∇W‖² rounding the {what}: median ratio {np.median(q):.3f}, "
                f"10–90 % {np.quantile(q, 0.1):.2f}–{np.quantile(q, 0.9):.2f} ({len(g)} pairs)"
            )


if __name__ == "__main__":
    main()
