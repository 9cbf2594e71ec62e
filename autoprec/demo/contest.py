"""Train a task under one precision and measure it, with the same functions for every contestant."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Generator, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

import autoprec
from autoprec.demo.results import AUTOCAST, BALANCED, FP32, MEMORY, Run
from autoprec.demo.tasks import Batch, Task
from autoprec.devices import Device
from autoprec.execution import measuring
from autoprec.serial import load_policy

__all__ = ["Contest", "Trainer"]

POLICIES = {BALANCED: "balanced", MEMORY: "memory"}

#: Steps that are not timed: calibration, the first plan, and what is compiled in the first planned step.
UNTIMED_STEPS = max(load_policy(name).calibration.steps for name in POLICIES.values()) + 2


class Contest:
    """Runs contestants; each distinct op is timed once and the timings are shared by all runs."""

    def __init__(self) -> None:
        self.device: Device | None = None

    def run(self, task: Task, contestant: str, seed: int) -> Run:
        """Train and measure. The same seed gives every contestant the same weights and batches."""
        torch.manual_seed(seed)
        model, generator = task.build(), Generator().manual_seed(seed)
        policy = POLICIES.get(contestant)
        if policy is not None:
            autoprec.compile(model, policy=policy, device=self.device, events=None)
        trainer = Trainer(task, model, autocast=contestant == AUTOCAST)
        seconds = [trainer.timed_step(task.batch(generator)) for _ in range(task.steps)]
        model.eval()
        with trainer.precision():
            score = task.score(model)
        model.train()
        batch = task.batch(generator)
        figures: dict[str, Any] = {
            "contestant": contestant,
            "seed": seed,
            "score": score,
            "step_seconds": tuple(seconds[UNTIMED_STEPS:]),
            "peak_bytes": trainer.peak_bytes(batch),
            "saved_bytes": trainer.saved_bytes(batch),
        }
        if policy is None:
            return Run(formats=(FP32,) if contestant == FP32 else ("bf16", FP32), **figures)
        session = autoprec.session(model)
        self.device = session.device
        return Run(
            formats=session.plan.formats_used() if session.plan is not None else (),
            promotions=sum(e.kind == "promoted" for e in session.events),
            skipped_steps=session.skipped_steps,
            plan=session.plan,
            **figures,
        )


class Trainer:
    """A plain training loop, taken apart for measuring."""

    def __init__(self, task: Task, model: nn.Module, *, autocast: bool) -> None:
        self.task, self.model, self.autocast = task, model, autocast
        self.optimizer: Optimizer = task.optimizer(model.parameters())
        self.schedule = LinearLR(self.optimizer, 1.0, 0.0, total_iters=task.steps)

    def precision(self) -> Any:
        """Where the forward pass runs."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss."""
        with self.precision():
            return self.task.loss(self.model, batch)

    def step(self, batch: Batch, *, keep_gradients: bool = False) -> None:
        """One training step; `keep_gradients` accumulates into the gradients' memory instead of allocating it anew."""
        self.optimizer.zero_grad(set_to_none=not keep_gradients)
        self.forward(batch).backward()
        self.optimizer.step()

    def timed_step(self, batch: Batch) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self.step(batch)
        self.schedule.step()
        return time.perf_counter() - begin

    def saved_bytes(self, batch: Batch) -> int:
        """Bytes that autograd holds between forward and backward."""
        exclude = [*self.model.parameters(), *self.model.buffers(), *batch]
        return measuring.saved_bytes(lambda: self.forward(batch), exclude)

    def peak_bytes(self, batch: Batch) -> int:
        """Peak of a step whose gradients and optimizer state are allocated already."""
        return measuring.peak_bytes(lambda: self.step(batch, keep_gradients=True), torch.device("cpu"))
