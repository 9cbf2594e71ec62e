"""A small language model with adapters, whose other weights are frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.numerics.frozen import NarrowParameter
from autoprec.serial import load_policy

NARROW = ["bf16", "fp8_e4m3"]


class Adapted(nn.Module):
    """A frozen linear beside a trained product of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tuned(nn.Module):
    """A small language model with adapters; its embedding and its head are frozen."""

    def __init__(self, width: int = 64, words: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width).requires_grad_(False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.wide = nn.ModuleList(Adapted(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(Adapted(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, wide, back in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + back(F.gelu(wide(norm(x))))
        return self.head(x)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def made(width: int = 64, rows: int = 4, length: int = 17, layers: int = 1) -> tuple[Tuned, list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Tuned(width, layers=layers), [torch.randint(0, 32, (rows, length)) for _ in range(4)]


def policy_with(*formats: str, **changes: Any) -> Any:
    policy = load_policy("memory")
    storage = {**policy.storage.model_dump(), "frozen": formats}
    return policy.replaced(calibration={"steps": 4}, storage=storage, **changes)


def compiled(model: nn.Module, batches: list[Tensor], *formats: str, **changes: Any) -> nn.Module:
    options = {k: changes.pop(k) for k in ("backend",) if k in changes}
    policy = policy_with(*formats, **changes)
    return autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss_of, events=None, **options)


def narrow_of(model: nn.Module) -> dict[str, str]:
    return {f: p.format for f, p in model.named_parameters() if isinstance(p, NarrowParameter)}


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {f: p.grad.clone() for f, p in model.named_parameters() if p.grad is not None}
