"""How much of a tournament is chance? `python -m tests.bench.chance [NAME ...]`: ten of them under one calibration.

For each contestant the lowest and the highest measured ratio to the one that ran first, and how often it was adopted.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

from tests.bench.measure import calibrate, one_thread
from tests.bench.workloads import chosen

TOURNAMENTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.chance")
    parser.add_argument("--budget", help="as in a policy; default: none")
    workloads, options = chosen(parser)
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            ratios: dict[str, list[float]] = defaultdict(list)
            adopted: Counter[str] = Counter()
            for _ in range(TOURNAMENTS):
                plan = found.planned("balanced", options.budget)
                if plan is None:
                    raise SystemExit(f"{workload.name}: no plan fits {options.budget}")
                adopted.update(c.name for c in plan.contestants if c.adopted)
                for c in plan.contestants:
                    if c.measured is not None:
                        ratios[c.name].append(c.measured.ratio)
            first = next(name for name, seen in ratios.items() if set(seen) == {1.0})
            for name, seen in ratios.items():
                print(f"{workload.name:12} {name:8} {min(seen):.3f} to {max(seen):.3f} of the step of {first},"
                      f" adopted {adopted[name]} times of {TOURNAMENTS}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
