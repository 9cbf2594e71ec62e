"""Rows about decisions: which unit has which format, which copies follow from that, and who computes a product."""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.planning.codes import owner
from autoprec.planning.linear import Linear, Rows
from autoprec.planning.values import Gemm, Problem

__all__ = ["ChoiceRows"]


class ChoiceRows(Rows):
    """The variables of a problem's decisions, and expressions of them.

    Attributes:
        problem: whose decisions they are.
        y: by unit and option, the binary that is 1 if the unit has it.
        s: by tensor and storage, the binary that is 1 if it is kept in that.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.y = [[self.variable(0.0, binary=True) for _ in u.options] for u in problem.units]
        self.s = {(t, f): self.variable(0.0, binary=True) for t in problem.storable
                  for f in problem.tensors[t].storages}  # fmt: skip

    def is_in(self, unit: int | None, format_name: str) -> Linear:
        """1 if the unit has the format: variables, or a constant. `result_of(unit)` has that of its results."""
        if unit is None:
            return Linear(float(format_name == "fp32"))
        total = Linear()
        for f, k in zip(self.problem.formats_of(unit), self.y[owner(unit)], strict=True):
            if f == format_name:
                total.add(k)
        return total

    def formats(self, unit: int | None) -> tuple[str, ...]:
        """Formats that a unit may have."""
        return tuple(dict.fromkeys(self.problem.formats_of(unit)))

    def plain(self, unit: int | None) -> int | None:
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
        always, unless = ([*dict.fromkeys(map(self.plain, units))] for units in (always, unless))
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

    def ours(self, gemm: Gemm) -> dict[str, Linear]:
        """By format of the output: 1 if it has that, and some role is not in FP32 or the input is stored."""
        found = {f: self.is_in(gemm.output, f) for f in self.formats(gemm.output)}
        narrow = [self.is_in(u, f) for u in (gemm.grad_input, gemm.grad_weight) for f in self.formats(u) if f != "fp32"]
        t = self.problem.tensors[gemm.x]
        narrow += [Linear().add(self.s[gemm.x, f]) for f in t.storages if gemm.number in t.gemms]
        if (wide := found.pop("fp32", None)) is not None and narrow:
            found["fp32"] = both = Linear().add(self.variable(0.0))
            some = Linear().add(both)
            for other in narrow:
                self.at_most(Linear().add(wide).add(other).add(both, -1.0), 1.0)
                some.add(other, -1.0)
            self.at_most(some, 0.0)
            self.at_most(Linear().add(both).add(wide, -1.0), 0.0)
        return found
