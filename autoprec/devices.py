"""A device as a value: what it computes natively, and seconds, measured there or modelled from its `Datasheet`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autoprec.checks import check_amount, check_choice, check_format, check_text, check_unique
from autoprec.errors import DeviceError
from autoprec.formats import is_scaled
from autoprec.graphs import Role

__all__ = [
    "DEVICE_TYPES",
    "PIECE_NUMEL",
    "CastTiming",
    "Datasheet",
    "Device",
    "NoKernel",
    "OpTiming",
    "Peak",
    "Sourced",
]

DEVICE_TYPES = ("cpu", "cuda")

#: Elements that are made into something else at a time, by type. On a CPU what is made on the way then fits the caches
#: (docs/measurements/pieces.md); larger pieces keep a GPU busy.
PIECE_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass(frozen=True, kw_only=True)
class OpTiming:
    """Seconds of one role of one distinct op in one format (measured: the median over repeats).

    `private_saved_bytes`, with the role "output": bytes that the op keeps for its backward besides what it is given and
    what it gives (statistics, masks); None if that was not looked at.
    `forward_seconds`: of an op whose only role is "output", the part of `seconds` that one forward pass takes; None if
    that was not looked at.
    `workspace_bytes`: held for a moment while the role runs (casts of weights, kernels' buffers), beside what it is
    given, what it gives and what it keeps; `backward_workspace_bytes` the same in the backward pass of an op whose only
    role is "output". None if that was not looked at.
    `mixed_workspace_bytes`: of a gradient role of a product in FP32, the workspace where another role is narrow or the
    input is kept narrow: what runs then is not torch's own product. None if that was not looked at.
    `piece_frac`: of a gradient role of a convolution that copies an operand to this format, the share of the images of
    which there are copies at a time (a CPU goes a few images at a time). None for all of them.
    `compiled_workspace_bytes`: of a role of a convolution on a CPU, the workspace in a compiled graph, where all images
    are convolved at once and have their channels last. None if that was not looked at.
    """

    timing_key: str
    role: str
    format: str
    seconds: float
    private_saved_bytes: int | None = None
    workspace_bytes: int | None = None
    backward_workspace_bytes: int | None = None
    mixed_workspace_bytes: int | None = None
    piece_frac: float | None = None
    compiled_workspace_bytes: int | None = None
    forward_seconds: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.role, tuple(Role), "role", DeviceError, "role")
        check_format(self.format, DeviceError, "format")
        check_amount(self.seconds, "seconds", DeviceError, "seconds")
        sizes = ("private_saved_bytes", "workspace_bytes", "backward_workspace_bytes", "mixed_workspace_bytes")
        for name in (*sizes, "compiled_workspace_bytes", "forward_seconds"):
            check_amount(getattr(self, name), name, DeviceError, name)
        if self.piece_frac is not None and not 0.0 < self.piece_frac <= 1.0:
            raise DeviceError(f"piece_frac must be above 0 and at most 1, not {self.piece_frac}", at=("piece_frac",))


@dataclass(frozen=True, kw_only=True)
class NoKernel:
    """An op that the device cannot run in a format, and what it said."""

    timing_key: str
    format: str
    reason: str

    def __post_init__(self) -> None:
        check_format(self.format, DeviceError, "format")


@dataclass(frozen=True, kw_only=True)
class CastTiming:
    """Seconds per element of one cast (`packing` to fp8 includes finding the scale)."""

    source: str
    target: str
    seconds_per_element: float
    seconds_per_call: float = 0.0

    def __post_init__(self) -> None:
        check_format(self.source, DeviceError, "source")
        check_format(self.target, DeviceError, "target")
        check_amount(self.seconds_per_element, "seconds_per_element", DeviceError, "seconds_per_element")
        check_amount(self.seconds_per_call, "seconds_per_call", DeviceError, "seconds_per_call")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device does natively, and how long things take there.

    Attributes:
        name: for people ("cpu AVX2", "NVIDIA H200").
        type: torch device type ("cpu", "cuda").
        native: formats whose GEMMs the hardware computes; the others are emulated (upcast, FP32 accumulation).
        timings: one entry per (timing_key, role, format) known so far.
        casts: one entry per (source, target).
        no_kernels: what was tried and cannot run.
        source: "measured" or "modelled".
        fp32_products: what torch's switches made of FP32 products when they were measured: "ieee", or the narrower
            arithmetic that they allowed ("conv: tf32", `numerics.switches.fp32_arithmetic`); "" where nobody noted it.
        fused_casts: whether casts with a scale, and products of what they give, were timed as compiled code has them,
            in two passes, and not in the dozen kernels of eager mode (on a GPU).
    """

    name: str
    type: str
    native: tuple[str, ...]
    timings: tuple[OpTiming, ...] = ()
    casts: tuple[CastTiming, ...] = ()
    no_kernels: tuple[NoKernel, ...] = ()
    source: str = "measured"
    fp32_products: str = ""
    fused_casts: bool = False

    def __post_init__(self) -> None:
        check_text(self.name, "name", DeviceError, "name")
        check_choice(self.type, DEVICE_TYPES, "device type", DeviceError, "type")
        for i, name in enumerate(self.native):
            check_format(name, DeviceError, "native", i)
        check_unique(self.native, "format", DeviceError, "native")
        check_unique([(t.timing_key, t.role, t.format) for t in self.timings], "timing", DeviceError, "timings")
        check_unique([(c.source, c.target) for c in self.casts], "cast", DeviceError, "casts")
        check_unique([(k.timing_key, k.format) for k in self.no_kernels], "the op", DeviceError, "no_kernels")
        check_choice(self.source, ("measured", "modelled"), "source", DeviceError, "source")
        if self.fp32_products:
            check_text(self.fp32_products, "fp32_products", DeviceError, "fp32_products")

    @cached_property
    def seconds_by_key(self) -> dict[tuple[str, str, str], float]:
        """(timing_key, role, format) → seconds."""
        return {(t.timing_key, t.role, t.format): t.seconds for t in self.timings}

    @cached_property
    def no_kernel_by_key(self) -> dict[tuple[str, str], str]:
        """(timing_key, format) → why the device cannot run it."""
        return {(k.timing_key, k.format): k.reason for k in self.no_kernels}

    @cached_property
    def private_bytes_by_key(self) -> dict[tuple[str, str], int]:
        """(timing_key, format) → bytes kept privately, where known."""
        found = ((t.timing_key, t.format, t.private_saved_bytes) for t in self.timings if t.role == "output")
        return {(key, fmt): size for key, fmt, size in found if size is not None}

    @cached_property
    def forward_seconds_by_key(self) -> dict[tuple[str, str, str], float]:
        """(timing_key, role, format) → seconds of the forward pass alone, where known."""
        found = ((t, t.forward_seconds) for t in self.timings)
        return {(t.timing_key, t.role, t.format): seconds for t, seconds in found if seconds is not None}

    @cached_property
    def workspace_by_key(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """(timing_key, role, format) → bytes of workspace of the role, and of its op's backward pass, where known."""
        return {
            (t.timing_key, t.role, t.format): (t.workspace_bytes, t.backward_workspace_bytes or 0)
            for t in self.timings
            if t.workspace_bytes is not None
        }

    @cached_property
    def mixed_workspace_by_key(self) -> dict[tuple[str, str], int]:
        """(timing_key, role) → `mixed_workspace_bytes`, where known."""
        found = ((t, t.mixed_workspace_bytes) for t in self.timings)
        return {(t.timing_key, t.role): size for t, size in found if size is not None}

    @cached_property
    def piece_frac_by_key(self) -> dict[tuple[str, str, str], float]:
        """(timing_key, role, format) → `piece_frac`, where there is one."""
        found = ((t, t.piece_frac) for t in self.timings)
        return {(t.timing_key, t.role, t.format): frac for t, frac in found if frac is not None}

    @cached_property
    def compiled_workspace_by_key(self) -> dict[tuple[str, str, str], int]:
        """(timing_key, role, format) → `compiled_workspace_bytes`, where known."""
        found = ((t, t.compiled_workspace_bytes) for t in self.timings)
        return {(t.timing_key, t.role, t.format): size for t, size in found if size is not None}

    @cached_property
    def cast_by_pair(self) -> dict[tuple[str, str], CastTiming]:
        """(source, target) → timing."""
        return {(c.source, c.target): c for c in self.casts}

    def cast_seconds(self, source: str, target: str, numel: int) -> float:
        """Seconds to cast `numel` elements; 0.0 between equal formats; `DeviceError` if never measured."""
        if source == target:
            return 0.0
        timing = self.cast_by_pair.get((source, target))
        if timing is None:
            raise DeviceError(
                f"device {self.name!r} has no timing for the cast {source} → {target}; calibrate there, under a"
                " policy that has both (autoprec calibrate --policy)"
            )
        return timing.seconds_per_call + timing.seconds_per_element * numel

    def told_of_casts(self, *, fused: bool) -> Device:
        """This device, without the timings of formats with a scale if those were made in the other way (see
        `fused_casts`): they are to be measured again. What is modelled stays as it is."""
        if fused == self.fused_casts or self.source == "modelled":
            return self
        return replace(
            self,
            timings=tuple(t for t in self.timings if not is_scaled(t.format)),
            casts=tuple(c for c in self.casts if not (is_scaled(c.source) or is_scaled(c.target))),
            no_kernels=tuple(k for k in self.no_kernels if not is_scaled(k.format)),
            fused_casts=fused,
        )

    def extended(
        self,
        timings: tuple[OpTiming, ...] = (),
        no_kernels: tuple[NoKernel, ...] = (),
        casts: tuple[CastTiming, ...] = (),
    ) -> Device:
        """This device with further findings (those it has already are kept)."""
        known, missing = self.seconds_by_key, self.no_kernel_by_key
        return replace(
            self,
            timings=self.timings + tuple(t for t in timings if (t.timing_key, t.role, t.format) not in known),
            no_kernels=self.no_kernels + tuple(k for k in no_kernels if (k.timing_key, k.format) not in missing),
            casts=self.casts + tuple(c for c in casts if (c.source, c.target) not in self.cast_by_pair),
        )


@dataclass(frozen=True, kw_only=True)
class Sourced:
    """A number, and where it is from: document and year, or the assumption that it follows from."""

    value: float
    source: str

    def __post_init__(self) -> None:
        check_text(self.source, "source", DeviceError, "source")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most floating-point operations per second of matrix products in one format, dense (without sparsity)."""

    format: str
    value: float
    source: str

    def __post_init__(self) -> None:
        check_format(self.format, DeviceError, "format")
        check_amount(self.value, "value", DeviceError, "value", least=1.0)
        check_text(self.source, "source", DeviceError, "source")


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """What is written about a device that is not here. `planning.roofline` makes a `Device` of it for a graph.

    Attributes:
        name: for people ("NVIDIA H100 SXM").
        type: torch device type ("cpu", "cuda").
        peak_flops_per_second: one entry per format whose matrix products the hardware computes, fp32 among them; the
            other formats are emulated (upcast, computed in FP32, rounded).
        memory_bytes_per_second: read and written together.
        launch_seconds: what a kernel costs that has next to nothing to do.
        attainable_compute_frac, attainable_bandwidth_frac: of the two peaks, above 0 and at most 1.
        memory_bytes: what a step may hold, or None for no limit.
    """

    name: str
    type: str
    peak_flops_per_second: tuple[Peak, ...]
    memory_bytes_per_second: Sourced
    launch_seconds: Sourced
    attainable_compute_frac: Sourced
    attainable_bandwidth_frac: Sourced
    memory_bytes: Sourced | None = None

    def __post_init__(self) -> None:
        check_text(self.name, "name", DeviceError, "name")
        check_choice(self.type, DEVICE_TYPES, "device type", DeviceError, "type")
        check_unique(self.native, "format", DeviceError, "peak_flops_per_second")
        if "fp32" not in self.native:
            what = "fp32 must be among the formats; those that are not listed are computed in it"
            raise DeviceError(what, at=("peak_flops_per_second",))
        check_amount(self.launch_seconds.value, "launch_seconds", DeviceError, "launch_seconds", "value")
        for name in ("memory_bytes_per_second", "memory_bytes"):
            given: Sourced | None = getattr(self, name)
            check_amount(None if given is None else given.value, name, DeviceError, name, "value", least=1.0)
        for name in ("attainable_compute_frac", "attainable_bandwidth_frac"):
            frac: float = getattr(self, name).value
            if not 0.0 < frac <= 1.0:
                raise DeviceError(f"{name} must be above 0 and at most 1, not {frac:g}", at=(name, "value"))

    @property
    def native(self) -> tuple[str, ...]:
        """Formats whose matrix products the hardware computes."""
        return tuple(peak.format for peak in self.peak_flops_per_second)
