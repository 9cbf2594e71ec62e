"""Relative gradient variance as a sparse linear system: what enters at each place, and what arrives at each row.

The places are the gradient nodes, in their order, and then the savers of tensors that may be kept narrow. The system is
that of `Step.rows`: triangular, because variance flows from the end of the graph to its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array
from scipy.sparse.linalg import splu

from autoprec.planning.codes import result_of
from autoprec.planning.values import Problem

__all__ = ["Propagation", "worst_variances"]

_Floats = npt.NDArray[np.float64]


class Propagation:
    """Variances of a problem, solved forth and back in the time of its edges.

    A variance that still grows after a node read it (as `Step.rows` goes) is another unknown from then on.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._saver: dict[tuple[int, int], int] = {}
        for t in problem.storable:
            for k in range(len(problem.tensors[t].others)):
                self._saver[t, k] = len(problem.nodes) + len(self._saver)
        self.places = len(problem.nodes) + len(self._saver)
        number = {id(s): self._saver[t, k] for t in problem.storable for k, s in enumerate(problem.tensors[t].others)}
        rows: list[int] = []
        columns: list[int] = []
        shares: list[float] = []
        enters: tuple[list[int], list[int], list[float]] = ([], [], [])
        growing: dict[int, list[tuple[bool, int, float]]] = {}
        closed: dict[int, int] = {}
        self._unknowns = 0

        def new(terms: list[tuple[bool, int, float]]) -> int:
            """An unknown: a sum of shares of others (True) and of what enters at places (False)."""
            for inner, index, share in terms:
                if inner:
                    rows.append(self._unknowns)
                    columns.append(index)
                    shares.append(-share)
                else:
                    enters[0].append(self._unknowns)
                    enters[1].append(index)
                    enters[2].append(share)
            self._unknowns += 1
            return self._unknowns - 1

        def read(k: int) -> int | None:
            """The unknown of a variance as it is now."""
            if k in growing:
                before = [(True, closed[k], 1.0)] if k in closed else []
                closed[k] = new(before + growing.pop(k))
            return closed.get(k)

        for n in range(len(problem.nodes) - 1, -1, -1):
            node = problem.nodes[n]
            arriving = [(unknown, share) for k, share in node.outputs if (unknown := read(k)) is not None]
            passed = new([(False, n, 1.0)] + [(True, unknown, share) for unknown, share in arriving])
            for k, share in node.inputs:
                growing.setdefault(k, []).append((True, passed, share))
            for _, saver in problem.savers_at.get(node.moment, ()):
                for k, share in saver.reached:
                    growing.setdefault(k, []).append((False, number[id(saver)], share))
        ups: tuple[list[int], list[int], list[float]] = ([], [], [])
        for r, row in enumerate(problem.rows):
            for k, energy in problem.reaching(row):
                unknown = read(k)
                if unknown is not None and energy:
                    ups[0].append(r)
                    ups[1].append(unknown)
                    ups[2].append(energy / row.limit)
        size = self._unknowns
        diagonal = list(range(size))
        system = csc_array((shares + [1.0] * size, (rows + diagonal, columns + diagonal)), shape=(size, size))
        self._enter = csc_array((enters[2], (enters[0], enters[1])), shape=(size, self.places)).tocsr()
        self._up = csc_array((ups[2], (ups[0], ups[1])), shape=(len(problem.rows), size)).tocsr()
        self._enter_back, self._up_back = self._enter.T.tocsr(), self._up.T.tocsr()
        options = {"Equil": False, "SymmetricMode": False}
        self._solver: Any = None
        if size:
            self._solver = splu(system, permc_spec="NATURAL", diag_pivot_thresh=0.0, options=options)

    def saver(self, tensor: int, index: int) -> int:
        """The place of one of a tensor's `others`."""
        return self._saver[tensor, index]

    def rows(self, entering: _Floats) -> _Floats:
        """What comes from above to each row, as a share of its limit, for variance that enters at each place."""
        if self._solver is None:
            return np.zeros(len(self._problem.rows))
        return np.asarray(self._up @ self._solver.solve(np.asarray(self._enter @ entering)))

    def prices(self, rows: _Floats) -> _Floats:
        """What variance costs where it enters, for prices of the rows: the transposed system."""
        if self._solver is None:
            return np.zeros(self.places)
        return np.asarray(self._enter_back @ self._solver.solve(np.asarray(self._up_back @ rows), trans="T"))


def worst_variances(problem: Problem) -> list[float]:
    """Relative gradient variances if every rounding that may happen did."""
    worst = [0.0] * problem.variances
    for node in reversed(problem.nodes):
        possible = {f for u in node.units for v in (u, result_of(u)) for f in problem.formats_of(v)}
        passed = sum(relative for f, relative in node.local if f in possible)
        passed += sum(share * worst[k] for k, share in node.outputs)
        for k, share in node.inputs:
            worst[k] += share * passed
        for t, saver in problem.savers_at.get(node.moment, ()):
            most = max((relative for _, relative in saver.noise), default=0.0)
            most += sum(_largest_by_source(problem.inherited.get(t, ())))
            for k, share in saver.reached:
                worst[k] += share * most
    return worst


def _largest_by_source(noise: Iterable[tuple[int, str, float]]) -> Iterable[float]:
    largest: dict[int, float] = {}
    for source, _, relative in noise:
        largest[source] = max(largest.get(source, 0.0), relative)
    return largest.values()
