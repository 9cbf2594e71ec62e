"""How long a run waits for the compiler when its plan changes: `python -m tests.bench.takeover [NAME ...]
[--takeover-steps 0 100] [--budget 70%] [--elsewhere]`.

A workload trains through inductor under `balanced`, and after some steps an op loses its format, as when it proves
unstable. Printed are medians of steps before that, while the new plan runs uncompiled, and when it runs compiled, and
the two steps that take the longest beyond that: where the plan changes, and where what was compiled takes over (as it
does at the change where that is after 0 steps). The compiler's cache is empty at the beginning of each run. Under a
budget it is told how many plans were made in the place of one that would have broken it compiled. `--elsewhere`: not a
copy of the process compiles, but a new one, as on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from torch import Generator
from torch._inductor.utils import fresh_cache

import autoprec
from autoprec.execution import takeover
from autoprec.graphs import Role
from autoprec.serial import load_policy
from tests.bench.measure import one_thread
from tests.bench.workloads import Workload, chosen

#: Steps that are timed on each side.
STEPS = 40


def cannot_be_copied() -> AbstractContextManager[object]:
    """Processes are as where they have used CUDA."""
    return patch.object(takeover, "can_copy", lambda _: False)


def seconds_of(workload: Workload, takeover_steps: int, budget: str | None) -> tuple[list[float], str]:
    """Of the steps before the change, the step whose end it is, and those behind it; and what came of the change."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, generator = workload.build(), Generator().manual_seed(0)
    optimizer = workload.optimizer(model.parameters())
    policy = load_policy("balanced").replaced(monitor={"takeover_steps": takeover_steps})
    autoprec.compile(model, policy=policy, events=None, backend="inductor", budget=budget)
    session = autoprec.session(model)
    taken = []

    def step(change: bool = False) -> None:
        begin = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, workload.batch(generator)).backward()
        optimizer.step()
        if change:
            assert session.plan is not None
            narrow = (op for (op, role), f in session.plan.format_of.items() if role is Role.OUTPUT and f == "bf16")
            session._stability.floors = session._stability.floors.with_ban(next(narrow), "bf16", "noise")
            session.replan()
        taken.append(time.perf_counter() - begin)

    for _ in range(policy.calibration.steps + 2):
        step()
    taken.clear()
    for _ in range(STEPS):
        step()
    step(change=True)
    for _ in range(takeover_steps + STEPS):
        step()
    warnings = [e.evidence for e in session.events if e.kind == "warning"]
    lowered = sum(e.kind == "lowered" for e in session.events)
    assert lowered == (1 if takeover_steps else 0) or (budget is not None and warnings), warnings
    replaced = sum(e.trigger == "budget" for e in session.events if e.kind == "planned")
    return taken, "; ".join([*warnings, *([f"replaced {replaced} times at the takeover"] if replaced else [])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.takeover")
    parser.add_argument("--takeover-steps", type=int, nargs="+", default=[0, 100])
    parser.add_argument("--budget")
    parser.add_argument("--elsewhere", action="store_true")
    workloads, given = chosen(parser)
    print(
        "workload       takes over   median step before   uncompiled    compiled   waits at the change  at the takeover"
    )
    with one_thread(), cannot_be_copied() if given.elsewhere else nullcontext():
        for workload in workloads:
            for steps in given.takeover_steps:
                with fresh_cache():
                    taken, told = seconds_of(workload, steps, given.budget)
                before, change, rest = taken[:STEPS], taken[STEPS], taken[STEPS + 1 :]
                uncompiled, over, compiled = rest[: max(0, steps - 1)], rest[max(0, steps - 1)], rest[steps:]
                usual = statistics.median(compiled)
                middle = f"{statistics.median(uncompiled) * 1e3:9.1f} ms" if uncompiled else f"{'–':>12}"
                later = f"{over - usual:14.2f} s" if steps else f"{'–':>16}"
                print(
                    f"{workload.name:12} {steps:6} steps {statistics.median(before) * 1e3:16.1f} ms {middle}"
                    f" {usual * 1e3:8.1f} ms {change - statistics.median(before):17.2f} s {later}   {told}".rstrip(),
                    flush=True,
                )


if __name__ == "__main__":
    main()
