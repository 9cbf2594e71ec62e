"""A model and its loop, for steps whose verdict is left to the device; the fixture `elsewhere` stands for a GPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.serial import load_policy

__all__ = ["Net", "adamw", "batch", "compiled", "everything", "is_left", "running", "step"]


class Net(nn.Module):
    """Buffers that change, numbers by chance, and a large buffer that does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.mask: Tensor
        self.register_buffer("mask", torch.zeros(32).index_fill(0, torch.tensor([3]), -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.relu(self.norm(self.first(x))), 0.1, self.training)
        return self.last(y * self.mask.exp())


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True, **more)


def compiled(policy: str = "bf16", model: nn.Module | None = None, **changes: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net() if model is None else model
    chosen = load_policy(policy).replaced(calibration={"steps": 2}, **changes)
    return model, autoprec.session(autoprec.compile(model, policy=chosen, events=None))


def running(*given: Any, **changes: Any) -> tuple[nn.Module, Any, torch.optim.AdamW]:
    """A compiled model, its session and optimizer, two steps behind calibration."""
    model, session = compiled(*given, **changes)
    optimizer = adamw(model)
    for k in range(4):
        step(model, optimizer, batch(k))
    return model, session, optimizer


def batch(k: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(k))
    return x.index_fill(0, torch.tensor([2]), math.nan) if bad else x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, factor: float = 1.0) -> float:
    optimizer.zero_grad()
    loss = (model(x) * factor).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a bad step must leave alone, read without a question to the session."""
    return copy.deepcopy([[*model.parameters()], [*model.buffers()], optimizer.state_dict()])


def is_left(session: Any) -> bool:
    return bool(session._guard.owes)
