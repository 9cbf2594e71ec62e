"""Planning problems of transformers with any number of ops.

A transformer of three blocks goes through `build_problem`, and its middle block is repeated: lifetimes, uses and roles
are those of a real problem. What differs from block to block are the figures: seconds, noise, shares and limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoprec.planning.evaluator import evaluate
from autoprec.planning.problem import build_problem
from autoprec.planning.solutions import Choice
from autoprec.planning.uses import Remaking, Replacement, Saver, Use
from autoprec.planning.values import Gemm, GradientNode, PlanTensor, Problem, Unit, WeightRow
from autoprec.policies import Policy
from tests.planning.planning_cases import modelled_device, transformer

__all__ = ["transformer_problem"]

#: Rows and width of the activations: a batch of 2,048 tokens in a model of width 1,024.
_ROWS, _WIDTH = 2048, 1024

#: Share of ops whose FP16 the device emulates, at four times the seconds.
_EMULATED = 0.4


def transformer_problem(ops: int, *, seed: int = 0, budget: float | None = 0.5, decades: float = 1.5) -> Problem:
    """A problem of about `ops` ops, in whole blocks, with three compute formats and BF16 and FP8 storages.

    Seconds differ by some 15 % and noise by orders of magnitude from op to op, so that limits bind here and not there;
    the limits of weights are spread over so many `decades`. The budget is that share of the way from the peak of
    everything narrow that noise allows to that of everything at its fastest.
    """
    template = _template()
    problem = _Stretched(template, ops, seed, decades).problem()
    problem = replace(problem, loss_limit=(limit := _loss_limit(problem)), loss_scale=limit)
    if budget is None:
        return problem
    low, high = (evaluate(problem, c).peak_bytes for c in (_narrowest(problem), _fastest(problem)))
    return replace(problem, budget_bytes=round(low + budget * (high - low)))


def _template() -> Problem:
    make, graph = transformer(3, width=_WIDTH, rows=_ROWS)
    policy = Policy.model_validate({
        "name": "scale", "formats": ("fp32", "bf16", "fp16"), "noise": {"gradient": 0.05, "loss": 0.005},
        "storage": {"formats": ("bf16", "fp8_e4m3")},
    })  # fmt: skip
    return build_problem(graph, make.profile(graph), modelled_device(graph), policy)


def _narrowest(problem: Problem) -> Choice:
    """FP16 everywhere, and FP8 for what GEMMs keep where that takes at most half of each weight's limit."""
    limit = {k: row.limit for row in problem.rows for k in row.gemms}
    stored = set()
    for i in problem.storable:
        noise = [dict(problem.gemms[k].stored_noise)["fp8_e4m3"] / limit[k] for k in problem.tensors[i].gemms]
        stored.add((i, "fp8_e4m3" if noise and max(noise) < 0.5 else "bf16"))
    return Choice(options=tuple(u.options.index("fp16") for u in problem.units), stored=frozenset(stored))


def _fastest(problem: Problem) -> Choice:
    return Choice(options=tuple(int(np.argmin(u.seconds)) for u in problem.units))


def _loss_limit(problem: Problem) -> float:
    """A twentieth of the loss variance of rounding everything to BF16."""
    return 0.05 * sum(max((e for _, e in t.loss_noise), default=0.0) for t in problem.tensors if t.born is not None)


@dataclass(frozen=True)
class _Layout:
    """Where the blocks are in one of the template's lists: how many come before them, and how many a block has."""

    before: int
    each: int

    def block(self, index: int) -> int:
        """0 for what comes before the blocks, 3 for what follows them."""
        return min(max(index - self.before, 0) // self.each, 3)


class _Stretched:
    """The template with its second block repeated; every index is moved by whole blocks."""

    def __init__(self, template: Problem, ops: int, seed: int, decades: float) -> None:
        self.template, self.decades = template, decades
        births = [t.birth for t in template.tensors if t.id.endswith("layer_norm#1") or "layer_norm#17" in t.id]
        self.period = births[1] - births[0]
        self.blocks = max(3, round((ops - len(template.ops)) / self.period) + 3)
        self.extra = self.blocks - 3
        self.rng = np.random.default_rng([ops, seed])
        t = template
        assert t.variances == 2 * len(t.tensors)  # of gradients, and of activations
        self.ops = _Layout(births[0], self.period)
        self.units = self._layout([self.ops.block(self._forward(u.moment)) for u in t.units])
        self.tensors = self._layout([0 if i < 3 else self.ops.block(x.birth) for i, x in enumerate(t.tensors)])
        self.gemms = self._layout([self.ops.block(g.moment) for g in t.gemms])
        self.ties = self._layout([self.ops.block(self._forward(t.units[a].moment)) for a, _ in t.ties])
        self.backward = [n for n in t.nodes if n.moment < len(t.ops)]
        self.forward = [n for n in reversed(t.nodes) if n.moment >= len(t.ops)]
        self.nodes = self._layout([self.ops.block(n.moment) for n in self.backward])
        self.forward_nodes = self._layout([self.ops.block(n.moment - len(t.ops)) for n in self.forward])
        self.count = len(self._copies(self.tensors, t.tensors))

    def _layout(self, blocks: list[int]) -> _Layout:
        """From each element's block; parameters of norms are listed with the block's first op."""
        each = blocks.count(1)
        last = len(blocks) - blocks.count(3)
        return _Layout(last - 3 * each, each)

    def _forward(self, moment: int) -> int:
        n = len(self.template.ops)
        return moment if moment < n else 2 * n - 1 - moment

    def _copies(self, layout: _Layout, items: tuple[Any, ...]) -> list[tuple[Any, int]]:
        """Each item with the blocks that it is moved by."""
        first, second = layout.before + layout.each, layout.before + 2 * layout.each
        found = [(x, 0) for x in items[:first]]
        found += [(x, k) for k in range(self.extra + 1) for x in items[first:second]]
        return found + [(x, self.extra) for x in items[second:]]

    def _at(self, moment: int, blocks: int) -> int:
        """A moment, moved."""
        n = len(self.template.ops)
        if moment < n:
            return moment + blocks * self.period
        return 2 * (n + self.extra * self.period) - 1 - (2 * n - 1 - moment + blocks * self.period)

    def problem(self) -> Problem:
        t, rng = self.template, self.rng
        ops = [f"{name}@{k}" for name, k in self._copies(self.ops, t.ops)]
        slow = dict.fromkeys(ops, 1.0) | {op: 4.0 for op in ops if rng.random() < _EMULATED}
        units = self._copies(self.units, t.units)
        spread = np.exp(0.15 * rng.standard_normal((len(units), 3))).tolist()
        tensors = self._copies(self.tensors, t.tensors)
        loud = (10.0 ** rng.normal(0.0, 0.7, len(tensors))).tolist()
        self.branch = rng.uniform(0.01, 0.08, len(tensors)).tolist()  # of a residual's gradient, through the branch
        self.residual = {i for i, x in enumerate(t.tensors) if len({u.moment for u in x.gradient_readers}) == 2}
        gemms = self._copies(self.gemms, t.gemms)
        # Variance adds up along the residual stream, so limits that would suit 64 blocks grow with more of them.
        row_of = {number: row for row in t.rows for number in row.gemms}
        judged = [(n, row_of[g.number], k) for n, (g, k) in enumerate(gemms) if g.number in row_of]
        limits = (10.0 ** rng.uniform(0.5 - self.decades, 0.5, len(judged)) * max(1.0, self.blocks / 64)).tolist()
        made = tuple(self._unit(u, k, slow, s) for (u, k), s in zip(units, spread, strict=True))
        return replace(
            t,
            ops=tuple(ops),
            units=made,
            tensors=tuple(self._tensor(x, k, n) for (x, k), n in zip(tensors, loud, strict=True)),
            gemms=tuple(self._gemm(g, k) for g, k in gemms),
            nodes=(
                *(self._node(n, k) for n, k in self._copies(self.nodes, tuple(self.backward))),
                *reversed([self._node(n, k) for n, k in self._copies(self.forward_nodes, tuple(self.forward))]),
            ),
            rows=tuple(
                self._row(row, k, number, share) for (number, row, k), share in zip(judged, limits, strict=True)
            ),
            ties=tuple(
                (a + k * self.units.each, b + k * self.units.each) for (a, b), k in self._copies(self.ties, t.ties)
            ),
            replacements=tuple(map(self._replacement, t.replacements)),
            variances=2 * len(tensors),
            fixed_bytes=t.fixed_bytes // 3 * self.blocks,
            seconds_scale=t.constant_seconds + sum(u.seconds[0] for u in made),
            bytes_scale=t.bytes_scale / 3 * self.blocks,
        )

    def _replacement(self, ours: Replacement) -> Replacement:
        """Of the loss, behind all blocks."""
        assert self.ops.block(ours.moment) == 3 and ours.unit is None
        moved = tuple(i + self.extra * self.tensors.each for i in ours.tensors)
        return replace(ours, moment=self._at(ours.moment, self.extra), tensors=moved)

    def _unit(self, unit: Unit, k: int, slow: dict[str, float], spread: list[float]) -> Unit:
        op = f"{unit.op}@{k}"
        seconds = [s * factor for s, factor in zip(unit.seconds, spread, strict=False)]
        seconds = [s * slow[op] if f == "fp16" else s for s, f in zip(seconds, unit.options, strict=True)]
        return Unit(
            op=op, role=unit.role, options=unit.options, seconds=tuple(seconds), workspace=unit.workspace,
            backward_workspace=unit.backward_workspace, moment=self._at(unit.moment, k), kept=unit.kept,
            needed=unit.needed,
        )  # fmt: skip

    def _moved(self, unit: int | None, k: int) -> int | None:
        return None if unit is None else unit + k * self.units.each

    def _uses(self, uses: tuple[Use, ...], k: int) -> tuple[Use, ...]:
        moved = (replace(u, moment=self._at(u.moment, k), unit=self._moved(u.unit, k), copied=self._moved(u.copied, k))
                 for u in uses)  # fmt: skip
        return tuple(replace(u, shared_until=None, instead=None, to_a_view=False) for u in moved)

    def _tensor(self, t: PlanTensor, k: int, loud: float) -> PlanTensor:
        moment, unit = t.stored_by
        return PlanTensor(
            id=f"{t.id}@{k}", numel=t.numel, is_float32=t.is_float32, wide_bytes=t.wide_bytes,
            narrow_costs=t.narrow_costs, birth=self._at(t.birth, k), born=self._moved(t.born, k), inherits=t.inherits,
            part_of=None if t.part_of is None else t.part_of + k * self.tensors.each,
            readers=self._uses(t.readers, k), savers=self._uses(t.savers, k), storages=t.storages,
            stored_by=(self._at(moment, k), self._moved(unit, k)),
            gemms=tuple(g + k * self.gemms.each for g in t.gemms), others=tuple(self._saver(s, k) for s in t.others),
            gradient_readers=self._uses(t.gradient_readers, k),
            remaking=None if t.remaking is None else self._remaking(t.remaking, k), casts_back=t.casts_back,
            loss_noise=tuple((f, e * loud) for f, e in t.loss_noise),
        )  # fmt: skip

    def _remaking(self, remaking: Remaking, k: int) -> Remaking:
        ids = [f"{t.id}@{n}" for t, n in self._copies(self.tensors, self.template.tensors)]
        moved = {s: ids[self.template.tensor_index[s] + k * self.tensors.each] for s in remaking.made_from}
        noise = tuple((moved[s], f, v) for s, f, v in remaking.noise)
        opening = remaking.opening
        if opening is not None and opening.later is not None:
            there = ids[self.template.tensor_index[opening.later] + k * self.tensors.each]
            opening = replace(opening, later=there)
        steps = tuple(tuple((self._moved(unit, k), n) for unit, n in step) for step in remaking.steps)
        return replace(remaking, made_from=tuple(moved.values()), noise=noise, steps=steps, opening=opening)

    def _variance(self, i: int, k: int) -> int:
        """Those of gradients are numbered as tensors are, those of activations after them."""
        beyond = max(0, self.count - len(self.template.tensors)) if i >= len(self.template.tensors) else 0
        return i + beyond + k * self.tensors.each

    def _shares(self, shares: tuple[tuple[int, float], ...], k: int, branch: bool) -> tuple[tuple[int, float], ...]:
        found = []
        for i, share in shares:
            moved = self._variance(i, k)
            if i in self.residual:
                share = self.branch[moved] if branch else 1.0 - self.branch[moved]
            found.append((moved, share))
        return tuple(found)

    def _saver(self, s: Saver, k: int) -> Saver:
        return replace(s, moment=self._at(s.moment, k), unit=self._moved(s.unit, k),
                       reached=self._shares(s.reached, k, branch=True))  # fmt: skip

    def _gemm(self, g: Gemm, k: int) -> Gemm:
        up = k * self.units.each
        return replace(
            g, number=g.number + k * self.gemms.each, op=f"{g.op}@{k}", moment=self._at(g.moment, k),
            output=g.output + up, grad_input=g.grad_input + up, grad_weight=g.grad_weight + up,
            x=g.x + k * self.tensors.each, variance=g.variance + k * self.tensors.each,
        )  # fmt: skip

    def _node(self, n: GradientNode, k: int) -> GradientNode:
        ops = len(self.template.ops)
        branch = "add" not in self.template.ops[n.moment % ops]
        moment = n.moment + k * self.period + (self.extra * self.period if n.moment >= ops else 0)
        return GradientNode(
            moment=moment, units=tuple(u + k * self.units.each for u in n.units), local=n.local,
            outputs=tuple((self._variance(i, k), share) for i, share in n.outputs),
            inputs=self._shares(n.inputs, k, branch),
        )  # fmt: skip

    def _row(self, row: WeightRow, k: int, number: int, share: float) -> WeightRow:
        passing = tuple((self._variance(i, k), energy) for i, energy in row.passing)
        return WeightRow(weight=f"{row.weight}@{k}", reference=row.reference, limit=row.limit * share, gemms=(number,),
                         passing=passing)  # fmt: skip
