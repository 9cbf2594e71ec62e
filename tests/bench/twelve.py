"""How long does timing take? `python -m tests.bench.twelve`: the distinct ops of two 12-layer transformers.

Calibrated on two batches; equal layers are timed once. Exit code 1 if the bar is missed.
"""

from __future__ import annotations

import sys
import time

import torch

import autoprec
from autoprec.demo.tasks import ByteTransformer
from autoprec.serial import load_policy
from tests.bench.measure import one_thread
from tests.bench.workloads import next_byte_loss, text_batch

#: From the issue.
BAR_SECONDS = 20.0


def timing_seconds(width: int, depth: int) -> tuple[float, int, int]:
    """Seconds, ops of the graph, and ops that were timed."""
    torch.manual_seed(0)
    model = ByteTransformer(width=width, heads=12, depth=depth, context=128)
    generator = torch.Generator().manual_seed(0)
    autoprec.compile(model, policy=load_policy("balanced").replaced(calibration={"steps": 2}), events=None)
    session = autoprec.session(model)
    session.calibrate([text_batch(generator) for _ in range(2)], next_byte_loss)
    begin = time.perf_counter()
    device = session.measure_device()
    seconds = time.perf_counter() - begin
    return seconds, len(session.graph.ops), len({t.timing_key for t in device.timings})


def main() -> None:
    missed = False
    with one_thread():
        for width in (384, 768):
            seconds, ops, timed = timing_seconds(width, 12)
            missed |= seconds > BAR_SECONDS
            print(f"width {width}, 12 layers: {ops} ops, {timed} distinct ones timed in {seconds:.1f} s"
                  f" (bar {BAR_SECONDS:.0f})", flush=True)  # fmt: skip
    sys.exit(missed)


if __name__ == "__main__":
    main()
