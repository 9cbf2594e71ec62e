"""Which proposal is adopted, by what each of them measured on a replayed step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoprec.planning.proposals import LOW_FRAC, SOLVER, Proposal, Proposals, totals_of
from autoprec.planning.reasons import bytes_text, seconds_text
from autoprec.plans import Contestant, Measurement, Plan, Totals

__all__ = ["adopt", "runners"]

#: Contestants within this share of the fastest are as fast: in ten tournaments of a small network one of two took 1.001
#: to 1.020 of the other's step (docs/measurements/suite.md), and how that falls must not decide what a step holds. What
#: the rounds of one tournament leave open comes on top, up to a tenth: on a machine that measures nothing, too, a plan
#: that is faster by more than that is faster.
_TIE_FRAC, _MOST_TIE_FRAC = 0.02, 0.10


def runners(proposals: Proposals) -> dict[str, Plan]:
    """The plans that run, FP32 first: those whose predictions keep every limit."""
    kept = [p for p in proposals.all if not p.broken]
    return {p.name: proposals.decisions(p.solution) for p in sorted(kept, key=_simplest)}


def adopt(
    proposals: Proposals,
    measured: Mapping[str, Measurement],
    budget_bytes: int | None,
    told: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """The fastest that keeps the budget; of equally fast ones FP32, then the one with the lowest measured peak. With
    the objective "peak" and no budget, the fastest whose measured peak is the lowest, as nearly as peaks are predicted.
    With the objective "bytes", the solver's plan, and another one only where that cannot run or breaks the budget.

    The plan carries every contestant. Where none is fit, the solver's plan stands by its predictions, and its verdict
    says what it breaks. `budget_bytes` is the one that counts; the proposals may have been made for a smaller one.
    `told`: by name, peaks that are known better than the problem has them, of steps that are compiled.
    """

    def predicted(p: Proposal) -> Totals:
        found = totals_of(p.solution.evaluation)
        return replace(found, peak_bytes=told.get(p.name, found.peak_bytes))

    limit, what = budget_bytes, "the budget"
    if proposals.question.at_lowest_peak:
        what, limit = "the lowest", _low_peak(proposals, [m for m in measured.values() if not m.failure])
    unfit = {p.name: p.broken or _unfit(measured.get(p.name), limit, what) for p in proposals.all}
    fit = [p for p in sorted(proposals.all, key=_simplest) if not unfit[p.name]]
    equal, fastest = _fastest(fit, measured)
    winner = _winner(proposals, fit, equal, measured)
    own = measured.get(winner.name)

    def verdict(p: Proposal) -> str:
        if unfit[p.name] or own is None or p is winner:
            return unfit[p.name]
        if proposals.question.policy.objective == "bytes":
            return "keeps more bytes"
        assert fastest is not None
        other, tie = measured[p.name], _tie_frac(measured[p.name], measured[fastest.name])
        if p not in equal:
            than = "" if winner is fastest else f" than {fastest.name}"
            return f"{other.ratio / measured[fastest.name].ratio - 1.0:.1%} slower{than}"
        if winner.name != "fp32" and other.peak_bytes > own.peak_bytes:
            return f"as fast within {tie:.0%}, and takes {bytes_text(other.peak_bytes - own.peak_bytes)} more"
        return f"as fast within {tie:.0%}, and less simple"

    contestants = tuple(
        Contestant(
            name=p.name,
            formats=proposals.decisions(p.solution).formats_used(),
            predicted=predicted(p),
            adopted=p is winner,
            verdict=verdict(p),
            measured=measured.get(p.name),
        )
        for p in proposals.all
    )
    plan = proposals.plan(winner.solution, why=_why(proposals, winner, measured), contestants=contestants)
    fp32 = plan.predicted_fp32
    if fp32 is not None and "fp32" in told:
        fp32 = replace(fp32, peak_bytes=told["fp32"])
    return replace(plan, budget_bytes=budget_bytes, predicted=predicted(winner), predicted_fp32=fp32)


def _simplest(p: Proposal) -> tuple[bool, bool]:
    return p.name == SOLVER, p.name != "fp32"


def _unfit(found: Measurement | None, limit: int | None, what: str) -> str:
    if found is None:
        return "did not run"
    if found.failure:
        return found.failure
    if limit is not None and found.peak_bytes > limit:
        return f"its measured peak exceeds {what} by {bytes_text(found.peak_bytes - limit)}"
    return ""


def _low_peak(proposals: Proposals, measured: Sequence[Measurement]) -> int | None:
    """What a measured peak may be to count as the lowest; None if none was measured."""
    low = min((m.peak_bytes for m in measured), default=None)
    return None if low is None else low + int(LOW_FRAC * max(0, low - proposals.problem.fixed_bytes))


def _fastest(
    fit: Sequence[Proposal], measured: Mapping[str, Measurement]
) -> tuple[Sequence[Proposal], Proposal | None]:
    """Those that are as fast as the fastest, and that; nobody and None where none is fit."""
    if not fit:
        return (), None
    fastest = min(fit, key=lambda p: measured[p.name].ratio)
    own = measured[fastest.name]
    return [p for p in fit if measured[p.name].ratio <= (1.0 + _tie_frac(measured[p.name], own)) * own.ratio], fastest


def _winner(
    proposals: Proposals, fit: Sequence[Proposal], equal: Sequence[Proposal], measured: Mapping[str, Measurement]
) -> Proposal:
    if not fit:
        return proposals.best
    if proposals.question.policy.objective == "bytes":
        return min(fit, key=lambda p: (p is not proposals.best, p.solution.evaluation.saved_bytes))
    return min(equal, key=lambda p: (p.name != "fp32", measured[p.name].peak_bytes))


def _tie_frac(a: Measurement, b: Measurement) -> float:
    """What the ratios of two that are as fast may differ by: margins add as squares do, as if they were independent."""
    margins = (m.ratio_margin / m.ratio for m in (a, b) if m.ratio > 0.0)
    return min(_MOST_TIE_FRAC, math.hypot(_TIE_FRAC, *margins))


def _why(proposals: Proposals, winner: Proposal, measured: Mapping[str, Measurement]) -> str:
    """What decided, where it was not the solver's plan; "" leaves it to that plan's own alternatives."""
    if winner is proposals.best:
        return ""
    taken = ", ".join(f"{n} {seconds_text(m.seconds).lstrip('+')}" for n, m in measured.items() if not m.failure)
    return f"measured on a replayed step: {taken}; {winner.name} is adopted"
