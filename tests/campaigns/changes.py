"""Many changes of the plan in one run: `python -m tests.campaigns.changes [--count 100] [--how NAME ...]`.

A small network trains while its budget is changed every few steps, and every fifth change is forced by an overflow that
is injected at an op in FP16, which is promoted. After every change: every op gave the format that the plan claims, the
graphs that ran are ours and were captured once, no plan was lowered twice, and the peak of every plain step, at the
allocator, is within the budget. Exit code 1 if not. Under inductor the run waits for the compiler (inductor), or a plan
runs uncompiled for five steps, while a copy of the process compiles it (beside), or, as on a GPU, a new one does
(elsewhere). By default all four.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.formats import result_format
from autoprec.graphs import Role
from autoprec.planning.problem import fixed_bytes
from autoprec.testing import inject
from tests.bench.takeover import cannot_be_copied
from tests.campaigns.fault_starts import Block

BUDGETS = ("100%", "92%", "84%", "76%", "70%")

#: Of the changes, one in so many is a forced promotion.
FORCED = 5


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.blocks = nn.Sequential(*(Block(64) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


#: By how plans run, the backend and `takeover_steps`.
HOW = {"eager": ("eager", 0), "inductor": ("inductor", 0), "beside": ("inductor", 5), "elsewhere": ("inductor", 5)}


def policy(takeover_steps: int = 0) -> autoprec.Policy:
    """FP16 in the blocks wherever it may be; formats come back after a window, to be taken again."""
    return autoprec.Policy(
        name="changes",
        formats=("fp32", "fp16", "bf16"),
        objective="time",
        storage={"formats": ("bf16", "fp8_e4m3")},
        calibration={"steps": 4},
        noise={"gradient": 10.0, "loss": 10.0},
        rules=[{"match": "blocks.*", "kinds": ["linear", "gelu"], "pin": "fp16", "optional": True}],
        monitor={"window_steps": 4, "interval_steps": 2, "cooldown_windows": 1, "takeover_steps": takeover_steps},
    )


@dataclass
class Tally:
    """What was counted."""

    changes: int = 0
    promotions: int = 0
    steps: int = 0
    skipped: int = 0
    ops_checked: int = 0
    lowered: int = 0
    plans: set[str] = field(default_factory=set)
    seconds_lowering: float = 0.0
    plain_peak_frac: float = 0.0
    observed_peak_frac: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Training:
    def __init__(self, how: str, depth: int) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()
        self.model = Net(depth)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        backend, takeover_steps = HOW[how]
        chosen = policy(takeover_steps)
        autoprec.compile(self.model, policy=chosen, budget=BUDGETS[0], events=None, backend=backend)  # type: ignore[arg-type]
        self.session = autoprec.session(self.model)
        self.tally = Tally()
        for _ in range(policy().calibration.steps + 1):
            self.step()
        self.captured = counters["stats"]["unique_graphs"]

    def step(self) -> None:
        """With an update. Its peak is measured, and held against the budget that it ran under."""
        x, plan = torch.randn(4096, 32), self.session.plan
        observed = self.session.steps % policy().monitor.interval_steps == policy().monitor.interval_steps - 1

        def passes() -> None:
            self.model(x).square().mean().backward()

        self.optimizer.zero_grad()
        for p in self.model.parameters():  # as the budget counts them: there from the start
            p.grad = torch.zeros_like(p)
        peak = peak_bytes(passes, torch.device("cpu"))
        self.optimizer.step()
        self.tally.steps += 1
        if plan is None or plan.budget_bytes is None or self.session.graph is None or self.session.step_was_skipped:
            return
        frac = (fixed_bytes(self.session.graph) + peak) / plan.budget_bytes
        if observed:
            self.tally.observed_peak_frac = max(self.tally.observed_peak_frac, frac)
        else:
            self.tally.plain_peak_frac = max(self.tally.plain_peak_frac, frac)

    def check(self, what: str) -> None:
        """The plan that is adopted is the one that runs: told by the next step that is not observed."""
        tally, session = self.tally, self.session
        for _ in range(policy().monitor.interval_steps + 1):
            plan, calls = session.plan, sum(session.executed_calls().values())
            self.step()
            if sum(session.executed_calls().values()) != calls + 1:
                tally.wrong.append(f"{what}: the step did not run our graph once")
            assert plan is not None
            executed = session.executed_formats()
            if session.plan is plan and (executed or plan.is_identity):
                break
        tally.plans.add(plan.fingerprint)
        for (op, role), fmt in plan.format_of.items():
            if role is Role.OUTPUT and not plan.is_identity:
                tally.ops_checked += 1
                if executed.get(op) != result_format(fmt):
                    tally.wrong.append(f"{what}: {op} is planned in {fmt} and gave {executed.get(op)}")

    def narrow_op(self) -> str | None:
        plan = self.session.plan
        assert plan is not None
        found = [op for (op, role), fmt in plan.format_of.items() if role is Role.OUTPUT and fmt == "fp16"]
        return found[self.tally.promotions % len(found)] if found else None


def campaign(count: int, how: str, *, depth: int = 2) -> Tally:
    """So many changes, of a network with so many blocks."""
    run = Training(how, depth)
    tally, session = run.tally, run.session
    k = 0
    while tally.changes < count and tally.steps < 100 * count:
        before = session.plan.fingerprint  # type: ignore[union-attr]
        op = run.narrow_op()
        if k % FORCED == 0 and op is not None:
            inject(run.model, op)
            run.step()
            if not session.step_was_skipped:
                tally.wrong.append(f"change {tally.changes}: the overflow of {op} was not vetoed")
            tally.promotions += 1
            what = f"promotion of {op}"
        else:
            budget = BUDGETS[k % len(BUDGETS)]
            session.replan(budget=budget)
            what = f"budget {budget}"
        k += 1
        run.check(what)
        if session.plan.fingerprint != before:  # type: ignore[union-attr]
            tally.changes += 1
        for _ in range(policy().monitor.window_steps + 1):  # a window, after which formats may come back
            run.step()
    tally.skipped = session.skipped_steps
    made = session.lowering.compiled
    tally.lowered, tally.seconds_lowering = len(made), sum(c.seconds for c in made)
    by_plan = [c.plan for c in made]
    if twice := {p for p in by_plan if by_plan.count(p) > 1}:
        tally.wrong.append(f"{len(twice)} plans were lowered twice")
    if counters["stats"]["unique_graphs"] != run.captured:
        tally.wrong.append(f"Dynamo captured {counters['stats']['unique_graphs'] - run.captured} graphs more")
    if tally.skipped != tally.promotions:
        tally.wrong.append(f"{tally.skipped} steps were vetoed, and {tally.promotions} overflows were injected")
    if tally.plain_peak_frac > 1.0:
        tally.wrong.append(f"a step's peak was {tally.plain_peak_frac:.5f} of the budget")
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.changes", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--how", nargs="+", choices=[*HOW], default=[*HOW])
    given = parser.parse_args()
    torch.set_num_threads(1)
    wrong = []
    for how in given.how:
        with cannot_be_copied() if how == "elsewhere" else nullcontext():
            t = campaign(given.count, how)
        print(
            f"{how}: {t.changes} changes, {t.promotions} of them forced promotions, {len(t.plans)} distinct plans,"
            f" {t.steps} steps, {t.skipped} vetoed; {t.ops_checked} formats of ops as claimed; {t.lowered} lowerings in"
            f" {t.seconds_lowering:.0f} s; highest peak {t.plain_peak_frac:.3f} of its budget, of observed steps"
            f" {t.observed_peak_frac:.3f}; {len(t.wrong)} wrong"
        )
        wrong += t.wrong
    print("\n".join(wrong[:20]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
