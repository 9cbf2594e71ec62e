"""The demo's results as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoprec.demo import growth, tasks
from autoprec.demo.contest import Contest, Trainer
from autoprec.demo.results import CONTESTANTS, FP32, MEMORY, Demo, Growth, TaskResult
from autoprec.execution import measuring
from autoprec.planning.reasons import bytes_text, seconds_text
from autoprec.plans import Plan
from autoprec.reporting.plans import ops_table, plan_data

__all__ = ["demo_data", "demo_tables"]

#: Who measured each figure.
MEASURED_BY: dict[str, Callable[..., Any]] = {
    "score": tasks.Task.score,
    "step_seconds": Trainer.timed_step,
    "saved_bytes": measuring.saved_bytes,
    "peak_bytes": measuring.peak_bytes,
    "formats": Plan.formats_used,
    "promotions": Contest.run,
    "skipped_steps": Contest.run,
    "largest": growth.largest_result,
    "bad_steps": growth.Watch.step,
    "bad_updates": growth.Watch.step,
    "good_steps_after": growth.Watch.step,
}


def demo_tables(demo: Demo) -> list[RenderableType]:
    """Everything, in the order in which it is told."""
    found: list[RenderableType] = []
    for task in demo.tasks:
        found.append(_contest_table(task))
        plan = task.of(MEMORY)[-1].plan
        if plan is not None:
            found.append(Text(f"{task.name}, {MEMORY}: {', '.join(plan.formats_used())}; held back by {plan.binding}"))
            found.append(ops_table(plan, changed_only=True))
    found += [_growth_text(demo.growth), _claims_table(demo)]
    found.append(Text(f"{demo.seconds:.0f} s on {demo.device}, {demo.threads} thread(s), torch {demo.torch_version}"))
    return found


def demo_data(demo: Demo) -> dict[str, Any]:
    """Each figure with the function that measured it."""
    return {
        "seconds": demo.seconds,
        "torch": demo.torch_version,
        "device": demo.device,
        "threads": demo.threads,
        "tasks": {task.name: _task_data(task) for task in demo.tasks},
        "growth": {name: _figure(name, value) for name, value in asdict(demo.growth).items()},
        "claims": [asdict(c) for c in demo.claims()],
        "holds": all(c.holds for c in demo.claims()),
    }


def _contest_table(task: TaskResult) -> Table:
    seeds = len(task.of(FP32))
    runs = f"medians of {seeds} seeds" if seeds > 1 else "one seed"
    table = Table(
        title=f"{task.name}: {task.steps} steps, {runs}, all measured",
        caption=f"fp32's own spread of {task.metric} over the seeds: {task.spread(FP32):.4f}" if seeds > 1 else None,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for who in CONTESTANTS:
        table.add_column(who, justify="right")
    for label, text in _contest_rows(task).items():
        table.add_row(label, *(text(who) for who in CONTESTANTS))
    return table


def _contest_rows(task: TaskResult) -> dict[str, Callable[[str], str]]:
    """Label → the text of a contestant's figure."""
    return {
        task.metric: lambda who: f"{task.median(who, lambda r: r.score):.4f}",
        "step": lambda who: seconds_text(task.step_seconds(who)).lstrip("+"),
        "kept for backward": lambda who: bytes_text(task.median(who, lambda r: r.saved_bytes)),
        "peak beyond weights": lambda who: bytes_text(task.median(who, lambda r: r.peak_bytes)),
        "promotions": lambda who: str(sum(r.promotions for r in task.of(who))),
        "skipped steps": lambda who: str(sum(r.skipped_steps for r in task.of(who))),
        "formats": lambda who: "\n".join(task.formats(who)),
    }


def _growth_text(g: Growth) -> Text:
    lines = [
        f"A layer that overflows: the weights of {g.layer} were grown by the training loop until its results reached"
        f" {g.largest:.4g}; {g.was} ends at {g.limit:g}.",
        *(f"  {line}" for line in g.caught),
        f"  promoted: {', '.join(g.promoted) or 'nothing'}; {g.op} is now {g.now}",
        f"  {g.bad_steps} steps of {g.steps} had a non-finite gradient; {g.bad_updates} of them changed any bit of"
        " parameters, buffers or optimizer state",
        f"  {g.good_steps_after} good steps followed; loss {g.first_loss:.3f} at first, {g.last_loss:.3f} at the end",
    ]
    return Text("\n".join(lines))


def _claims_table(demo: Demo) -> Table:
    table = Table(title="What has to hold", title_justify="left")
    table.add_column("claim")
    for name in ("measured", "allowed", "holds"):
        table.add_column(name, justify="right")
    for c in demo.claims():
        table.add_row(c.text, f"{c.measured:.4g}", f"{c.allowed:g}", "yes" if c.holds else "NO")
    return table


def _task_data(task: TaskResult) -> dict[str, Any]:
    return {
        "metric": task.metric,
        "steps": task.steps,
        "fp32_spread": _figure("score", task.spread(FP32)),
        "contestants": {who: _contestant_data(task, who) for who in CONTESTANTS},
    }


def _contestant_data(task: TaskResult, who: str) -> dict[str, Any]:
    runs = task.of(who)
    figures = {
        "score": task.median(who, lambda r: r.score),
        "step_seconds": task.step_seconds(who),
        "saved_bytes": task.median(who, lambda r: r.saved_bytes),
        "peak_bytes": task.median(who, lambda r: r.peak_bytes),
        "formats": list(task.formats(who)),
        "promotions": sum(r.promotions for r in runs),
        "skipped_steps": sum(r.skipped_steps for r in runs),
    }
    found: dict[str, Any] = {name: _figure(name, value) for name, value in figures.items()}
    found["score_by_seed"] = {str(r.seed): r.score for r in runs}
    if runs[-1].plan is not None:
        found["plan"] = plan_data(runs[-1].plan)
    return found


def _figure(name: str, value: Any) -> Any:
    """A figure with the function that measured it; other values as they are."""
    by = MEASURED_BY.get(name)
    return value if by is None else {"value": value, "measured_by": f"{by.__module__}.{by.__qualname__}"}
