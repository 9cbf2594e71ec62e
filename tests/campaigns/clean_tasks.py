"""What the campaign of clean runs trains: small models on real data, how, and the rules of their plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from autoprec.demo.tasks import ByteTransformer, DigitNet
from autoprec.policies import Rule
from tests.bench import data

__all__ = ["TASKS", "Task", "learning_rate"]

#: The learning rate rises over so many steps, and falls as a cosine to this share of itself.
_WARM_UP, _LAST_RATE = 50, 0.05


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, how it is trained, and the rules of one of its plans; `kinds`: of ops that are FP16 in another
    one, and all else FP32."""

    name: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: Callable[[Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    rules: tuple[Rule, ...]
    kinds: tuple[str, ...] = ()


def pinned(half: str, *globs: str) -> tuple[Rule, ...]:
    """These modules in a format, all others in BF16, where ops can take it."""
    first = (Rule(match=g, pin=half, optional=True) for g in globs)
    return (*first, Rule(match="*", pin="bf16", optional=True))


def perceptron(width: int = 64) -> nn.Module:
    """Four layers with dropout between them."""
    hidden = [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Linear(9, width), nn.ReLU(), nn.Dropout(0.1), *hidden, nn.Linear(width, 1))


def bytes_batch(generator: Generator, rows: int = 8, length: int = 32) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, and the next ones."""
    text = data.standard_library()
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]


@cache
def all_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 images of 8×8, and what they show."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0, torch.tensor(digits.target)


def rows_of(tables: tuple[Tensor, Tensor], generator: Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Rows by chance."""
    chosen = torch.randint(len(tables[1]), (rows,), generator=generator)
    return tables[0][chosen], tables[1][chosen]


def cross_entropy(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Classes are in the last dimension."""
    return F.cross_entropy(outputs.flatten(0, -2), wanted.flatten())


TASKS = {
    t.name: t
    for t in (
        Task(
            name="text",
            build=lambda: ByteTransformer(width=32, heads=2, depth=1, context=32),
            optimizer=lambda parameters: AdamW(parameters, lr=3e-3),
            batch=bytes_batch,
            loss=cross_entropy,
            rules=pinned("fp16", "blocks.*"),
            kinds=("embedding", "add", "layer_norm"),
        ),
        Task(
            name="digits",
            build=lambda: DigitNet(width=4),
            optimizer=lambda parameters: SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4),
            batch=lambda generator: rows_of(all_digits(), generator, 32),
            loss=cross_entropy,
            rules=pinned("fp16", "convs.[01]", "norms.[01]"),
        ),
        Task(
            name="visits",
            build=perceptron,
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            batch=lambda generator: rows_of(data.doctor_visits(), generator, 64),
            loss=F.mse_loss,
            rules=pinned("fp16", "[0-5]"),
        ),
    )
}


def learning_rate(step: int, steps: int) -> float:
    """Share of the optimizer's own."""
    through = min(1.0, max(0.0, (step - _WARM_UP) / max(steps - _WARM_UP, 1)))
    falling = _LAST_RATE + (1.0 - _LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * through))
    return falling * min(1.0, (step + 1) / _WARM_UP)
