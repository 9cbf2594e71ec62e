"""The five workloads: plain PyTorch on real data; nothing in here knows of precision."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from autoprec.demo.tasks import ByteTransformer
from tests.bench import data

__all__ = ["FUSED_ATTENTION", "PLAIN_RECURRENT", "WORKLOADS", "WRITTEN_ATTENTION", "Workload", "chosen", "conclude"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and how it is trained.

    Attributes:
        name, description: for people.
        build: makes the model; its weights follow torch's random state.
        optimizer: of the model's parameters.
        batch: draws a batch; held-out ones with `unseen=True`.
        loss: (model, batch) → the scalar to differentiate.
        warm_steps: FP32 steps after which the model has left its initial state.
    """

    name: str
    description: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: Callable[..., Any]
    loss: Callable[[nn.Module, Any], Tensor]
    warm_steps: int


def split(count: int, rows: int, generator: Generator, unseen: bool) -> Tensor:
    """Row numbers: of the last tenth if unseen, of the others if not."""
    cut = count - count // 10
    low, high = (cut, count) if unseen else (0, cut)
    return torch.randint(low, high, (rows,), generator=generator)


# Text ----------------------------------------------------------------------------------------------------------------


def text_batch(generator: Generator, *, unseen: bool = False, rows: int = 8, length: int = 128) -> Tensor:
    """Windows of bytes, (rows, length + 1)."""
    text = data.standard_library()
    starts = split(len(text) - length - 1, rows, generator, unseen)
    return text[starts[:, None] + torch.arange(length + 1)].long()


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Recurrence(nn.Module):
    """An LSTM layer and a feed-forward layer, each behind a norm and beside a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lstm(self.norm1(x))[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteRecurrent(nn.Module):
    """Recurrent blocks between an embedding and a head."""

    def __init__(self, width: int = 160, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Recurrence(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes → (batch, time, 256) logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PlainRecurrent(nn.Module):
    """Two LSTM layers between an embedding and a two-layer head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 96), nn.LSTM(96, 192, num_layers=2, batch_first=True)
        self.up, self.head = nn.Linear(192, 768), nn.Linear(768, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes → (batch, time, 256) logits."""
        return self.head(F.gelu(self.up(self.lstm(self.embed(tokens))[0])))


class Heads(nn.Module):
    """Attention to what came before, and a feed-forward layer. `fused`: one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.read = nn.ModuleList(
            [nn.Linear(width, 3 * width)] if fused else [nn.Linear(width, width) for _ in range(3)]
        )
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        h = self.norm1(x)
        read = self.read[0](h).chunk(3, -1) if len(self.read) == 1 else [f(h) for f in self.read]
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in read)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        x = x + self.proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class WrittenAttention(nn.Module):
    """Two such layers between an embedding and a head."""

    def __init__(self, width: int = 128, length: int = 128, *, fused: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width) / 8.0)
        self.layers = nn.ModuleList(Heads(width, 4, fused=fused) for _ in range(2))
        self.head = nn.Linear(width, 256)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes → (batch, time, 256) logits."""
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x, self.future)
        return self.head(x)


# Images --------------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Two 3×3 convolutions with batch norm and a skip connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    """Three stages, or the first of them, on one-channel images."""

    def __init__(self, width: int = 32, stages: int = 3) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        plan = ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2))[:stages]
        self.stages = nn.ModuleList(Stage(*s) for s in plan)
        self.head = nn.Linear(plan[-1][1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 28, 28) → (batch, 10) logits."""
        x = F.relu(self.norm(self.stem(images)))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def digit_batch(generator: Generator, *, unseen: bool = False) -> tuple[Tensor, Tensor]:
    images, labels = data.digits()
    rows = split(len(labels), 32, generator, unseen)
    return images[rows], labels[rows]


def label_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# Sentences -----------------------------------------------------------------------------------------------------------


class Rater(nn.Module):
    """The pretrained encoder, mean pooling, and one number per sentence."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(data.encoder_folder(), attn_implementation="sdpa")
        self.head = nn.Linear(self.encoder.config.hidden_size, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, time) tokens → (batch,) ratings."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].float()
        return self.head((states * mask).sum(1) / mask.sum(1)).squeeze(-1)


def sentence_batch(generator: Generator, *, unseen: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    from transformers import AutoTokenizer

    sentences, ratings = data.movie_sentences()
    rows = split(len(sentences), 16, generator, unseen)
    tokenizer = AutoTokenizer.from_pretrained(data.encoder_folder())
    chosen = [sentences[i] for i in rows.tolist()]
    tokens = tokenizer(chosen, padding="max_length", truncation=True, max_length=48, return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"], ratings[rows]


def rating_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


# Tables --------------------------------------------------------------------------------------------------------------


def perceptron(width: int = 512) -> nn.Module:
    layers = [nn.Linear(9, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def visit_batch(generator: Generator, *, unseen: bool = False) -> tuple[Tensor, Tensor]:
    features, visits = data.doctor_visits()
    rows = split(len(visits), 1024, generator, unseen)
    return features[rows], visits[rows]


def visit_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            name="transformer",
            description="decoder, 4 layers of width 256, 8 × 128 bytes of the standard library's sources",
            build=lambda: ByteTransformer(width=256, heads=4, depth=4, context=128),
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            batch=text_batch,
            loss=next_byte_loss,
            warm_steps=40,
        ),
        Workload(
            name="cnn",
            description="residual network with batch norm, 7 convolutions of width 32 to 128, 32 MNIST digits",
            build=ResNet,
            optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
            batch=digit_batch,
            loss=label_loss,
            warm_steps=40,
        ),
        Workload(
            name="encoder",
            description="pretrained all-MiniLM-L6-v2 rating 16 movie review sentences of up to 48 tokens",
            build=Rater,
            optimizer=lambda parameters: AdamW(parameters, lr=5e-5),
            batch=sentence_batch,
            loss=rating_loss,
            warm_steps=20,
        ),
        Workload(
            name="mlp",
            description="four layers of width 512, 1,024 person-years of the RAND health insurance experiment",
            build=perceptron,
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            batch=visit_batch,
            loss=visit_loss,
            warm_steps=60,
        ),
        Workload(
            name="recurrent",
            description="3 blocks of an LSTM and a feed-forward layer, width 160, 8 × 128 bytes as for the transformer",
            build=ByteRecurrent,
            optimizer=lambda parameters: AdamW(parameters, lr=2e-3),
            batch=text_batch,
            loss=next_byte_loss,
            warm_steps=40,
        ),
    )
}

#: Beside the suite: attention as people write it by hand, two products of activations and a softmax.
WRITTEN_ATTENTION = replace(
    WORKLOADS["transformer"],
    name="written-attention",
    description="two layers of width 128 whose attention is written out, 8 × 128 bytes as for the transformer",
    build=WrittenAttention,
)

FUSED_ATTENTION = replace(
    WRITTEN_ATTENTION,
    name="fused-attention",
    description="the same with one product for queries, keys and values",
    build=partial(WrittenAttention, fused=True),
)

#: And a model with next to nothing to choose.
PLAIN_RECURRENT = replace(
    WORKLOADS["recurrent"],
    name="plain-recurrent",
    description="two LSTM layers of width 192 and a two-layer head, 8 × 128 bytes as for the transformer",
    build=PlainRecurrent,
)


def chosen(parser: ArgumentParser) -> tuple[list[Workload], Namespace]:
    """The workloads that a command names, by default the suite's, and its other arguments. Ends the command where there
    is none of the name."""
    known = WORKLOADS | {w.name: w for w in (WRITTEN_ATTENTION, FUSED_ATTENTION, PLAIN_RECURRENT)}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    given = parser.parse_args()
    unknown = [n for n in given.names if n not in known]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(known)}")
    return [known[n] for n in given.names or WORKLOADS], given


def conclude(missed: Sequence[str], otherwise: str) -> NoReturn:
    """End a command with what was missed and exit code 1, or with a good word and 0."""
    print("\n".join(["", *(f"missed: {m}" for m in missed)]) if missed else f"\n{otherwise}")
    sys.exit(1 if missed else 0)
