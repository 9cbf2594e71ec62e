"""Answers to a `Problem`: `Choice`, what it costs (`Evaluation`), and a choice with a proven bound (`Solution`)."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.plans import Violation

__all__ = ["Choice", "Evaluation", "Solution"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One option per unit, and (tensor, storage) of what is kept in a narrow format."""

    options: tuple[int, ...]
    stored: frozenset[tuple[int, str]] = frozenset()

    def keeping(self, tensor: int, storage: str | None) -> Choice:
        """The same but for how one tensor is kept; None is as it is."""
        rest = {(t, f) for t, f in self.stored if t != tensor}
        return Choice(options=self.options, stored=frozenset(rest if storage is None else rest | {(tensor, storage)}))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one choice costs, by simulation of the step.

    Attributes:
        seconds, saved_bytes, peak_bytes, loss_sigma, gradient_ratio: as in `Totals`.
        peak_phase: the first phase with the peak.
        bytes_at: bytes held in each phase (`Problem.phase`).
        rows: E‖δ∇W‖² by weight row.
        noise: Σ row / limit plus loss variance / its scale; breaks ties only.
        objective: what the solvers minimise.
        violations: broken constraints; none means feasible.
    """

    seconds: float
    saved_bytes: int
    peak_bytes: int
    peak_phase: int
    loss_sigma: float
    gradient_ratio: float
    bytes_at: tuple[int, ...]
    rows: tuple[float, ...]
    noise: float
    objective: float
    violations: tuple[Violation, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether it keeps every constraint."""
        return not self.violations


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A choice, what the evaluator says of it, and a proven lower bound of the objective."""

    choice: Choice
    evaluation: Evaluation
    bound: float

    @property
    def gap(self) -> float:
        """(objective − bound) / objective; 0.0 when proven optimal, up to what HiGHS lets a row be broken by (1e-7)."""
        gap = (self.evaluation.objective - self.bound) / max(abs(self.evaluation.objective), 1e-300)
        return gap if gap > 1e-7 else 0.0
