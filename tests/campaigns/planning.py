"""Every op that torch tests, through calibration, timing, planning and planned steps.

`python -m tests.campaigns.planning [NAME ...]` runs the first FP32 sample of each op of torch's own `op_db` for four
steps under a policy that takes BF16, and one that takes FP16, wherever the op can, and ends with exit code 1 if a law
is broken: nothing is raised that the op does not raise, the observed steps are bitwise the op, and no dtype changes at
the boundary. What is planned narrow is counted; what it computes is the matter of `tests.campaigns.ops`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import autoprec
from autoprec.plans import Plan
from tests.campaigns import report
from tests.campaigns.ops import OpModule, named_ops, outcome, same, samples_of
from tests.campaigns.report import Tally, quietly


def policy(fmt: str) -> autoprec.Policy:
    """The format wherever an op can take it, whatever the noise."""
    return autoprec.Policy(
        name=fmt,
        formats=["fp32", fmt],
        rules=[autoprec.Rule(pin=fmt, optional=True)],
        noise={"gradient": 1e3, "loss": 1e3},
        calibration={"steps": 2},
    )


@dataclass
class PlanTally(Tally):
    """Of ops that were planned."""

    ops: int = 0
    narrow: int = 0

    def summary(self) -> str:
        return f"{self.ops} runs, {self.narrow} planned narrow"


@dataclass(frozen=True)
class Planned:
    """What an op gave without us, and in each step; and the plan that the last of them ran under."""

    expected: list[Tensor | None]
    steps: list[list[Tensor | None]]
    plan: Plan | None


def run_planned(name: str, module: OpModule, policy: autoprec.Policy, steps: int, tally: Tally) -> Planned | None:
    """The op through calibration, planning and planned steps; None where it does not say the same twice without us, has
    no gradient, or is refused. What it raises is broken."""
    try:
        expected, again = outcome(module, module), outcome(module, module)
    except Exception:  # the op itself raises
        return None
    if same(expected, again) or not any(p.grad is not None for p in module.parameters()):
        return None
    torch._dynamo.reset()
    autoprec.compile(module, policy=policy, events=None)
    session = autoprec.session(module)
    found: list[list[Tensor | None]] = []
    try:
        for _ in range(steps):
            found.append(outcome(module, module))
            session.step()
    except autoprec.NotCapturedError:
        tally.left_out["refused as not captured"] += 1
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        tally.broken.append(f"{name}: {policy.name} raises {what}")
    plan = session.plan
    autoprec.unwrap(module)
    return Planned(expected, found, plan)


def check(name: str, module: OpModule, fmt: str, tally: PlanTally) -> None:
    """Two observed steps and two planned ones."""
    ran = run_planned(name, module, policy(fmt), 4, tally)
    if ran is None:
        return
    tally.ops += 1
    for step, found in enumerate(ran.steps):
        if step < 2 and (difference := same(ran.expected, found)):
            tally.broken.append(f"{name}: {fmt}: observed: {difference}")
        if [getattr(x, "dtype", None) for x in ran.expected] != [getattr(x, "dtype", None) for x in found]:
            tally.broken.append(f"{name}: {fmt}: a dtype changed at the boundary")
    tally.narrow += ran.plan is not None and any(a.format == fmt for a in ran.plan.assignments)


def campaign(names: Sequence[str], *, every: int = 1) -> PlanTally:
    """The first sample of every so many ops, or of those with the given names."""
    tally = PlanTally()
    with quietly():
        for name, op in named_ops(names, every):
            for sample in samples_of(op, 1):
                module = OpModule(op.op, sample)
                if any(p.requires_grad for p in module.parameters()):
                    for fmt in ("bf16", "fp16"):
                        check(name, module, fmt, tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    return report.main(__doc__, campaign, argv)


if __name__ == "__main__":
    sys.exit(main())
