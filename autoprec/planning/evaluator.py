"""What a choice costs, by going through the step. Knows no solver: it is the judge of all of them."""

from __future__ import annotations

import math

from autoprec.planning.values import PACKED, Choice, Evaluation, Gemm, PlanTensor, Problem, Violation, bytes_of

__all__ = ["SECONDARY", "TERTIARY", "evaluate", "holders", "objective_of"]

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


class _Step:
    """One simulated step: seconds, and the bytes that each interval of moments holds."""

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self.problem = problem
        self.packed = choice.packed
        self.formats = [u.options[k] for u, k in zip(problem.units, choice.options, strict=True)]
        self.seconds = problem.constant_seconds
        self.saved = 0
        self.held: list[tuple[str, int, int, int]] = []
        for unit, k in zip(problem.units, choice.options, strict=True):
            self.seconds += unit.seconds[k]
            if unit.workspace[k]:
                self.hold(f"weights of {unit.op}", unit.moment, unit.moment, unit.workspace[k])
            if unit.kept:
                first = unit.moment if unit.kept_from is None else unit.kept_from
                self.hold(f"statistics of {unit.op}", first, problem.backward(unit.moment), unit.kept[k])
                self.saved += unit.kept[k] if unit.kept_from is None else 0
        for moment, kept_from, size in problem.private:
            self.hold(f"statistics of {problem.ops[moment]}", kept_from, problem.backward(moment), size)
            self.saved += size if kept_from == moment else 0
        for i, tensor in enumerate(problem.tensors):
            self.tensor(i, tensor)
        for gemm in problem.gemms:
            self.backward(gemm)

    def hold(self, what: str, first: int, last: int, size: int) -> None:
        if size:
            self.held.append((what, first, last, size))

    def format(self, unit: int | None) -> str:
        return "fp32" if unit is None else self.formats[unit]

    def tensor(self, index: int, t: PlanTensor) -> None:
        """Casts and copies of one tensor, and the gradient of it."""
        p = self.problem
        born = self.format(t.born)
        last = {(born, t.birth): t.birth}
        for use in t.readers:
            key = (self.format(use.unit), t.birth)
            last[key] = max(last.get(key, t.birth), use.moment)
        for f, _ in last:
            if f != born:
                self.seconds += t.runs * p.cast_seconds(born, f, t.numel)
                if t.casts_back:
                    self.seconds += p.cast_seconds(f, born, t.numel)
        if index in self.packed:
            self.pack(t)
        else:
            for use in t.savers:
                key = (self.format(use.unit), t.birth if use.kept_from is None else use.kept_from)
                last[key] = max(last.get(key, t.birth), p.backward(use.moment))
            self.saved += sum(t.bytes_in(f) for f in {self.format(u.unit) for u in t.savers if u.kept_from is None})
        for (f, begin), end in last.items():
            self.hold(t.id, begin, end, t.bytes_in(f))
        if t.gradient_from is not None:
            size = t.numel * bytes_of(born)
            self.hold(f"gradient of {t.id}", p.backward(t.gradient_from), p.backward(t.birth), size)

    def pack(self, t: PlanTensor) -> None:
        p = self.problem
        first = min((p.gemms[k] for k in t.gemms), key=lambda gemm: gemm.moment)
        self.seconds += p.cast_seconds(self.format(first.output), PACKED, t.numel)
        self.hold(t.id, first.moment, p.backward(first.moment), t.packed_bytes)
        self.saved += t.packed_bytes
        for moment in t.masks:
            self.hold(f"mask of {t.id}", moment, p.backward(moment), t.mask_bytes)
            self.saved += t.mask_bytes

    def unpacks(self, gemm: Gemm) -> bool:
        """Whether a GEMM's backward reads its input from an E4M3 copy."""
        return gemm.x in self.packed and any(self.problem.gemms[k] is gemm for k in self.problem.tensors[gemm.x].gemms)

    def backward(self, gemm: Gemm) -> None:
        """Casts of one GEMM's backward pass, and what they hold for its moment."""
        p = self.problem
        moment = p.backward(gemm.moment)
        made, h, g = (self.format(u) for u in (gemm.output, gemm.grad_input, gemm.grad_weight))
        casts: list[tuple[str, str, int, int]] = []
        wanted = ({h} if gemm.has_grad_input else set()) | ({g} if gemm.has_grad_weight else set())
        for f in sorted(wanted - {made}):
            casts.append((made, f, gemm.out_numel, gemm.out_numel * bytes_of(f)))
        if gemm.has_grad_input and h != made:
            casts.append((h, made, gemm.x_numel, gemm.x_numel * bytes_of(h)))
        if gemm.has_grad_weight and self.unpacks(gemm):
            casts.append((PACKED, g, gemm.x_numel, gemm.x_numel * bytes_of(g)))
        elif gemm.has_grad_weight and g != made:
            casts.append((made, g, gemm.x_numel, gemm.x_numel * bytes_of(g)))
        for source, target, numel, size in casts:
            self.seconds += p.cast_seconds(source, target, numel)
            self.hold(f"workspace of {gemm.op}", moment, moment, size)

    def loss_variance(self) -> float:
        """E(δL)² per step over all rounding events."""
        total = 0.0
        for t in self.problem.tensors:
            if not t.loss_noise:
                continue
            born = self.format(t.born)
            rounded = {self.format(use.unit) for use in t.readers} | {born}
            if t.inherits:
                rounded.discard(born)
            total += sum(energy for f, energy in t.loss_noise if f in rounded)
        return total

    def rows(self) -> list[float]:
        """E‖δ∇W‖² per weight row."""
        p = self.problem
        variance = [0.0] * p.variances
        for node in reversed(p.nodes):
            passed = sum(share * variance[k] for k, share in node.outputs)
            formats = {self.format(u) for u in node.units}
            passed += sum(relative for f, relative in node.local if f in formats)
            for k, share in node.inputs:
                variance[k] += share * passed
        return [sum(self.weight_noise(p.gemms[k], variance) for k in row.gemms) for row in p.rows]

    def weight_noise(self, gemm: Gemm, variance: list[float]) -> float:
        made, g = self.format(gemm.output), self.format(gemm.grad_weight)
        total = gemm.upstream * variance[gemm.variance]
        total += sum(energy for f, energy in gemm.gradient_noise if f in (made, g))
        if self.unpacks(gemm):
            return total + gemm.packed_noise
        read = {made, g, self.format(self.problem.tensors[gemm.x].born)}
        return total + sum(energy for f, energy in gemm.x_noise if f in read)


def evaluate(problem: Problem, choice: Choice) -> Evaluation:
    """Seconds, bytes and noise of a choice, and every constraint that it breaks."""
    step = _Step(problem, choice)
    change = [0] * (2 * len(problem.ops) + 1)
    for _, first, last, size in step.held:
        change[first] += size
        change[last + 1] -= size
    bytes_at, now = [], problem.fixed_bytes
    for delta in change[:-1]:
        now += delta
        bytes_at.append(now)
    peak = max(bytes_at, default=problem.fixed_bytes)
    peak_moment = bytes_at.index(peak) if bytes_at else 0
    variance, rows = step.loss_variance(), step.rows()
    noise = variance / problem.loss_scale
    if rows:
        noise += sum(v / row.limit for v, row in zip(rows, problem.rows, strict=True))
    ratios = (v / row.reference for v, row in zip(rows, problem.rows, strict=True))
    return Evaluation(
        seconds=step.seconds,
        saved_bytes=step.saved,
        peak_bytes=peak,
        peak_moment=peak_moment,
        loss_sigma=math.sqrt(variance),
        gradient_ratio=math.sqrt(max(ratios, default=0.0)),
        bytes_at=tuple(bytes_at),
        rows=tuple(rows),
        noise=noise,
        objective=objective_of(problem, step.seconds, step.saved, noise),
        violations=tuple(_violations(problem, step, peak, peak_moment, variance, rows)),
    )


def _violations(
    problem: Problem, step: _Step, peak: int, peak_moment: int, variance: float, rows: list[float]
) -> list[Violation]:
    found = []
    if problem.budget_bytes is not None and peak > problem.budget_bytes:
        what = problem.moment_name(peak_moment)
        found.append(Violation(kind="peak", what=what, value=peak, limit=problem.budget_bytes))
    limit = problem.loss_limit
    if limit is not None and variance > limit * (1.0 + _TOLERANCE):
        found.append(Violation(kind="loss", what="loss", value=variance, limit=limit))
    for value, row in zip(rows, problem.rows, strict=True):
        if value > row.limit * (1.0 + _TOLERANCE):
            found.append(Violation(kind="gradient", what=row.weight, value=value, limit=row.limit))
    for a, b in problem.ties:
        if step.formats[a] != step.formats[b]:
            ops = f"{problem.units[a].op} and {problem.units[b].op}"
            found.append(Violation(kind="tie", what=ops, value=1.0, limit=0.0))
    return found


def holders(problem: Problem, choice: Choice, moment: int, count: int = 3) -> list[tuple[str, int]]:
    """What holds the most bytes at a moment, largest first (parameters and inputs not counted)."""
    sizes: dict[str, int] = {}
    for what, first, last, size in _Step(problem, choice).held:
        if first <= moment <= last:
            sizes[what] = sizes.get(what, 0) + size
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:count]
