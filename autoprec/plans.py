"""Decisions as values: `Assignment`, `Plan`, `Event`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autoprec.checks import check_amount, check_format, check_storage, check_text, check_unique, described
from autoprec.errors import InputError, PlanError
from autoprec.graphs import Role

__all__ = [
    "AS_IS",
    "KEPT",
    "MOST_STEPS",
    "RECOMPUTED",
    "Alternative",
    "Assignment",
    "Contestant",
    "Dropped",
    "Event",
    "Holding",
    "Measurement",
    "Plan",
    "Region",
    "Storage",
    "Totals",
    "Violation",
    "is_parameter",
]

#: A saved tensor that is kept in the format in which it was read.
AS_IS = "as_is"

#: Of a run: what curves and pictures have numbers for.
MOST_STEPS = 2**63 - 1

#: Not kept at all: made again in the backward pass from what other ops keep.
RECOMPUTED = "recomputed"

#: What a tensor that is kept has in place of a role.
KEPT = "kept"


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken constraint: "peak" (bytes), "loss" (variance), "gradient" (variance, of the weight `what`) or "tie"."""

    kind: Literal["peak", "loss", "gradient", "tie"]
    what: str
    value: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A format that one decision could have had, all others as they are: what it adds to the step.

    Attributes:
        format: a compute format, or a storage (`AS_IS` too).
        seconds, saved_bytes, peak_bytes: as in `Totals`, differences from the plan.
        noise: difference of the sum over weights of the share of their noise limit, and the loss's share of its own.
        broken: constraints that it would break, the worst of each kind; none if it could have been taken.
    """

    format: str
    seconds: float
    saved_bytes: int
    peak_bytes: int
    noise: float
    broken: tuple[Violation, ...] = ()

    def __post_init__(self) -> None:
        check_format(self.format, PlanError, "format", among=(AS_IS, RECOMPUTED))
        for name in ("seconds", "noise"):
            if not math.isfinite(getattr(self, name)):
                raise PlanError(f"{name} must be finite, not {getattr(self, name)}", at=(name,))


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A format of the policy's that one decision could not have, and why."""

    format: str
    why: str

    def __post_init__(self) -> None:
        check_format(self.format, PlanError, "format", among=(AS_IS, RECOMPUTED))


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The format of one role of one op, and why.

    `alternatives`: the other formats that it could have had, best first; None where that was not recorded.
    `dropped`: the policy's formats that it could not have.
    """

    op: str
    role: Role
    format: str
    reason: str
    alternatives: tuple[Alternative, ...] | None = None
    dropped: tuple[Dropped, ...] = ()

    def __post_init__(self) -> None:
        check_text(self.op, "op", PlanError, "op")
        check_format(self.format, PlanError, "format")


def is_parameter(tensor: str) -> bool:
    """Whether a tensor's id is that of a parameter: `param:` and its name."""
    return tensor.startswith("param:")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How one tensor is kept for backward, or what a frozen parameter lives in for good (`param:` and its name), and
    why: `AS_IS`, the name of a narrower format, or `RECOMPUTED`.

    `made_from`: what is kept in place of a tensor that is recomputed. `alternatives` and `dropped` as in `Assignment`,
    of the policy's storages.
    """

    tensor: str
    format: str
    reason: str
    made_from: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] | None = None
    dropped: tuple[Dropped, ...] = ()

    def __post_init__(self) -> None:
        check_text(self.tensor, "tensor", PlanError, "tensor")
        check_storage(self.format, PlanError, "format", among=(AS_IS, RECOMPUTED))
        check_unique(self.made_from, "the tensor", PlanError, "made_from")
        if bool(self.made_from) != (self.format == RECOMPUTED):
            how = f"is kept in {self.format}" if self.made_from else "is recomputed from nothing"
            told = f"{self.tensor} {how}: made_from names what a tensor is recomputed from, and goes with that alone"
            raise PlanError(told, at=("made_from",))


@dataclass(frozen=True, kw_only=True)
class Region:
    """A maximal set of connected FP16 ops whose gradients share the scale 2**scale_log2."""

    ops: tuple[str, ...]
    scale_log2: int
    reason: str

    def __post_init__(self) -> None:
        check_unique(self.ops, "op", PlanError, "ops")
        if not self.ops:
            raise PlanError("a region needs at least one op", at=("ops",))
        if not -126 <= self.scale_log2 <= 126:  # beyond it 2**scale_log2 is no normal FP32 number
            raise PlanError(f"scale_log2 must be within -126 and 126, not {self.scale_log2}", at=("scale_log2",))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over one training step. `saved_bytes` is what autograd holds between forward and backward, without inputs,
    and of parameters only the frozen ones whose format is decided; `peak_bytes` is the largest sum over the moments of
    the step, of a compiled one as the compiler's code tells it once there is some; `loss_sigma` the standard deviation
    that rounding adds to the loss; `gradient_ratio` the largest √(E‖δ∇W‖² / spread) over the weights."""

    seconds: float
    saved_bytes: int
    peak_bytes: int
    loss_sigma: float
    gradient_ratio: float

    def __post_init__(self) -> None:
        for name in ("seconds", "saved_bytes", "peak_bytes", "loss_sigma"):
            check_amount(getattr(self, name), name, PlanError, name)
        if not self.gradient_ratio >= 0.0:  # infinite where a weight's gradient has no spread
            raise PlanError(f"gradient_ratio must be at least 0, not {self.gradient_ratio}", at=("gradient_ratio",))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a plan cost when the last calibration step was replayed under it, forward and backward.

    Attributes:
        seconds: median.
        ratio: median over rounds of its seconds to those of the first contestant in the same round.
        ratio_margin: half of the 95 % interval of that median; 0 where it is not known.
        peak_bytes: at the allocator, with what a step holds whatever the plan.
        loss_change: Σ gradient · (output − output in FP32) over the outputs of the model: its loss where it returns
            that, else to first order; None if FP32 did not run beside it.
        gradient_ratio: as in `Totals`, of the one replayed step; None if FP32 did not run beside it.
        failure: why it cannot run, or "".
    """

    seconds: float = 0.0
    ratio: float = 1.0
    ratio_margin: float = 0.0
    peak_bytes: int = 0
    loss_change: float | None = None
    gradient_ratio: float | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        check_amount(self.seconds, "seconds", PlanError, "seconds")
        check_amount(self.ratio, "ratio", PlanError, "ratio")
        check_amount(self.ratio_margin, "ratio_margin", PlanError, "ratio")
        check_amount(self.peak_bytes, "peak_bytes", PlanError, "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A plan that could have been adopted: "solver", or the name of the one format that it uses where it can.

    `measured` is None where it did not run: its predictions break a limit. `verdict` says why it was not adopted, or
    what the adopted one breaks all the same.
    """

    name: str
    formats: tuple[str, ...]
    predicted: Totals
    adopted: bool = False
    verdict: str = ""
    measured: Measurement | None = None

    def __post_init__(self) -> None:
        check_text(self.name, "name", PlanError, "name")


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Bytes of one kind that a layer holds when a step is at its peak (modelled): of this plan, and of FP32 and BF16
    throughout, each at its own peak.

    Attributes:
        layer: dotted name of the module; "" for what belongs to none, "others" for layers that hold next to nothing.
        kind: "parameters", "gradients", "optimizer", "inputs"; "activations, bf16" and the like; "masks"; "made again"
            and "read again" in the backward pass; "gradients of activations"; "statistics"; "workspace".
        fp32, bf16, plan: bytes; `bf16` is None where the policy does not have it.
    """

    layer: str
    kind: str
    fp32: int
    bf16: int | None
    plan: int

    def __post_init__(self) -> None:
        check_text(self.kind, "kind", PlanError, "kind")
        for name in ("fp32", "bf16", "plan"):
            check_amount(getattr(self, name), name, PlanError, name)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs in which format. Ops without an assignment run as the user wrote them, in FP32.

    Attributes:
        assignments: by (op, role).
        storages: for tensors kept for backward whose storage was decided, and for frozen parameters.
        regions: FP16 regions with their gradient scales.
        saturating: tensors whose casts saturate instead of overflowing to inf: constants and masks that leave the
            format by design, never activations.
        scales: what has a scale of its own in formats that carry one: "tensorwise" a tensor, "rowwise" each row of an
            operand of a linear.
        predicted, predicted_fp32: totals of this plan and of the all-FP32 plan (modelled).
        budget_bytes: the peak that was allowed, or None.
        gap: (objective − proven lower bound) / objective, 0.0 when proven optimal.
        binding: the constraint that holds the plan back, for people.
        policy, graph_fingerprint, device: what it was made from.
        contestants: it and its rivals, predicted and measured, where they ran on a replayed step.
        memory: where the bytes of the predicted peak are; () in a plan without reasons.
    """

    assignments: tuple[Assignment, ...]
    storages: tuple[Storage, ...] = ()
    regions: tuple[Region, ...] = ()
    saturating: tuple[str, ...] = ()
    scales: str = "tensorwise"
    predicted: Totals | None = None
    predicted_fp32: Totals | None = None
    budget_bytes: int | None = None
    gap: float = 0.0
    binding: str = "nothing"
    policy: str = ""
    graph_fingerprint: str = ""
    device: str = ""
    contestants: tuple[Contestant, ...] = ()
    memory: tuple[Holding, ...] = ()

    def __post_init__(self) -> None:
        check_unique([f"{a.op} {a.role}" for a in self.assignments], "the role", PlanError, "assignments")
        check_unique([s.tensor for s in self.storages], "the tensor", PlanError, "storages")
        check_unique(self.saturating, "the tensor", PlanError, "saturating")
        if self.scales not in ("tensorwise", "rowwise"):
            raise PlanError(f"scales must be tensorwise or rowwise, not {self.scales!r}", at=("scales",))
        check_amount(self.budget_bytes, "budget_bytes", PlanError, "budget_bytes", least=1)
        check_amount(self.gap, "gap", PlanError, "gap")
        check_unique([c.name for c in self.contestants], "the contestant", PlanError, "contestants")
        check_unique([f"{h.layer} {h.kind}" for h in self.memory], "the holding", PlanError, "memory")

    @cached_property
    def format_of(self) -> dict[tuple[str, Role], str]:
        """(op, role) → format name."""
        return {(a.op, a.role): a.format for a in self.assignments}

    @cached_property
    def storage_of(self) -> dict[str, str]:
        """Tensor id → storage name."""
        return {s.tensor: s.format for s in self.storages}

    @cached_property
    def living(self) -> dict[str, str]:
        """Of each frozen parameter that lives in a narrow format, its tensor id and that format."""
        return {t: f for t, f in self.storage_of.items() if is_parameter(t) and f != AS_IS}

    @cached_property
    def made_from_of(self) -> dict[str, tuple[str, ...]]:
        """Of each tensor that is recomputed, what from."""
        return {s.tensor: s.made_from for s in self.storages if s.format == RECOMPUTED}

    @property
    def decides_parameters(self) -> bool:
        """Whether it says what frozen parameters live in; their bytes are then among `saved_bytes`."""
        return any(is_parameter(s.tensor) for s in self.storages)

    @property
    def adopted(self) -> Contestant | None:
        """The contestant that it was; None where there was no contest."""
        return next((c for c in self.contestants if c.adopted), None)

    @property
    def is_identity(self) -> bool:
        """True if nothing is changed: every format fp32, every storage as it is."""
        return all(a.format == "fp32" for a in self.assignments) and all(s.format == AS_IS for s in self.storages)

    @cached_property
    def fingerprint(self) -> str:
        """Of the decisions alone (not of reasons, alternatives and predictions)."""
        body = (
            sorted((a.op, str(a.role), a.format) for a in self.assignments),
            sorted((s.tensor, s.format, *s.made_from) for s in self.storages),
            sorted((r.ops, r.scale_log2) for r in self.regions),
            sorted(self.saturating),
            *([self.scales] if self.scales != "tensorwise" else []),
        )
        return hashlib.sha256(repr(body).encode()).hexdigest()[:16]

    def formats_used(self) -> tuple[str, ...]:
        """Names of every compute format and narrow storage in use, sorted."""
        compute = {a.format for a in self.assignments}
        kept = {f"{s.format} storage" for s in self.storages if s.format not in (AS_IS, RECOMPUTED)}
        kept |= {RECOMPUTED for s in self.storages if s.format == RECOMPUTED}
        return tuple(sorted(compute | kept))


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened during the run. The first plan plus the events give the current plan.

    Attributes:
        step: optimizer steps completed before it.
        kind: "calibrated", "planned", "promoted", "demoted", "released" (a format may be used again, and is not),
            "rescaled" (gradients of an FP16 region have another scale), "scheduled", "bad_step", "incident", "warning",
            "lowered" (what ran as it is until now runs compiled), "frozen", "unwrapped".
        op: the op concerned, or "".
        role: the role of it that showed it, or "".
        was, now: formats before and after, or ""; of "rescaled" the gradient scales.
        trigger: "overflow", "saturation", "nonfinite", ...
        evidence: one sentence with the measured figures.
    """

    step: int
    kind: str
    op: str = ""
    role: str = ""
    was: str = ""
    now: str = ""
    trigger: str = ""
    evidence: str = ""

    @property
    def is_first_plan(self) -> bool:
        """Whether a run begins here: its later plans were asked for, or keep a budget that the one before would not."""
        return self.kind == "planned" and self.trigger not in ("asked", "budget")

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MOST_STEPS:
            raise InputError(f"step must be at least 0 and below 2^63, not {described(self.step)}")
