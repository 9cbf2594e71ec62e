"""The best prices of a relaxation: cutting planes of the bound within a box around the best prices so far.

The bound is concave in the prices, and each evaluation gives its slope in every price. Prices are asked for only where
an assignment broke the limit, so there are some tens of them, however many limits there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from autoprec.planning.relaxation import Limit, Prices, Relaxation, Totals

__all__ = ["Ascent", "Cut", "ascend", "priced"]

_Floats = npt.NDArray[np.float64]

#: First half-width of the box, of the bound: rows of weights matter less than what all ops share.
_SHARED, _ROW = 1e-2, 3e-3
#: How many rows get their prices in one step.
_NEW_ROWS = 10


@dataclass(frozen=True)
class Cut:
    """One evaluation: prices, the bound there, and the assignment that reaches it."""

    prices: Prices
    bound: float
    values: npt.NDArray[np.int64]
    totals: Totals


@dataclass
class Ascent:
    """Planes of the bound, and the best prices so far.

    Attributes:
        cuts: evaluations whose assignments are allowed: each is a plane above the bound, wherever it was found.
        best: the evaluation with the highest bound.
        widths: half-widths of the box by limit.
        weights: of the cuts that the last program saw, how much each counts in its answer.
    """

    relaxation: Relaxation
    cuts: list[Cut]
    best: Cut
    widths: dict[Limit, float]
    weights: _Floats

    def climb(self, *, steps: int, enough: float, ceiling: float) -> None:
        """Better prices, in so many evaluations at most; ends when the planes promise less than the share `enough` of
        the bound, twice, or when the bound is above `ceiling`."""
        small, last = 0, self.cuts[-1]
        for _ in range(steps):
            if not self.best.bound <= ceiling:
                return
            scale = abs(self.best.bound) or 1.0
            for limit in missed(self.relaxation, last.totals, self.widths):
                self.widths[limit] = scale * (_ROW if limit.kind == "row" else _SHARED)
            found = self.promise(self.cuts) if self.widths else None
            if found is None:
                return
            prices, promised, self.weights = found
            small = small + 1 if promised - self.best.bound <= enough * scale else 0
            if small == 2:
                return
            last = priced(self.relaxation, {limit: price for limit, price in prices.items() if price > 0.0})
            self.cuts.append(last)
            self._resize(prices, (last.bound - self.best.bound) / max(promised - self.best.bound, 1e-300))
            if last.bound > self.best.bound:
                self.best = last

    def _resize(self, prices: Prices, share: float) -> None:
        """A larger box where it held a good step back, a smaller one after a step that brought little."""
        if share > 0.3:
            for limit, price in prices.items():
                if abs(price - self.best.prices.get(limit, 0.0)) >= 0.999 * self.widths[limit]:
                    self.widths[limit] *= 2.0
        if share < 0.1:
            least = 1e-9 * (abs(self.best.bound) or 1.0)
            self.widths = {limit: max(0.7 * width, least) for limit, width in self.widths.items()}

    def promise(self, cuts: Sequence[Cut]) -> tuple[Prices, float, _Floats] | None:
        """The prices in the box where the planes of some cuts allow the highest bound, how high it is, and the weights
        of the cuts; None if the program fails."""
        limits = list(self.widths)
        slopes = np.array([self.relaxation.slopes(c.totals, limits) for c in cuts])
        there = np.array([[c.prices.get(limit, 0.0) for limit in limits] for c in cuts])
        bounds = np.array([c.bound for c in cuts])
        centre = np.array([self.best.prices.get(limit, 0.0) for limit in limits])
        width = np.array([self.widths[limit] for limit in limits])
        # In units of the box, around the best prices, so that the program is of moderate numbers.
        height = float(abs(self.best.bound)) or 1.0
        offset = (bounds + (slopes * (centre - there)).sum(axis=1) - self.best.bound) / height
        lower = np.maximum(-1.0, -centre / width)
        found = linprog(
            np.append(np.zeros(len(limits)), -1.0),
            A_ub=np.column_stack((-slopes * width / height, np.ones(len(cuts)))),
            b_ub=offset,
            bounds=[*((low, 1.0) for low in lower.tolist()), (None, None)],
            method="highs-ds",
        )
        if found.x is None or found.status != 0:
            return None
        price = np.maximum(centre + width * found.x[:-1], 0.0)
        price[price < 1e-12 * height] = 0.0
        prices = dict(zip(limits, price.tolist(), strict=True))
        return prices, self.best.bound + height * float(found.x[-1]), -np.asarray(found.ineqlin.marginals)


def ascend(relaxation: Relaxation, *, steps: int, enough: float, ceiling: float) -> Ascent:
    """The way from no prices to the best ones."""
    first = priced(relaxation, {})
    ascent = Ascent(relaxation, [first], first, {}, np.ones(1))
    ascent.climb(steps=steps, enough=enough, ceiling=ceiling)
    return ascent


def priced(relaxation: Relaxation, prices: Prices) -> Cut:
    """The bound at some prices, and the assignment that reaches it."""
    bound = relaxation.bound(prices)
    values = relaxation.assignment()
    return Cut(prices, bound, values, relaxation.totals(values))


def missed(relaxation: Relaxation, totals: Totals, known: Iterable[Limit]) -> list[Limit]:
    """Limits without a price that an assignment breaks: the highest phase, the loss, and the rows broken most."""
    taken = set(known)
    found = []
    budget = relaxation.problem.budget_bytes
    if budget is not None and len(totals.bytes_at):
        peak = int(totals.bytes_at.argmax())
        near = any(limit.kind == "phase" and abs(limit.place - peak) <= 2 for limit in taken)
        if totals.bytes_at[peak] > budget and not near:
            found.append(Limit("phase", peak))
    if relaxation.over(totals, Limit("loss", 0)) > 0.0:
        found.append(Limit("loss", 0))
    order = np.argsort(-totals.short, kind="stable")[:_NEW_ROWS]
    found += [Limit("row", int(r)) for r in order if totals.short[r] > 1e-6]
    return [limit for limit in found if limit not in taken]
