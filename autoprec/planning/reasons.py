"""Why each decision was taken: every alternative is evaluated, and its price is the reason.

In a reason, "noise" is the sum over weights of the share of their noise limit, and the loss's share of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.planning.neighbours import Neighbours
from autoprec.planning.options import goes_without_saying
from autoprec.planning.polish import flips, storage_flips, tied_groups
from autoprec.planning.solutions import Evaluation, Solution
from autoprec.planning.values import Problem
from autoprec.plans import AS_IS, Alternative, Dropped, Violation

__all__ = ["Reason", "Reasons", "bytes_text", "seconds_text", "violation_text"]


def seconds_text(seconds: float) -> str:
    """Signed seconds for people."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1.0:
            return f"{seconds * factor:+.3g} {unit}"
    return f"{seconds * 1e9:+.3g} ns"


def bytes_text(size: float, sign: bool = False) -> str:
    """Bytes for people."""
    plus = "+" if sign else ""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:{plus}.3g} {unit}"
    return f"{size:{plus}.0f} B"


def violation_text(v: Violation) -> str:
    """A broken constraint for people."""
    if v.kind == "peak":
        return f"the peak would exceed its limit by {bytes_text(v.value - v.limit)} ({v.what})"
    if v.kind == "loss":
        return f"the loss noise would be {math.sqrt(v.value / v.limit):.3g} times its limit"
    if v.kind == "gradient":
        return f"the gradient noise of weight {v.what} would be {math.sqrt(v.value / v.limit):.3g} times its limit"
    return f"{v.what} share a tensor and must agree"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Of one decision: a sentence, the price of every other format best first, and the formats that it cannot have."""

    text: str
    alternatives: tuple[Alternative, ...] = ()
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Neighbour:
    format: str
    evaluation: Evaluation

    @property
    def name(self) -> str:
        """For people."""
        return "as it is" if self.format == AS_IS else self.format


def _told(dropped: Sequence[tuple[str, str]]) -> str:
    """Why an op cannot have some formats, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in dropped:
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"not {', '.join(names)}: {why}" for why, names in by_reason.items())


class Reasons:
    """Reasons for the decisions of a solution, and the constraint that holds it back."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self._problem = problem
        self._solution = solution
        self._groups = tied_groups(problem)
        self._near = Neighbours(problem, solution.choice)
        self._blocked: Counter[tuple[str, str]] = Counter()
        self.units = tuple(self._unit(i) for i in range(len(problem.units)))
        self.storages = {t: self._storage(t) for t in problem.storable}
        self.binding = self._binding()

    def _unit(self, index: int) -> Reason:
        unit, choice = self._problem.units[index], self._solution.choice
        dropped = tuple(Dropped(format=f, why=why) for f, why in unit.dropped)
        if not unit.needed:
            return Reason(text="nobody asks for this gradient", dropped=dropped)
        told = _told(unit.dropped)
        if len(unit.options) == 1:
            if unit.rule and not [why for _, why in unit.dropped if not why.startswith("rule ")]:
                return Reason(text=f"rule ({unit.rule})", dropped=dropped)
            return Reason(text=told or "the policy allows no other format", dropped=dropped)
        found = [
            _Neighbour(format=name, evaluation=self._near.evaluate(changed))
            for name, changed in flips(self._problem, choice, self._groups, index)
        ]
        own = [(f, why) for f, why in unit.dropped if not goes_without_saying(why)]  # `--why-not` tells the rest
        return self._reason(found, _told(own), dropped)

    def _storage(self, tensor: int) -> Reason:
        found = [
            _Neighbour(format=storage or AS_IS, evaluation=self._near.evaluate(changed))
            for storage, changed in storage_flips(self._problem, self._solution.choice, tensor)
        ]
        return self._reason(found, "", ())

    def _reason(self, found: list[_Neighbour], told: str, dropped: tuple[Dropped, ...]) -> Reason:
        ordered = sorted(found, key=lambda a: (not a.evaluation.feasible, a.evaluation.objective))
        endless = [a for a in ordered if not math.isfinite(a.evaluation.noise)]  # what it rounds leaves the format
        return Reason(
            text=self._priced(ordered) + (f"; {told}" if told else ""),
            alternatives=tuple(self._alternative(a) for a in ordered if a not in endless),
            dropped=(*dropped, *(Dropped(format=a.format, why="its noise would have no bound") for a in endless)),
        )

    def _alternative(self, neighbour: _Neighbour) -> Alternative:
        """Differences from the plan; what is predicted is not worth more than six digits."""
        mine, theirs = self._solution.evaluation, neighbour.evaluation
        worst: dict[str, Violation] = {}
        for v in theirs.violations:
            if v.kind not in worst or v.value * worst[v.kind].limit > worst[v.kind].value * v.limit:
                worst[v.kind] = v
        return Alternative(
            format=neighbour.format,
            seconds=_six_digits(_more(theirs.seconds, mine.seconds)),
            saved_bytes=theirs.saved_bytes - mine.saved_bytes,
            peak_bytes=theirs.peak_bytes - mine.peak_bytes,
            noise=_six_digits(theirs.noise - mine.noise),
            broken=tuple(
                v if v.kind == "peak" else replace(v, value=_six_digits(v.value), limit=_six_digits(v.limit))
                for v in worst.values()
            ),
        )

    def _priced(self, ordered: list[_Neighbour]) -> str:
        """The price of the next-best alternative; if none is feasible, what the nearest one breaks."""
        mine = self._solution.evaluation
        for a in ordered:
            if a.evaluation.objective < mine.objective:
                broken = a.evaluation.violations
                self._blocked.update({(v.kind, v.what if v.kind == "gradient" else "") for v in broken})
        best = ordered[0]
        if not best.evaluation.feasible:
            return f"{best.name}: {violation_text(best.evaluation.violations[0])}"
        seconds = _more(best.evaluation.seconds, mine.seconds)
        kept = best.evaluation.saved_bytes - mine.saved_bytes
        peak = best.evaluation.peak_bytes - mine.peak_bytes
        noise = best.evaluation.noise - mine.noise
        return (
            f"next best {best.name}: {seconds_text(seconds)}, {bytes_text(kept, True)} kept,"
            f" {bytes_text(peak, True)} peak, {noise:+.2g} noise"
        )

    def _binding(self) -> str:
        """The constraint that most often forbids a single change for the better."""
        if not self._problem.units:
            return "nothing to decide: no op of a kind that takes a format computes in float32"
        if not self._blocked:
            return "nothing"
        kind, what = min(self._blocked, key=lambda key: (-self._blocked[key], key))
        problem, found = self._problem, self._solution.evaluation
        if kind == "peak" and problem.budget_bytes is not None:
            where = problem.phase_name(found.peak_phase)
            return f"peak: {bytes_text(found.peak_bytes)} of {bytes_text(problem.budget_bytes)} at {where}"
        if kind == "loss" and problem.loss_limit is not None:
            return f"loss noise: {found.loss_sigma:.3g} of {math.sqrt(problem.loss_limit):.3g}"
        if kind == "gradient":
            value, row = next(
                (v, r) for v, r in zip(found.rows, problem.rows, strict=True) if r.weight == what
            )  # fmt: skip
            ratio, limit = math.sqrt(value / row.reference), math.sqrt(row.limit / row.reference)
            return f"gradient noise of weight {what}: {ratio:.3g} of {limit:.3g}"
        return kind


def _more(theirs: float, mine: float) -> float:
    """A difference of two sums, without what comes of the order in which they were added up."""
    return 0.0 if math.isclose(theirs, mine, rel_tol=1e-12) else theirs - mine


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
