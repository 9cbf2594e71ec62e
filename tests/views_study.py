"""How well are peaks of small models predicted that hold little but one thing? `python -m tests.views_study [NAME ...]
[--count N]`

Models whose tensors, or gradients, are views (slices, chunks, what was expanded or summed), of attention that runs op
by op, and in several graphs: predicted over measured peak of a step all in FP32, all in BF16, and in random mixtures of
both with random storages. Prints one line for each.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.planning.planner import ask, propose
from autoprec.planning.uniform import uniform_choice
from autoprec.serial import load_policy
from tests.bench.measure import one_thread
from tests.bench.mixtures import mixture
from tests.memory_study import Attends, peaks_under

__all__ = ["MODELS", "Masked", "ratios"]


class Block(nn.Module):
    """Twice the same: a wide layer, of which a function makes something, and a layer back, beside a skip connection."""

    def __init__(self, of: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.up, self.down, self.of = nn.Linear(64, 256), nn.Linear(width, 64), of

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(self.of(self.up(x)))
        return x.square().mean()


def gated(h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    return a * F.silu(b)


def slices(h: Tensor) -> Tensor:
    return h[..., :128] * torch.tanh(h[..., 128:])


def unbound(h: Tensor) -> Tensor:
    a, b = h.unflatten(-1, (2, 128)).unbind(-2)
    return torch.exp(a * 0.1) * b


def one_slice(h: Tensor) -> Tensor:
    return torch.tanh(h[..., :64])


def one_for_nobody(h: Tensor) -> Tensor:
    a, _, c = h.split((64, 128, 64), -1)
    return torch.tanh(a) * c


def parts_of_parts(h: Tensor) -> Tensor:
    q, k = h.chunk(2, -1)
    first, second = q.chunk(2, -1)
    return torch.cat([first * 1.5 - second.tanh(), second * k[..., :64]], -1)


def expanded(h: Tensor) -> Tensor:
    few = h[..., :32].tanh()
    return (few.unsqueeze(-2).expand(-1, -1, 8, -1) * h.unflatten(-1, (8, 32))).flatten(2)


def normalized(h: Tensor) -> Tensor:
    """Its sum sends back a view."""
    return h * (h.square().sum(-1, keepdim=True) + 1.0).rsqrt()


def sliced_and_summed(h: Tensor) -> Tensor:
    return h[..., :128].tanh() * h.sum(-1, keepdim=True)


class OwnGelu(torch.autograd.Function):
    """A user's, which keeps what it is given, and takes more on the way back than forward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return 0.5 * x * (1.0 + torch.tanh(0.8 * x * (1.0 + 0.045 * x * x)))

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        y = torch.tanh(0.8 * x * (1.0 + 0.045 * x * x))
        return g * (0.5 * x * ((1.0 - y * y) * (0.8 + 0.108 * x * x)) + 0.5 * (1.0 + y))


def own_function(h: Tensor) -> Tensor:
    y: Tensor = OwnGelu.apply(h)
    return y


def heads(h: Tensor, count: int) -> list[Tensor]:
    return [t.unflatten(-1, (4, 16)).transpose(1, 2) for t in h.chunk(count, -1)]


def attention(h: Tensor) -> Tensor:
    q, k, v = heads(h[..., :192], 3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def gated_attention(h: Tensor) -> Tensor:
    q, k, v, gate = heads(h, 4)
    return (F.scaled_dot_product_attention(q, k, v) * gate.sigmoid()).transpose(1, 2).flatten(2)


def by_kind(kind: str) -> Callable[[Tensor], Tensor]:
    """Attention that torch runs op by op on a CPU, though nothing drops out and no mask is trained."""

    def of(h: Tensor) -> Tensor:
        q, k, v = heads(h[..., :192], 3)
        if kind == "three_dimensions":
            q, k, v = h[..., :192].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)
        if kind == "narrow_values":
            y = F.scaled_dot_product_attention(q, k, v[..., :8])
            return torch.cat([y, y], -1).transpose(1, 2).flatten(2)
        i = torch.arange(h.shape[1])
        mask = -(i[:, None] - i).abs() * (2.0 ** -torch.arange(1, 5))[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    return of


def summed(h: Tensor) -> Tensor:
    """The sum sends back one number for many."""
    return F.gelu(h).unflatten(-1, (4, 64)).sum(-2)


def summed_behind_a_view(h: Tensor) -> Tensor:
    return h.sigmoid().view(*h.shape[:-1], 4, 64).sum(-2)


def behind_an_instance_norm(h: Tensor) -> Tensor:
    """Which gives a view."""
    return F.instance_norm(h.mT).relu_().mT


def times_integers(h: Tensor) -> Tensor:
    """Made here."""
    return h * (torch.arange(h.numel()).view(h.shape) % 3).float()


def as_another(h: Tensor) -> Tensor:
    return h.mean(1, keepdim=True).sigmoid().expand_as(h) * h.softmax(-1).type_as(h)


class Masked(nn.Module):
    """Attention with a trained mask, which a CPU computes op by op; of the whole batch, or one for all. Where it has
    all scores, what torch keeps is as large as what it is given."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.made, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.zeros(rows, 4, 48, 48))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            q, k, v = heads(self.made(x), 3)
            y = F.scaled_dot_product_attention(q * 1.5, k * 1.5, v * 1.5, self.bias * 2.0)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x.square().mean()


class QueriesOfOne(nn.Module):
    """Attention with dropout, whose queries are a part of a product's result, and keys and values are not: as where
    they go into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            q, k, v = heads(self.made(x), 3)
            y = F.scaled_dot_product_attention(q, k * 1.5, v * 1.5, dropout_p=0.2)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x.square().mean()


#: By name, how to make it, and how long its sequences are.
class Broken(nn.Module):
    """In three graphs, of which each gives the next what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(*s) for _ in range(3)) for s in ((64, 256), (256, 64)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down[0](torch.tanh(self.up[0](x)))
        torch._dynamo.graph_break()
        x = x + self.down[1](torch.tanh(self.up[1](x)))
        torch._dynamo.graph_break()
        return (x + self.down[2](torch.tanh(self.up[2](x)))).square().mean()


class Skipping(Broken):
    """What the first graph returns, and two ops of the second read, is given to the third as well, and a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.up[0](x))
        torch._dynamo.graph_break()
        y = self.down[0](torch.tanh(h) * h)
        part = h[:, :24]
        torch._dynamo.graph_break()
        return (self.down[1](torch.sin(h)) * y).square().mean() + self.down[2](torch.tanh(part)).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{
        of.__name__: (lambda of=of, width=width: Block(of, width), 96)  # type: ignore[misc]
        for of, width in (
            (gated, 128), (slices, 128), (unbound, 128), (one_slice, 64), (one_for_nobody, 64), (parts_of_parts, 128),
            (expanded, 256), (normalized, 256), (attention, 64), (gated_attention, 64), (sliced_and_summed, 128),
            (own_function, 256), (summed, 64), (summed_behind_a_view, 64), (behind_an_instance_norm, 256),
            (times_integers, 256), (as_another, 256),
        )
    },
    **{
        kind: (lambda kind=kind: Block(by_kind(kind), 64), 96)  # type: ignore[misc]
        for kind in ("a_mask_for_each_head", "narrow_values", "three_dimensions")
    },
    "mask_of_the_batch": (lambda: Masked(16), 48),
    "mask_for_all": (lambda: Masked(1), 48),
    "dropout": (lambda: Attends(True), 48),
    "dropout_of_three": (lambda: Attends(False), 48),
    "dropout_of_a_part": (QueriesOfOne, 48),
    "broken": (Broken, 96),
    "skipping": (Skipping, 96),
}  # fmt: skip


def ratios(name: str, count: int) -> list[float]:
    """Predicted over measured peak of a model: FP32, BF16, and so many mixtures."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, length = MODELS[name]
    model, batches = make(), [torch.randn(16, length, 64) for _ in range(2)]
    policy = load_policy("balanced").replaced(
        calibration={"steps": 2}, formats=("fp32", "bf16"), rules=(), noise={"loss": 1e6, "gradient": 1e6}
    )
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b), events=None)
    session = autoprec.session(model)
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem, chance = proposals.problem, random.Random(0)
    choices = [uniform_choice(problem, f) for f in ("fp32", "bf16")] + [mixture(problem, chance) for _ in range(count)]
    found = []
    for choice in choices:
        measured, predicted = peaks_under(model, proposals, choice, batches[0])
        found.append(predicted / measured)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.views_study")
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--count", type=int, default=8)
    given = parser.parse_args()
    print(f"predicted / measured peak   fp32   bf16  of {given.count} mixtures: lowest  highest", flush=True)
    with one_thread():
        for name in given.names or MODELS:
            wide, narrow, *mixed = ratios(name, given.count)
            print(f"{name:25} {wide:6.3f} {narrow:6.3f} {min(mixed):23.3f} {max(mixed):8.3f}", flush=True)


if __name__ == "__main__":
    main()
