"""Do the default noise limits bind? `python -m tests.bench.binding [NAME ...]`

For each workload: what E5M2 for everything (with a scale per tensor) would do by the noise model: the loss's σ where
every tensor is rounded, and the largest gradient noise of a weight where every product is, as shares of their limits.
And the solver's plans under the default policy, with the constraint that holds each back: of this machine, by measured
times, and of one where formats differ by their arithmetic alone, as in layers wide enough (modelled: an H100's
rates without launches and traffic, so that FP8 pays wherever the noise allows it). Exit code 1 if E5M2 for everything
would keep the limits on a workload, or if of the modelled plans fewer than three have two formats or more and are held
back by a limit.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from autoprec.devices import Datasheet, Device
from autoprec.formats import FP8_E5M2
from autoprec.graphs import OpGraph
from autoprec.planning.evaluator import evaluate
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.planning.planner import ask, propose
from autoprec.planning.proposals import Proposals
from autoprec.planning.roofline import modelled_device
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import Plan
from autoprec.serial import load_device, load_policy
from tests.bench.fp8 import policy_of
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import chosen, conclude


def h100() -> Datasheet:
    sheet = load_device("h100")
    assert isinstance(sheet, Datasheet)
    return sheet


def arithmetic_alone(graph: OpGraph) -> Device:
    """An H100 whose launches and memory cost next to nothing."""
    sheet = h100()
    fast = replace(sheet.memory_bytes_per_second, value=1e6 * sheet.memory_bytes_per_second.value)
    none = replace(sheet.launch_seconds, value=0.0)
    return modelled_device(replace(sheet, launch_seconds=none, memory_bytes_per_second=fast), graph)


def widely(found: Calibrated) -> Proposals:
    """What the default policy proposes where formats differ by their arithmetic alone."""
    session = found.session
    return propose(ask(session.graph, session.profile, arithmetic_alone(session.graph), load_policy("balanced")))


def solved(proposals: Proposals) -> Plan:
    """The solver's plan, with its reasons."""
    return proposals.plan(proposals.best.solution)


def uniform_e5m2(found: Calibrated) -> tuple[float, float]:
    """(σ of the loss, largest gradient noise of a weight), as shares of their limits under the default policy."""
    proposals = found.proposals("balanced")
    profile, problem = found.session.profile, proposals.problem
    loss = 0.0
    for t in profile.tensors:
        if t.loss is not None:
            energy = error_energy(t.loss, FP8_E5M2, current_scale_log2(FP8_E5M2, t.values.amax)) / profile.steps
            loss += energy if math.isfinite(energy) else 0.0
    device = modelled_device(h100(), found.session.graph)
    asked = ask(found.session.graph, profile, device, policy_of(("fp8_e5m2", "fp8_e5m2", "fp8_e5m2")))
    narrow = propose(asked, advise=False).problem  # products in E5M2: noise alone, and no matter how fast
    rows = evaluate(narrow, uniform_choice(narrow, "bf16")).rows
    noise = {row.weight: energy for row, energy in zip(narrow.rows, rows, strict=True)}
    worst = max((noise[r.weight] / r.limit for r in problem.rows), default=0.0)
    limit = problem.loss_limit
    return math.sqrt(loss / limit) if limit else 0.0, math.sqrt(worst)


def main() -> None:
    workloads, _ = chosen(argparse.ArgumentParser(prog="python -m tests.bench.binding"))
    held, allowed = 0, []
    print("workload      E5M2: σ / limit  gradient / limit   plan: formats; binding", flush=True)
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            loss, gradient = uniform_e5m2(found)
            here, wide = solved(found.proposals("balanced")), solved(widely(found))
            formats = {a.format for a in wide.assignments}
            held += len(formats) > 1 and wide.binding != "nothing"
            if loss <= 1.0 and gradient <= 1.0:
                allowed.append(workload.name)
            print(
                f"{workload.name:12} {loss:16.2f} {gradient:17.2f}   here:     {', '.join(here.formats_used())};"
                f" {here.binding}\n{'':48}modelled: {', '.join(wide.formats_used())}; {wide.binding}",
                flush=True,
            )
    missed = [f"E5M2 for everything would keep the limits of {name}" for name in allowed]
    if held < min(3, len(workloads)):
        missed.append(f"two formats or more, held back by a limit, on {held} workloads")
    conclude(missed, "E5M2 for everything is forbidden on each, and enough plans mix formats up to a limit")


if __name__ == "__main__":
    main()
