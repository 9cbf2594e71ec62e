"""Is `speed` faster than autocast, and than the best uniform precision? `python -m tests.bench.speed [NAME ...]`

Both sides eager, one thread, in turn, step by step; medians over rounds of the ratio to autocast in the same round, and
its quartiles. Exit code 1 if `speed` is below 1.12 × autocast on the transformer, or below 0.98 × the best uniform
precision anywhere.
"""

from __future__ import annotations

import argparse

from tests.bench.measure import AUTOCAST, PLAIN, calibrate, one_thread, run_live
from tests.bench.workloads import chosen, conclude

#: Per workload, of at most 41 rounds; nine, which 15 s are on the transformer, gave medians from 1.10 to 1.13.
SECONDS = 75.0

#: From the issue.
OVER_AUTOCAST, OVER_UNIFORM = 1.12, 0.98

SPEED = "speed"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speed")
    workloads, _ = chosen(parser)
    print("workload     contestant    ms  speed over autocast (quartiles)  MB beyond the state  formats", flush=True)
    missed = []
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            proposals = found.proposals(SPEED, noise={"gradient": 1000.0, "loss": 1000.0})
            uniform = {p.name: proposals.decisions(p.solution) for p in proposals.all if p.name != "solver"}
            plan = found.planned(SPEED)
            assert plan is not None
            plans = {AUTOCAST: None, PLAIN: None, **uniform, SPEED: plan}
            live = run_live(found, plans, SECONDS)
            for name, seen in live.items():
                made = plans[name]
                used = "" if made is None else ", ".join(made.formats_used())
                slow, fast = seen.spread
                print(f"{workload.name:12} {name:10} {seen.seconds * 1e3:7.1f} {1 / seen.ratio:8.3f}"
                      f" ({1 / fast:.3f}, {1 / slow:.3f}) {seen.peak_bytes / 2**20:25.2f}  {used}",
                      flush=True)  # fmt: skip
            best = min(live[name].ratio for name in uniform)
            if live[SPEED].ratio > best / OVER_UNIFORM:
                missed.append(f"{workload.name}: speed is {best / live[SPEED].ratio:.3f} of the best uniform precision")
            if workload.name == "transformer" and 1 / live[SPEED].ratio < OVER_AUTOCAST:
                missed.append(f"transformer: speed is {1 / live[SPEED].ratio:.3f} of autocast")
    conclude(missed, "every bar is met")


if __name__ == "__main__":
    main()
