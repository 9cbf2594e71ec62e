"""A device as a value: what it computes natively, and measured seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoprec.errors import DeviceError
from autoprec.formats import format_named

__all__ = ["CastTiming", "Device", "OpTiming"]


@dataclass(frozen=True, kw_only=True)
class OpTiming:
    """Measured seconds of one role of one distinct op in one format (median over repeats).

    `private_saved_bytes`, with the role "output": bytes that the op keeps for its backward besides what it is given and
    what it gives (statistics, masks); None if that was not looked at.
    """

    timing_key: str
    role: str
    format: str
    seconds: float
    private_saved_bytes: int | None = None

    def __post_init__(self) -> None:
        format_named(self.format)
        if not self.seconds >= 0.0:
            raise DeviceError(f"{self.timing_key}: seconds must not be negative, not {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class CastTiming:
    """Measured seconds per element of one cast (`packing` to fp8 includes finding the scale)."""

    source: str
    target: str
    seconds_per_element: float
    seconds_per_call: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device does natively, and how long things take there.

    Attributes:
        name: for people ("cpu AVX2", "NVIDIA H200").
        type: torch device type ("cpu", "cuda").
        native: formats whose GEMMs the hardware computes; the others are emulated (upcast, FP32 accumulation).
        timings: one entry per (timing_key, role, format) measured so far.
        casts: one entry per (source, target).
        source: "measured" or "modelled".
    """

    name: str
    type: str
    native: tuple[str, ...]
    timings: tuple[OpTiming, ...] = ()
    casts: tuple[CastTiming, ...] = ()
    source: str = "measured"

    @cached_property
    def seconds_by_key(self) -> dict[tuple[str, str, str], float]:
        """(timing_key, role, format) → seconds."""
        return {(t.timing_key, t.role, t.format): t.seconds for t in self.timings}

    @cached_property
    def private_bytes_by_key(self) -> dict[tuple[str, str], int]:
        """(timing_key, format) → bytes kept privately, where known."""
        found = ((t.timing_key, t.format, t.private_saved_bytes) for t in self.timings if t.role == "output")
        return {(key, fmt): size for key, fmt, size in found if size is not None}

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
            raise DeviceError(f"device {self.name!r} has no timing for the cast {source} → {target}; calibrate there")
        return timing.seconds_per_call + timing.seconds_per_element * numel

    def extended(self, timings: tuple[OpTiming, ...]) -> Device:
        """This device with further timings (those it has already are kept)."""
        known = self.seconds_by_key
        new = tuple(t for t in timings if (t.timing_key, t.role, t.format) not in known)
        return Device(
            name=self.name,
            type=self.type,
            native=self.native,
            timings=self.timings + new,
            casts=self.casts,
            source=self.source,
        )
