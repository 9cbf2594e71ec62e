"""What a choice costs, by going through the step. Knows no solver: it is the judge of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

from autoprec.formats import held_as, is_scaled, other_operand, result_format
from autoprec.graphs import Role
from autoprec.planning.codes import bytes_of, rounds_again
from autoprec.planning.pairs import Part, stages
from autoprec.planning.solutions import Choice, Evaluation
from autoprec.planning.uses import Replacement, Saver, Steps, Use
from autoprec.planning.values import Gemm, GradientNode, PlanTensor, Problem
from autoprec.plans import RECOMPUTED, Violation

__all__ = ["SECONDARY", "TERTIARY", "Step", "evaluate", "judged", "objective_of"]

#: What breaks ties. SECONDARY: all saved bytes are worth 1e-4 of the step's time (under "bytes": the other way
#: round). TERTIARY: the whole noise limit of one weight is worth 1e-6 of it.
SECONDARY = 1e-6
TERTIARY = 1e-9

_TOLERANCE = 1e-9


def objective_of(problem: Problem, seconds: float, saved_bytes: float, noise: float) -> float:
    """The number that solvers minimise."""
    time, space = seconds / problem.seconds_scale, saved_bytes / problem.bytes_scale
    first, second = (time, space) if problem.objective == "time" else (space, time)
    return first + SECONDARY * second + TERTIARY * noise


_GRADIENTS = "gradients of activations"

#: Source, target, elements.
_Cast = tuple[str, str, int]

#: `Gemm.of_input` or `Gemm.of_weight`.
_There = Callable[[int, str], int]


class Step:
    """A simulated step, or parts of one: seconds, and the bytes that each interval of moments holds."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self.problem, self.options, self.stored = problem, choice.options, dict(choice.stored)
        self.clear()

    def clear(self) -> None:
        """Forget what was simulated."""
        self.seconds = 0.0
        self.saved = 0
        self.held: list[tuple[str, int, int, int]] = []
        self.kinds: list[str] = []

    def whole(self) -> Self:
        """Simulate every part."""
        p = self.problem
        self.constant()
        for i in range(len(p.units)):
            self.unit(i)
        for i in range(len(p.tensors)):
            self.tensor(i)
        for gemm in p.gemms:
            self.backward(gemm)
        for ours in p.replacements:
            self.replacement(ours)
        return self

    def constant(self) -> None:
        """What does not depend on the choice."""
        p = self.problem
        self.seconds += p.constant_seconds
        for moment, kept_from, size in p.private:
            self.hold(f"statistics of {p.ops[moment]}", "statistics", kept_from, p.backward(moment), size)
            self.saved += size if kept_from == moment else 0
        for held in p.standing:
            self.hold_phases(held.what, _GRADIENTS, *p.with_casts(held.first, held.last), held.bytes)
        for moment, size in p.workspace:
            self.hold(f"workspace of {p.op_at(moment)}", "workspace", moment, moment, size)

    def unit(self, index: int) -> None:
        """Seconds, workspace and private bytes of one role of an op."""
        unit, k = self.problem.units[index], self.options[index]
        self.seconds += unit.seconds[k]
        if unit.role is Role.OUTPUT:
            self.hold(f"workspace of {unit.op}", "workspace", unit.moment, unit.moment, unit.workspace[k])
        if unit.backward_workspace:
            then = self.problem.backward(unit.moment)
            self.hold(f"workspace of {unit.op}", "workspace", then, then, unit.backward_workspace[k])
        if unit.kept:
            first = unit.moment if unit.kept_from is None else unit.kept_from
            what, kind = f"statistics of {unit.op}", "statistics"
            if unit.is_parameter:
                module, _, name = unit.op.removeprefix("param:").rpartition(".")
                what, kind = f"{module}:{name}", "parameters"
            self.hold(what, kind, first, self.problem.backward(unit.moment), unit.kept[k])
            self.saved += unit.kept[k] if unit.kept_from is None else 0

    def hold(self, what: str, kind: str, first: int, last: int, size: int) -> None:
        """Bytes of a kind (`plans.Holding`) that are held while the ops of two moments run, and between them."""
        self.hold_phases(what, kind, self.problem.phase(first), self.problem.phase(last), size)

    def hold_phases(self, what: str, kind: str, first: int, last: int, size: int) -> None:
        """The same from one phase to another, both included."""
        if size:
            self.held.append((what, first, last, size))
            self.kinds.append(kind)

    def format(self, unit: int | None) -> str:
        """The format of a unit; FP32 where nothing is decided."""
        return "fp32" if unit is None else self.problem.units[unit].options[self.options[unit]]

    def copy(self, unit: int | None) -> str:
        """The format of the copy that a unit's op reads: its own, FP32 for TF32."""
        return held_as(self.format(unit))

    def result(self, unit: int | None) -> str:
        """The format in which a unit's op is given tensors and gives its result: its own, BF16 for FP8."""
        return result_format(self.format(unit))

    def tensor(self, index: int) -> None:
        """Casts and copies of one tensor, and the gradient of it."""
        p, t = self.problem, self.problem.tensors[index]
        born, birth = self.result(t.born), p.phase(t.birth)
        begins, last = dict[str, int](), dict[tuple[str, int | None], int]()
        casts = [birth]
        for use in t.readers:
            casts += [p.cast_at(t, use)] if use.part else []
            for f in dict.fromkeys((self.result(use.unit), self.copy(use.unit))):
                if self.has_copy(t, use, f):
                    begins[f] = min(begins.get(f, p.phases), p.cast_at(t, use))
                    last[f, None] = max(last.get((f, None), 0), p.phase(use.moment))
        if t.part_of is None:
            first = min((p.cast_at(t, use) for use in t.readers), default=birth)
            casts += [first, *(begin for f, begin in begins.items() if f != born and not is_scaled(f))]
            begins[born], last[born, None] = birth, max(last.get((born, None), 0), *casts)
        for f, _ in last:
            if is_scaled(f):
                self.seconds += t.runs * p.cast_seconds(result_format(f), f, t.numel)
            elif f != born:
                self.seconds += t.runs * p.cast_seconds(born, f, t.numel)
                if t.casts_back:
                    self.seconds += p.cast_seconds(f, born, t.numel)
        if index in self.stored:
            self.store(t, self.stored[index])
        elif t.part_of in self.stored:
            self.keep_narrow(t, self.stored[t.part_of])
        else:
            savers = [(use, f) for use in t.savers if self.has_copy(t, use, f := self.copy(use.unit))]
            for use, f in savers:
                key = (f, use.kept_from)
                last[key] = max(last.get(key, 0), p.phase(p.backward(use.moment)))
                begins[f] = min(begins.get(f, p.phases), p.cast_at(t, use))
            self.saved += sum(t.bytes_in(f) for f in {f for use, f in savers if use.kept_from is None})
        for (f, again), end in last.items():
            begin = begins[f] if again is None else p.phase(again)
            self.hold_phases(t.id, f"activations, {f}", begin, end, t.bytes_in(f))
        self.gradients(t, born)

    def has_copy(self, t: PlanTensor, use: Use, format_name: str) -> bool:
        """Whether a tensor has a copy for a use in this format: of a part, it has one or the whole has."""
        wide = use.copied is not None and {self.format(use.unit), self.format(use.copied)} == {"fp32"}
        alone = wide or format_name != self.result(t.born)
        return alone if t.part_of is not None else not (use.part and alone)

    def gradients(self, t: PlanTensor, born: str) -> None:
        """The gradient of one tensor: in each format in which it is read, from the last reader there until the first
        one there ran backward and it is cast to the format that the tensor was born in, and in that until its birth.
        What a further reader sends is added to what is there."""
        p, what, readers = self.problem, f"gradient of {t.id}", t.gradient_readers
        formats = [self.result(use.unit) for use in readers]
        cast: dict[str, int] = {}
        for use, f in zip(readers, formats, strict=True):
            cast.setdefault(f, p.gradient_cast_at(t, use))
        begins = {born: min((phase for f, phase in cast.items() if f != born), default=p.phases)}
        for use, f in zip(readers, formats, strict=True):
            alone = use.instead is not None and self.result(use.instead[0]) != f
            begins[f] = min(begins.get(f, p.phases), p.own_at(use) if alone else p.sent_at(use))
        for f, begin in begins.items():
            end = p.phase(p.backward(t.birth)) if f == born else cast[f]
            if begin <= end:
                self.hold_phases(what, _GRADIENTS, begin, end, t.numel * bytes_of(f))
        for k, (use, f) in enumerate(zip(readers[:-1], formats, strict=False)):
            then, others = p.added_at(use), formats[k + 1 :]
            if f in others or (f == born and any(g != f and cast[g] <= then for g in others)):
                self.hold_phases(f"sum of the {what}", _GRADIENTS, then, then, t.numel * bytes_of(f))

    def store(self, t: PlanTensor, storage: str) -> None:
        """The narrow copy of one tensor, what is made of it in the backward pass (but for GEMMs), and the masks of the
        ReLUs that made it."""
        p = self.problem
        moment, unit = t.stored_by
        if storage == RECOMPUTED:
            self.remake(t)
        elif t.in_parts:
            self.keep_narrow(t, storage)
        else:
            self.seconds += p.cast_seconds(self.copy(unit), storage, t.numel)
            self.hold(t.id, f"activations, {storage}", moment, p.backward(moment), t.stored_bytes(storage))
            self.saved += t.stored_bytes(storage)
        for saver in t.others:
            f, then = self.copy(saver.unit), p.backward(saver.moment)
            if f != storage:
                self.seconds += 0.0 if storage == RECOMPUTED else p.cast_seconds(storage, f, saver.numel)
                size = 0 if saver.in_pieces else saver.numel * bytes_of(f)
                self.hold(f"{t.id} read again", "read again", then, then, size)
        if storage == RECOMPUTED:
            self.open(t)
        for moment in t.masks:
            self.hold(f"mask of {t.id}", "masks", moment, p.backward(moment), t.mask_bytes)
            self.saved += t.mask_bytes

    def keep_narrow(self, t: PlanTensor, storage: str) -> None:
        """The narrow copies of a part, or of a tensor kept in parts: of each copy, while its first keeper does."""
        p, born, first = self.problem, self.result(t.born), dict[str, int]()
        for use in t.keepers if storage != RECOMPUTED else ():
            f = self.copy(use.unit) if use.part or t.part_of is not None else born
            if (f == born) == (t.part_of is None):
                first[f] = min(first.get(f, p.phases), use.moment)
        for f, moment in first.items():
            self.seconds += p.cast_seconds(f, storage, t.numel)
            self.hold(t.id, f"activations, {storage}", moment, p.backward(moment), t.stored_bytes(storage))
            self.saved += t.stored_bytes(storage)

    def remake(self, t: PlanTensor) -> None:
        """A tensor made again, once, for all that would have kept it."""
        p, made = self.problem, self.result(t.born)
        assert t.remaking is not None
        self.seconds += dict(t.remaking.seconds)[made]
        first, last = p.made_again(t)
        if first < last:  # at the last moment it is there for the weight's gradient alone, which comes first
            self.hold_phases(
                f"{t.id} made again", "made again", p.phase(first), p.cast_phase(last - 1), t.numel * bytes_of(made)
            )

    def largest(self, steps: Steps) -> int:
        """Bytes that are there in one of the steps at most."""
        return max(sum(n * bytes_of(self.result(u)) for u, n in step) for step in steps)

    def open(self, t: PlanTensor) -> None:
        """What a factor takes while it is made again, beyond what counts there anyway."""
        if (opened := self.problem.opened(t)) is not None and opened.steps:
            counted = opened.numel + (opened.later_numel if opened.later in self.stored else 0)
            more = max(0, self.largest(opened.steps) - counted * bytes_of(self.result(opened.unit)))
            self.hold_phases(f"{t.id} made again", "made again", opened.phase, opened.phase, more)

    def replacement(self, ours: Replacement) -> None:
        """What an op in FP32 holds more, and spares, if it keeps something narrow."""
        if self.copy(ours.unit) == "fp32" and any(t in self.stored for t in ours.tensors):
            self.saved -= ours.spared
            for kind, first, last, more in self.problem.held_more(ours):  # of the kind that it is more, or fewer, of
                self.hold_phases(f"{kind} of {self.problem.op_at(ours.moment)}", kind, first, last, more)

    def storage_of(self, gemm: Gemm) -> str | None:
        """How the input of a GEMM is kept for its backward pass; None if that is as it was."""
        return self.stored.get(gemm.x) if gemm.number in self.problem.tensors[gemm.x].gemms else None

    def format_kept(self, gemm: Gemm) -> str:
        """The format in which a GEMM's backward pass is given its input."""
        storage = self.storage_of(gemm)
        if storage == RECOMPUTED:
            return self.result(self.problem.tensors[gemm.x].born)
        return storage or self.copy(gemm.output)

    def backward(self, gemm: Gemm) -> None:
        """Casts of one GEMM's backward pass, and what they hold for its moment. The weight's gradient is made first,
        then the input's, and each casts for itself."""
        p, moment = self.problem, self.problem.backward(gemm.moment)
        made, h, g = (self.result(u) for u in (gemm.output, gemm.grad_input, gemm.grad_weight))
        x, out, read = gemm.x_numel, gemm.out_numel, self.format_kept(gemm)
        beside = held_as(other_operand(self.format(gemm.grad_weight)))
        # A product in FP8 makes its copies of gradients and weights itself: they are in its own seconds.
        of_input = [(made, h, out)] if gemm.has_grad_input else []
        operands = [gemm.operands_numel] if gemm.operands_numel else [other for _, other in gemm.pairs]
        again = held_as(other_operand(self.format(gemm.grad_input)))
        of_input += [(self.copy(gemm.output), again, numel) for numel in operands]
        of_weight = [(made, g, out), (read, beside, gemm.read_numel)] if gemm.has_grad_weight else []
        held = [
            self.product(gemm, gemm.grad_input, of_input, gemm.of_input),
            self.product(gemm, gemm.grad_weight, of_weight, gemm.of_weight),
        ]
        if gemm.has_grad_input and h != made:
            self.seconds += p.cast_seconds(h, made, x)
            if h in dict(gemm.input_pieces):  # each piece is cast by itself
                held[0] -= dict(gemm.spared).get(h, 0)
            else:  # the input's gradient is cast when all else is gone
                held[0] = max(held[0] + x * (bytes_of(h) - bytes_of(made)), x * bytes_of(h))
        not_yet = 0 if gemm.input_pieces else x * bytes_of(made)  # of the input's gradient
        held[0] = max(held[0], _before(gemm, of_input, gemm.of_input) - not_yet)
        held[1] = max(held[1], _before(gemm, of_weight, gemm.of_weight))
        if self.storage_of(gemm) == RECOMPUTED:
            own, steps = p.remade_for(gemm)
            width = bytes_of(self.format_kept(gemm))
            held[1] += own * width
            if steps:  # what it is made of is gone when the product begins
                held.append(self.largest(steps) + (own - p.tensors[gemm.x].numel) * width)
        if gemm.pairs:
            held = [self.of_two(gemm)]
        roles = (gemm.output, gemm.grad_input, gemm.grad_weight)
        plain = self.storage_of(gemm) is None and all(self.format(u) == "fp32" for u in roles)
        early, late = p.one_after_the_other(gemm, self.format(gemm.output), plain=plain)
        kept, gone = self.let_go(gemm, plain=plain)
        of_input_alone = held[0] + early - gone
        most = max([of_input_alone, *(max(-gone, size - late) for size in held[1:])])
        if most < 0 or most == of_input_alone:
            self.hold(p.tensors[gemm.x].id, f"activations, {kept}", moment, moment, -gone)
            most += gone
        self.hold(f"workspace of {gemm.op}", "workspace", moment, moment, most)
        if plain and gemm.summed is not None:
            then = p.backward(gemm.summed[0])
            self.hold(f"sum of gradients of the weight of {gemm.op}", "workspace", then, then, gemm.summed[1])

    def let_go(self, gemm: Gemm, *, plain: bool) -> tuple[str, int]:
        """How a GEMM keeps its input, and bytes of that which are gone when the input's gradient is made."""
        t, storage, (later, narrow) = self.problem.tensors[gemm.x], self.storage_of(gemm), self.problem.lets_go(gemm)
        if storage is not None:
            return storage, t.stored_bytes(storage) if narrow and storage != RECOMPUTED else 0
        kept = self.copy(gemm.output)
        is_needed = plain or later is None or kept in map(self.copy, later)
        return kept, 0 if is_needed else t.bytes_in(kept)

    def of_two(self, gemm: Gemm) -> int:
        """Bytes of the backward pass of a product of two activations, above the gradients that it gives."""
        made, h, kept = self.result(gemm.output), self.result(gemm.grad_input), self.copy(gemm.output)
        again = held_as(other_operand(self.format(gemm.grad_input)))
        own, emulated = bytes_of(h), h in gemm.emulated
        copy = own if made != h else 0
        operand = bytes_of(again) if kept != again else 0
        rounded = made != ("fp32" if emulated else h)
        unit = self.problem.units[gemm.grad_input]
        workspace = dict(zip(unit.options, unit.workspace, strict=True))
        sizes = {
            Part.MADE: bytes_of(made),
            Part.PRODUCT: 4 if emulated else own,
            Part.ROUNDED: (4 if emulated else own) if rounded else 0,
            Part.GIVEN: bytes_of(made) if rounded else 0,
            Part.ARRIVING: 4 if emulated else copy,
            Part.OPERAND: 4 if emulated else operand,
            Part.CASTING: copy + 4 if emulated and copy else 0,
            Part.READING: operand + 4 if emulated and operand else 0,
            Part.WORKSPACE: workspace.get("fp32", 0) if emulated else workspace[self.format(gemm.grad_input)],
        }
        found = stages(gemm.out_numel, gemm.pairs, gemm.x_numel, 1)
        return max(sum(sign * numel * sizes[part] for part, numel, sign in stage) for stage in found)

    def product(self, gemm: Gemm, unit: int, casts: Sequence[_Cast], there: _There) -> int:
        """Bytes of a product of a GEMM's backward pass, and of its operands' casts; seconds of the latter. `there`: of
        so many elements, those of which there are copies in a format at a time."""
        size = self.problem.units[unit].workspace[self.options[unit]]
        for source, target, numel in casts:
            self.seconds += self.problem.cast_seconds(source, target, numel)
            if source != target and target not in gemm.emulated:
                size += there(numel, target) * bytes_of(target)
        return size

    def loss_variance(self) -> float:
        """E(δL)² per step over all rounding events."""
        return sum(self.loss_noise(t) for t in self.problem.tensors)

    def loss_noise(self, t: PlanTensor) -> float:
        """The part of one tensor's rounding."""
        if not t.loss_noise:
            return 0.0
        born = self.result(t.born)
        rounded = {f(use.unit) for use in t.readers for f in (self.format, self.result)} | {born}
        if t.inherits:
            rounded.discard(born)
        return sum(energy for f, energy in t.loss_noise if f in rounded)

    def variances(self) -> list[float]:
        """Relative variance by number: of gradients and of activations."""
        p = self.problem
        variance = [0.0] * p.variances
        for node in reversed(p.nodes):
            passed = sum(share * variance[k] for k, share in node.outputs) + self.rounding(node)
            for k, share in node.inputs:
                variance[k] += share * passed
            for t, saver in p.savers_at.get(node.moment, ()):
                for k, share in saver.reached:
                    variance[k] += share * self.saver_noise(t, saver)
        return variance

    def saver_noise(self, tensor: int, saver: Saver) -> float:
        """The relative variance of how a tensor is kept that one of its savers reads."""
        return saver.noise_in(self.stored.get(tensor)) + self.inherited(tensor)

    def inherited(self, tensor: int) -> float:
        """The relative variance that a tensor, made again, has of how what it is made of is kept."""
        if self.stored.get(tensor) != RECOMPUTED:
            return 0.0
        return sum((v for s, f, v in self.problem.inherited.get(tensor, ()) if self.stored.get(s) == f), 0.0)

    def rows(self) -> list[float]:
        """E‖δ∇W‖² per weight row."""
        p, variance = self.problem, self.variances()
        return [
            sum((self.weight_noise(p.gemms[k], variance) for k in row.gemms), 0.0)
            + sum((energy * variance[k] for k, energy in row.passing), 0.0)
            for row in p.rows
        ]

    def rounding(self, node: GradientNode) -> float:
        """The relative variance that an op's own roundings add to the gradient that it passes on."""
        own = node.units[1:] or node.units  # a product with gradient roles reads what arrives in theirs
        formats = {self.result(u) for u in node.units} | {self.format(u) for u in own}
        return sum(relative for f, relative in node.local if f in formats)

    def weight_noise(self, gemm: Gemm, variance: list[float]) -> float:
        """E‖δ∇W‖² of one GEMM: what comes from above, and the roundings of its operands."""
        made, g = self.result(gemm.output), self.format(gemm.grad_weight)
        total = gemm.upstream * variance[gemm.variance]
        total += sum(energy for f, energy in gemm.gradient_noise if f in (made, g, result_format(g)))
        storage, operand = self.storage_of(gemm), other_operand(g)
        if storage is None or storage == RECOMPUTED:  # the same numbers, if what they are made of is kept as it is
            read = {self.copy(gemm.output), made, operand, self.result(self.problem.tensors[gemm.x].born)}
            total += gemm.x_energy * self.inherited(gemm.x) if storage is not None else 0.0
        else:
            total += sum(energy for f, energy in gemm.stored_noise if f == storage)
            read = {operand} if rounds_again(storage, operand) else set()
        return total + sum(energy for f, energy in gemm.x_noise if f in read)


def _before(gemm: Gemm, casts: Sequence[_Cast], there: _There) -> int:
    """Most bytes before an emulated product: a cast, beside the FP32 copy of it and those of the operands before it."""
    copies = most = 0
    for source, target, whole in casts:
        numel = there(whole, "fp32")
        if source != target and target in gemm.emulated:
            most = max(most, copies + numel * (4 + bytes_of(target)))
        copies += 4 * numel
    return most


def evaluate(problem: Problem, choice: Choice) -> Evaluation:
    """Seconds, bytes and noise of a choice, and every constraint that it breaks."""
    step = Step(problem, choice).whole()
    change = [0] * (problem.phases + 1)
    for _, first, last, size in step.held:
        change[first] += size
        change[last + 1] -= size
    bytes_at, now = [], problem.fixed_bytes
    for delta in change[:-1]:
        now += delta
        bytes_at.append(now)
    return judged(problem, choice, step.seconds, step.saved, bytes_at, step.loss_variance(), step.rows())


def judged(
    problem: Problem,
    choice: Choice,
    seconds: float,
    saved: int,
    bytes_at: Sequence[int],
    variance: float,
    rows: Sequence[float],
) -> Evaluation:
    """The sums of a step against the limits."""
    peak = max(bytes_at, default=problem.fixed_bytes)
    peak_phase = bytes_at.index(peak) if bytes_at else 0
    noise = variance / problem.loss_scale
    if rows:
        noise += sum(v / row.limit for v, row in zip(rows, problem.rows, strict=True))
    ratios = (v / row.reference for v, row in zip(rows, problem.rows, strict=True))
    return Evaluation(
        seconds=seconds,
        saved_bytes=saved,
        peak_bytes=peak,
        peak_phase=peak_phase,
        loss_sigma=math.sqrt(variance),
        gradient_ratio=math.sqrt(max(ratios, default=0.0)),
        bytes_at=tuple(bytes_at),
        rows=tuple(rows),
        noise=noise,
        objective=objective_of(problem, seconds, saved, noise),
        violations=tuple(_violations(problem, choice, peak, peak_phase, variance, rows)),
    )


def _violations(
    problem: Problem, choice: Choice, peak: int, peak_phase: int, variance: float, rows: Sequence[float]
) -> list[Violation]:
    found = []
    if problem.budget_bytes is not None and peak > problem.budget_bytes:
        what = problem.phase_name(peak_phase)
        found.append(Violation(kind="peak", what=what, value=peak, limit=problem.budget_bytes))
    limit = problem.loss_limit
    if limit is not None and variance > limit * (1.0 + _TOLERANCE):
        found.append(Violation(kind="loss", what="loss", value=variance, limit=limit))
    for value, row in zip(rows, problem.rows, strict=True):
        if value > row.limit * (1.0 + _TOLERANCE):
            found.append(Violation(kind="gradient", what=row.weight, value=value, limit=row.limit))
    for a, b in problem.ties:
        if problem.units[a].options[choice.options[a]] != problem.units[b].options[choice.options[b]]:
            ops = f"{problem.units[a].op} and {problem.units[b].op}"
            found.append(Violation(kind="tie", what=ops, value=1.0, limit=0.0))
    return found
