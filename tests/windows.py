"""What tests of the monitor share: windows made up tensor by tensor, plans of one op, and a run that takes FP16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import autoprec
from autoprec.graphs import OpClass, OpGraph
from autoprec.numerics.histograms import histogram, sample
from autoprec.plans import Assignment, Plan, Region
from autoprec.policies import Monitor
from autoprec.profiles import Profile, RangeHistogram, TensorProfile
from tests.planning.maker import Maker

LIMITS = Monitor()
X = "input:x"
NORMAL = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def seen(values: Tensor, gradients: Tensor | None = None) -> tuple[RangeHistogram, RangeHistogram | None]:
    return histogram(sample(values)), None if gradients is None else histogram(sample(gradients))


def profile(**tensors: tuple[RangeHistogram, RangeHistogram | None]) -> Profile:
    named = {"x": X, "y": "y"}
    found = (TensorProfile(id=named[k], values=v, gradients=g) for k, (v, g) in tensors.items())
    return Profile(graph_fingerprint="", steps=1, tensors=tuple(found))


def one_op() -> OpGraph:
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    out = make.op("relu", OpClass.POINTWISE, (X,), (64, 64))
    return make.graph(out)


def plan_in(graph: OpGraph, fmt: str, scale_log2: int | None = None) -> Plan:
    op = graph.ops[0].id
    regions = () if scale_log2 is None else (Region(ops=(op,), scale_log2=scale_log2, reason="test"),)
    assignments = tuple(Assignment(op=op, role=r, format=fmt, reason="test") for r in graph.ops[0].roles)
    return Plan(assignments=assignments, regions=regions)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def half(**changes: object) -> autoprec.Policy:
    return autoprec.Policy(
        name="half",
        formats=("fp32", "fp16"),
        objective="bytes",
        storage={"formats": ()},
        calibration={"steps": 2},
        monitor={"window_steps": 4, "interval_steps": 1, "cooldown_windows": 2},
    ).replaced(**changes)


def overflow_for_some_windows(events: Path) -> None:
    """A run of a model whose values pass 65504 for some windows, and come back; its events go to a file."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = layers()
    autoprec.compile(model, policy=half(), events=events)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for size in (*[1.0] * 12, *[3e5] * 8, *[1.0] * 40):
        optimizer.zero_grad()
        (model(torch.randn(64, 16) * size) / size).square().mean().backward()
        optimizer.step()
