"""Do the default noise limits bind? `python -m tests.bench.binding [NAME ...]`

For each workload: the formats of the solver's plan under the default policy, the constraint that holds it back, and
what E5M2 for everything (with a scale per tensor) would do by the same noise model: the loss's σ where every tensor is
rounded, and the largest gradient noise of a weight where every product is, each as a share of its limit. Exit code 1 if
fewer than three workloads get two formats or more, or if E5M2 for everything would keep the limits on one of them.
"""

from __future__ import annotations

import argparse
import math

from autoprec.devices import Datasheet
from autoprec.formats import FP8_E5M2
from autoprec.planning.evaluator import evaluate
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.planning.planner import ask, propose
from autoprec.planning.roofline import modelled_device
from autoprec.planning.uniform import uniform_choice
from autoprec.serial import load_device
from tests.bench.fp8 import policy_of
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import chosen, conclude


def uniform_e5m2(found: Calibrated) -> tuple[float, float]:
    """(σ of the loss, largest gradient noise of a weight), as shares of their limits under the default policy."""
    proposals = found.proposals("balanced")
    profile, problem = found.session.profile, proposals.problem
    loss = 0.0
    for t in profile.tensors:
        if t.loss is not None:
            energy = error_energy(t.loss, FP8_E5M2, current_scale_log2(FP8_E5M2, t.values.amax)) / profile.steps
            loss += energy if math.isfinite(energy) else 0.0
    sheet = load_device("h100")
    assert isinstance(sheet, Datasheet)
    device = modelled_device(sheet, found.session.graph)
    asked = ask(found.session.graph, profile, device, policy_of(("fp8_e5m2", "fp8_e5m2", "fp8_e5m2")))
    narrow = propose(asked, advise=False).problem  # products in E5M2: noise alone, and no matter how fast
    rows = evaluate(narrow, uniform_choice(narrow, "bf16")).rows
    noise = {row.weight: energy for row, energy in zip(narrow.rows, rows, strict=True)}
    worst = max((noise[r.weight] / r.limit for r in problem.rows), default=0.0)
    limit = problem.loss_limit
    return math.sqrt(loss / limit) if limit else 0.0, math.sqrt(worst)


def main() -> None:
    workloads, _ = chosen(argparse.ArgumentParser(prog="python -m tests.bench.binding"))
    mixed, allowed = 0, []
    print("workload      E5M2: σ / limit  gradient / limit   formats under balanced; binding", flush=True)
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            loss, gradient = uniform_e5m2(found)
            proposals = found.proposals("balanced")
            plan = proposals.plan(proposals.best.solution)
            formats = {a.format for a in plan.assignments}
            mixed += len(formats) > 1
            if loss <= 1.0 and gradient <= 1.0:
                allowed.append(workload.name)
            print(
                f"{workload.name:12} {loss:16.2f} {gradient:17.2f}   {', '.join(plan.formats_used())}; {plan.binding}",
                flush=True,
            )
    missed = [f"E5M2 for everything would keep the limits of {name}" for name in allowed]
    if mixed < min(3, len(workloads)):
        missed.append(f"two formats or more on {mixed} workloads")
    conclude(missed, "E5M2 for everything is forbidden on each, and enough plans mix formats")


if __name__ == "__main__":
    main()
