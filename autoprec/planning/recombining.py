"""From assignments that reach the bound, but break limits, to a feasible one near it.

Two assignments differ in islands: decisions that no table connects across the rest. Each island can be taken or left on
its own, so it is an item with an objective and a use of each limit, and so is the change of a single decision. Which
items to take is a small integer program; what it proposes is summed up exactly, and a limit that it broke unseen is in
the next program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array, hstack, identity, vstack
from scipy.sparse.csgraph import connected_components

from autoprec.planning.evaluator import TERTIARY
from autoprec.planning.relaxation import Limit, Prices, Relaxation

#: Objectives in a program are relative, times this, so that its absolute tolerances are harmless.
_SCALE = 1e4

__all__ = ["Items", "flips", "islands", "joined", "take"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """Changes of an assignment.

    Attributes:
        changes: (item, variable, new value), three arrays.
        entries: by group, (item, table, new entry) for each table that a change touches.
        count: how many items there are.
    """

    changes: tuple[_Ints, _Ints, _Ints]
    entries: tuple[tuple[_Ints, _Ints, _Ints], ...]
    count: int

    def only(self, kept: npt.NDArray[np.bool_]) -> Items:
        """Some of the items, numbered anew."""
        number = np.cumsum(kept) - 1

        def some(triple: tuple[_Ints, _Ints, _Ints]) -> tuple[_Ints, _Ints, _Ints]:
            mine = kept[triple[0]]
            return number[triple[0][mine]], triple[1][mine], triple[2][mine]

        return Items(some(self.changes), tuple(some(t) for t in self.entries), int(kept.sum()))

    def applied(self, values: _Ints, taken: npt.NDArray[np.bool_]) -> _Ints:
        """The assignment with some items taken."""
        item, variable, value = self.changes
        mine = taken[item]
        found = values.copy()
        found[variable[mine]] = value[mine]
        return found


def joined(items: Sequence[Items]) -> Items:
    """All items of several collections, each change once: the same islands are between many assignments, and would
    crowd out the others where only the best are weighed."""
    starts = np.cumsum([0, *(i.count for i in items)])

    def together(triples: Sequence[tuple[_Ints, _Ints, _Ints]]) -> tuple[_Ints, _Ints, _Ints]:
        number = np.concatenate([t[0] + start for t, start in zip(triples, starts, strict=False)])
        return number, np.concatenate([t[1] for t in triples]), np.concatenate([t[2] for t in triples])

    groups = range(len(items[0].entries))
    found = Items(
        together([i.changes for i in items]),
        tuple(together([i.entries[k] for i in items]) for k in groups),
        int(starts[-1]),
    )
    return found.only(_first_of_equals(found))


def _first_of_equals(items: Items) -> npt.NDArray[np.bool_]:
    """Items that change something else than every item before them, told by a sum of a random word for each change: of
    two that share it by chance, one is left out, which costs a possibility and breaks nothing."""
    item, variable, value = items.changes
    shape = (int(variable.max(initial=-1)) + 1, int(value.max(initial=-1)) + 1)
    words = np.random.default_rng(0).integers(0, 2**63, shape, np.uint64)
    names = np.zeros(items.count, np.uint64)
    np.add.at(names, item, words[variable, value])
    first = np.zeros(items.count, np.bool_)
    first[np.unique(names, return_index=True)[1]] = True
    return first


def islands(relaxation: Relaxation, here: _Ints, there: _Ints) -> Items:
    """The islands in which an assignment differs from another one."""
    different = here != there
    pairs: list[tuple[_Ints, _Ints]] = []
    touched: list[tuple[_Ints, _Ints]] = []
    for g in relaxation.groups:
        if not g.shape:
            touched.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
            continue
        mine = different[g.scopes]
        rows = np.flatnonzero(mine.any(axis=1))
        first = g.scopes[rows, mine[rows].argmax(axis=1)]
        touched.append((rows, first))
        row, axis = np.nonzero(mine[rows])
        pairs.append((first[row], g.scopes[rows][row, axis]))
    size = len(here)
    a = np.concatenate([a for a, _ in pairs] or [np.zeros(0, np.int64)])
    b = np.concatenate([b for _, b in pairs] or [np.zeros(0, np.int64)])
    graph = coo_array((np.ones(len(a)), (a, b)), shape=(size, size))
    _, label = connected_components(graph, directed=False)
    variables = np.flatnonzero(different)
    names, number = np.unique(label[variables], return_inverse=True)
    of = np.full(size, -1)
    of[variables] = number.reshape(-1)
    entries = []
    for g, (rows, first) in zip(relaxation.groups, touched, strict=True):
        entries.append((of[first], rows, g.entry(there)[rows]))
    return Items((of[variables], variables, there[variables]), tuple(entries), len(names))


def flips(relaxation: Relaxation, here: _Ints) -> Items:
    """Every change of one decision."""
    sizes = np.array([len(d) for d in relaxation.decisions.domains], np.int64)
    start = np.cumsum(sizes - 1) - (sizes - 1)
    variable = np.repeat(np.arange(len(sizes)), sizes - 1)
    count = len(variable)
    shift = np.arange(count) - start[variable] + 1
    entries = []
    for g in relaxation.groups:
        entry, stride = g.entry(here), 1
        found: list[tuple[_Ints, _Ints, _Ints]] = []
        rows = np.arange(len(g.scopes))
        for axis in range(len(g.shape) - 1, -1, -1):
            size, mine = g.shape[axis], g.scopes[:, axis]
            for k in range(1, size):
                changed = entry + ((here[mine] + k) % size - here[mine]) * stride
                found.append((start[mine] + k - 1, rows, changed))
            stride *= size
        none = np.zeros(0, np.int64)
        entries.append(
            (
                np.concatenate([f[0] for f in found] or [none]),
                np.concatenate([f[1] for f in found] or [none]),
                np.concatenate([f[2] for f in found] or [none]),
            )
        )
    return Items((np.arange(count), variable, (here[variable] + shift) % sizes[variable]), tuple(entries), count)


def effects(relaxation: Relaxation, here: _Ints, items: Items, limits: Sequence[Limit]) -> tuple[_Floats, _Floats]:
    """What each item adds to the objective [items], and to the use of each limit [limits, items]."""
    objective, uses = np.zeros(items.count), np.zeros((len(limits), items.count))
    rows = [(k, limit.place) for k, limit in enumerate(limits) if limit.kind == "row"]
    worth = [relaxation.row_prices(place) for _, place in rows]
    second = relaxation.row_prices(None) * TERTIARY
    for g, (item, table, new) in zip(relaxation.groups, items.entries, strict=True):
        if not len(item):
            continue
        old = g.entry(here)[table]
        objective += np.bincount(item, g.base[table, new] - g.base[table, old], items.count)
        for k, limit in enumerate(limits):
            if limit.kind == "loss" and g.loss is not None:
                uses[k] += np.bincount(item, g.loss[table, new] - g.loss[table, old], items.count)
            if limit.kind == "phase":
                more = relaxation.share(g, table, new, limit.place) - relaxation.share(g, table, old, limit.place)
                uses[k] += np.bincount(item, more, items.count)
        if g.noise is not None:
            more = g.noise.amount[table, new] - g.noise.amount[table, old]
            for k, place in rows:
                mine = g.noise.place[table] == place
                uses[k] += np.bincount(item[mine], more[mine], items.count)
        if g.rounding is not None:
            more = g.rounding.amount[table, new] - g.rounding.amount[table, old]
            at = g.rounding.place[table]
            objective += np.bincount(item, more * second[at], items.count)
            for (k, _), gain in zip(rows, worth, strict=True):
                uses[k] += np.bincount(item, more * gain[at], items.count)
    return objective, uses


def forbidden(relaxation: Relaxation, items: Items) -> npt.NDArray[np.bool_]:
    """Items that no limit allows, whatever the rest is."""
    found = np.zeros(items.count, np.bool_)
    for g, (item, table, new) in zip(relaxation.groups, items.entries, strict=True):
        found[item[relaxation.forbidden(g, table, new)]] = True
    return found


def take(
    relaxation: Relaxation, here: _Ints, items: Items, prices: Prices, limits: dict[Limit, float], *, most: int,
    nodes: int, enough: float,
) -> _Ints:  # fmt: skip
    """The assignment with the best items taken: those of the best priced value, at most `most`, are weighed by an
    integer program of at most `nodes` nodes, to the share `enough` of the objective. Limits that are broken may stay
    so, but that is dear."""
    totals = relaxation.totals(here)
    objective, uses = effects(relaxation, here, items, list(limits))
    price = np.array([prices.get(limit, 0.0) for limit in limits])
    over = np.array([relaxation.over(totals, limit) + margin for limit, margin in limits.items()])
    scale = abs(totals.objective)
    value = objective + (price[:, None] * uses).sum(axis=0)
    # What eases a limit that is broken without a price is worth something, too.
    broken = (over > 0.0) & (price == 0.0)
    value = value - np.where(broken[:, None], scale * np.maximum(-uses, 0.0), 0.0).sum(axis=0)
    helps = (objective < 0.0) | (uses < 0.0).any(axis=0)  # what saves nothing is no part of an exchange
    order = np.flatnonzero(helps & ~forbidden(relaxation, items))
    order = order[np.argsort(value[order], kind="stable")][:most]
    if not len(order):
        return here
    kept = np.zeros(items.count, np.bool_)
    kept[order] = True
    few = items.only(kept)
    objective, uses = objective[kept], uses[:, kept]
    penalty = 10.0 * price + scale
    binding = len(limits)
    use = hstack([csr_array(uses), -identity(binding, format="csr")]) if binding else csr_array((0, few.count))
    clash = _clashes(few)
    pad = csr_array((clash.shape[0], binding))
    matrix = csr_array(vstack([use, hstack([clash, pad])])) if binding else clash
    upper = np.concatenate([-over, np.ones(clash.shape[0])])
    taken = _solve(
        np.concatenate([objective, penalty]) / (scale or 1.0),
        matrix,
        upper,
        np.concatenate([np.ones(few.count), np.maximum(over, 0.0)]),
        few.count,
        enough=enough,
        nodes=nodes,
    )
    return here if taken is None else few.applied(here, taken)


def _solve(
    cost: _Floats, matrix: csr_array, upper: _Floats, most: _Floats, binaries: int, *, enough: float, nodes: int
) -> npt.NDArray[np.bool_] | None:
    """Binaries of the least cost within `enough`, or of the best that so many nodes find; None if they find nothing.
    HiGHS on one thread, so that the answer does not depend on how many there are."""
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "threads": 1, "parallel": "off", "mip_max_nodes": nodes, "mip_rel_gap": 0.0,
               "mip_abs_gap": max(enough * _SCALE, 1e-6)}  # fmt: skip
    for name, value in options.items():
        solver.setOptionValue(name, value)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), len(upper)
    model.col_cost_ = cost * _SCALE
    model.col_lower_, model.col_upper_ = np.zeros(len(cost)), most
    model.row_lower_, model.row_upper_ = np.full(len(upper), -np.inf), upper
    columns = matrix.tocsc()
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = (
        columns.indptr, columns.indices, columns.data,
    )  # fmt: skip
    model.integrality_ = [highspy.HighsVarType(int(k < binaries)) for k in range(len(cost))]
    solver.passModel(model)
    solver.run()
    if not solver.getSolution().value_valid:
        return None
    return np.asarray(solver.getSolution().col_value, np.float64)[:binaries] > 0.5


def _clashes(items: Items) -> csr_array:
    """One row for each table that several items touch (once for each pattern): at most one of them is taken."""
    rows, columns, count = [], [], 0
    for item, table, _ in items.entries:
        pairs = np.unique(np.column_stack((table, item)), axis=0)
        if not len(pairs):
            continue
        tables, which, many = np.unique(pairs[:, 0], return_inverse=True, return_counts=True)
        shared = many[which.reshape(-1)] > 1
        number = np.cumsum(many > 1) - 1
        rows.append(number[which.reshape(-1)][shared] + count)
        columns.append(pairs[:, 1][shared])
        count += int((many > 1).sum())
    row = np.concatenate(rows or [np.zeros(0, np.int64)])
    column = np.concatenate(columns or [np.zeros(0, np.int64)])
    return csr_array((np.ones(len(row)), (row, column)), shape=(count, items.count))
