"""Models of the laws: each with a batch maker and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, *, graph_break: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)
        self.graph_break = graph_break

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (m(h).view(batch, length, 4, width // 4).transpose(1, 2) for m in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.out(a))
        if self.graph_break:
            torch._dynamo.graph_break()
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Decoder with tied embedding and head; returns the loss when targets are given."""

    def __init__(
        self, width: int = 64, depth: int = 2, vocabulary: int = 100, *, graph_break: bool = False, tied: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, graph_break=graph_break) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class ConvNet(nn.Module):
    """Batch norm, groups, stride, in-place activations and an in-place residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        y += x
        y = F.relu_(y)
        y = F.dropout(F.relu(self.conv3(y), inplace=True), 0.1, self.training)
        return self.head(y.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@dataclass(frozen=True)
class Case:
    """A model, its batches (the last of them shorter), and its loss."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]

    def batches(self) -> list[Any]:
        g = torch.random.get_rng_state()
        torch.manual_seed(1234)
        found = [self.batch(6) for _ in range(4)] + [self.batch(3)]
        torch.random.set_rng_state(g)
        return found


def _tokens(n: int) -> Tensor:
    return torch.randint(0, 100, (n, 17))


def _images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 12, 12), torch.randint(0, 10, (n,))


def _sequences(features: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, 7, features), torch.randint(0, 10, (n,)))


def _vectors(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 12), torch.randint(0, 10, (n,))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def twice_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model is called twice in a step."""
    return F.cross_entropy(model(batch[0]) + model(batch[0].flip(0)).flip(0), batch[1])


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


CASES = [
    Case("transformer, tied weights", Transformer, _tokens, language_loss),
    Case("transformer, untied", lambda: Transformer(tied=False), _tokens, language_loss),
    Case("batch-norm CNN, in place", ConvNet, _images, class_loss),
    Case("nn.Sequential", sequential, _vectors, class_loss),
    Case("nn.LSTM", Recurrent, _sequences(8), class_loss),
    Case("nn.TransformerEncoder", Encoder, _sequences(16), class_loss),
    Case("graph break in each block", lambda: Transformer(graph_break=True, depth=3), _tokens, language_loss),
    Case("called twice in a step", ConvNet, _images, twice_loss),
]
