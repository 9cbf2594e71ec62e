"""What the noise limits cost: `python -m tests.bench.defaults [--seeds N] [--steps N]`

Two real tasks are trained under plans that keep the fewest bytes within one noise limit, the other limit binding
nothing: final held-out loss minus FP32's of the same seed (same weights, same batches), mean over the seeds, beside
FP32's own spread over the seeds. And what each limit allows: bytes kept against FP32's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Generator
from torch.optim.lr_scheduler import LinearLR

import autoprec
from autoprec.demo.tasks import Task, digits_task, language_task
from autoprec.devices import Device
from autoprec.serial import load_policy
from tests.bench.measure import one_thread

GRADIENT_LIMITS = (0.002, 0.01, 0.1)
LOSS_LIMITS = (0.0003, 0.001, 0.005)
UNBOUND = 1e6


@dataclass(frozen=True)
class End:
    """How a run ended: mean held-out loss; bytes kept of FP32's and predicted noise, 1 and 0 for FP32 itself."""

    loss: float
    kept: float = 1.0
    loss_sigma: float = 0.0
    gradient_ratio: float = 0.0


class Trainer:
    """Trains a task; timings of ops are shared by all runs."""

    def __init__(self, task: Task, steps: int) -> None:
        self.task, self.steps = task, steps
        self.device: Device | None = None

    def run(self, seed: int, noise: dict[str, float] | None) -> End:
        """One run; without limits in FP32."""
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model, generator = self.task.build(), Generator().manual_seed(seed)
        if noise is not None:
            policy = load_policy("memory").replaced(objective="bytes", noise=noise)
            unseen = Generator().manual_seed(1000 + seed)  # up front, so that the loss is visible
            batches = [self.task.batch(unseen) for _ in range(policy.calibration.steps)]
            autoprec.compile(
                model, policy=policy, device=self.device, batches=batches, loss_fn=self.task.loss, events=None
            )
        optimizer = self.task.optimizer(model.parameters())
        schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=self.steps)
        for _ in range(self.steps):
            optimizer.zero_grad()
            self.task.loss(model, self.task.batch(generator)).backward()
            optimizer.step()
            schedule.step()
        plan = None
        if noise is not None:
            session = autoprec.session(model)
            self.device, plan = session.device, session.plan
            autoprec.unwrap(model)
        model.eval()
        with torch.no_grad():
            loss = statistics.fmean(self.task.loss(model, b).item() for b in self.task.held_out)
        if plan is None or plan.predicted is None or plan.predicted_fp32 is None:
            return End(loss)
        found = plan.predicted
        return End(loss, found.saved_bytes / plan.predicted_fp32.saved_bytes, found.loss_sigma, found.gradient_ratio)


def row(name: str, ends: list[End], plain: list[End]) -> str:
    """Means over the seeds; the change's standard error."""
    changes = [a.loss - b.loss for a, b in zip(ends, plain, strict=True)]
    error = statistics.stdev(changes) / len(changes) ** 0.5

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    return (
        f"{name:24} {mean(changes):+10.5f} ± {error:.5f}   {mean(e.kept for e in ends):8.2f}"
        f" {mean(e.gradient_ratio for e in ends):12.4f} {mean(e.loss_sigma for e in ends):12.2e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.defaults")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    seeds = range(given.seeds)
    limits = [("gradient", g, {"gradient": g, "loss": UNBOUND}) for g in GRADIENT_LIMITS]
    limits += [("loss", x, {"gradient": UNBOUND, "loss": x}) for x in LOSS_LIMITS]
    limits += [("neither", UNBOUND, {"gradient": UNBOUND, "loss": UNBOUND})]
    with one_thread():
        for task in (language_task(), digits_task()):
            trainer = Trainer(task, given.steps)
            plain = [trainer.run(seed, None) for seed in seeds]
            losses = [e.loss for e in plain]
            print(
                f"\n{task.name}, {given.steps} steps: FP32 {statistics.fmean(losses):.5f}, spread over"
                f" {given.seeds} seeds {statistics.stdev(losses):.5f}\n"
                "limit                     loss change             kept / fp32  gradient ratio  loss sigma (predicted)",
                flush=True,
            )
            for what, limit, noise in limits:
                name = what if limit == UNBOUND else f"noise.{what} {limit:g}"
                print(row(name, [trainer.run(seed, noise) for seed in seeds], plain), flush=True)


if __name__ == "__main__":
    main()
