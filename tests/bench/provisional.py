"""Calibrating a run that fits in BF16 only. `python -m tests.bench.provisional [NAME ...]`

Each workload gets as its budget, in bytes, what FP32 takes, less a tenth of the part that precision can change, or less
as much as leaves a plan: CPUs that compute BF16 in FP32 hold copies. Peaks of the first two calibration steps, measured
at the allocator, beside the budget and an observed FP32 step; and how far the profile is from FP32's: quartiles of the
ratio of energies, over all histograms of ops' results. Exit code 1 if a step exceeds the budget.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoprec
from autoprec.devices import Device
from autoprec.errors import InfeasibleError
from autoprec.execution.measuring import peak_bytes
from autoprec.planning.planner import ask, fp32_totals, propose
from autoprec.planning.problem import fixed_bytes
from autoprec.policies import Policy
from autoprec.profiles import Profile
from tests.bench.measure import calibrate, one_thread
from tests.bench.workloads import chosen, conclude

__all__ = ["FIELDS", "Tight", "calibrate_tightly", "energies"]

#: Of the part that precision can change; the first that leaves a plan, or the last.
SHARES = (0.9, 0.95)

FIELDS = ("values", "loss", "gradients", "input_weight_grad", "gradient_weight_grad")

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Tight:
    """A session that calibrated in the loop under a budget in bytes; peaks of its first two steps. Budget and peaks are
    bytes beyond parameters, gradients, optimizer state and inputs."""

    session: Any
    budget_bytes: int
    peaks: tuple[int, ...]


def calibrate_tightly(
    model: nn.Module, batches: Sequence[Any], loss: Loss, *, policy: Policy, plain: Any, device: Device
) -> Tight:
    """`plain` is the session of another copy of the model that calibrated in FP32. Ops are known to `device`, because
    timing them uses the same profiler of torch as measuring peaks does; so does the tournament at the end of the last
    step, which is therefore not measured."""
    fixed = fixed_bytes(plain.graph)
    budget = budget_of(plain, device, policy) - fixed
    steps = policy.calibration.steps
    torch._dynamo.reset()
    autoprec.compile(model, policy=policy, budget=fixed + budget, device=device, events=None)
    session = autoprec.session(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step(batch: Any) -> None:
        loss(model, batch).backward()
        session.step()

    peaks = tuple(peak_bytes(lambda b=b: step(b), torch.device("cpu")) for b in batches[:2])  # type: ignore[misc]
    for batch in batches[2:steps]:
        step(batch)
    return Tight(session=session, budget_bytes=budget, peaks=peaks)


def budget_of(plain: Any, device: Device, policy: Policy) -> int:
    """Bytes of a whole step."""
    fixed, asked = fixed_bytes(plain.graph), ask(plain.graph, plain.profile, device, policy)
    wide = fp32_totals(plain.graph, plain.profile, device, policy).peak_bytes - fixed
    budgets = [fixed + int(share * wide) for share in SHARES]
    for budget in budgets[:-1]:
        with suppress(InfeasibleError):
            propose(asked.under(budget), advise=False)
            return budget
    return budgets[-1]


def energies(plain: Profile, other: Profile, field: str) -> list[float]:
    """Energy of each op's result per step in the other profile, as a share of that in the plain one, over those that
    have any. NaN where the other lacks it."""
    found, steps = [], other.steps / plain.steps
    for t in plain.tensors:
        x = getattr(t, field)
        if "#" in t.id and x is not None and x.energy > 0.0:
            y = getattr(other.tensor_by_id.get(t.id), field, None)
            found.append(float("nan") if y is None else y.energy / x.energy / steps)
    return found


def main() -> None:
    workloads, _ = chosen(argparse.ArgumentParser(prog="python -m tests.bench.provisional"))
    missed: list[str] = []
    print("workload     MB: budget  observed fp32  observed bf16   profile / fp32's: quartiles  missing", flush=True)
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            policy = found.session.policy
            tight = calibrate_tightly(
                copy.deepcopy(found.model), found.batches, workload.loss, policy=policy, plain=found.session,
                device=found.device,
            )  # fmt: skip
            ratios = [r for f in FIELDS for r in energies(found.session.profile, tight.session.profile, f)]
            known = [r for r in ratios if r == r]
            quartiles = ", ".join(f"{q:.3f}" for q in statistics.quantiles(known, n=4))
            print(f"{workload.name:12} {tight.budget_bytes / 1e6:10.2f} {found.observed_peak_bytes / 1e6:14.2f}"
                  f" {max(tight.peaks) / 1e6:14.2f} {quartiles:>29} {len(ratios) - len(known):4} of {len(ratios)}",
                  flush=True)  # fmt: skip
            if max(tight.peaks) > tight.budget_bytes:
                missed.append(f"{workload.name}: {max(tight.peaks)} bytes of {tight.budget_bytes}")
    conclude(missed, "every calibration step keeps the budget")


if __name__ == "__main__":
    main()
