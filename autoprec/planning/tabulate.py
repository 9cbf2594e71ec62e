"""The tables of a `Problem`: everything that the evaluator adds up, by the few decisions that each part reads.

Parts are sorted by pattern (which decision is read where), and what a pattern costs is worked out once for all of its
parts: seconds of casts and bytes of copies are linear in a tensor's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from autoprec.graphs import Role
from autoprec.planning.decisions import Decisions
from autoprec.planning.pairs import Pairs, Part, stages
from autoprec.planning.part_tables import PartTables
from autoprec.planning.propagation import Propagation
from autoprec.planning.recorder import LARGEST_TABLE
from autoprec.planning.remade_tables import RemadeTables
from autoprec.planning.spans import Read, Sent, added, of_copies, of_gradients
from autoprec.planning.tables import Copies, Entries, Group, Held, Noise, Pattern, Span, summed
from autoprec.planning.uses import Replacement, Use
from autoprec.planning.values import Gemm, PlanTensor, Problem, Unit
from autoprec.plans import RECOMPUTED

__all__ = ["Tabulated"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

#: Source, target, elements, and by format those of which there are copies at a time.
_Cast = tuple[_Ints, _Ints, _Floats, _Floats]


class Tabulated(PartTables, RemadeTables):
    """All tables of a problem, in groups.

    Attributes:
        groups: the tables; `length` is the number of their entries.
        constant: the objective's part that no decision changes.
        steady: bytes in each phase that no decision changes, the fixed ones included.
        exact: False if some tensor is described by a mean of tables.
    """

    def __init__(self, problem: Problem, decisions: Decisions, propagation: Propagation) -> None:
        super().__init__(problem, decisions)
        self.constant = self._second * problem.constant_seconds
        change = np.zeros(problem.phases + 1, np.int64)
        self.constant += self._byte * sum(size for moment, since, size in problem.private if since == moment)
        for begin, last, size in problem.always_held():
            change[begin] += size
            change[last + 1] -= size
        self.steady = problem.fixed_bytes + np.cumsum(change[:-1])
        for k, unit in enumerate(problem.units):
            self._unit(k, unit)
        for i, t in enumerate(problem.tensors):
            self._tensor(i, t, propagation)
        for ours in problem.replacements:
            self._replacement(ours)
        row_of: dict[int, list[int]] = {}
        for r, row in enumerate(problem.rows):
            for k in row.gemms:
                row_of.setdefault(k, []).append(r)
        for gemm in problem.gemms:
            self._gemm(gemm, row_of.get(gemm.number, []))
        for n, node in enumerate(problem.nodes):
            self._node(n, node.units, node.local)
        self.groups: list[Group] = []
        makers: dict[str, Callable[..., Group]] = {
            "unit": self._units, "copies": self._copies, "store": self._stores, "other": self._others,
            "ours": self._replacements, "gemm": self._gemms, "noise": self._noises, "node": self._nodes,
            "narrow": self._narrow, "open": self._opened, "again_row": self._inherited, "again_saver": self._inherited,
        }  # fmt: skip
        for pattern, (scopes, figures) in self._found.items():
            entries = Entries(pattern)
            shape = (len(scopes), len(pattern.domains))
            group = makers[pattern.kind](
                pattern, entries, np.array(scopes, np.int64).reshape(shape), np.array(figures, np.float64).T
            )
            self.groups.append(group)
            self.length = group.end

    # Units

    def _unit(self, index: int, unit: Unit) -> None:
        place = self.decisions.unit[index]
        domain = self.decisions.domains[place] if place >= 0 else (-1 - place,)
        names = [self.decisions.formats[f] for f in domain]
        options = [unit.options.index(f) if f in unit.options else 0 for f in names]
        none = (0,) * len(unit.options)
        workspace = unit.workspace if unit.role is Role.OUTPUT else none
        columns = (unit.seconds, workspace, unit.backward_workspace or none, unit.kept or none)
        phase, then = self.problem.phase(unit.moment), self.problem.phase(self.problem.backward(unit.moment))
        kept = (phase, 1.0) if unit.kept_from is None else (self.problem.phase(unit.kept_from), 0.0)
        figures = [column[k] for column in columns for k in options]
        self._record("unit", [place], (), [*figures, phase, then, *kept])

    def _units(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        n = entries.count
        seconds, workspace, backward, kept = (figures[k * n : (k + 1) * n].T for k in range(4))
        phase, then, first = figures[4 * n : 4 * n + 3].astype(np.int64)
        counts = figures[4 * n + 3][:, None]
        held = (Held(workspace, phase, phase), Held(backward, then, then), Held(kept, first, then))
        return self._group(scopes, entries, seconds, counts * kept, held=held)

    # Tensors

    def _tensor(self, index: int, t: PlanTensor, propagation: Propagation) -> None:
        p, of = self.problem, self.decisions.of
        storage = self.decisions.storage.get(index)
        if t.part_of is not None and t.savers:
            storage = self.decisions.storage.get(t.part_of)
        if t.readers or t.savers or t.loss_noise or t.wide_bytes or t.born is not None or t.gradient_readers:
            self._uses(t, storage)
        if storage is not None and (t.in_parts or (t.part_of is not None and t.keepers)):
            self._kept_in_parts(t, storage)
        if storage is None or t.part_of is not None:
            return
        moment, unit = t.stored_by
        masks = [p.phase(m) for m in (*t.masks, *map(p.backward, t.masks))]
        figures: list[float] = [t.numel, p.phase(moment), p.phase(p.backward(moment)), t.mask_bytes, *masks]
        if t.remaking is not None:
            first, last = p.made_again(t)
            figures += [p.phase(first), 2 * last, *self._vector(t.remaking.seconds)]
            self._open(t, storage)
        born = -1 if t.remaking is None else of(t.born)
        self._record("store", [storage, of(unit), born], (len(t.masks), t.remaking is not None, t.in_parts), figures)
        for k, saver in enumerate(t.others):
            noise = self._vector((f, saver.noise_in(f)) for f in dict.fromkeys(f for f, _ in saver.noise))
            then, place = p.phase(p.backward(saver.moment)), propagation.saver(index, k)
            figures = [saver.numel, then, place, *noise]
            self._record("other", [storage, of(saver.unit)], (saver.in_pieces,), figures)
            self._inheriting(index, "again_saver", place, 1.0)

    def _uses(self, t: PlanTensor, storage: int | None) -> None:
        """One table for a tensor, or several for a few of its readers each."""
        fixed = [self.decisions.of(t.born)] + ([] if storage is None else [storage])
        instead = [u.instead[0] for u in t.gradient_readers if u.instead is not None]
        copied = [u.copied for u in t.savers if u.copied is not None]
        units = [*(u.unit for u in (*t.readers, *t.savers, *t.gradient_readers)), *instead, *copied]
        uses = [*map(self.decisions.of, units)]
        rooms = self._rooms(fixed, [u for u in uses if u >= 0 and u not in fixed])
        for k, room in enumerate(rooms):
            there = {*fixed, *room}
            readers, savers, sending = (
                [(n, u) for n, u in enumerate(group)
                 if self.decisions.of(u.unit) < 0 or self.decisions.of(u.unit) in there]
                for group in (t.readers, t.savers, t.gradient_readers)
            )  # fmt: skip
            last = len(t.gradient_readers) - 1  # an op that reads it twice sends twice: equal uses
            sums = [i for i, (n, u) in enumerate(sending) if n < last and self._belongs(u, there, rooms[:k], fixed)]
            senders = [self._known(u, there) for _, u in sending]
            keeping = [u for _, u in savers if u.copied is None or self.decisions.of(u.copied) < 0
                      or self.decisions.of(u.copied) in there]  # fmt: skip
            self._one_table(t, storage, [u for _, u in readers], keeping, senders, sums, len(rooms))

    def _known(self, use: Use, there: set[int]) -> Use:
        """A use as far as a table tells: less is held where it does not have the other term of a sum."""
        other = -1 if use.instead is None else self.decisions.of(use.instead[0])
        return use if other < 0 or other in there else replace(use, instead=None)

    def _belongs(self, use: Use, there: set[int], earlier: list[list[int]], fixed: list[int]) -> bool:
        """Whether a use is counted in this table: in the first one that has its variable."""
        place = self.decisions.of(use.unit)
        if place < 0 or place in fixed:
            return not earlier
        return place in there

    def _one_table(
        self, t: PlanTensor, storage: int | None, readers: Sequence[Use], savers: Sequence[Use],
        senders: Sequence[Use], sums: Sequence[int], tables: int,
    ) -> None:  # fmt: skip
        p, of = self.problem, self.decisions.of
        then: Callable[[int], int] = lambda moment: p.phase(p.backward(moment))  # noqa: E731
        begins = dict.fromkeys(u.kept_from for u in savers if u.kept_from is not None)
        copy = {None: 0} | {begin: 1 + k for k, begin in enumerate(begins)}
        others = [of(u.unit if u.instead is None else u.instead[0]) for u in senders]
        copied = [k for k, u in enumerate(savers) if u.copied is not None]
        places = [of(t.born), *(of(u.unit) for u in (*readers, *savers, *senders)), *others,
                  *(of(savers[k].copied) for k in copied)]  # fmt: skip
        loss = self._vector(t.loss_noise, p.loss_scale) if t.is_float32 or t.loss_noise else [0.0] * self._formats
        reads = (
            len(readers), len(savers), len(senders), tuple(sums), storage is not None,
            tuple(copy[u.kept_from] for u in savers), t.inherits, t.casts_back, t.runs, t.narrow_costs, tables,
            t.part_of is not None, tuple(u.part for u in readers), tuple(u.part for u in savers), tuple(copied),
        )  # fmt: skip
        places.append(-1 if storage is None else storage)
        figures = [
            t.numel, t.wide_bytes, p.phase(t.birth), then(t.birth),
            min((p.cast_at(t, u) for u in t.readers), default=p.phase(t.birth)),
            max((p.gradient_cast_at(t, u) for u in t.gradient_readers), default=0), *loss,
            *(p.cast_at(t, u) for u in readers), *(p.phase(u.moment) for u in readers),
            *(p.cast_at(t, u) if u.kept_from is None else p.phase(u.kept_from) for u in savers),
            *(then(u.moment) for u in savers),
            *map(p.sent_at, senders), *(p.gradient_cast_at(t, u) for u in senders), *map(p.own_at, senders),
            *(p.added_at(senders[k]) for k in sums),
        ]  # fmt: skip
        self._record("copies", places, reads, figures)

    def _copies(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (places, nr, ns, ng, sums, stored, shared, inherits, casts_back, runs, narrow, tables,
         part, read_of_part, saved_of_part, copied) = pattern.reads  # fmt: skip
        columns = [entries.format(place) for place in places]
        born, own = self._result[columns[0]], columns[1 : 1 + nr]
        read_as = [self._result[c] for c in own]
        saved_as = columns[1 + nr : 1 + nr + ns]
        senders, others = (
            [self._result[c] for c in columns[begin : begin + ng]] for begin in (1 + nr + ns, 1 + nr + ns + ng)
        )
        wide = dict(zip(copied, columns[1 + nr + ns + 2 * ng :], strict=False))
        apart = [(self._copy[c] != born) | ((c == 0) & (wide[k] == 0) if k in wide else False)
                 for k, c in enumerate(saved_as)]  # fmt: skip
        savers = [_whose(self._copy[c], one, part, of_part)
                  for c, one, of_part in zip(saved_as, apart, saved_of_part, strict=True)]  # fmt: skip
        readers = [_whose(c, c != born, part, of_part) for c, of_part in zip(read_as, read_of_part, strict=True)]
        scaled = [np.where((self._result[c] != self._copy[c]) & (not of_part), c, -1)
                  for c, of_part in zip(own, read_of_part, strict=True)]  # fmt: skip
        if stored:  # what is stored narrow is not kept as it is
            savers = [np.where(columns[-1] >= 0, -1, c) for c in savers]
        numel, as_it_is = figures[0], figures[1]
        birth, then, first, first_back = figures[2:6].astype(np.int64)
        loss, rest = figures[6 : 6 + self._formats], iter(figures[6 + self._formats :].astype(np.int64))
        casts, reads, starts, keeps, sends, back, alone, adds = (
            [next(rest) for _ in range(k)] for k in (nr, nr, ns, ns, ng, ng, ng, len(sums))
        )
        size = [as_it_is if f == 0 else numel * self._sizes[f] * narrow for f in range(self._formats)]
        made = self._any([born, *readers], entries.count)
        seconds = np.zeros((len(scopes), entries.count))
        for f, there in enumerate(self._any(scaled, entries.count)):
            if there.any():
                seconds += runs * there * self._cast(self._result[[f]], np.array([f]), numel)
        for f, there in enumerate(made):
            target = np.full(entries.count, f)
            cast = runs * self._cast(born, target, numel)
            if casts_back:
                cast = cast + self._cast(target, born, numel)
            seconds += np.where(there & (born != f), cast, 0.0)
        kept = self._any([c for c, copy in zip(savers, shared, strict=True) if copy == 0], entries.count)
        saved = summed(kept, np.array(size))
        rounded = self._any([born, *read_as, *own], entries.count)
        rounded = [there & (born != f) for f, there in enumerate(rounded)] if inherits else rounded
        uses = [*map(Read, readers, casts, reads, read_of_part)]
        spans = [*of_copies(born, birth, first, uses, tables == 1)] if not part else [
            Span(0, c, begin, end) for c, begin, end in zip(readers, casts, reads, strict=True)]  # fmt: skip
        spans += [Span(0, c, begin, end) for c, begin, end in zip(scaled, casts, reads, strict=True) if (c >= 0).any()]
        spans += [Span(copy, c, begin, end) for copy, c, begin, end in zip(shared, savers, starts, keeps, strict=True)]
        gradient, sent = 1 + max(shared, default=0), [*map(Sent, senders, sends, back, others, alone)]
        spans += of_gradients(gradient, born, then, first_back, sent, tables == 1)
        sizes = {(copy, f): size[f] / tables for copy in range(gradient) for f in range(self._formats)}
        width = np.array(self._sizes, np.float64)
        if senders:
            sizes |= {(gradient, f): numel * width[f] / tables for f in range(self._formats)}
        held = [Held(numel[:, None] * width[senders[k]] * added(k, born, m, sent, tables == 1), m, m)
                for k, m in zip(sums, adds, strict=True)]  # fmt: skip
        sizes = {key: s for key, s in sizes.items() if s.any()}
        return self._group(
            scopes, entries, seconds / tables, saved / tables, held=tuple(held),
            copies=Copies(tuple(spans), sizes), loss=summed(rounded, loss) / tables,
        )  # fmt: skip

    def _stores(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (storage, maker, maker_of_it), masks, remakable, in_parts = pattern.reads
        kept, made = entries.format(storage), self._copy[entries.format(maker)]
        there = kept >= 0
        numel, mask = figures[0], figures[3]
        first, last, *moments = (figures[k].astype(np.int64) for k in (1, 2, *range(4, 4 + 2 * masks)))
        widths = np.array(self._sizes, np.float64)
        width = widths[kept] * there
        size = numel[:, None] * width + np.where(width == 1.0, 4.0, 0.0)
        masked = mask[:, None] * there
        narrow = there & (kept != self._again) & (not in_parts)
        size *= not in_parts  # `_narrow` counts that
        seconds = np.where(narrow, self._cast(made, np.where(narrow, kept, made), numel), 0.0)
        held = [Held(size, first, last)]
        held += [Held(masked, moments[k], moments[masks + k]) for k in range(masks)]
        if remakable:
            again, born = kept == self._again, self._result[entries.format(maker_of_it)]
            begin, end = figures[4 + 2 * masks : 6 + 2 * masks].astype(np.int64)
            seconds = seconds + np.where(again, figures[6 + 2 * masks :][born].T, 0.0)
            held.append(Held(numel[:, None] * widths[born] * again, begin, end - 1))
        return self._group(scopes, entries, seconds, size + masks * masked, held=tuple(held))

    def _others(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        (storage, unit), in_pieces = pattern.reads
        kept, read = entries.format(storage), self._copy[entries.format(unit)]
        there = (kept >= 0) & (kept != read)
        casts = there & (kept != self._again)
        numel, then, place = figures[0], figures[1].astype(np.int64), figures[2].astype(np.int64)
        seconds = np.where(casts, self._cast(np.where(casts, kept, read), read, numel), 0.0)
        sizes = numel[:, None] * np.array(self._sizes, np.float64)[read] * there
        held = [] if in_pieces else [Held(sizes, then, then)]
        noise = summed(self._any([kept], entries.count), figures[3 : 3 + self._formats])
        return self._group(scopes, entries, seconds, held=tuple(held), rounding=Noise(place, noise))

    def _replacement(self, ours: Replacement) -> None:
        storages = [self.decisions.storage[t] for t in ours.tensors]
        held = [figure for _, *more in self.problem.held_more(ours) for figure in more]
        self._record("ours", [self.decisions.of(ours.unit), *storages], (), [ours.spared, *held])

    def _replacements(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        ((unit, *storages),) = pattern.reads
        narrow = np.any([entries.format(storage) >= 0 for storage in storages], axis=0)
        ours = narrow & (self._copy[entries.format(unit)] == 0)
        held = tuple(Held(more[:, None] * ours, first.astype(np.int64), last.astype(np.int64))
                     for first, last, more in (figures[k : k + 3] for k in (1, 4, 7)))  # fmt: skip
        return self._group(scopes, entries, np.zeros(ours.shape), -figures[0][:, None] * ours, held=held)

    def _inheriting(self, index: int, kind: str, place: int, factor: float) -> None:
        """What a tensor that is made again has of each source, where it is read."""
        by_source: dict[int, list[tuple[str, float]]] = {}
        for source, f, relative in self.problem.inherited.get(index, ()):
            by_source.setdefault(source, []).append((f, relative * factor))
        for source, noise in by_source.items():
            storages = [self.decisions.storage[index], self.decisions.storage[source]]
            self._record(kind, storages, (), [place, *self._vector(noise)])

    def _inherited(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        ((storage, source),) = pattern.reads
        again = entries.format(storage) == self._again
        amount = summed([f & again for f in self._any([entries.format(source)], entries.count)], figures[1:])
        noise = Noise(figures[0].astype(np.int64), amount)
        if pattern.kind == "again_row":
            return self._group(scopes, entries, noise=noise)
        return self._group(scopes, entries, rounding=noise)

    # GEMMs and nodes

    def _gemm(self, gemm: Gemm, rows: list[int]) -> None:
        p, of = self.problem, self.decisions.of
        made, h, g = of(gemm.output), of(gemm.grad_input), of(gemm.grad_weight)
        storage = self.decisions.storage.get(gemm.x) if gemm.number in p.tensors[gemm.x].gemms else None
        stored = -1 if storage is None else storage
        workspace = []
        for index in (gemm.grad_input, gemm.grad_weight):
            unit = p.units[index]
            sizes = dict(zip(unit.options, unit.workspace, strict=True))
            workspace += self._vector((f, float(sizes.get(f, 0))) for f in unit.options)
        number = self.decisions.number
        emulated = tuple(number[f] for f in gemm.emulated if f in number)
        present = (storage is not None, gemm.has_grad_input, gemm.has_grad_weight, gemm.operands_numel > 0, emulated,
                   len(gemm.pairs))  # fmt: skip
        summed_at, summed = gemm.summed or (gemm.moment, 0)
        pieces = self._vector((f, 1.0) for f, _ in gemm.input_pieces) + self._vector(gemm.spared)
        for there, numel in ((gemm.of_input, gemm.out_numel), (gemm.of_weight, gemm.out_numel),
                          (gemm.of_weight, gemm.read_numel)):  # fmt: skip
            pieces += [float(there(numel, f)) for f in self.decisions.formats]
        own, steps = p.remade_for(gemm)
        x = p.tensors[gemm.x]
        made_numel = x.numel if steps else 0
        as_it_is = [0 if f == RECOMPUTED else x.bytes_in(f) for f in self.decisions.formats]
        figures = [gemm.x_numel, gemm.out_numel, gemm.operands_numel, p.phase(p.backward(gemm.moment)), *workspace,
                   *pieces, *chain.from_iterable(gemm.pairs), own, made_numel, gemm.weight_bytes, gemm.read_numel,
                   *gemm.plain_extra, p.phase(p.backward(summed_at)), summed, *as_it_is, x.numel]  # fmt: skip
        born = of(x.born)
        again = born if storage is not None and x.remaking is not None else -1
        places = [made, h, g, stored, again]
        of_steps, steps = self._steps(places, steps if storage is not None else ())
        later, narrow = p.lets_go(gemm)
        of_later = [*map(of, later or ())]
        if self._product([*places, *of_steps, *of_later]) > LARGEST_TABLE:
            self.exact, of_later = False, []  # fewer bytes than there are
        lets_go = None if later is None else len(of_later), narrow
        self._record("gemm", [*places, *of_later, *of_steps], (*present, lets_go, tuple(map(len, steps))),
                     [*(numel for step in steps for _, numel in step), *figures])  # fmt: skip
        for r in rows:
            limit = p.rows[r].limit
            self._record("noise", [made, g, born, stored], (storage is not None,),
                         [r, *self._vector(gemm.gradient_noise, limit), *self._vector(gemm.x_noise, limit),
                          *self._vector(gemm.stored_noise, limit)])  # fmt: skip
            if stored >= 0:
                self._inheriting(gemm.x, "again_row", r, gemm.x_energy / limit)

    def _gemms(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        places, stored, has_input, has_weight, reads_again, emulated, count, lets_go, lengths = pattern.reads
        own, h, g, kept, born = (entries.format(place) for place in places[:5])
        count_later, narrow = lets_go
        later = None if count_later is None else places[5 : 5 + count_later]
        made_of = self._largest(entries, places[5 + len(later or ()) :], figures, lengths)
        whole, as_it_is = figures[-1], figures[-1 - self._formats : -1]
        figures = figures[sum(lengths) : -1 - self._formats]
        again = kept == self._again
        there = kept >= 0 if stored else np.zeros(entries.count, np.bool_)
        kept = np.where(again, self._result[born], kept)
        made, beside = self._result[own], self._copy[self._beside[g]]
        x, out, operands, phase = *figures[:3], figures[3].astype(np.int64)
        n, width = self._formats, np.array(self._sizes, np.float64)
        of_input: list[_Cast] = []
        of_weight: list[_Cast] = []
        in_pieces, spared, out_of_input, out_of_weight, read_of_weight = (
            figures[4 + k * n : 4 + (k + 1) * n] for k in range(2, 7)
        )
        if has_input:
            back = self._result[h]
            of_input = [(made, back, out, out_of_input)]
        pairs = [(figures[k], figures[k + 1]) for k in range(4 + 7 * n, 4 + 7 * n + 2 * count, 2)]
        kept_as, beside_h = self._copy[own], self._copy[self._beside[h]]
        of_input += [(kept_as, beside_h, numel, np.tile(numel, (n, 1)))
                     for numel in ([operands] if reads_again else [k for _, k in pairs])]  # fmt: skip
        if has_weight:
            read = np.where(there, kept, self._copy[own])
            of_weight = [(made, self._result[g], out, out_of_weight), (read, beside, figures[-5], read_of_weight)]
        seconds, held, before = np.zeros((len(scopes), entries.count)), [], []
        for size, casts in ((figures[4 : 4 + n][h].T, of_input), (figures[4 + n : 4 + 2 * n][g].T, of_weight)):
            most, copies = np.zeros_like(seconds), np.zeros_like(seconds)
            for source, target, numel, at_once in casts:
                on, brief = source != target, np.isin(target, emulated)
                seconds += np.where(on, self._cast(source, target, numel), 0.0)
                size = size + at_once[target].T * width[target] * (on & ~brief)
                most = np.maximum(most, (copies + at_once[0][:, None] * (4.0 + width[target])) * (on & brief))
                copies = copies + 4.0 * at_once[0][:, None]
            held.append(size)
            before.append(most)
        if has_input:  # the result is cast when all else is gone
            seconds += np.where(made != back, self._cast(back, made, x), 0.0)
            alone = np.maximum(held[0] + x[:, None] * (width[back] - width[made]), x[:, None] * width[back])
            alone = np.where(in_pieces[back].T > 0.0, held[0] - spared[back].T, alone)
            held[0] = np.where(made != back, alone, held[0])
        not_yet = x[:, None] * width[made] * (in_pieces.max(axis=0) == 0.0)[:, None]
        held[0] = np.maximum(held[0], before[0] - not_yet)
        held[1] = np.maximum(held[1], before[1])
        plain = (own == 0) & (h == 0) & (g == 0) & ~there
        gone = (whole[:, None] * width[kept] + 4.0 * (width[kept] == 1.0)) * (there & ~again & narrow)
        if later is not None:
            alone = np.all([self._copy[entries.format(u)] != kept_as for u in later] + [~there, ~plain], axis=0)
            gone = gone + as_it_is[kept_as].T * alone
        there, made_again = (amount[:, None] * width[kept] * again for amount in figures[-8:-6])
        both = ~plain if has_input and has_weight else np.zeros(entries.count, np.bool_)
        extra_input, extra_weight = figures[-4:-2]
        early = figures[-6][:, None] * both + extra_input[:, None] * plain
        late = x[:, None] * width[made] * both - extra_weight[:, None] * plain
        making = there + made_of * again - made_again
        early = early - gone
        phases: tuple[_Floats, ...] = (held[0] + early, held[1] + there - late, making - late)
        if pairs:
            workspace = np.where(np.isin(back, emulated), figures[4][:, None], figures[4 : 4 + n][h].T)
            two = self._of_two(workspace, out, pairs, x, (made, back, kept_as, beside_h), emulated)
            phases = (two + early,)
        largest = np.maximum(np.maximum.reduce(phases), -gone)
        then, summed = figures[-2].astype(np.int64), figures[-1][:, None] * plain
        parts = (Held(largest, phase, phase), Held(summed, then, then))
        return self._group(scopes, entries, seconds, held=parts)

    def _of_two(
        self, workspace: _Floats, out: _Floats, pairs: Pairs[_Floats], given: _Floats, formats: Sequence[_Ints],
        emulated: Sequence[int],
    ) -> _Floats:  # fmt: skip
        """`Step.of_two`, of several products."""
        width, (made, h, kept, again) = np.array(self._sizes, np.float64), formats
        brief = np.isin(h, emulated)
        own, as_given = np.where(brief, 4.0, width[h]), width[made]
        copy, operand = width[h] * (made != h), width[again] * (kept != again)
        rounded = np.where(brief, made != 0, made != h)
        sizes = {
            Part.MADE: as_given,
            Part.PRODUCT: own,
            Part.ROUNDED: own * rounded,
            Part.GIVEN: as_given * rounded,
            Part.ARRIVING: np.where(brief, 4.0, copy),
            Part.OPERAND: np.where(brief, 4.0, operand),
            Part.CASTING: (copy + 4.0) * (brief & (copy > 0.0)),
            Part.READING: (operand + 4.0) * (brief & (operand > 0.0)),
            Part.WORKSPACE: workspace,
        }
        found = stages(out, pairs, given, np.ones(1))
        totals = [sum(sign * numel[:, None] * sizes[part] for part, numel, sign in stage) for stage in found]
        largest: _Floats = np.maximum.reduce(np.broadcast_arrays(*totals))
        return largest

    def _noises(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        places, stored = pattern.reads
        own, g, born, kept = (entries.format(place) for place in places)
        made, born = self._result[own], self._result[born]
        there = (kept >= 0) & (kept != self._again) if stored else np.zeros(entries.count, np.bool_)
        n, row = self._formats, figures[0].astype(np.int64)
        arriving, read, narrow = (figures[1 + k * n : 1 + (k + 1) * n] for k in range(3))
        amount = summed(self._any([made, g, self._result[g]], entries.count), arriving)
        operands = [self._copy[own], made, self._beside[g], born]
        again = there & self._rounds_again[kept, self._beside[g]]
        operand = self._any([self._beside[g]], entries.count)
        read_in = [(f & ~there) | (o & again) for f, o in zip(self._any(operands, entries.count), operand, strict=True)]
        amount += summed(read_in, read)
        amount += summed([f & there for f in self._any([kept], entries.count)], narrow)
        return self._group(scopes, entries, noise=Noise(row, amount))

    def _node(self, number: int, units: tuple[int, ...], local: tuple[tuple[str, float], ...]) -> None:
        places = [self.decisions.unit[u] for u in units]
        if not any(relative for _, relative in local) or not units:
            return
        rooms = self._rooms([], places)
        own = places[1:] or places
        for room in rooms:
            which = tuple(place in own for place in room)
            self._record("node", room, (len(rooms), which), [number, *self._vector(local)])

    def _nodes(self, pattern: Pattern, entries: Entries, scopes: _Ints, figures: _Floats) -> Group:
        places, tables, own = pattern.reads
        columns = [entries.format(place) for place in places]
        columns = [self._result[c] for c in columns] + [c for c, mine in zip(columns, own, strict=True) if mine]
        there = self._any(columns, entries.count)
        amount = summed(there, figures[1 : 1 + self._formats]) / tables
        return self._group(scopes, entries, rounding=Noise(figures[0].astype(np.int64), amount))


def _whose(formats: _Ints, alone: npt.NDArray[np.bool_], part: bool, of_part: bool) -> _Ints:
    """`Step.has_copy`: formats of the copies that a tensor has, where they are `alone` copies of a part."""
    return np.where(alone, formats, -1) if part else np.where(alone, -1, formats) if of_part else formats
