"""The planning program as plain data: `Problem` and its parts (with `uses`).

Moments. A graph of n ops has 2n moments: op i runs forward at moment i and backward at moment 2n − 1 − i. Every
`moment` below is the forward one unless it says otherwise; `Problem.backward` gives the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from autoprec.devices import CastTiming
from autoprec.errors import DeviceError
from autoprec.formats import result_format
from autoprec.graphs import Role
from autoprec.planning.codes import bytes_of, format_of, owner
from autoprec.planning.phases import Phases
from autoprec.planning.uses import Remaking, Replacement, Saver, Steps, Use
from autoprec.plans import is_parameter

__all__ = [
    "Gemm",
    "GradientNode",
    "Opened",
    "PlanTensor",
    "Problem",
    "Standing",
    "Unit",
    "WeightRow",
]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One decision: the format of one role of one op.

    Attributes:
        op, role: whose format it is.
        options: formats to choose from, widest first; never empty.
        seconds: time of the role by option, over all calls, casts of weights inside it included.
        workspace: bytes held only while it runs (casts of weights, kernels' buffers), by option. Of the two gradient
            roles of a GEMM, which run one after the other, the larger one counts.
        backward_workspace: the same in the backward pass of an op whose only unit it is; empty for none.
        moment: the moment (forward or backward) at which it runs.
        kept: bytes of its own (statistics, masks) that it keeps for its backward, by option; empty for none.
        kept_from: as in `Use`.
        dropped: formats that were candidates and are not options, each with the reason.
        rule: the rule that limits it, for people, or "".
        needed: False for a gradient that nobody asks for.
    """

    op: str
    role: Role
    options: tuple[str, ...]
    seconds: tuple[float, ...]
    workspace: tuple[int, ...]
    moment: int
    backward_workspace: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    kept_from: int | None = None
    dropped: tuple[tuple[str, str], ...] = ()
    rule: str = ""
    needed: bool = True

    @property
    def is_parameter(self) -> bool:
        """Whether it decides what a frozen parameter lives in, whose id is then `op`."""
        return is_parameter(self.op)


@dataclass(frozen=True, kw_only=True)
class PlanTensor:
    """One root tensor: what has a born format, readers, copies and rounding events.

    Attributes:
        id: of the root; views and in-place results of it are the same tensor.
        numel: number of elements; where they are not FP32, of FP32 numbers in as many bytes.
        is_float32: others are never cast; all their uses have unit None.
        wide_bytes: bytes of the copy in FP32 (or as it is); 0 where it is counted among the fixed bytes.
        narrow_costs: whether copies in other formats cost bytes (of parameters, where an op keeps them).
        birth: moment of the op that makes it; of its first reader for inputs, parameters and buffers.
        born: the unit whose format it is born in; None is FP32.
        inherits: its values are those of another tensor (a copying view), so its birth rounds nothing anew.
        part_of: of a part (`parts`), the tensor whose memory it shares (index): it has a place here for its copies in
            other formats than that of birth, and for its gradient. It is kept as it is unless that one is not.
        readers, savers: who reads it in the forward pass, and who keeps it for the backward pass; a checkpoint keeps
            what it reads from outside.
        storages: narrow formats that it may be kept in, `RECOMPUTED` among them; none if it is kept as it is. The next
            five speak of those.
        stored_by: who makes the narrow copy: moment and unit of the first op that keeps it.
        gemms: the GEMMs that keep it.
        others: the other ops that keep it.
        masks: moments of those that keep one bit per element instead (ReLU).
        remaking: how it is made again, where that may be; only GEMMs keep it then, or one product with another tensor.
        gradient_readers: readers that send a gradient, in forward order; none if its gradient costs no bytes.
        casts_back: whether each cast of it casts a gradient in the backward pass.
        runs: how often a step makes it, and casts it: once more for each activation checkpoint around it; 0 for a
            weight that products cast themselves.
        loss_noise: by format, E(δL)² per step of rounding it.
        saturates: formats whose largest value it exceeds by design (masks and constants).
    """

    id: str
    numel: int
    is_float32: bool
    wide_bytes: int
    narrow_costs: bool
    birth: int
    born: int | None
    inherits: bool
    part_of: int | None = None
    readers: tuple[Use, ...]
    savers: tuple[Use, ...]
    storages: tuple[str, ...] = ()
    stored_by: tuple[int, int | None] = (0, None)
    gemms: tuple[int, ...] = ()
    others: tuple[Saver, ...] = ()
    masks: tuple[int, ...] = ()
    remaking: Remaking | None = None
    gradient_readers: tuple[Use, ...] = ()
    casts_back: bool = False
    runs: int = 1
    loss_noise: tuple[tuple[str, float], ...] = ()
    saturates: tuple[str, ...] = ()

    def bytes_in(self, format_name: str) -> int:
        """Bytes of its copy in a compute format."""
        if format_name == "fp32":
            return self.wide_bytes
        return self.numel * bytes_of(format_name) if self.narrow_costs else 0

    def stored_bytes(self, storage: str) -> int:
        """Bytes of its narrow copy, the scale of an FP8 one included, masks not."""
        return self.numel * bytes_of(storage) + (4 if bytes_of(storage) == 1 else 0)

    @property
    def keepers(self) -> tuple[Use, ...]:
        """Savers that would keep a narrow copy, and not a mask."""
        return tuple(use for use in self.savers if use.moment not in self.masks)

    @property
    def in_parts(self) -> bool:
        """Whether one of them keeps a part: what is there narrow then depends on the formats of those that do."""
        return any(use.part for use in self.keepers)

    @property
    def mask_bytes(self) -> int:
        """Bytes of one mask with one bit per element."""
        return -(-self.numel // 8)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """The backward pass of a GEMM with a weight, or of a product of activations.

    Attributes:
        number: its place in `Problem.gemms`.
        op: its id.
        moment: forward moment.
        output, grad_input, grad_weight: its units; without a weight the last is `grad_input` once more.
        x: the root tensor that it reads (index); x_numel: elements of its own input, or of all inputs with gradients.
        seen_numel: elements of its input that the weight's gradient is made of, None for all of them.
        plain_extra: bytes that torch's own product, all in FP32, takes beside the workspaces of `grad_input` and of
            `grad_weight`; it may take less.
        operands_numel: elements of activations that a kernel of `grad_input` reads again.
        pairs: of a product of two activations, for each gradient in the order in which they are made, its elements and
            those of the operand that is read again for it (see `pairs.stages`).
        out_numel: elements of gradient that arrive.
        variance: whose relative gradient variance arrives (index, see `GradientNode`).
        has_grad_input, has_grad_weight: which gradients are computed.
        weight_bytes: of the gradients of its weight and bias, in FP32, where they are gone after it (see `Standing`).
        input_pieces, weight_pieces: of a convolution that goes a few images at a time, by format, the share of the
            images of which the product for the input's gradient, or the weight's, has copies in it at a time. All, in
            formats that are not among them.
        spared: by format of `grad_input`, bytes of its workspace that are not there where it goes so.
        emulated: of a plain product, formats in which the device multiplies FP32 copies of its operands.
        summed: (forward moment, bytes): where torch's own product sends the first gradient of a weight with several
            readers, the next of them makes a new tensor of both. None where it adds in place.
        x_noise: by format, E‖δ∇W‖² per step of rounding x; `stored_noise` by storage, of keeping x in it.
        gradient_noise: by format, of rounding the gradient that arrives.
        x_energy, upstream: E‖∇W‖²-like energy that relative variance of x, or of the arriving gradient, multiplies.
    """

    number: int
    op: str
    moment: int
    output: int
    grad_input: int
    grad_weight: int
    x: int
    x_numel: int
    out_numel: int
    variance: int
    has_grad_input: bool
    has_grad_weight: bool
    x_noise: tuple[tuple[str, float], ...] = ()
    stored_noise: tuple[tuple[str, float], ...] = ()
    gradient_noise: tuple[tuple[str, float], ...] = ()
    x_energy: float = 0.0
    upstream: float = 0.0
    operands_numel: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    weight_bytes: int = 0
    emulated: tuple[str, ...] = ()
    seen_numel: int | None = None
    plain_extra: tuple[int, int] = (0, 0)
    summed: tuple[int, int] | None = None
    input_pieces: tuple[tuple[str, float], ...] = ()
    weight_pieces: tuple[tuple[str, float], ...] = ()
    spared: tuple[tuple[str, int], ...] = ()

    @property
    def read_numel(self) -> int:
        """Elements of the input that the weight's gradient is made of."""
        return self.x_numel if self.seen_numel is None else self.seen_numel

    def of_input(self, numel: int, format_name: str) -> int:
        """Of so many elements, those of which there are copies in a format at a time for the input's gradient."""
        return round(numel * dict(self.input_pieces).get(format_name, 1.0))

    def of_weight(self, numel: int, format_name: str) -> int:
        """The same for the weight's."""
        return round(numel * dict(self.weight_pieces).get(format_name, 1.0))


@dataclass(frozen=True, kw_only=True)
class GradientNode:
    """An op that gradients pass through, for the propagation of relative gradient variance.

    Variances are numbered on their own: one per root tensor, one more per in-place result.

    Attributes:
        moment: forward moment of the op; of nodes of the forward pass, the number of ops more.
        outputs: (variance, share): which gradients arrive, and their shares of the energy that arrives.
        inputs: (variance, share): the share of each input's gradient that comes through it.
        units: units in whose formats the arriving gradient is rounded; of the first, where there are more, only in that
            of its result.
        local: by format, the relative variance of that rounding.
    """

    moment: int
    outputs: tuple[tuple[int, float], ...]
    inputs: tuple[tuple[int, float], ...]
    units: tuple[int, ...] = ()
    local: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Bytes of gradients that are held from one moment to another, both included, whatever the choice. `what` they
    are, for people."""

    what: str
    first: int
    last: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """The gradient criterion of one weight: the sum over its GEMMs is at most `limit` = noise² · `reference`.

    `passing` is for weights inside other ops: (variance, energy), what the relative variance of the weight's own
    gradient is multiplied by.
    """

    weight: str
    reference: float
    limit: float
    gemms: tuple[int, ...]
    passing: tuple[tuple[int, float], ...] = ()


class Opened(NamedTuple):
    """Where a factor is made again: the phase, the steps of that; the unit of the `mul` that reads it, and elements
    that count in this phase in the format of that: with `later_numel`, where the tensor `later` (index) is kept in
    another way than it was."""

    phase: int
    steps: Steps
    unit: int | None
    numel: int
    later: int | None
    later_numel: int


@dataclass(frozen=True, kw_only=True)
class Problem(Phases):
    """Everything that solvers and the evaluator need, and nothing else.

    Attributes:
        ops: op ids in forward order (moment i is ops[i]).
        units, tensors, gemms, nodes, rows: see there; nodes in forward order.
        variances: how many relative gradient variances there are.
        ties: (unit, unit) pairs that must have the same format (in-place ops and the tensor that they change).
        casts: the device's cast timings.
        constant_seconds: of ops without a decision.
        fixed_bytes: parameters whose format is not decided, gradients, optimizer state and inputs.
        private: of ops without a decision, (moment, kept from, bytes): held from the second moment until the backward
            moment of the first.
        standing: gradients that stay.
        workspace: (moment, bytes) held only at that moment, whatever the choice.
        replacements: ops that are ours where they keep something narrow.
        loss_limit: E(δL)² allowed, or None.
        budget_bytes: largest peak allowed, or None.
        objective: what is minimised first.
        seconds_scale, bytes_scale, loss_scale: divide seconds, saved bytes and loss variance in the objective.
    """

    ops: tuple[str, ...]
    units: tuple[Unit, ...]
    tensors: tuple[PlanTensor, ...]
    gemms: tuple[Gemm, ...]
    nodes: tuple[GradientNode, ...]
    rows: tuple[WeightRow, ...]
    variances: int
    ties: tuple[tuple[int, int], ...]
    casts: tuple[CastTiming, ...]
    constant_seconds: float
    fixed_bytes: int
    private: tuple[tuple[int, int, int], ...]
    standing: tuple[Standing, ...] = ()
    workspace: tuple[tuple[int, int], ...]
    replacements: tuple[Replacement, ...] = ()
    loss_limit: float | None
    budget_bytes: int | None
    objective: Literal["time", "bytes"]
    seconds_scale: float
    bytes_scale: float
    loss_scale: float

    def always_held(self) -> Iterator[tuple[int, int, int]]:
        """(first phase, last phase, bytes) of what is held whatever the choice, without the fixed bytes."""
        for moment, first, size in self.private:
            yield self.phase(first), self.phase(self.backward(moment)), size
        yield from ((*self.with_casts(s.first, s.last), s.bytes) for s in self.standing)
        yield from ((self.phase(moment), self.phase(moment), size) for moment, size in self.workspace)

    def frozen_bytes(self, options: Sequence[int]) -> int:
        """Bytes of frozen parameters whose format is decided, under a choice of options."""
        return sum(u.kept[k] for u, k in zip(self.units, options, strict=True) if u.is_parameter)

    def formats_of(self, unit: int | None) -> tuple[str, ...]:
        """By option of a unit, its format, or the format of what goes with it; FP32 where nothing is decided."""
        if unit is None:
            return ("fp32",)
        return format_of(unit, self.units[owner(unit)].options)

    def cast_at(self, t: PlanTensor, use: Use) -> int:
        """The phase in which a tensor is cast for a use, unless an earlier one has the same format."""
        return max(self.cast_phase(use.moment), self.phase(t.birth))

    def gradient_cast_at(self, t: PlanTensor, use: Use) -> int:
        """The phase in which what a reader sends is cast to the format that the tensor was born in: after it ran
        backward, unless an earlier one has the same format, which runs backward later."""
        return min(self.cast_phase(self.backward(use.moment)), self.phase(self.backward(t.birth)))

    def sent_at(self, use: Use) -> int:
        """The phase from which on the gradient that a reader sends is held."""
        return self.phase(self.backward(use.moment if use.shared_until is None else use.shared_until))

    def own_at(self, use: Use) -> int:
        """The same where the other term of its sum has a cast of its own."""
        return self.sent_at(use) if use.instead is None else self.phase(self.backward(use.instead[1]))

    def added_at(self, use: Use) -> int:
        """The phase in which what a reader sends is held beside what it is added to, or their sum."""
        then = self.backward(use.moment)
        return self.cast_phase(then) if use.to_a_view else self.phase(then)

    def made_again(self, t: PlanTensor) -> tuple[int, int]:
        """The backward moments between which a tensor that is made again is held: of the last and of the first product
        that would keep it."""
        moments = [self.backward(m) for m in (*(self.gemms[k].moment for k in t.gemms), *(s.moment for s in t.others))]
        return min(moments), max(moments)

    def opened(self, t: PlanTensor) -> Opened | None:
        """Where a tensor is made again as a factor; None where it is not."""
        if t.remaking is None or (opening := t.remaking.opening) is None:
            return None
        (saver,) = t.others
        later = None if opening.later is None else self.tensor_index[opening.later]
        then, read = self.phase(self.backward(saver.moment)), saver.numel + opening.given_numel
        return Opened(then, t.remaking.steps, saver.unit, read, later, opening.later_numel)

    def remade_for(self, gemm: Gemm) -> tuple[int, Steps]:
        """If its input is made again: elements of it that are there for its weight's gradient alone, and the steps of
        making it for this GEMM. The first one to go backward makes it, the last one needs it last."""
        t = self.tensors[gemm.x]
        if t.remaking is None or gemm.number not in t.gemms:
            return 0, ()
        first, last = self.made_again(t)
        moment = self.backward(gemm.moment)
        steps = t.remaking.steps or (((t.born, t.remaking.numel + t.numel),),)  # compiled it is one
        return (t.numel if moment == last else 0), (steps if moment == first else ())

    def one_after_the_other(self, gemm: Gemm, format_name: str, *, plain: bool) -> tuple[int, int]:
        """Where a GEMM makes the weight's gradient before the input's, bytes of the former, which is there then, and of
        the latter, which is not there before, under this format of the output. `plain`: torch's own product, all in
        FP32 and kept as it is, goes the other way round, and takes another workspace."""
        if plain:
            return gemm.plain_extra[0], -gemm.plain_extra[1]
        if not (gemm.has_grad_input and gemm.has_grad_weight):
            return 0, 0
        return gemm.weight_bytes, gemm.x_numel * bytes_of(result_format(format_name))

    def lets_go(self, gemm: Gemm) -> tuple[tuple[int | None, ...] | None, bool]:
        """Whether a GEMM, which makes the weight's gradient first, lets go of its input before it makes that one's,
        because it is the last to need it: as it is, with the units of those that need it later, unless their format is
        another (None: it does not); and the narrow copy of it. Torch's own product lets go of nothing."""
        t = self.tensors[gemm.x]
        if not (gemm.has_grad_input and gemm.has_grad_weight) or gemm.pairs or any(use.part for use in t.savers):
            return None, False
        own = [use.kept_from for use in t.savers if use.moment == gemm.moment]
        later = dict.fromkeys(u.unit for u in t.savers if u.moment < gemm.moment and u.kept_from is None)
        return (tuple(later) if own == [None] else None), gemm.number in t.gemms and t.stored_by[0] == gemm.moment

    @cached_property
    def _cast_by_pair(self) -> dict[tuple[str, str], CastTiming]:
        return {(c.source, c.target): c for c in self.casts}

    def cast_seconds(self, source: str, target: str, numel: int) -> float:
        """Seconds of one cast; 0.0 between equal formats."""
        if source == target:
            return 0.0
        timing = self._cast_by_pair.get((source, target))
        if timing is None:
            raise DeviceError(f"no timing for the cast {source} → {target}; calibrate the device")
        return timing.seconds_per_call + timing.seconds_per_element * numel

    @cached_property
    def unit_index(self) -> dict[tuple[str, Role], int]:
        """(op, role) → unit."""
        return {(u.op, u.role): i for i, u in enumerate(self.units)}

    @cached_property
    def tensor_index(self) -> dict[str, int]:
        """Root tensor id → tensor."""
        return {t.id: i for i, t in enumerate(self.tensors)}

    def reaching(self, row: WeightRow) -> Iterator[tuple[int, float]]:
        """(variance, energy): what the relative variances that arrive at a row are multiplied by."""
        yield from ((self.gemms[k].variance, self.gemms[k].upstream) for k in row.gemms)
        yield from row.passing

    @cached_property
    def storable(self) -> tuple[int, ...]:
        """Tensors whose storage is decided."""
        return tuple(i for i, t in enumerate(self.tensors) if t.storages)

    @cached_property
    def inherited(self) -> dict[int, tuple[tuple[int, str, float], ...]]:
        """By tensor that may be made again, (source, storage, relative variance): `Remaking.noise` of the sources that
        may be kept so."""
        found = {}
        for i in self.storable:
            remaking = self.tensors[i].remaking
            noise = () if remaking is None else remaking.noise
            placed = ((self.tensor_index[source], f, relative) for source, f, relative in noise)
            found[i] = tuple((s, f, relative) for s, f, relative in placed if f in self.tensors[s].storages)
        return {i: noise for i, noise in found.items() if noise}

    def held_more(self, ours: Replacement) -> Iterator[tuple[str, int, int, int]]:
        """(kind, first phase, last phase, bytes) of what ours holds more than torch's own, below 0 for less."""
        then = self.backward(ours.moment)
        for moment, more in zip((ours.moment, then), ours.workspace, strict=True):
            yield "workspace", self.phase(moment), self.phase(moment), more
        yield "statistics", self.phase(ours.moment) + 1, self.phase(then) - 1, -ours.spared

    @cached_property
    def savers_at(self) -> dict[int, tuple[tuple[int, Saver], ...]]:
        """Forward moment → (tensor, saver) of what the op there may read from a narrow copy in its backward pass."""
        found: dict[int, list[tuple[int, Saver]]] = {}
        for i in self.storable:
            for saver in self.tensors[i].others:
                found.setdefault(saver.moment, []).append((i, saver))
        return {moment: tuple(savers) for moment, savers in found.items()}
