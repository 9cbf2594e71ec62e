"""How the tool itself scales: `python -m tests.scale_study [LAYERS ...]` prints seconds per op of each activity, and
bytes per op of the profile file, for transformers of small width and growing depth."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import autoprec
from autoprec.planning.planner import make_plan
from autoprec.rewriting.rewrite import rewrite
from autoprec.serial import load_policy, read_profile, write_plan, write_profile
from tests.models import Transformer, language_loss

WIDTH = 32
LAYERS = (6, 12, 24, 48, 72)


@dataclass(frozen=True)
class Row:
    """Seconds of each activity; bytes of the profile file."""

    layers: int
    ops: int
    plain_capture: float
    capture: float
    observe: float
    time_ops: float
    plan: float
    plan_budget: float
    rewrite: float
    write: float
    read: float
    profile_bytes: int


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def batch() -> torch.Tensor:
    return torch.randint(0, 64, (2, 17))


def measure(layers: int) -> Row:
    """One depth. Capture is the first two observed steps, beside the first step under torch.compile's eager backend;
    observing is one later step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Transformer(width=WIDTH, depth=layers, vocabulary=64, tied=False)
    compiled = torch.compile(lambda x: language_loss(plain, x), backend="eager")
    plain_capture, _ = seconds(lambda: compiled(batch()).backward())
    torch._dynamo.reset()
    model = Transformer(width=WIDTH, depth=layers, vocabulary=64, tied=False)
    policy = load_policy("memory").replaced(calibration={"steps": 4})
    autoprec.compile(model, policy=policy, events=None)
    session = autoprec.session(model)
    capture, _ = seconds(lambda: session.calibrate([batch(), batch()], language_loss))
    observe, _ = seconds(lambda: session.calibrate([batch() for _ in range(3)], language_loss))
    time_ops, device = seconds(session.measure_device)
    graph, profile = session.graph, session.profile
    assert graph is not None and profile is not None
    plan_seconds, plan = seconds(lambda: make_plan(graph, profile, device, policy))
    budget = (plan.predicted.peak_bytes + plan.predicted_fp32.peak_bytes) // 2
    balanced = load_policy("balanced").replaced(formats=policy.formats)
    plan_budget, _ = seconds(lambda: make_plan(graph, profile, device, balanced, budget_bytes=budget))
    rewriting, _ = seconds(lambda: [rewrite(b, plan, "cpu") for b in session.bindings])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.safetensors"
        write, _ = seconds(lambda: write_profile(file, profile, graph))
        read, _ = seconds(lambda: read_profile(file))
        size = os.path.getsize(file)
        write_plan(Path(folder) / "plan.yaml", plan)
    return Row(
        layers, len(graph.ops), plain_capture, capture, observe / 3, time_ops, plan_seconds, plan_budget, rewriting,
        write, read, size,
    )  # fmt: skip


ACTIVITIES = ("plain_capture", "capture", "observe", "time_ops", "plan", "plan_budget", "rewrite", "write", "read")


def main(layers: Sequence[int]) -> None:
    torch.set_num_threads(1)
    print("layers   ops  " + " ".join(f"{name:>13}" for name in ACTIVITIES) + "   profile bytes")
    measure(2)  # imports, first calls
    for depth in layers:
        row = measure(depth)
        each = " ".join(f"{1e3 * getattr(row, name) / row.ops:10.3f} ms" for name in ACTIVITIES)
        print(f"{row.layers:6} {row.ops:5}  {each}  {row.profile_bytes / row.ops:8.0f} per op", flush=True)
    print("each activity in milliseconds per op")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or LAYERS)
