"""A file of targets for the command line: one that works, and many that do not."""

from __future__ import annotations

TARGETS = """
from dataclasses import dataclass

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))  # line wrong_width


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch.x), batch.y)


def batches(count=4, width=32):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(256, width, generator=generator)
        yield Batch(x, torch.randint(4, (256,), generator=generator))


def target():
    torch.manual_seed(0)
    return Net(), batches(), loss


def two_values():
    return Net(), batches()


def no_model():
    return 3, batches(), loss


def no_batches():
    return Net(), 3, loss


def no_loss():
    return Net(), batches(), 3


def empty():
    return Net(), [], loss


def vector_loss():
    return Net(), batches(), lambda model, batch: model(batch.x)


def fails():
    return {}["missing"]  # line fails


def loss_fails():
    def loss(model, batch):
        return model(batch.x) / undefined  # line loss_fails

    return Net(), batches(), loss


def batches_fail():
    def broken():
        yield next(batches())
        raise OSError("the disk is gone")  # line batches_fail

    return Net(), broken(), loss


def wrong_width():
    return Net(), batches(width=31), loss


def needs(argument):
    pass


value = 3
"""
