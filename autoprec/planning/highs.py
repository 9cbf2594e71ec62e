"""The exact solver: HiGHS on the integer program, liveness rows added where a proposal breaks the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from autoprec.errors import SolverError
from autoprec.planning.evaluator import evaluate
from autoprec.planning.milp import OBJECTIVE_SCALE, Linear, Program
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Choice, Evaluation, Problem, Solution

__all__ = ["smallest_peak", "solve"]

_ROUNDS = 500
#: Proposals that break a row by less than the solver's tolerance are forbidden one by one this often; after that the
#: budget's rows are tightened by two millionths.
_FORBIDDEN = 25
#: Nodes of a search that need not end with the optimum.
_NODES = 100


@dataclass(frozen=True)
class _Answer:
    x: npt.NDArray[np.float64]
    bound: float


def _run(program: Program, cost: list[float], gap: float, nodes: int | None = _NODES) -> _Answer | None:
    """One call of HiGHS; None if infeasible; `SolverError` for an end without a choice and a bound.

    A search that has found a choice stops after `nodes` nodes: the last tenths of a percent can take hours. (Seconds
    would make the plan depend on the machine's load.)
    """
    if not cost:
        broken = any(floor > 0.0 for floor in program.floors)
        return None if broken else _Answer(x=np.zeros(0), bound=0.0)
    result = milp(
        np.asarray(cost),
        integrality=np.asarray(program.integer),
        bounds=Bounds(np.zeros(len(cost)), np.asarray(program.upper)),
        constraints=LinearConstraint(program.matrix(), np.asarray(program.floors), np.inf),
        options={"mip_rel_gap": gap} if nodes is None else {"mip_rel_gap": gap, "node_limit": nodes},
    )
    if result.status == 2:
        return None
    stopped = nodes is not None and "Solution limit" in str(result.message)  # scipy has no status for it
    if stopped and (result.x is None or gap == 0.0):
        return _run(program, cost, gap, None)
    if (result.status != 0 and not stopped) or result.x is None:
        raise SolverError(f"HiGHS ended without a proven answer (status {result.status}: {result.message})")
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
    return _Answer(x=np.asarray(result.x, np.float64), bound=min(float(bound), float(result.fun)))


class _Liveness:
    """The liveness rows in a program: bytes(τ) ≤ budget, or ≤ the variable `peak`, relative to `unit` bytes."""

    def __init__(self, program: Program, unit: float, *, limit: float | None, peak: int | None) -> None:
        self.program = program
        self.unit = unit
        self.limit = limit
        self.peak = peak
        self.slack = 0.0
        self.moments: dict[int, int | None] = {}

    def add(self, moment: int) -> bool:
        """Add the row of a moment; False if it is there."""
        if moment in self.moments:
            return False
        held = self.program.bytes_at(moment)
        expression = Linear().add(held, 1.0 / self.unit)
        if self.peak is not None:
            expression.add(self.peak, -1.0)
        before = len(self.program.rows)
        self.program.at_most(expression, 0.0 if self.limit is None else self.limit - self.slack)
        self.moments[moment] = before if len(self.program.rows) > before else None
        return True

    def add_peaks(self, found: Evaluation, above: float, count: int = 6) -> bool:
        """Add rows for the highest moments above a level, not next to each other; False if none is new."""
        order = sorted(range(len(found.bytes_at)), key=lambda m: (-found.bytes_at[m], m))
        picked: list[int] = []
        for m in order:
            if found.bytes_at[m] <= above or len(picked) == count:
                break
            if all(abs(m - other) > 3 for other in picked):
                picked.append(m)
        return any([self.add(m) for m in picked])

    def tighten(self) -> None:
        """Ask for two millionths of the budget more than is needed."""
        self.slack = 2e-6
        for row in self.moments.values():
            if row is not None:
                self.program.floors[row] += self.slack


def _seeds(problem: Problem) -> list[Evaluation]:
    return [evaluate(problem, uniform_choice(problem, f)) for f in ("fp32", "bf16")]


def solve(problem: Problem, *, relative_gap: float = 0.0) -> Solution | None:
    """The best feasible choice with a proven bound, or None if there is none.

    Proposals come from the program, verdicts from the evaluator; moments whose bytes break the budget get a row and
    the program is solved again. `relative_gap`: how far from the optimum HiGHS may stop. `SolverError` if it ends
    without a proof.
    """
    program = Program(problem)
    liveness: _Liveness | None = None
    budget = problem.budget_bytes
    if budget is not None:
        if budget < problem.fixed_bytes:
            return None
        seeds = _seeds(problem)
        # Relative to the budget's room, or to a thousandth of what is there, so that coefficients stay moderate.
        unit = max(budget - problem.fixed_bytes, max(e.peak_bytes - problem.fixed_bytes for e in seeds) / 1000, 1.0)
        # Half a byte of room, because bytes are whole numbers and the solver is not exact.
        limit = (budget - problem.fixed_bytes + 0.5) / unit
        liveness = _Liveness(program, unit, limit=limit, peak=None)
        for found in seeds:
            liveness.add_peaks(found, budget)
    seen: set[Choice] = set()
    for _ in range(_ROUNDS):
        answer = _run(program, program.cost, relative_gap)
        if answer is None:
            return None
        choice = program.choice(answer.x)
        found = evaluate(problem, choice)
        if found.feasible:
            bound = (answer.bound + program.offset) / OBJECTIVE_SCALE
            return Solution(choice=choice, evaluation=found, bound=min(bound, found.objective))
        if liveness is not None and budget is not None and liveness.add_peaks(found, budget):
            continue
        if choice in seen:
            raise SolverError("HiGHS proposed a forbidden choice again; its tolerances are too wide for this problem")
        seen.add(choice)
        program.forbid(choice)
        if liveness is not None and len(seen) == _FORBIDDEN:
            liveness.tighten()
    raise SolverError(f"no feasible proposal in {_ROUNDS} rounds of HiGHS")


def smallest_peak(problem: Problem, *, relative_gap: float = 0.0) -> Solution | None:
    """The choice with the smallest peak that keeps everything but the budget; None if nothing else can be kept.

    Proven to `relative_gap`, or two millionths, of the bytes that precision can change; `bound` is in bytes.
    """
    program = Program(problem)
    unit = max(float(found.peak_bytes - problem.fixed_bytes) for found in _seeds(problem)) or 1.0
    peak = program.variable(0.0, upper=np.inf)
    liveness = _Liveness(program, unit, limit=None, peak=peak)
    best: Solution | None = None
    for seed in _seeds(problem):
        liveness.add_peaks(seed, problem.fixed_bytes)
    for _ in range(_ROUNDS):
        cost = [0.0] * len(program.cost)
        cost[peak] = OBJECTIVE_SCALE
        answer = _run(program, cost, relative_gap / 2)
        if answer is None:
            return best
        bound = problem.fixed_bytes + answer.bound / OBJECTIVE_SCALE * unit
        choice = program.choice(answer.x)
        found = evaluate(problem, choice)
        kept = all(v.kind == "peak" for v in found.violations)
        if kept and (best is None or found.peak_bytes < best.evaluation.peak_bytes):
            best = Solution(choice=choice, evaluation=found, bound=bound)
        if best is not None and best.evaluation.peak_bytes <= bound + max(2e-6, relative_gap) * unit + 0.5:
            return best
        if kept and liveness.add_peaks(found, bound + 0.5):
            continue
        program.forbid(choice)
    raise SolverError(f"no proven smallest peak in {_ROUNDS} rounds of HiGHS")
