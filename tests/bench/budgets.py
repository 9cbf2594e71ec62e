"""Does a smaller budget ever mean a higher peak? `python -m tests.bench.budgets [NAME ...]`

From what FP32 needs down to where no plan fits, in twentieths of what precision can change: the plan that `compile`
adopts, its predicted and measured peak, and its seconds. Exit code 1 if a peak is more than 1.02 of the budget, or
higher than under a larger budget, unless the plan adopted there ran here as well and was slower.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from autoprec.planning.proposals import SOLVER
from tests.bench.__main__ import BUDGET_FRAC
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import chosen, conclude

#: What the allocator rounds differently from one run to another, of a peak.
ROUNDING_FRAC = 0.002


@dataclass(frozen=True, kw_only=True)
class Point:
    """A budget and the adopted plan's peaks, in bytes beyond parameters, gradients, optimizer state and inputs.
    `slower`: who else kept the budget, and took longer."""

    percent: int
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    seconds: float
    adopted: str
    slower: tuple[str, ...]


def descent(found: Calibrated, percents: range = range(100, 0, -5)) -> list[Point]:
    """Budget after budget, until none fits."""
    points: list[Point] = []
    fixed = found.fixed_bytes
    for percent in percents:
        plan = found.planned("balanced", f"{percent}%")
        if plan is None:
            break
        own = plan.adopted
        assert own is not None and own.measured is not None and plan.budget_bytes is not None
        points.append(
            Point(
                percent=percent,
                budget_bytes=plan.budget_bytes - fixed,
                predicted_bytes=own.predicted.peak_bytes - fixed,
                measured_bytes=own.measured.peak_bytes - fixed,
                seconds=own.measured.seconds,
                adopted=own.name,
                slower=tuple(c.name for c in plan.contestants if "% slower" in c.verdict),
            )
        )
    return points


def misses(name: str, points: list[Point]) -> list[str]:
    """Peaks that rise or break the budget, in words."""
    found = [
        f"{name}: {p.measured_bytes} bytes under {p.percent} % are {p.measured_bytes / p.budget_bytes:.3f} of it"
        for p in points
        if p.measured_bytes > (1.0 + BUDGET_FRAC) * p.budget_bytes
    ]
    for a, b in zip(points, points[1:], strict=False):
        # A uniform precision is the same plan under every budget.
        is_faster = a.adopted != SOLVER and a.adopted in b.slower
        if b.measured_bytes > (1.0 + ROUNDING_FRAC) * a.measured_bytes and not is_faster:
            found.append(f"{name}: the peak rises from {a.measured_bytes} bytes under {a.percent} % to"
                         f" {b.measured_bytes} under {b.percent} %")  # fmt: skip
    return found


def main() -> None:
    workloads, _ = chosen(argparse.ArgumentParser(prog="python -m tests.bench.budgets"))
    missed: list[str] = []
    print("workload      budget %      MB  peak MB: predicted  measured  step ms  adopted", flush=True)
    with one_thread():
        for workload in workloads:
            points = descent(calibrate(workload))
            for p in points:
                print(
                    f"{workload.name:12} {p.percent:9} {p.budget_bytes / 1e6:7.2f} {p.predicted_bytes / 1e6:19.2f}"
                    f" {p.measured_bytes / 1e6:9.2f} {p.seconds * 1e3:8.1f}  {p.adopted}",
                    flush=True,
                )
            missed += misses(workload.name, points)
    conclude(missed, "no peak rises")


if __name__ == "__main__":
    main()
