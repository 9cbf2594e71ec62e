"""Branch and bound on top of the prices: for problems of some thousand decisions, where single ones matter.

At the best prices several assignments are equally good, and a mixture of them keeps the limits. A decision that the
mixture does not agree on is taken both ways, and each way has its own best prices. The bound is the least of all ways.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoprec.planning.bundle import Ascent, Cut, priced
from autoprec.planning.recombining import effects, flips
from autoprec.planning.relaxation import Relaxation

__all__ = ["Tree"]

_Floats = npt.NDArray[np.float64]

#: Evaluations in a node; decisions that are compared before one is taken.
_STEPS, _COMPARED = 10, 8
#: The cuts that a node starts from, at most: those that are best at its parent's prices.
_CUTS = 60


@dataclass
class _Node:
    """(variable, value) pairs that are closed, and the ascent with them."""

    closed: list[tuple[int, int]]
    ascent: Ascent
    bound: float


class Tree:
    """Ways to take decisions, the one with the least bound first.

    Attributes:
        bound: a proven lower bound of every feasible objective below the `ceiling` of the last `grow`.
    """

    def __init__(self, relaxation: Relaxation, root: Ascent) -> None:
        self.relaxation = relaxation
        self._cuts = list(root.cuts)
        self._left = np.inf
        self._open: list[tuple[float, int, _Node]] = []
        self._count = 0
        self._push(_Node([], root, root.best.bound))
        limits = list(root.best.prices)
        changes = flips(relaxation, root.best.values)
        objective, uses = effects(relaxation, root.best.values, changes, limits)
        price = np.array([root.best.prices[limit] for limit in limits])
        self._weight = np.zeros(len(relaxation.decisions.domains))
        np.maximum.at(self._weight, changes.changes[1], np.abs(objective) + (price[:, None] * np.abs(uses)).sum(axis=0))

    @property
    def bound(self) -> float:
        """The least bound of all ways."""
        return min(self._left, self._open[0][0]) if self._open else self._left

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._open, (node.bound, self._count, node))
        self._count += 1

    def grow(self, ceiling: float, visit: Callable[[Ascent, Sequence[Cut]], None]) -> bool:
        """Split the way with the least bound; False if there is nothing to split. Ways above `ceiling` are not looked
        at any further. `visit` is called with each new way's prices and the cuts that led there, in that way."""
        if not self._open:
            return False
        bound, _, node = heapq.heappop(self._open)
        split = None if bound > ceiling else self._split(node)
        if split is None:
            self._left = min(self._left, bound if bound > ceiling else self._decided(node, bound))
            return bool(self._open) and self._open[0][0] <= ceiling
        variable, value = split
        others = [k for k in range(len(self.relaxation.decisions.domains[variable])) if k != value]
        for more in ([value], others):
            closed = [*node.closed, *((variable, k) for k in more)]
            self.relaxation.closed = np.concatenate([self.relaxation.without(v, k) for v, k in closed])
            child = self._child(node, closed, ceiling, visit)
            self.relaxation.closed = np.zeros(0, np.int64)
            if child is not None:
                self._push(child)
        return True

    def _decided(self, node: _Node, bound: float) -> float:
        """The bound of a way in which everything is decided."""
        totals = self.relaxation.totals(node.ascent.best.values)
        return np.inf if self.relaxation.broken(totals) else max(bound, totals.objective)

    def _child(
        self, parent: _Node, closed: list[tuple[int, int]], ceiling: float,
        visit: Callable[[Ascent, Sequence[Cut]], None],
    ) -> _Node | None:  # fmt: skip
        """A way with more values closed; None if nothing is left in it."""
        relaxation, best = self.relaxation, parent.ascent.best
        first = priced(relaxation, best.prices)
        if np.isinf(first.bound):
            return None
        known = self._allowed(self._cuts, closed)
        value = [self._at(cut, best) for cut in known]
        known = [known[k] for k in np.argsort(value, kind="stable")[:_CUTS]]
        widths = {
            limit: max(width, 0.3 * best.prices.get(limit, 0.0), 3e-4 * (abs(first.bound) or 1.0))
            for limit, width in parent.ascent.widths.items()
        }
        ascent = Ascent(relaxation, [*known, first], first, widths, np.ones(1))
        ascent.climb(steps=_STEPS, enough=5e-6, ceiling=ceiling)
        new = ascent.cuts[len(known) :]
        self._cuts += new
        visit(ascent, new)
        return _Node(closed, ascent, max(parent.bound, ascent.best.bound))

    def _at(self, cut: Cut, best: Cut) -> float:
        """How high the plane of a cut is at the best prices."""
        limits = list(dict.fromkeys([*best.prices, *cut.prices]))
        slopes = self.relaxation.slopes(cut.totals, limits)
        return cut.bound + sum(
            slope * (best.prices.get(limit, 0.0) - cut.prices.get(limit, 0.0))
            for slope, limit in zip(slopes, limits, strict=True)
        )

    @staticmethod
    def _allowed(cuts: list[Cut], closed: list[tuple[int, int]]) -> list[Cut]:
        return [cut for cut in cuts if all(cut.values[v] != k for v, k in closed)]

    def _split(self, node: _Node) -> tuple[int, int] | None:
        """The decision, and its most frequent value, that the mixture does not agree on and that promises most: the
        lower of both ways' planes; if it agrees on all, the weightiest one. None if nothing is open."""
        ascent = node.ascent
        weights = ascent.weights / max(float(ascent.weights.sum()), 1e-300)
        mixed = [(cut, w) for cut, w in zip(ascent.cuts, weights.tolist(), strict=False) if w > 1e-6]
        domains = self.relaxation.decisions.domains
        share = np.zeros((len(domains), max(map(len, domains))))
        rows = np.arange(len(domains))
        for cut, w in mixed:
            share[rows, cut.values] += w
        rest = 1.0 - share.max(axis=1)
        score = np.where(rest > 1e-3, np.minimum(rest, 0.5) * self._weight, 0.0)
        best: tuple[float, int, int] | None = None
        for variable in np.argsort(-score, kind="stable")[:_COMPARED].tolist():
            if score[variable] <= 0.0:
                break
            value = int(share[variable].argmax())
            promised = []
            for same in (False, True):
                cuts = [c for c in ascent.cuts if (c.values[variable] == value) == same]
                found = ascent.promise(cuts) if cuts else None
                promised.append(found[1] if found is not None else np.inf)
            worth = min(promised) + 0.1 * min(max(promised), 10.0 * abs(node.bound))
            if best is None or worth > best[0]:
                best = (worth, variable, value)
        if best is not None:
            return best[1], best[2]
        # All agree: a decision that is still open, and what the best prices say of it.
        closed = set(node.closed)
        left = np.array([sum((v, k) not in closed for k in range(len(d))) for v, d in enumerate(domains)])
        if not (left > 1).any():
            return None
        variable = int(np.where(left > 1, self._weight, -1.0).argmax())
        return variable, int(ascent.best.values[variable])
