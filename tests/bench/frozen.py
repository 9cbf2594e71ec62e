"""Frozen weights: `python -m tests.bench.frozen [transformer] [encoder] [--train STEPS]`

The workloads of the suite, tuned through adapters: every linear is frozen and gets a trained product of rank 8 beside
it, all else is frozen but the last linear. Under `memory`, as `compile` adopts it, against torch's autocast in BF16,
both eager, one thread: bytes of parameters, peak of a step beyond what is held, step time in turn, and how much the
loss on unseen batches changes when the frozen weights are rounded. With --train, the loss on unseen batches after so
many steps from three seeds. Exit code 1 if a predicted peak is more than 5 % off, or a loss outside FP32's spread over
seeds.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

import autoprec
from autoprec.plans import Plan
from tests.bench.measure import Calibrated, calibrate, one_thread, warm
from tests.bench.memory import UNSEEN, table, training
from tests.bench.workloads import WORKLOADS, Workload, conclude

RANK = 8
#: FP32 steps of the adapters before anything is measured.
WARM_STEPS = 20


class Adapted(nn.Module):
    """A frozen linear beside a trained product of low rank, which is zero at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    """The same model with adapters; its last linear goes on being trained."""
    model.requires_grad_(False)
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name, linear in linears[:-1]:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, Adapted(linear))
    linears[-1][1].requires_grad_(True)
    return model


def tuned(workload: Workload) -> Workload:
    """The workload after its own warm steps, through adapters."""

    def build(make: Callable[[], nn.Module] = workload.build) -> nn.Module:
        seed = torch.initial_seed()
        base, _ = warm(replace(workload, build=make), seed=seed)
        torch.manual_seed(seed)
        return adapted(base)

    return replace(workload, name=f"tuned {workload.name}", build=build, warm_steps=WARM_STEPS)


def rounded_loss(found: Calibrated, plan: Plan) -> tuple[float, float]:
    """Mean loss on unseen batches, in FP32, of the weights as they were and as the plan rounds them."""
    torch._dynamo.reset()
    plain, own = copy.deepcopy(found.model), copy.deepcopy(found.model)
    autoprec.compile(own, plan=plan, events=None)
    losses = []
    for model in (plain, copy.deepcopy(own)):  # a copy is the FP32 model of the rounded weights
        generator = Generator().manual_seed(7)
        with torch.no_grad():
            batches = [found.workload.batch(generator, unseen=True) for _ in range(UNSEEN)]
            losses.append(sum(float(found.workload.loss(model.eval(), b)) for b in batches) / UNSEEN)
    return losses[0], losses[1]


def report(found: Calibrated) -> list[str]:
    """The contestants' lines, what the parameters hold, and what is missed."""
    plan, missed = table(found)
    wide = sum(p.numel() * p.element_size() for p in found.model.parameters())
    narrow = {t: found.model.get_parameter(t.removeprefix("param:")).numel() for t in plan.living}
    holds = wide - sum(n * {"bf16": 2, "fp8_e4m3": 3}[plan.living[t]] for t, n in narrow.items())
    counted = ", ".join(f"{n} in {f}" for f, n in sorted(Counter(plan.living.values()).items())) or "none"
    print(f"{found.workload.name:12} parameters {wide / 1e6:.2f} MB → {holds / 1e6:.2f} MB; weights {counted}")
    before, after = rounded_loss(found, plan)
    assert plan.predicted is not None
    told = f"{found.workload.name:12} loss on unseen batches {before:.5f} → {after:.5f} when they are rounded"
    print(f"{told}; predicted σ of a step, all roundings {plan.predicted.loss_sigma:.5f}", flush=True)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.frozen")
    parser.add_argument("workloads", nargs="*", choices=["transformer", "encoder", []], metavar="WORKLOAD")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS")
    given = parser.parse_args()
    missed: list[str] = []
    with one_thread():
        for name in given.workloads or ("transformer", "encoder"):
            workload = tuned(WORKLOADS[name])
            missed += report(calibrate(workload))
            if given.train:
                missed += training(workload, given.train)
    conclude(missed, "peaks are as predicted")


if __name__ == "__main__":
    main()
