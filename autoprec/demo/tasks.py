"""The tasks of the demo: a transformer on the Python standard library's sources, a CNN on scikit-learn's digits.

Both are plain PyTorch; nothing in here knows of precision.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from autoprec.errors import UnsupportedError

__all__ = ["Batch", "Task", "digits_task", "language_task"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and how they are trained.

    Attributes:
        name, metric: for people; `metric` is "held-out loss" or "accuracy".
        steps: optimizer steps.
        build: makes the model; its weights follow torch's random state.
        optimizer: of the model's parameters; its learning rate falls to 0 over the steps.
        batch: draws a training batch.
        held_out: batches that are never trained on.
    """

    name: str
    metric: str
    steps: int
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: Callable[[Generator], Batch]
    held_out: Sequence[Batch]

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy; classes are in the last dimension."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Mean held-out loss, or the share of the held-out images that are recognised."""
        if self.metric == "accuracy":
            right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in self.held_out)
            return right / sum(y.numel() for _, y in self.held_out)
        return sum(self.loss(model, b).item() for b in self.held_out) / len(self.held_out)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → the same."""
        n, t, width = x.shape
        heads = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes → (batch, time, 256) logits."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DigitNet(nn.Module):
    """Strided convolutions with batch norm and ReLU, no pooling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        plan = ((1, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 4 * width, 2))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, stride, 1, bias=False) for i, o, stride in plan)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in plan)
        self.head = nn.Linear(16 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) → (batch, 10) logits."""
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.flatten(1))


def language_task() -> Task:
    """Next byte on the sources of the standard library; the last tenth of them is held out."""
    context, size = 64, 8
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 1 << 20:
        raise UnsupportedError(
            f"the demo reads the standard library's sources, and {folder} has less than 1 MiB of them"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(data) - len(data) // 10

    def draw(generator: Generator, low: int, high: int) -> Batch:
        starts = torch.randint(low, high - context, (size, 1), generator=generator)
        window = data[starts + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]

    unseen = Generator().manual_seed(0)
    return Task(
        name="language model",
        metric="held-out loss",
        steps=80,
        build=lambda: ByteTransformer(width=64, heads=2, depth=2, context=context),
        optimizer=lambda parameters: AdamW(parameters, lr=3e-3),
        batch=lambda generator: draw(generator, 0, cut),
        held_out=tuple(draw(unseen, cut, len(data)) for _ in range(8)),
    )


def digits_task() -> Task:
    """Ten classes of 8×8 images; a third is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnsupportedError("the demo's digits come with scikit-learn: pip install 'autoprec[demo]'") from error
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=Generator().manual_seed(0))
    seen, unseen = order[600:], order[:600]

    def draw(generator: Generator) -> Batch:
        chosen = seen[torch.randint(len(seen), (64,), generator=generator)]
        return images[chosen], labels[chosen]

    return Task(
        name="digits",
        metric="accuracy",
        steps=110,
        build=lambda: DigitNet(width=8),
        optimizer=lambda parameters: SGD(parameters, lr=0.02, momentum=0.9),
        batch=draw,
        held_out=((images[unseen], labels[unseen]),),
    )
