"""What the demo measured, as values. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from autoprec.plans import Plan

__all__ = ["AUTOCAST", "BALANCED", "CONTESTANTS", "FP32", "MEMORY", "Claim", "Demo", "Growth", "Run", "TaskResult"]

FP32, AUTOCAST, BALANCED, MEMORY = "fp32", "autocast bf16", "autoprec balanced", "autoprec memory"
CONTESTANTS = (FP32, AUTOCAST, BALANCED, MEMORY)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of one contestant.

    Attributes:
        score: held-out loss or accuracy.
        step_seconds: of every step after calibration and compilation.
        saved_bytes: kept for backward, without parameters, buffers and inputs.
        peak_bytes: of one step beyond parameters, gradients and optimizer state.
        formats: that the run computed or stored in.
        promotions, skipped_steps: counted by the session; 0 without one.
        plan: that the run ended with; None without a session.
    """

    contestant: str
    seed: int
    score: float
    step_seconds: tuple[float, ...]
    saved_bytes: int
    peak_bytes: int
    formats: tuple[str, ...]
    promotions: int = 0
    skipped_steps: int = 0
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """All runs of one task."""

    name: str
    metric: str
    steps: int
    runs: tuple[Run, ...]

    def of(self, contestant: str) -> tuple[Run, ...]:
        """The runs of one contestant, by seed."""
        return tuple(r for r in self.runs if r.contestant == contestant)

    def median(self, contestant: str, figure: Callable[[Run], float]) -> float:
        """Of a figure over the seeds."""
        return statistics.median(figure(r) for r in self.of(contestant))

    def step_seconds(self, contestant: str) -> float:
        """Median over all steps of all seeds."""
        return statistics.median(s for r in self.of(contestant) for s in r.step_seconds)

    def spread(self, contestant: str) -> float:
        """Largest minus smallest score over the seeds."""
        scores = [r.score for r in self.of(contestant)]
        return max(scores) - min(scores)

    def formats(self, contestant: str) -> tuple[str, ...]:
        """In use in any of its runs."""
        return tuple(sorted({f for r in self.of(contestant) for f in r.formats}))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What happened while one layer's weights were grown.

    Attributes:
        layer: its module.
        op: its op in the plan.
        was, now: format of its output before and after.
        largest: |x| of its output, in FP32, when the growth ended.
        limit: of the format that it had.
        steps: of the training loop.
        bad_steps: those with a non-finite gradient, as the loop saw them.
        bad_updates: steps with a non-finite gradient that changed a parameter, a buffer or the optimizer's state in
            any bit, and steps that left a non-finite value in one of them.
        good_steps_after: steps after the last bad one.
        first_loss, last_loss: means over the first and the last five finite steps.
        caught: what the session reported, in order.
    """

    layer: str
    op: str
    was: str
    now: str
    largest: float
    limit: float
    steps: int
    bad_steps: int
    bad_updates: int
    good_steps_after: int
    first_loss: float
    last_loss: float
    caught: tuple[str, ...]
    promoted: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something that autoprec promises, what was measured, and what is allowed."""

    text: str
    measured: float
    allowed: float
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Everything that the demo shows. `has_bf16`: whether the CPU has instructions for it. Without, convolutions make
    FP32 copies of what they read, which are there at the peak whatever is kept between the passes."""

    tasks: tuple[TaskResult, ...]
    growth: Growth
    seconds: float
    torch_version: str
    device: str
    has_bf16: bool
    threads: int

    def claims(self) -> tuple[Claim, ...]:
        """What has to hold."""
        found = [claim for task in self.tasks for claim in _task_claims(task, has_bf16=self.has_bf16)]
        g = self.growth
        found.append(_at_least(f"growth: {g.layer} was caught and promoted", float(g.op in g.promoted), 1.0))
        found.append(_at_most("growth: updates with a non-finite gradient", float(g.bad_updates), 0.0))
        found.append(_at_most("growth: loss at the end / at first", g.last_loss / g.first_loss, 1.0))
        found.append(_at_least("growth: good steps after the last bad one", float(g.good_steps_after), 1.0))
        return tuple(found)


def _task_claims(task: TaskResult, *, has_bf16: bool) -> list[Claim]:
    plain, kept = task.median(FP32, lambda r: r.score), task.median(AUTOCAST, lambda r: r.saved_bytes)
    claims = []
    for who in (BALANCED, MEMORY):
        mine = task.median(who, lambda r: r.score)
        if task.metric == "accuracy":
            claims.append(_at_most(f"{task.name}, {who}: accuracy lost against fp32", plain - mine, 0.01))
        else:
            claims.append(_at_most(f"{task.name}, {who}: {task.metric} / fp32's − 1", abs(mine / plain - 1), 0.01))
    peak = task.median(MEMORY, lambda r: r.peak_bytes) / task.median(AUTOCAST, lambda r: r.peak_bytes)
    claims.append(_at_most(f"{task.name}, {MEMORY}: peak of a step beyond weights / autocast's", peak, 1.0))
    if has_bf16:
        ratio = task.median(MEMORY, lambda r: r.saved_bytes) / kept
        claims.append(_at_most(f"{task.name}, {MEMORY}: bytes kept for backward / autocast's", ratio, 0.80))
    return claims


def _at_most(text: str, measured: float, allowed: float) -> Claim:
    return Claim(text=text, measured=measured, allowed=allowed, holds=measured <= allowed)


def _at_least(text: str, measured: float, allowed: float) -> Claim:
    return Claim(text=text, measured=measured, allowed=allowed, holds=measured >= allowed)
