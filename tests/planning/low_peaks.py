"""`python -m tests.planning.low_peaks [LAYERS ...]`: what it takes to solve for the fastest at the lowest peak, for a
narrow model with adapters on frozen layers: seconds until the lowest peak is known, then for a search that may stop
half a hundredth from the optimum, and for one that may a thousandth from it; the gap that it ends with, and the seconds
of a step that are predicted of its plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import autoprec
from autoprec.planning import planner
from autoprec.planning.solvers import decisions_count, solve
from tests.adapters import loss_of, made, policy_with
from tests.bench.measure import one_thread
from tests.scale_study import seconds

LAYERS = (2, 4, 6)
GAPS = (5e-3, 1e-3)


def question_of(layers: int) -> planner.Question:
    model, batches = made(layers=layers)
    policy = policy_with("bf16", "fp8_e4m3")
    autoprec.compile(model, policy=policy, events=None)
    session = autoprec.session(model)
    session.calibrate(batches, loss_of)
    device = session.measure_device()
    assert session.graph is not None and session.profile is not None
    return planner.ask(session.graph, session.profile, device, policy)


def main(depths: Sequence[int]) -> None:
    for layers in depths:
        question = question_of(layers)
        taken, limited = seconds(lambda q=question: planner._at_lowest_peak(q, GAPS[-1]))  # type: ignore[misc]
        print(f"{layers} layers, {decisions_count(limited.problem)} decisions: lowest peak {taken:.1f} s", flush=True)
        for gap in GAPS:
            taken, found = seconds(lambda p=limited.problem, g=gap: solve(p, relative_gap=g))  # type: ignore[misc]
            step = 1e6 * found.evaluation.seconds
            print(f"  to {gap:.1%}: {taken:5.1f} s, gap {found.gap:.2%}, {step:.0f} µs predicted", flush=True)


if __name__ == "__main__":
    with one_thread():
        main([int(n) for n in sys.argv[1:]] or LAYERS)
