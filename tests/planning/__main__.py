"""`python -m tests.planning [CASES]`: random problems of up to eight ops (1,000 unless said otherwise), solved by brute
force, HiGHS and prices; exit code 1 if they, the integer program and the evaluator do not agree."""

from __future__ import annotations

import sys
from collections import Counter

from tests.planning.planning_cases import random_case
from tests.planning.test_solvers import disagreement


def main(cases: int) -> int:
    wrong, met = 0, Counter[str]()
    for seed in range(cases):
        case = random_case(seed)
        problem = case.problem()
        met["tied"] += bool(problem.ties)
        met["checkpointed"] += any(use.kept_from for t in problem.tensors for use in t.savers)
        met["with parts"] += any(t.part_of is not None for t in problem.tensors)
        met["with sums"] += any(use.to_a_view for t in problem.tensors for use in t.gradient_readers)
        met["with breaks"] += bool(case.graph.first_ops[1:])
        met["with storages"] += bool(problem.storable)
        met[f"of {len(problem.ops)} ops"] += 1
        if said := disagreement(case, seed):
            wrong += 1
            print(f"seed {seed}: {said}", flush=True)
    print(f"{cases} problems ({', '.join(f'{n} {what}' for what, n in sorted(met.items()))}): {wrong} disagreements")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
