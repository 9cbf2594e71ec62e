"""A planning problem that stands on its own, to be solved again elsewhere: `Case`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoprec.checks import check_amount, check_format, check_storage, check_unique
from autoprec.errors import InputError
from autoprec.graphs import Role
from autoprec.planning.codes import result_of
from autoprec.planning.phases import NEVER
from autoprec.planning.uses import Remaking, Replacement, Use
from autoprec.planning.values import PlanTensor, Problem, Unit
from autoprec.plans import RECOMPUTED

__all__ = ["Case"]

At = tuple[str | int, ...]

#: Bytes and elements beyond this are a mistake, and no longer exact where they are summed.
_MOST = 2**62


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, and what is known of its best choice.

    Attributes:
        problem: every index and moment in it is checked.
        objective: of the best choice that is known; None if none is.
        gap: how far that may be above the optimum, as a share of it; 0.0 if it is proven.
    """

    problem: Problem
    objective: float | None = None
    gap: float = 0.0

    def __post_init__(self) -> None:
        check_amount(self.objective, "objective", InputError, "objective")
        check_amount(self.gap, "gap", InputError, "gap")
        _Check(self.problem).whole()


class _Check:
    """`InputError` at the first part of a problem that an evaluator could not follow."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ops = len(problem.ops)

    def whole(self) -> None:
        p = self.problem
        check_unique(p.ops, "the op", InputError, "problem", "ops")
        check_unique([f"{u.op} {u.role}" for u in p.units], "the role", InputError, "problem", "units")
        check_unique([t.id for t in p.tensors], "the tensor", InputError, "problem", "tensors")
        check_unique([f"{c.source} → {c.target}" for c in p.casts], "the cast", InputError, "problem", "casts")
        self.amounts(("problem",), p, "constant_seconds", "fixed_bytes", "loss_limit", "budget_bytes", "variances")
        for name in ("seconds_scale", "bytes_scale", "loss_scale"):
            self.positive(("problem", name), getattr(p, name))
        for i, (moment, kept_from, size) in enumerate(p.private):
            self.index(("problem", "private", i, 0), moment, self.ops, "moment")
            self.index(("problem", "private", i, 1), kept_from, 2 * self.ops, "moment")
            self.amount(("problem", "private", i, 2), size)
        for i, held in enumerate(p.standing):
            for name in ("first", "last"):
                self.index(("problem", "standing", i, name), getattr(held, name), 2 * self.ops, "moment")
            self.amounts(("problem", "standing", i), held, "bytes")
        for i, (moment, size) in enumerate(p.workspace):
            self.index(("problem", "workspace", i, 0), moment, 2 * self.ops, "moment")
            self.amount(("problem", "workspace", i, 1), size)
        for i, ours in enumerate(p.replacements):
            self.replacement(("problem", "replacements", i), ours)
        for i, unit in enumerate(p.units):
            self.unit(("problem", "units", i), unit)
        for i, tensor in enumerate(p.tensors):
            self.tensor(("problem", "tensors", i), tensor)
        self.gemms()
        self.noise()
        for i, pair in enumerate(p.ties):
            for k, unit_index in enumerate(pair):
                self.index(("problem", "ties", i, k), unit_index, len(p.units), "unit")
            if p.units[pair[0]].options != p.units[pair[1]].options:
                raise InputError("tied units must have the same options", at=("problem", "ties", i))

    def replacement(self, at: At, ours: Replacement) -> None:
        self.index((*at, "moment"), ours.moment, self.ops, "moment")
        self.unit_index((*at, "unit"), ours.unit)
        self.amounts(at, ours, "spared")
        self.indices((*at, "tensors"), ours.tensors, len(self.problem.tensors), "tensor")
        for k, tensor in enumerate(self.problem.tensors[t] for t in ours.tensors):
            if not tensor.storages or ours.moment not in [saver.moment for saver in tensor.others]:
                raise InputError("the op does not keep this tensor narrow", at=(*at, "tensors", k))

    def unit(self, at: At, unit: Unit) -> None:
        self.formats(at, "options", unit.options)
        if not unit.options:
            raise InputError("a unit needs at least one option", at=(*at, "options"))
        for name, needed in (("seconds", True), ("workspace", True), ("backward_workspace", False), ("kept", False)):
            given = getattr(unit, name)
            if len(given) != len(unit.options) and (needed or given):
                what = f"{name} must have a value for each of the {len(unit.options)} options, not {len(given)}"
                raise InputError(what, at=(*at, name))
            for k, value in enumerate(given):
                self.amount((*at, name, k), value)
        self.index((*at, "moment"), unit.moment, 2 * self.ops, "moment")
        runs = unit.op if unit.is_parameter and unit.moment == 0 else self.problem.op_at(unit.moment)
        if runs != unit.op or (unit.role is Role.OUTPUT) != (unit.moment < self.ops):
            raise InputError(f"{unit.op} does not run its {unit.role} at this moment", at=(*at, "moment"))
        self.backward_moment((*at, "kept_from"), unit.kept_from)

    def tensor(self, at: At, t: PlanTensor) -> None:
        self.amounts(at, t, "numel", "wide_bytes")
        check_amount(t.runs, "runs", InputError, *at, "runs")
        for k, name in enumerate(t.storages):
            check_storage(name, InputError, *at, "storages", k, among=(RECOMPUTED,))
        check_unique(t.storages, "format", InputError, *at, "storages")
        if (RECOMPUTED in t.storages) != (t.remaking is not None):
            raise InputError(f"a tensor that may be {RECOMPUTED} says how, and no other does", at=(*at, "remaking"))
        if t.remaking is not None:
            self.remaking((*at, "remaking"), t, t.remaking)
        self.formats(at, "saturates", t.saturates)
        self.energies((*at, "loss_noise"), t.loss_noise)
        self.index((*at, "birth"), t.birth, self.ops, "moment")
        self.unit_index((*at, "born"), t.born)
        if t.part_of is not None:
            self.part((*at, "part_of"), t, t.part_of)
        self.index((*at, "stored_by", 0), t.stored_by[0], max(self.ops, 1), "moment")
        self.unit_index((*at, "stored_by", 1), t.stored_by[1])
        for k, use in enumerate(t.readers):  # what crosses a graph break is held, as if read, until the step is over
            self.use((*at, "readers", k), use, 2 * self.ops if use.unit is None else self.ops)
        for name in ("savers", "gradient_readers"):
            for k, use in enumerate(getattr(t, name)):
                self.use((*at, name, k), use, self.ops)
        self.indices((*at, "masks"), t.masks, self.ops, "moment")
        self.indices((*at, "gemms"), t.gemms, len(self.problem.gemms), "GEMM")
        for k, saver in enumerate(t.others):
            here = (*at, "others", k)
            self.index((*here, "moment"), saver.moment, self.ops, "moment")
            self.unit_index((*here, "unit"), saver.unit)
            self.amounts(here, saver, "numel")
            self.energies((*here, "noise"), saver.noise)
            self.shares((*here, "reached"), saver.reached)

    def part(self, at: At, t: PlanTensor, whole: int) -> None:
        self.index(at, whole, len(self.problem.tensors), "tensor")
        if self.problem.tensors[whole].part_of is not None:
            raise InputError("a part is one of a whole tensor", at=at)
        if (t.readers or t.savers) and self.problem.tensors[whole].born != t.born:
            raise InputError("a part that is read is born as the whole", at=at)
        if t.storages:
            raise InputError("a part is kept as the tensor that it is of", at=at)

    def remaking(self, at: At, t: PlanTensor, remaking: Remaking) -> None:
        self.amounts(at, remaking, "numel")
        for k, (source, name, relative) in enumerate(remaking.noise):
            there = self.problem.tensor_index.get(source)
            if there is None or source not in remaking.made_from:
                raise InputError(f"it is not made of {source!r}", at=(*at, "noise", k, 0))
            if self.problem.tensors[there].remaking is not None:
                raise InputError("a source is kept, and not made again", at=(*at, "noise", k, 0))
            check_storage(name, InputError, *at, "noise", k, 1)
            self.amount((*at, "noise", k, 2), relative)
        for k, step in enumerate(remaking.steps):
            for j, (unit, numel) in enumerate(step):
                self.unit_index((*at, "steps", k, j, 0), unit)
                self.amount((*at, "steps", k, j, 1), numel)
        self.energies((*at, "seconds"), remaking.seconds)
        if bool(t.gemms) == bool(t.others) or len(t.others) > 1:
            raise InputError("only what products of matrices keep, or one of two factors, is made again", at=at)
        if (opening := remaking.opening) is not None:
            if not t.others:
                raise InputError("only a factor is opened", at=(*at, "opening"))
            self.amounts((*at, "opening"), opening, "given_numel", "later_numel")
            if opening.later is not None and opening.later not in self.problem.tensor_index:
                raise InputError(f"there is no tensor {opening.later!r}", at=(*at, "opening", "later"))
        known = {name for name, _ in remaking.seconds}
        missing = [f for f in self.problem.formats_of(result_of(t.born)) if f not in known]
        if missing:
            what = f"there are no seconds in {missing[0]}, in which the tensor may be born"
            raise InputError(what, at=(*at, "seconds"))

    def use(self, at: At, use: Use, moments: int) -> None:
        self.index((*at, "moment"), use.moment, moments, "moment")
        self.unit_index((*at, "unit"), use.unit)
        self.unit_index((*at, "copied"), use.copied)
        self.backward_moment((*at, "kept_from"), use.kept_from)
        if use.shared_until not in (None, NEVER):
            self.index((*at, "shared_until"), use.shared_until, self.ops, "moment")
        if use.instead is not None:
            self.unit_index((*at, "instead", 0), use.instead[0])
            self.index((*at, "instead", 1), use.instead[1], self.ops, "moment")

    def gemms(self) -> None:
        p = self.problem
        roles = {"output": Role.OUTPUT, "grad_input": Role.GRAD_INPUT, "grad_weight": Role.GRAD_WEIGHT}
        for i, gemm in enumerate(p.gemms):
            at: At = ("problem", "gemms", i)
            if gemm.number != i:
                raise InputError(f"number must be its place, {i}, not {gemm.number}", at=(*at, "number"))
            self.index((*at, "moment"), gemm.moment, self.ops, "moment")
            self.index((*at, "x"), gemm.x, len(p.tensors), "tensor")
            self.index((*at, "variance"), gemm.variance, p.variances, "variance")
            self.amounts(at, gemm, "x_numel", "out_numel", "upstream", "operands_numel", "weight_bytes", "seen_numel")
            for k, pair in enumerate(gemm.pairs):
                for j, numel in enumerate(pair):
                    self.amount((*at, "pairs", k, j), numel)
            for name in ("input_pieces", "weight_pieces"):
                self.energies((*at, name), getattr(gemm, name))
            self.energies((*at, "spared"), [(f, abs(size)) for f, size in gemm.spared])
            for k, f in enumerate(gemm.emulated):
                check_format(f, InputError, *at, "emulated", k)
            if gemm.summed is not None:
                self.index((*at, "summed", 0), gemm.summed[0], self.ops, "moment")
                self.amount((*at, "summed", 1), gemm.summed[1])
            for name, role in roles.items():
                unit = getattr(gemm, name)
                self.index((*at, name), unit, len(p.units), "unit")
                if p.units[unit].role is not role and not (unit == gemm.grad_input and not gemm.has_grad_weight):
                    raise InputError(f"unit {unit} has the role {p.units[unit].role}", at=(*at, name))
            for name in ("x_noise", "stored_noise", "gradient_noise"):
                self.energies((*at, name), getattr(gemm, name))

    def noise(self) -> None:
        p = self.problem
        for i, node in enumerate(p.nodes):
            at: At = ("problem", "nodes", i)
            self.index((*at, "moment"), node.moment, 2 * self.ops, "moment")
            self.shares((*at, "outputs"), node.outputs)
            self.shares((*at, "inputs"), node.inputs)
            self.indices((*at, "units"), node.units, len(p.units), "unit")
            self.energies((*at, "local"), node.local)
        for i, row in enumerate(p.rows):
            self.positive(("problem", "rows", i, "reference"), row.reference)
            self.positive(("problem", "rows", i, "limit"), row.limit)
            self.indices(("problem", "rows", i, "gemms"), row.gemms, len(p.gemms), "GEMM")
            self.shares(("problem", "rows", i, "passing"), row.passing)

    # Parts

    def index(self, at: At, value: int, end: int, what: str) -> None:
        if not 0 <= value < end:
            valid = f"within 0 and {end - 1}" if end else "there is none"
            raise InputError(f"{what} {value} is not there: {valid}", at=at)

    def indices(self, at: At, values: Iterable[int], end: int, what: str) -> None:
        for k, value in enumerate(values):
            self.index((*at, k), value, end, what)

    def unit_index(self, at: At, value: int | None) -> None:
        if value is not None:
            self.index(at, value, len(self.problem.units), "unit")

    def backward_moment(self, at: At, value: int | None) -> None:
        if value is not None and not self.ops <= value < 2 * self.ops:
            raise InputError(f"{value} is no backward moment: {self.ops} to {2 * self.ops - 1}", at=at)

    def amounts(self, at: At, value: object, *names: str) -> None:
        for name in names:
            self.amount((*at, name), getattr(value, name))

    def amount(self, at: At, value: float | None) -> None:
        check_amount(value, "it", InputError, *at)
        if value is not None and value > _MOST:
            raise InputError(f"{value:g} is more than 2^62", at=at)

    def positive(self, at: At, value: float) -> None:
        check_amount(value, "it", InputError, *at)
        if value == 0.0:
            raise InputError("it must be above 0", at=at)

    def energies(self, at: At, pairs: Sequence[tuple[str, float]]) -> None:
        """By format; without bound where the values leave it."""
        for k, (name, value) in enumerate(pairs):
            check_format(name, InputError, *at, k, 0, among=(RECOMPUTED,))
            if not value >= 0.0:
                raise InputError(f"it must be at least 0, not {value}", at=(*at, k, 1))

    def shares(self, at: At, pairs: Sequence[tuple[int, float]]) -> None:
        for k, (variance, share) in enumerate(pairs):
            self.index((*at, k, 0), variance, self.problem.variances, "variance")
            self.amount((*at, k, 1), share)

    def formats(self, at: At, key: str, names: Sequence[str]) -> None:
        for k, name in enumerate(names):
            check_format(name, InputError, *at, key, k)
        check_unique(names, "the format", InputError, *at, key)
