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

import autoprec
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


def check(name: str, module: OpModule, fmt: str, tally: PlanTally) -> None:
    """Two observed steps and two planned ones."""
    try:
        expected, again = outcome(module, module), outcome(module, module)
    except Exception:  # the op itself raises
        return
    if same(expected, again) or not any(p.grad is not None for p in module.parameters()):
        return
    torch._dynamo.reset()
    autoprec.compile(module, policy=policy(fmt), events=None)
    session = autoprec.session(module)
    tally.ops += 1
    try:
        for step in range(4):
            found = outcome(module, module)
            difference = same(expected, found)
            if step < 2 and difference:
                tally.broken.append(f"{name}: {fmt}: observed: {difference}")
            if [getattr(x, "dtype", None) for x in expected] != [getattr(x, "dtype", None) for x in found]:
                tally.broken.append(f"{name}: {fmt}: a dtype changed at the boundary")
            session.step()
    except autoprec.NotCapturedError:
        tally.left_out["refused as not captured"] += 1
    except Exception as error:
        tally.broken.append(f"{name}: {fmt} raises {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    plan = session.plan
    tally.narrow += plan is not None and any(a.format == fmt for a in plan.assignments)
    autoprec.unwrap(module)


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
