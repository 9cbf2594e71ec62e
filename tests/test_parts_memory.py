"""Predicted and measured peaks of models whose tensors, or gradients, are views: slices, chunks, what was expanded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.planning.planner import ask, propose
from autoprec.planning.uniform import uniform_choice
from autoprec.serial import load_policy
from tests.bench.mixtures import mixture
from tests.memory_study import peaks_under


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


def heads(h: Tensor, count: int) -> list[Tensor]:
    return [t.unflatten(-1, (4, 16)).transpose(1, 2) for t in h.chunk(count, -1)]


def attention(h: Tensor) -> Tensor:
    q, k, v = heads(h[..., :192], 3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def gated_attention(h: Tensor) -> Tensor:
    q, k, v, gate = heads(h, 4)
    return (F.scaled_dot_product_attention(q, k, v) * gate.sigmoid()).transpose(1, 2).flatten(2)


MODELS = [(gated, 128), (slices, 128), (unbound, 128), (one_slice, 64), (one_for_nobody, 64), (parts_of_parts, 128),
          (expanded, 256), (normalized, 256), (attention, 64), (gated_attention, 64)]  # fmt: skip


@pytest.mark.parametrize(("of", "width"), MODELS, ids=[of.__name__ for of, _ in MODELS])
def test_the_peak_of_what_is_used_in_parts_is_predicted(of: Callable[[Tensor], Tensor], width: int) -> None:
    """All in FP32, all in BF16, and two mixtures of the two, with random storages."""
    torch.manual_seed(0)
    model, batches = Block(of, width), [torch.randn(16, 96, 64) for _ in range(2)]
    policy = load_policy("balanced").replaced(
        calibration={"steps": 2}, formats=("fp32", "bf16"), rules=(), noise={"loss": 1e6, "gradient": 1e6}
    )
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b), events=None)
    session = autoprec.session(model)
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem, chance = proposals.problem, random.Random(0)
    choices = [uniform_choice(problem, f) for f in ("fp32", "bf16")] + [mixture(problem, chance) for _ in range(2)]
    found = []
    for choice in choices:
        measured, predicted = peaks_under(model, proposals, choice, batches[0])
        found.append(predicted / measured)
    assert max(abs(ratio - 1.0) for ratio in found) <= 0.005, found
