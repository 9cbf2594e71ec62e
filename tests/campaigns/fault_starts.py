"""Where the runs of `tests.campaigns.faults` begin: small models, planned once in each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import autoprec
from autoprec.testing.chaos import Start, monitored

__all__ = ["loss_fn", "starts"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """Linear layers, norms and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 32), nn.Sequential(Block(32), Block(32))
        self.norm, self.last = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.blocks(self.first(x))))


class Halves(Residual):
    """The same in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(x))
        torch._dynamo.graph_break()
        return self.last(self.norm(x))


class Attention(nn.Module):
    """Attention over twelve places, with an embedding of places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.out = nn.Linear(16, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.last = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 8, 32)
        q, k, v = (t.view(-1, 8, 4, 8).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 8, 32)
        return self.last(h + self.out(a)).view(-1, 4)


class Convolutions(nn.Module):
    """Convolutions and batch norms, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn_a, self.bn_b, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn_a(self.a(x.view(-1, 1, 4, 4))))
        return self.last(torch.relu(self.bn_b(self.b(h))).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "attention": Attention,
    "convolutions": Convolutions,
    "two graphs": Halves,
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: Adam(p, lr=1e-4),
    "adamw fused": lambda p: AdamW(p, lr=1e-4, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=1e-4, foreach=True),
    "adagrad": lambda p: Adagrad(p, lr=1e-3),
}


def policy(*formats: str, storages: tuple[str, ...] = ()) -> autoprec.Policy:
    """As narrow as it goes, so that there is something to lose."""
    made = autoprec.Policy(
        name=" ".join(formats[1:]),
        formats=formats,
        objective="bytes",
        storage={"formats": storages},
        calibration={"steps": 4},
        noise={"gradient": 10.0, "loss": 10.0},
        rules=[{"pin": formats[1], "optional": True}] if len(formats) == 2 else (),
    )
    return monitored(made)


POLICIES = {
    "fp16": policy("fp32", "fp16"),
    "fp16, bf16": policy("fp32", "fp16", "bf16"),
    "bf16, e4m3 storage": policy("fp32", "bf16", storages=("bf16", "fp8_e4m3")),
}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def starts(seed: int) -> Iterator[tuple[str, Start]]:
    """Every model in every policy, with optimizers in turn."""
    optimizers = list(OPTIMIZERS)
    for i, (model, formats) in enumerate((m, f) for m in MODELS for f in POLICIES):
        torch.manual_seed(seed)
        name = optimizers[i % len(optimizers)]
        batches = [(torch.randn(64, 16), torch.randint(0, 4, (64,))) for _ in range(6)]
        yield (
            f"{model}, {formats}, {name}",
            Start.planned(MODELS[model](), POLICIES[formats], batches, loss_fn, OPTIMIZERS[name]),
        )
