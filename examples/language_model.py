"""Train a byte-level transformer on the sources of Python's standard library.

    python examples/language_model.py --steps 200 --policy memory
    autoprec calibrate examples/language_model.py:target

The training loop is a plain one; `model = autoprec.compile(model)` is the only line about precision.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 64, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position)))


def draw_batches(size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs of (bytes, next bytes)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (size, 1))
        window = data[starts + torch.arange(CONTEXT + 1)].long()
        yield window[:, :-1], window[:, 1:]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def target() -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]], object]:
    """For `autoprec calibrate`."""
    return LanguageModel(), draw_batches(), loss_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policy", default="balanced", help="memory, balanced, speed, safe, … or a file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    model = autoprec.compile(model, policy=args.policy)  # the one added line

    for step, batch in enumerate(islice(draw_batches(), args.steps)):
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    session = autoprec.session(model)
    if session.plan is not None:
        print(f"formats: {', '.join(session.plan.formats_used())}")


if __name__ == "__main__":
    main()
