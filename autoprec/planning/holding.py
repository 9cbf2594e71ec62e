"""Rows about formats: which unit has which, and which copies are there for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autoprec.planning.codes import bytes_of, owner, result_of
from autoprec.planning.linear import Linear, Rows
from autoprec.planning.liveness import Demand, Way
from autoprec.planning.values import Problem

__all__ = ["Holding"]


class Holding(Rows):
    """Rows of a problem's program. `y`: by unit, a variable for each option, 1 where the unit has it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.y: list[list[int]] = []
        self._one: dict[tuple[tuple[int | None, ...], str], Linear] = {}

    def is_in(self, unit: int | None, format_name: str) -> Linear:
        """1 if the unit has the format: variables, or a constant. `result_of(unit)` has that of its results."""
        if unit is None:
            return Linear(float(format_name == "fp32"))
        total = Linear()
        for f, k in zip(self.problem.formats_of(unit), self.y[owner(unit)], strict=True):
            if f == format_name:
                total.add(k)
        return total

    def bytes_in(self, unit: int | None) -> Linear:
        """Bytes of an element in the format of a unit."""
        total = Linear()
        for f in self.formats(unit):
            total.add(self.is_in(unit, f), bytes_of(f))
        return total

    def bytes_of(self, step: Iterable[tuple[int | None, int]]) -> Linear:
        """Bytes of what is there in a step, by (unit, elements)."""
        total = Linear()
        for unit, numel in step:
            total.add(self.bytes_in(result_of(unit)), numel)
        return total

    def formats(self, unit: int | None) -> tuple[str, ...]:
        """Formats that a unit may have."""
        return tuple(dict.fromkeys(self.problem.formats_of(unit)))

    def _plain(self, unit: int | None) -> int | None:
        """The unit itself where what goes with it has the same format in every option."""
        if unit is None or self.problem.formats_of(unit) != self.problem.units[owner(unit)].options:
            return unit
        return owner(unit)

    def copies(
        self,
        costs: dict[str, float],
        always: Sequence[int | None],
        unless: Sequence[int | None] = (),
        spared: Linear | None = None,
    ) -> dict[str, Linear]:
        """By format: 1 if a unit of `always` has it, or a unit of `unless` has it and `spared` is 0.

        Rows over all formats together keep the relaxation from halving a unit between two formats to get both free.
        """
        always, unless = ([*dict.fromkeys(map(self._plain, units))] for units in (always, unless))
        found = {}
        for f, cost in costs.items():
            cases = [self.is_in(u, f) for u in always]
            for u in unless:
                case = self.is_in(u, f)
                if spared is not None and (case.terms or case.constant):
                    case.add(spared, -1.0)
                cases.append(case)
            found[f] = self.any_of(cases, cost)
        if spared is not None and len(costs) > 1:
            for u in unless:
                short = Linear().add(spared, -1.0)
                for f in costs:
                    short.add(self.is_in(u, f)).add(found[f], -1.0)
                self.at_most(short, 0.0)
        return found

    def held(self, demand: Demand, spared: Linear | None, costs: dict[str, float] | None = None) -> dict[str, Linear]:
        """By format: 1 if the copy is held, which may cost; `spared` is 1 where the tensor is kept in a narrow
        format."""
        costs = costs or {f: 0.0 for f, _ in demand.sizes}
        found = self.copies(costs if not demand.ways else dict.fromkeys(costs, 0.0), demand.always,
                            demand.unless_stored, spared)  # fmt: skip
        for f in found if demand.ways else ():
            found[f] = self.any_of([found[f], *self._ways(demand.ways, f, spared)], costs[f])
        return found

    def _ways(self, ways: Iterable[Way], format_name: str, spared: Linear | None) -> Iterator[Linear]:
        for way in ways:
            for case in self._cases(way, format_name) if format_name in (way.formats or (format_name,)) else ():
                yield case if spared is None or not way.unless_stored else Linear().add(case).add(spared, -1.0)

    def _cases(self, way: Way, format_name: str) -> Iterator[Linear]:
        """Expressions, at most 1, of which one is 1 if a way holds the copy in a format."""
        both = Linear(1.0 - len(way.groups))
        for group in way.groups:
            both.add(self._one_has(group, format_name))
        if not way.apart:
            yield both
        elif not way.but:
            for unit in way.apart:
                yield Linear().add(both).add(self.is_in(unit, format_name), -1.0)
        else:
            for f in dict.fromkeys(f for u in way.apart for f in self.formats(u) if f != format_name):
                case = Linear(-1.0).add(both).add(self._one_has(way.apart, f))
                for unit in way.but:
                    case.add(self.is_in(unit, f), -1.0)
                yield case

    def _one_has(self, units: tuple[int | None, ...], format_name: str) -> Linear:
        """1 if one of the units has the format."""
        if (units, format_name) not in self._one:
            self._one[units, format_name] = self.any_of([self.is_in(u, format_name) for u in units])
        return self._one[units, format_name]
