"""The exact solver: HiGHS on the integer program, liveness rows added where a proposal breaks the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from autoprec.errors import SolverError
from autoprec.planning.evaluator import evaluate
from autoprec.planning.linear import Linear
from autoprec.planning.milp import OBJECTIVE_SCALE, Program
from autoprec.planning.polish import polish
from autoprec.planning.solutions import Choice, Evaluation, Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Problem

__all__ = ["smallest_peak", "solve"]

_ROUNDS = 500
#: Proposals that break a row by less than the solver's tolerance are forbidden one by one this often; after that the
#: budget's rows are tightened by two millionths.
_FORBIDDEN = 25
#: While rows are still being added for phases that break the budget.
_LOOSE_GAP = 5e-3
#: Of the objective, which is a share of 10,000: as fine as feasibility is.
_ABSOLUTE_GAP = 1e-6
#: Nodes of a search that need not end with the optimum.
_NODES = 100
#: And of one whose choice is right, and not proven.
_MOST_NODES = 10_000


@dataclass(frozen=True)
class _Answer:
    x: npt.NDArray[np.float64]
    bound: float
    proven: bool = True


@dataclass(frozen=True)
class _End:
    """How a search ended: HiGHS's word for it, the best point found, its objective, and the proven bound."""

    status: str
    x: npt.NDArray[np.float64] | None = None
    objective: float = math.inf
    bound: float = -math.inf


def _run(program: Program, cost: list[float], gap: float, offset: float = 0.0, nodes: int = _NODES) -> _Answer | None:
    """One call of HiGHS; None if infeasible; `SolverError` for an end without a choice and a bound. `offset` is what
    the objective holds beside the variables: the gap is relative to both together.

    A search that has found a choice stops after `nodes` nodes: the last tenths of a percent can take hours. (Seconds
    would make the plan depend on the machine's load.)
    """
    if not cost:
        broken = any(floor > 0.0 for floor in program.floors)
        return None if broken else _Answer(x=np.zeros(0), bound=0.0)
    presolves = True
    end = _search(program, cost, gap, offset, nodes)
    if (
        end.status == "Infeasible"
    ):  # its presolve takes a tight row for broken now and then (tests/planning/test_tight_budgets.py)
        presolves = False
        end = _search(program, cost, gap, offset, _MOST_NODES, presolves=False)
        if end.x is None:
            return None
    if end.status == "Solution limit reached" and (end.x is None or gap == 0.0):
        end = _search(program, cost, gap, offset, None, presolves=presolves)
    if end.status not in ("Optimal", "Solution limit reached") or end.x is None:
        raise SolverError(f"HiGHS ended without a proven answer ({end.status})")
    return _Answer(x=end.x, bound=min(end.bound, end.objective), proven=end.status == "Optimal")


def _search(
    program: Program, cost: list[float], gap: float, offset: float, nodes: int | None, *, presolves: bool = True
) -> _End:
    """HiGHS itself; on one thread, so that the answer does not depend on how many there are."""
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "output_flag": False,
        "threads": 1,
        "parallel": "off",
        "mip_rel_gap": gap,
        "mip_abs_gap": _ABSOLUTE_GAP,
        "presolve": "choose" if presolves else "off",
    }
    for name, value in (options if nodes is None else options | {"mip_max_nodes": nodes}).items():
        solver.setOptionValue(name, value)
    matrix = program.matrix().tocsc()
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), len(program.floors)
    model.col_cost_, model.offset_ = np.asarray(cost), offset
    model.col_lower_, model.col_upper_ = np.zeros(len(cost)), np.asarray(program.upper)
    model.row_lower_, model.row_upper_ = np.asarray(program.floors), np.full(len(program.floors), np.inf)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    model.integrality_ = [highspy.HighsVarType(kind) for kind in _integrality(program)]
    solver.passModel(model)
    solver.run()
    status, info = solver.modelStatusToString(solver.getModelStatus()), solver.getInfo()
    if not math.isfinite(info.objective_function_value) or not solver.getSolution().value_valid:
        return _End(status)
    objective = info.objective_function_value - offset
    bound = info.mip_dual_bound - offset if any(program.integer) else objective
    return _End(status, np.asarray(solver.getSolution().col_value, np.float64), objective, bound)


def _integrality(program: Program) -> list[int]:
    return program.integer


class _Liveness:
    """The liveness rows in a program: bytes(τ) ≤ budget, or ≤ the variable `peak`, relative to `unit` bytes."""

    def __init__(self, program: Program, unit: float, *, limit: float | None, peak: int | None) -> None:
        self.program = program
        self.unit = unit
        self.limit = limit
        self.peak = peak
        self.slack = 0.0
        self.phases: dict[int, int | None] = {}

    def add(self, phase: int) -> bool:
        """Add the row of a phase; False if it is there."""
        if phase in self.phases:
            return False
        held = self.program.bytes_at(phase)
        expression = Linear().add(held, 1.0 / self.unit)
        if self.peak is not None:
            expression.add(self.peak, -1.0)
        before = len(self.program.rows)
        self.program.at_most(expression, 0.0 if self.limit is None else self.limit - self.slack)
        self.phases[phase] = before if len(self.program.rows) > before else None
        return True

    def add_peaks(self, found: Evaluation, above: float, count: int = 6) -> bool:
        """Add rows for the highest phases above a level, not next to each other; False if none is new."""
        order = sorted(range(len(found.bytes_at)), key=lambda m: (-found.bytes_at[m], m))
        picked: list[int] = []
        for m in order:
            if found.bytes_at[m] <= above or len(picked) == count:
                break
            if all(abs(m - other) > 6 for other in picked):
                picked.append(m)
        return any([self.add(m) for m in picked])

    def tighten(self) -> None:
        """Ask for two millionths of the budget more than is needed."""
        self.slack = 2e-6
        for row in self.phases.values():
            if row is not None:
                self.program.floors[row] += self.slack


def _seeds(problem: Problem) -> list[Evaluation]:
    return [evaluate(problem, uniform_choice(problem, f)) for f in ("fp32", "bf16")]


def solve(problem: Problem, *, relative_gap: float = 0.0) -> Solution | None:
    """The best feasible choice with a proven bound, or None if there is none.

    Proposals come from the program, verdicts from the evaluator; phases whose bytes break the budget get a row and
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
    best: Solution | None = None
    gap = relative_gap if liveness is None else max(relative_gap, _LOOSE_GAP)
    for _ in range(_ROUNDS):
        answer = _run(program, program.cost, gap, program.offset)
        if answer is None:
            return best
        choice = program.choice(answer.x)
        found = evaluate(problem, choice)
        if found.feasible:
            bound = min((answer.bound + program.offset) / OBJECTIVE_SCALE, found.objective)
            if best is None or found.objective < best.evaluation.objective:
                best = Solution(choice=choice, evaluation=found, bound=bound)
            best = replace(best, bound=max(best.bound, min(bound, best.evaluation.objective)))
            if gap == relative_gap or best.gap <= relative_gap:
                return best if relative_gap else _settled(problem, best)
            gap = relative_gap
            continue
        if liveness is not None and budget is not None and liveness.add_peaks(found, budget):
            continue
        if choice in seen:
            raise SolverError("HiGHS proposed a forbidden choice again; its tolerances are too wide for this problem")
        seen.add(choice)
        program.forbid(choice)
        if liveness is not None and len(seen) == _FORBIDDEN:
            liveness.tighten()
    raise SolverError(f"no feasible proposal in {_ROUNDS} rounds of HiGHS")


def _settled(problem: Problem, optimum: Solution) -> Solution:
    """The optimum in what HiGHS does not see, too: of choices with equal bytes the seconds differ by less of the
    objective than it lets a row be broken by."""
    found = polish(problem, optimum)
    return replace(found, bound=min(found.bound, found.evaluation.objective))


def smallest_peak(problem: Problem, *, relative_gap: float = 0.0) -> Solution | None:
    """The choice with the smallest peak that keeps everything but the budget; None if nothing else can be kept.

    Proven to `relative_gap`, or two millionths, of the bytes that precision can change; `bound` is in bytes.
    """
    program = Program(problem)
    unit = max(float(found.peak_bytes - problem.fixed_bytes) for found in _seeds(problem)) or 1.0
    peak = program.variable(0.0, upper=np.inf)
    liveness = _Liveness(program, unit, limit=None, peak=peak)
    best: Solution | None = None
    nodes = _NODES
    for seed in _seeds(problem):
        liveness.add_peaks(seed, problem.fixed_bytes)
    for _ in range(_ROUNDS):
        cost = [0.0] * len(program.cost)
        cost[peak] = OBJECTIVE_SCALE
        answer = _run(program, cost, relative_gap / 2, nodes=nodes)
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
        if kept and not answer.proven and nodes < _MOST_NODES:
            nodes *= 10
            continue
        program.forbid(choice)
    raise SolverError(f"no proven smallest peak in {_ROUNDS} rounds of HiGHS")
