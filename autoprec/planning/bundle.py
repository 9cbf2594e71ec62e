"""The best prices of a relaxation: cutting planes of the bound within a box around the best prices so far.

The bound is concave in the prices, and each evaluation gives its slope in every price. Prices are asked for only where
an assignment broke the limit, so there are some tens of them, however many limits there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from autoprec.planning.relaxation import Limit, Prices, Relaxation, Totals

__all__ = ["Cut", "ascend", "missed", "priced"]

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


def ascend(relaxation: Relaxation, *, steps: int, enough: float, ceiling: float) -> list[Cut]:
    """Evaluations on the way to the best prices, the best one last; ends when the planes promise less than the share
    `enough` of the bound, twice, or when the bound is above `ceiling`."""
    cuts = [priced(relaxation, {})]
    best = cuts[0]
    widths: dict[Limit, float] = {}
    small = 0
    for _ in range(steps):
        if not best.bound <= ceiling:
            break
        for limit in missed(relaxation, cuts[-1].totals, widths):
            widths[limit] = abs(best.bound) * (_ROW if limit.kind == "row" else _SHARED)
        if not widths:
            break
        found = _model(relaxation, cuts, best, widths)
        if found is None:
            break
        prices, promised = found
        small = small + 1 if promised - best.bound <= enough * abs(best.bound) else 0
        if small == 2:
            break
        cut = priced(relaxation, {limit: price for limit, price in prices.items() if price > 0.0})
        cuts.append(cut)
        share = (cut.bound - best.bound) / max(promised - best.bound, 1e-300)
        if share > 0.3:
            for limit, price in prices.items():
                if abs(price - best.prices.get(limit, 0.0)) >= 0.999 * widths[limit]:
                    widths[limit] *= 2.0
        if share < 0.1:
            widths = {limit: max(0.7 * width, 1e-9 * abs(best.bound)) for limit, width in widths.items()}
        if cut.bound > best.bound:
            best = cut
    return [c for c in cuts if c is not best] + [best]


def priced(relaxation: Relaxation, prices: Prices) -> Cut:
    """The bound at some prices, and the assignment that reaches it."""
    bound = relaxation.bound(prices)
    values = relaxation.assignment()
    return Cut(prices, bound, values, relaxation.totals(values))


def missed(relaxation: Relaxation, totals: Totals, known: Iterable[Limit]) -> list[Limit]:
    """Limits without a price that an assignment breaks: the highest moment, the loss, and the rows broken most."""
    taken = set(known)
    found = []
    budget = relaxation.problem.budget_bytes
    if budget is not None and len(totals.bytes_at):
        peak = int(totals.bytes_at.argmax())
        near = any(limit.kind == "moment" and abs(limit.place - peak) <= 1 for limit in taken)
        if totals.bytes_at[peak] > budget and not near:
            found.append(Limit("moment", peak))
    if relaxation.over(totals, Limit("loss", 0)) > 0.0:
        found.append(Limit("loss", 0))
    order = np.argsort(-totals.short, kind="stable")[:_NEW_ROWS]
    found += [Limit("row", int(r)) for r in order if totals.short[r] > 1e-6]
    return [limit for limit in found if limit not in taken]


def _model(
    relaxation: Relaxation, cuts: list[Cut], best: Cut, widths: dict[Limit, float]
) -> tuple[Prices, float] | None:
    """The prices in the box where the planes allow the highest bound, and how high; None if the program fails."""
    limits = list(widths)
    slopes = np.array([[relaxation.slope(c.totals, limit) for limit in limits] for c in cuts])
    there = np.array([[c.prices.get(limit, 0.0) for limit in limits] for c in cuts])
    bounds = np.array([c.bound for c in cuts])
    centre = np.array([best.prices.get(limit, 0.0) for limit in limits])
    width = np.array([widths[limit] for limit in limits])
    # In units of the box, around the best prices, so that the program is of moderate numbers.
    height = float(abs(best.bound)) or 1.0
    offset = (bounds + (slopes * (centre - there)).sum(axis=1) - best.bound) / height
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
    return dict(zip(limits, price.tolist(), strict=True)), best.bound + height * float(found.x[-1])
