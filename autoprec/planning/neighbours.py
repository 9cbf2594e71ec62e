"""Evaluations of choices that differ in a few decisions, in the time that the few decisions take.

`Neighbours` keeps what each part of a step costs under one choice. For another choice only the parts that read a
changed decision are simulated again, by the evaluator's own code; bytes are summed as differences, and relative
gradient variance, which is linear in the roundings, goes through a matrix (gradient nodes by weights) made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoprec.planning.evaluator import Step, judged
from autoprec.planning.solutions import Choice, Evaluation
from autoprec.planning.values import Problem

__all__ = ["Neighbours"]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one unit, tensor or GEMM costs: seconds, bytes kept for backward, and the bytes held in each phase, as
    differences from the phase before."""

    seconds: float
    saved: int
    change: tuple[tuple[int, int], ...]


_Key = tuple[str, int]


class Neighbours:
    """Evaluates choices near `choice`; `move` makes another one the centre."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self._problem = problem
        self._readers, self._storing = _readers(problem)
        self._gain, self._saver_gain = _gains(problem)
        self._row_of = {k: r for r, row in enumerate(problem.rows) for k in row.gemms}
        self._nothing = [0.0] * problem.variances
        self.move(choice)

    def move(self, choice: Choice) -> None:
        """Simulate every part under a new centre."""
        p = self._problem
        self._choice = choice
        step = Step(p, choice)
        step.constant()
        self._seconds, self._saved = step.seconds, step.saved
        change = np.zeros(p.phases + 1, np.int64)
        for phase, size in _differences(step):
            change[phase] += size
        kinds = (
            ("unit", len(p.units)),
            ("tensor", len(p.tensors)),
            ("gemm", len(p.gemms)),
            ("ours", len(p.replacements)),
        )
        self._parts = {(kind, i): self._part(step, (kind, i)) for kind, n in kinds for i in range(n)}
        for part in self._parts.values():
            self._seconds += part.seconds
            self._saved += part.saved
            for phase, size in part.change:
                change[phase] += size
        self._change = change
        self._loss = [step.loss_noise(t) for t in p.tensors]
        self._own = [step.weight_noise(gemm, self._nothing) for gemm in p.gemms]
        self._rounding = [step.rounding(node) for node in p.nodes]
        self._rows = np.array(step.rows())

    def _part(self, step: Step, key: _Key) -> _Part:
        step.clear()
        kind, i = key
        if kind == "unit":
            step.unit(i)
        elif kind == "tensor":
            step.tensor(i)
        elif kind == "gemm":
            step.backward(self._problem.gemms[i])
        else:
            step.replacement(self._problem.replacements[i])
        return _Part(step.seconds, step.saved, tuple(_differences(step)))

    def evaluate(self, choice: Choice) -> Evaluation:
        """What `evaluate` says of the choice, up to the order of sums."""
        p, before = self._problem, self._choice
        units = [i for i, (a, b) in enumerate(zip(choice.options, before.options, strict=True)) if a != b]
        touched = {key for u in units for key in self._readers[u]}
        touched |= {key for t, _ in choice.stored ^ before.stored for key in self._storing[t]}
        step, centre = Step(p, choice), Step(p, before)
        seconds, saved, change, rows = self._seconds, self._saved, self._change.copy(), self._rows.copy()
        loss = sum(self._loss)
        for kind, i in touched:
            if kind == "node":
                rows += self._gain[i] * (step.rounding(p.nodes[i]) - self._rounding[i])
                continue
            if kind == "savers":
                for gain, saver in zip(self._saver_gain[i], p.tensors[i].others, strict=True):
                    rows += gain * (step.saver_noise(i, saver) - centre.saver_noise(i, saver))
                continue
            if kind == "noise":
                if (row := self._row_of.get(i)) is not None:
                    rows[row] += step.weight_noise(p.gemms[i], self._nothing) - self._own[i]
                continue
            old, new = self._parts[kind, i], self._part(step, (kind, i))
            seconds += new.seconds - old.seconds
            saved += new.saved - old.saved
            for phase, size in new.change:
                change[phase] += size
            for phase, size in old.change:
                change[phase] -= size
            if kind == "tensor":
                loss += step.loss_noise(p.tensors[i]) - self._loss[i]
        bytes_at = (p.fixed_bytes + np.cumsum(change[:-1])).tolist()
        return judged(p, choice, seconds, saved, bytes_at, max(loss, 0.0), np.maximum(rows, 0.0).tolist())


def _differences(step: Step) -> list[tuple[int, int]]:
    found = []
    for _, first, last, size in step.held:
        found += [(first, size), (last + 1, -size)]
    return found


def _readers(problem: Problem) -> tuple[list[set[_Key]], list[set[_Key]]]:
    """For each unit, and for each tensor's storage, what reads the decision: parts, nodes, and the noise of GEMMs."""
    by_unit: list[set[_Key]] = [{("unit", i)} for i in range(len(problem.units))]
    by_tensor: list[set[_Key]] = [{("tensor", i)} for i in range(len(problem.tensors))]

    def reads(unit: int | None, *keys: _Key) -> None:
        if unit is not None:
            by_unit[unit].update(keys)

    for i, t in enumerate(problem.tensors):
        if t.others:
            by_tensor[i].add(("savers", i))
        if t.part_of is not None:
            by_tensor[t.part_of].add(("tensor", i))
        if (opened := problem.opened(t)) is not None:
            for unit in (opened.unit, *(u for step in opened.steps for u, _ in step)):
                reads(unit, ("tensor", i))
            if opened.later is not None:
                by_tensor[opened.later].add(("tensor", i))
        copied = (use.copied for use in t.savers)
        others = (use.instead[0] for use in t.gradient_readers if use.instead is not None)
        for unit in (t.born, *(use.unit for use in (*t.readers, *t.savers)), *copied, *others):
            reads(unit, ("tensor", i))
        for unit in (t.stored_by[1], *(saver.unit for saver in t.others)):
            reads(unit, ("tensor", i))
    for k, gemm in enumerate(problem.gemms):
        for unit in (gemm.output, gemm.grad_input, gemm.grad_weight):
            reads(unit, ("gemm", k), ("noise", k))
        again = [("gemm", k)] if problem.tensors[gemm.x].remaking is not None else []
        reads(problem.tensors[gemm.x].born, ("noise", k), *again)
        for unit in (unit for step in problem.remade_for(gemm)[1] for unit, _ in step):
            reads(unit, ("gemm", k))
        by_tensor[gemm.x] |= {("gemm", k), ("noise", k)}
    for i, noise in problem.inherited.items():
        t = problem.tensors[i]
        for source, _, _ in noise:
            by_tensor[source] |= {("noise", k) for k in t.gemms} | ({("savers", i)} if t.others else set())
    for n, node in enumerate(problem.nodes):
        for unit in node.units:
            reads(unit, ("node", n))
    for k, ours in enumerate(problem.replacements):
        reads(ours.unit, ("ours", k))
        for number in ours.tensors:
            by_tensor[number].add(("ours", k))
    return by_unit, by_tensor


_Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def _gains(problem: Problem) -> tuple[_Matrix, dict[int, list[Any]]]:
    """By node and row: what one unit of relative variance, added where the node passes a gradient on, adds to the row.
    And, by tensor, the same for what each of its savers adds.

    The adjoint of `Step.rows`: its steps in the opposite order.
    """
    reach = np.zeros((problem.variances, len(problem.rows)))
    for r, row in enumerate(problem.rows):
        for k, energy in problem.reaching(row):
            reach[k, r] += energy
    gain = np.zeros((len(problem.nodes), len(problem.rows)))
    by_saver: dict[int, dict[int, Any]] = {t: {} for t in problem.storable}
    for n, node in enumerate(problem.nodes):
        for t, saver in problem.savers_at.get(node.moment, ()):
            by_saver[t][id(saver)] = sum((share * reach[k] for k, share in saver.reached), np.zeros(len(problem.rows)))
        for k, share in node.inputs:
            gain[n] += share * reach[k]
        for k, share in node.outputs:
            reach[k] += share * gain[n]
    nothing = np.zeros(len(problem.rows))
    return gain, {t: [found.get(id(s), nothing) for s in problem.tensors[t].others] for t, found in by_saver.items()}
