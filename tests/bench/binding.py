"""Do the default noise limits bind? `python -m tests.bench.binding [NAME ...]`

For each workload: the formats of the solver's plan under the default policy, the constraint that holds it back, and
what rounding everything to E5M2 (with a scale per tensor) would do by the same noise model: the loss's σ, and the
largest gradient noise of a weight, each as a share of its limit. Exit code 1 if fewer than three workloads get two
formats or more, or if E5M2 for everything would keep the limits on one of them.
"""

from __future__ import annotations

import argparse
import math

from autoprec.formats import FP8_E5M2
from autoprec.planning.noise import current_scale_log2, error_energy
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
    by_weight: dict[str, float] = {}
    for op in found.session.graph.ops:
        seen = profile.tensor_by_id.get(op.outputs[0]) if op.outputs else None
        if seen is None or not op.weights or seen.input_weight_grad is None or seen.gradient_weight_grad is None:
            continue
        x, g = seen.input_weight_grad, seen.gradient_weight_grad
        noise = sum(error_energy(h, FP8_E5M2, current_scale_log2(FP8_E5M2, h.amax)) for h in (x, g)) / profile.steps
        by_weight[op.weights[0]] = by_weight.get(op.weights[0], 0.0) + noise
    worst = max((by_weight[r.weight] / r.limit for r in problem.rows if r.weight in by_weight), default=0.0)
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
