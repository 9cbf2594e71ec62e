"""The integer program of a `Problem`: variables, rows, objective. Solves nothing, evaluates nothing.

Binaries: y[unit, format] and s[tensor, narrow storage]. All other variables are continuous, bounded below by rows and
made small by the objective and by the rows that limit them, so they are exact wherever the binaries are integral:

    c[t, f→g] ≥ …         one cast per (root, target); q likewise for what a GEMM's backward casts and reads
    r[t, f] ≥ y           rounding events of the loss
    a[o, f], b[o, f]      rounding of a GEMM's input and of the gradient that arrives; l[o, f] in passing gradients on
    v[k]                  relative gradient variance
    k[t, f] ≥ y − Σ s     copies kept for backward
    live[t, f, τ] ≥ …     only for phases that are asked for (`Program.bytes_at`)

Everything is relative (seconds to the FP32 total, noise to its limit, bytes to the budget) and the objective is
multiplied by 10⁴, so that the solver's absolute tolerances (10⁻⁶) are harmless.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autoprec.formats import is_scaled, result_format
from autoprec.graphs import Role
from autoprec.planning.backward_rows import Cast, CopyHeld, Operand, backward_of, most_of, plain_product
from autoprec.planning.codes import bytes_of, copy_of, other_operand_of, result_of, rounds_again
from autoprec.planning.evaluator import SECONDARY, TERTIARY
from autoprec.planning.holding import Holding
from autoprec.planning.linear import Linear
from autoprec.planning.liveness import Demand, demands, kept_copies
from autoprec.planning.propagation import worst_variances
from autoprec.planning.solutions import Choice
from autoprec.planning.uses import Replacement
from autoprec.planning.values import Gemm, PlanTensor, Problem, Unit
from autoprec.plans import RECOMPUTED

__all__ = ["OBJECTIVE_SCALE", "Program"]

OBJECTIVE_SCALE = 1e4

#: A coefficient beyond this many limits forbids its option as surely as the true one, and is kinder to the solver.
_CAP = 2.0


_DemandKey = tuple[Any, ...]


class Program(Holding):
    """The program of a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._live: dict[_DemandKey, dict[str, Linear]] = {}
        self.workspace: dict[int, list[CopyHeld]] = {}
        self.remade: dict[int, dict[str, Linear]] = {}
        self._of_sources: dict[int, list[tuple[Linear, float]]] = {}
        #: By GEMM, of the operands of its two products in the order in which they are cast.
        self.of_gemm: dict[int, tuple[list[Operand], list[Operand]]] = {}
        self.result_casts: dict[int, dict[tuple[str, str], Linear]] = {}
        primary, secondary = OBJECTIVE_SCALE, OBJECTIVE_SCALE * SECONDARY
        time, space = (primary, secondary) if problem.objective == "time" else (secondary, primary)
        self._second, self._byte = time / problem.seconds_scale, space / problem.bytes_scale
        self._noise = OBJECTIVE_SCALE * TERTIARY
        self.offset = self._second * problem.constant_seconds + self._byte * sum(
            size for moment, kept_from, size in problem.private if kept_from == moment
        )
        self.y += [[self.variable(self._option_cost(u, k), binary=True) for k in range(len(u.options))]
                   for u in problem.units]  # fmt: skip
        self.s = {(t, f): self.variable(0.0, binary=True) for t in problem.storable
                  for f in problem.tensors[t].storages}  # fmt: skip
        self.stored = {t: self._any_storage(t) for t in problem.storable}
        self._worst = _largest_variances(problem)
        self.v = [self.variable(0.0) for _ in self._worst]
        for unit in self.y:
            self.row({k: 1.0 for k in unit}, 1.0)
            self.row({k: -1.0 for k in unit}, -1.0)
        self._ties()
        self._tensors()
        for gemm in problem.gemms:
            self._gemm_casts(gemm)
        for ours in problem.replacements:
            self._replacement(ours)
        self._loss_row()
        self._variances()
        self._weight_rows()

    def _any_storage(self, tensor: int) -> Linear:
        """1 if the tensor is kept in a narrow format; at most one of them."""
        total = Linear()
        for f in self.problem.tensors[tensor].storages:
            total.add(self.s[tensor, f])
        if len(total.terms) > 1:
            self.at_most(total, 1.0)
        return total

    def _option_cost(self, unit: Unit, k: int) -> float:
        kept = unit.kept[k] if unit.kept and unit.kept_from is None else 0
        return self._second * unit.seconds[k] + self._byte * kept

    def _one_of(self, binary: int, unit: int | None, seconds: dict[str, float]) -> dict[str, Linear]:
        """By format: 1 if the binary is 1 and the unit has the format; costs seconds."""
        found = {}
        short = Linear().add(binary)
        for f, cost in seconds.items():
            both = self.variable(self._second * cost)
            self.at_most(Linear().add(both).add(self.is_in(unit, f), -1.0), 0.0)
            found[f] = Linear().add(both)
            short.add(both, -1.0)
        self.at_most(short, 0.0)
        return found

    # Parts

    def _ties(self) -> None:
        for a, b in self.problem.ties:
            for f in self.problem.units[a].options:
                same = Linear().add(self.is_in(a, f)).add(self.is_in(b, f), -1.0)
                self.at_most(same, 0.0)

    def _casts_to(
        self,
        source: int | None,
        targets: list[int | None],
        numel: int,
        *,
        back: bool,
        runs: int = 1,
        spared: Linear | None = None,
    ) -> list[Cast]:
        """Casts shared by all targets that read the same format: Σ_f c[f→g] ≥ y[target, g] − y[source, g]."""
        p, casts = self.problem, list[Cast]()
        source, targets = self._plain(source), [*map(self._plain, targets)]
        others = [t for t in dict.fromkeys(targets) if t != source]
        for g in dict.fromkeys(f for t in others for f in self.formats(t)):
            made = []
            for f in self.formats(source):
                if f == g:
                    continue
                seconds = runs * p.cast_seconds(f, g, numel) + (p.cast_seconds(g, f, numel) if back else 0.0)
                c = self.variable(self._second * seconds)
                self.at_most(Linear().add(c).add(self.is_in(source, f), -1.0), 0.0)
                made.append(c)
            if not made:
                continue
            total = Linear()
            for c in made:
                total.add(c)
            for t in others:
                need = Linear().add(self.is_in(t, g)).add(self.is_in(source, g), -1.0)
                if spared is not None:
                    need.add(spared, -1.0)
                self.at_most(need.add(total, -1.0), 0.0)
            casts.append(Cast(total, g, numel))
        return casts

    def _tensors(self) -> None:
        p = self.problem
        for i, t in enumerate(p.tensors):
            reading = [result_of(use.unit) for use in t.readers if not use.part]
            self._casts_to(result_of(t.born), reading, t.numel, back=t.casts_back, runs=t.runs)
            self._narrow_operands(t)
            spared = self.stored.get(i if t.part_of is None else t.part_of)
            keeping, ways = kept_copies(t, [use for use in t.savers if use.kept_from is None])
            units = (*keeping, *(u for way in ways for u in way.groups[0]))
            costs = {f: self._byte * t.bytes_in(f) for f in dict.fromkeys(f for u in units for f in self.formats(u))}
            self.held(Demand(tensor=i, unless_stored=keeping, ways=ways), spared, costs)
            for storage in t.storages:
                self._store(t, storage, self.s[i, storage])
            if t.in_parts or (t.part_of is not None and t.keepers):
                whole = i if t.part_of is None else t.part_of
                for storage in p.tensors[whole].storages:
                    self._keep_narrow(t, storage, self.s[whole, storage])

    def _narrow_operands(self, t: PlanTensor) -> None:
        """Copies for products in formats with a scale, made of those that the products are given."""
        readers = list(dict.fromkeys(use.unit for use in t.readers if not use.part))
        for f in dict.fromkeys(f for unit in readers for f in self.formats(unit) if is_scaled(f)):
            seconds = t.runs * self.problem.cast_seconds(result_format(f), f, t.numel)
            self.any_of([self.is_in(unit, f) for unit in readers], self._second * seconds)

    def _store(self, t: PlanTensor, storage: str, binary: int) -> None:
        """Bytes of a narrow copy, seconds of making it, and of reading it by all but GEMMs."""
        p = self.problem
        copied = 0 if t.in_parts else t.stored_bytes(storage)
        self.cost[binary] += self._byte * (copied + len(t.masks) * t.mask_bytes)
        if t.remaking is not None and storage == RECOMPUTED:
            seconds, (first, last) = dict(t.remaking.seconds), p.made_again(t)
            made = self._one_of(binary, result_of(t.born), {f: seconds[f] for f in self.formats(result_of(t.born))})
            held = [(expression, t.numel * bytes_of(f)) for f, expression in made.items()]
            for phase in range(p.phase(first), 2 * last):
                self.workspace.setdefault(phase, []).extend(held)
            self.remade[self.problem.tensor_index[t.id]] = made
            self._open(t, binary)
        elif not t.in_parts:
            maker = copy_of(t.stored_by[1])
            self._one_of(binary, maker, {f: p.cast_seconds(f, storage, t.numel) for f in self.formats(maker)})
        for saver in t.others:
            read = self._read(binary, storage, copy_of(saver.unit), saver.numel)
            if not saver.in_pieces:
                self.workspace.setdefault(p.phase(p.backward(saver.moment)), []).extend(cast.held for cast in read)

    def _open(self, t: PlanTensor, binary: int) -> None:
        """`Step.open`."""
        if (opened := self.problem.opened(t)) is None or not opened.steps:
            return
        other = self.bytes_in(result_of(opened.unit))
        counted = Linear().add(other, opened.numel)
        if opened.later in self.stored:
            unless = self.variable(0.0, upper=4.0)  # bytes of an element, unless the later one is stored
            self.at_least(unless, Linear().add(other).add(self.stored[opened.later], -4.0))
            counted.add(other, opened.later_numel).add(unless, -opened.later_numel)
        most = most_of(opened.steps)
        more = self.variable(0.0)  # a share of the most that it may be
        for step in opened.steps:
            beyond = self.bytes_of(step).add(counted, -1.0).add(Linear(-most)).add(binary, most)
            self.at_least(more, Linear().add(beyond, 1.0 / most))
        self.workspace.setdefault(opened.phase, []).append((Linear().add(more), most))

    def _replacement(self, ours: Replacement) -> None:
        """1 where the op is in FP32 and keeps one of the tensors narrow."""
        narrow, wide, runs = Linear(), self.is_in(copy_of(ours.unit), "fp32"), self.variable(-self._byte * ours.spared)
        for t in ours.tensors:
            narrow.add(self.stored[t])
            self.at_least(runs, Linear(-1.0).add(self.stored[t]).add(wide))
        for most in (narrow, wide):
            self.at_most(Linear().add(runs).add(most, -1.0), 0.0)
        for _, first, last, more in self.problem.held_more(ours):
            for phase in range(first, last + 1):
                self.workspace.setdefault(phase, []).append((Linear().add(runs), more))

    def _keep_narrow(self, t: PlanTensor, storage: str, binary: int) -> None:
        """`Step.keep_narrow`."""
        if storage == RECOMPUTED:
            return
        p, born, part, size = self.problem, result_of(t.born), t.part_of is not None, t.stored_bytes(storage)
        read = [(use.moment, copy_of(use.unit), use.part or part) for use in t.keepers]
        for f in dict.fromkeys(f for unit in ([u for _, u, _ in read] if part else [born]) for f in self.formats(unit)):
            cases = list[tuple[int, Linear]]()
            for moment, unit, told in sorted(read, key=lambda keeper: keeper[0]):
                case = Linear(-1.0).add(binary).add(self.is_in(unit, f) if told else Linear(1.0))
                cases.append((moment, case.add(self.is_in(born, f), -1.0) if part else
                              case.add(self.is_in(born, f)).add(Linear(-1.0))))  # fmt: skip
            cost = self._byte * size + self._second * p.cast_seconds(f, storage, t.numel)
            there = {m: self.any_of([case for k, case in cases if k <= m], cost if m == cases[-1][0] else 0.0)
                     for m in dict.fromkeys(k for k, _ in cases)}  # fmt: skip
            for phase in range(p.phase(cases[0][0]), p.phase(p.backward(cases[0][0])) + 1):
                inside = [m for m in there if p.phase(m) <= phase <= p.phase(p.backward(m))]
                self.workspace.setdefault(phase, []).append((there[inside[-1]], float(size)))

    def _read(self, binary: int, storage: str, unit: int | None, numel: int) -> list[Cast]:
        """What reading a narrow copy in the unit's format costs, if it is there; what it makes."""
        formats = self.formats(unit)
        seconds = dict.fromkeys(formats, 0.0)  # of what is made again, those are counted where it is
        if storage != RECOMPUTED:
            seconds = {f: self.problem.cast_seconds(storage, f, numel) for f in formats}
        made = self._one_of(binary, unit, seconds).items()
        return [Cast(read, f, numel) for f, read in made if f != storage]

    def _gemm_casts(self, gemm: Gemm) -> None:
        p = self.problem
        of_input, of_weight = self.of_gemm[gemm.number] = ([], [])
        made, h, g = (result_of(u) for u in (gemm.output, gemm.grad_input, gemm.grad_weight))
        if gemm.has_grad_input:
            of_input.append((gemm.out_numel, self._casts_to(made, [h], gemm.out_numel, back=False)))
            self.result_casts[gemm.number] = self._result_casts(gemm)
        again = copy_of(other_operand_of(gemm.grad_input))
        for numel in [gemm.operands_numel] if gemm.operands_numel else [other for _, other in gemm.pairs]:
            of_input.append((numel, self._casts_to(copy_of(gemm.output), [again], numel, back=False)))
        if not gemm.has_grad_weight:
            return
        spared = self.stores(gemm)
        of_weight.append((gemm.out_numel, self._casts_to(made, [g], gemm.out_numel, back=False)))
        beside = copy_of(other_operand_of(gemm.grad_weight))
        numel = gemm.read_numel
        read = self._casts_to(copy_of(gemm.output), [beside], numel, back=False, spared=spared)
        of_weight.append((numel, read))
        if spared is not None:
            x = p.tensors[gemm.x]
            for storage in x.storages:
                binary = self.s[gemm.x, storage]
                if storage == RECOMPUTED:
                    other = Linear(1.0).add(binary, -1.0)
                    read += self._casts_to(result_of(x.born), [beside], numel, back=False, spared=other)
                else:
                    read += self._read(binary, storage, beside, numel)

    def _result_casts(self, gemm: Gemm) -> dict[tuple[str, str], Linear]:
        """The input's gradient, made in the grad_input format, goes back in the format in which the input was read: by
        both, 1 where it is cast."""
        found = dict[tuple[str, str], Linear]()
        makes, given = result_of(gemm.grad_input), result_of(gemm.output)
        for h in self.formats(makes):
            others = {f: self.problem.cast_seconds(h, f, gemm.x_numel) for f in self.formats(given) if f != h}
            need = Linear().add(self.is_in(makes, h)).add(self.is_in(given, h), -1.0)
            for f, seconds in others.items():
                cast = self.variable(self._second * seconds)
                for unit, its in ((given, f), (makes, h)):
                    self.at_most(Linear().add(cast).add(self.is_in(unit, its), -1.0), 0.0)
                found[h, f] = Linear().add(cast)
                need.add(cast, -1.0)
            if others:
                self.at_most(need, 0.0)
        return found

    def stores(self, gemm: Gemm) -> Linear | None:
        """1 if the GEMM's input is kept in a narrow format; None if that cannot be."""
        return self.stored[gemm.x] if gemm.number in self.problem.tensors[gemm.x].gemms else None

    def _loss_row(self) -> None:
        p = self.problem
        limit = p.loss_limit
        total = Linear()
        for t in p.tensors:
            for f, energy in t.loss_noise:
                born = self.is_in(result_of(t.born), f)
                cases = [self.is_in(u, f) for use in t.readers for u in (use.unit, result_of(use.unit))]
                if t.inherits:
                    cases = [Linear().add(c).add(born, -1.0) for c in cases]
                else:
                    cases.append(born)
                scaled = min(energy / limit, _CAP) if limit else 0.0
                event = self.any_of(cases, self._noise * energy / p.loss_scale)
                total.add(event, scaled)
        if limit is not None:
            self.at_most(total, 1.0)

    def _variances(self) -> None:
        """v[k] ≥ Σ share·(what arrives at the reader + its own rounding), each relative to its worst case."""
        total = [Linear() for _ in self.v]
        for node in self.problem.nodes:
            passed = Linear()
            for k, share in node.outputs:
                passed.add(self.v[k], share * self._worst[k])
            for f, relative in node.local:
                if relative > 0.0:
                    units = (*(node.units[1:] or node.units), *map(result_of, node.units))
                    passed.add(self.any_of([self.is_in(u, f) for u in units]), relative)
            for k, share in node.inputs:
                if self._worst[k] > 0.0:
                    total[k].add(passed, share / self._worst[k])
            for t, saver in self.problem.savers_at.get(node.moment, ()):
                for k, share in saver.reached:
                    if self._worst[k] > 0.0:
                        for f, relative in saver.noise:
                            total[k].add(self.s[t, f], share * relative / self._worst[k])
                        for event, relative in self._inherited(t):
                            total[k].add(event, share * relative / self._worst[k])
        own = set(self.v)
        for variable, expression in zip(self.v, total, strict=True):
            for k, factor in expression.terms.items():
                expression.terms[k] = factor if k in own else min(factor, _CAP)
            self.at_least(variable, expression)

    def _weight_rows(self) -> None:
        p = self.problem
        for row in p.rows:
            total = Linear()
            for v, energy in p.reaching(row):
                total.add(self.v[v], energy * self._worst[v] / row.limit)
            for k in row.gemms:
                gemm = p.gemms[k]
                made, g = result_of(gemm.output), gemm.grad_weight
                for f, energy in gemm.gradient_noise:
                    event = self.any_of([self.is_in(u, f) for u in (made, g, result_of(g))])
                    total.add(event, min(energy / row.limit, _CAP))
                self._operand_noise(gemm, total, row.limit)
            self.at_most(total, 1.0)
            self.charged(total, self._noise)

    def _operand_noise(self, gemm: Gemm, total: Linear, limit: float) -> None:
        """What rounding its input, and keeping it narrow, adds to a GEMM's weight gradient, as shares of the limit."""
        t, operand = self.problem.tensors[gemm.x], other_operand_of(gemm.grad_weight)
        units = (copy_of(gemm.output), result_of(gemm.output), operand, result_of(t.born))
        mine = gemm.number in t.gemms
        narrow = [f for f in t.storages if mine and f != RECOMPUTED]
        spared = Linear()
        for f in narrow:
            spared.add(self.s[gemm.x, f])
        read = self.copies({f: 0.0 for f, _ in gemm.x_noise}, (), units, spared if narrow else None)
        for f, energy in gemm.x_noise:
            total.add(read[f], min(energy / limit, _CAP))
            finer = [Linear(-1.0).add(self.s[gemm.x, kept]).add(self.is_in(operand, f))
                     for kept in narrow if rounds_again(kept, f)]  # fmt: skip
            total.add(self.any_of(finer), min(energy / limit, _CAP))
        if narrow:
            for f, energy in gemm.stored_noise:
                total.add(self.s[gemm.x, f], min(energy / limit, _CAP))
        for event, relative in self._inherited(gemm.x) if mine else ():
            total.add(event, min(gemm.x_energy * relative / limit, _CAP))

    def _inherited(self, tensor: int) -> list[tuple[Linear, float]]:
        """The terms of `Step.inherited`: 1 where they count, and how much."""
        if tensor not in self._of_sources:
            noise = self.problem.inherited.get(tensor, ())
            both = [Linear(-1.0).add(self.s[tensor, RECOMPUTED]).add(self.s[s, f]) for s, f, _ in noise]
            self._of_sources[tensor] = [(self.any_of([b]), v) for b, (_, _, v) in zip(both, noise, strict=True)]
        return self._of_sources[tensor]

    # Bytes

    def bytes_at(self, phase: int) -> Linear:
        """Bytes held in a phase, without the fixed ones."""
        p = self.problem
        total = Linear(float(sum(size for first, last, size in p.always_held() if first <= phase <= last)))
        for unit, options in zip(p.units, self.y, strict=True):
            here, then = p.phase(unit.moment), p.phase(p.backward(unit.moment))
            if unit.backward_workspace and then == phase:
                for k, size in zip(options, unit.backward_workspace, strict=True):
                    total.add(k, float(size))
            if unit.role is Role.OUTPUT and here == phase:
                for k, size in zip(options, unit.workspace, strict=True):
                    total.add(k, float(size))
            if unit.kept and (p.phase(unit.kept_from) if unit.kept_from else here) <= phase <= then:
                for k, size in zip(options, unit.kept, strict=True):
                    total.add(k, float(size))
        for gemm in p.gemms:
            if p.phase(p.backward(gemm.moment)) == phase:
                total.add(*self._larger_workspace(gemm))
            if gemm.summed is not None and p.phase(p.backward(gemm.summed[0])) == phase:
                total.add(plain_product(self, gemm), float(gemm.summed[1]))
        for expression, held in self.workspace.get(phase, ()):
            total.add(expression, float(held))
        for demand in demands(p, phase):
            for f, size in demand.stored:
                total.add(self.s[demand.tensor, f], float(size))
            stored = bool(demand.unless_stored) or any(way.unless_stored for way in demand.ways)
            key = (demand.sizes, demand.always, demand.unless_stored, demand.ways, demand.tensor if stored else -1)
            if key not in self._live:
                self._live[key] = self.held(demand, self.stored.get(demand.tensor))
            for f, size in demand.sizes:
                total.add(self._live[key][f], float(size))
        return total

    def _larger_workspace(self, gemm: Gemm) -> tuple[Linear, float]:
        """An expression, and the bytes that it is a share of: the largest of what is held in the backward pass."""
        phases, gone = backward_of(self, gemm)
        most = gone + max(sum(size for _, size in phase if size > 0.0) for phase in phases)
        larger = self.variable(0.0)  # where something is let go of it may be fewer than none
        for phase in phases if most else ():
            total = Linear(gone / most)
            for expression, size in phase:
                total.add(expression, size / most)
            self.at_least(larger, total)
        return Linear(-gone / most if most else 0.0).add(larger), most

    # In and out

    def forbid(self, choice: Choice) -> None:
        """Any choice but this one."""
        terms = {self.y[u][k]: -1.0 for u, k in enumerate(choice.options)}
        terms |= {k: (-1.0 if key in choice.stored else 1.0) for key, k in self.s.items()}
        ones = len(choice.options) + len(choice.stored)
        self.row(terms, 1.0 - ones)

    def choice(self, x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Choice:
        """The choice that a solver's answer stands for."""
        options = tuple(int(np.argmax(x[unit])) for unit in self.y)
        return Choice(options=options, stored=frozenset(key for key, k in self.s.items() if x[k] > 0.5))


def _largest_variances(problem: Problem) -> list[float]:
    """What relative variances are shares of in the program: the largest that any choice has, or twice what the rows
    that they reach allow. Without the latter a row may have a coefficient of 1e8, and a solver with tolerances of
    1e-6 rules good choices out."""
    most = [math.inf] * problem.variances
    for row in problem.rows:
        for k, energy in problem.reaching(row):
            if energy > 0.0:
                most[k] = min(most[k], _CAP * row.limit / energy)
    for node in problem.nodes:
        passed = min((most[k] / share for k, share in node.inputs if share > 0.0), default=math.inf)
        for k, share in node.outputs:
            if share > 0.0:
                most[k] = min(most[k], passed / share)
    return [min(a, b) for a, b in zip(most, worst_variances(problem), strict=True)]
