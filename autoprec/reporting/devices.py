"""A `Device` for people: which formats it computes, emulates or only stores, and how fast it casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autoprec.devices import CastTiming, Device
from autoprec.formats import COMPUTE_FORMATS, FORMATS, STORAGE_FORMATS, format_named
from autoprec.planning.reasons import seconds_text

__all__ = ["Support", "casts_table", "device_data", "support", "support_table"]


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a device does with one format: arithmetic is "native", "emulated" or "no"; storage is true or false."""

    format: str
    arithmetic: str
    storage: bool


def support(device: Device) -> tuple[Support, ...]:
    """Of every format that autoprec knows."""

    def arithmetic(name: str) -> str:
        if name in device.native:
            return "native"
        return "emulated" if name in COMPUTE_FORMATS else "no"

    return tuple(
        Support(format=f.name, arithmetic=arithmetic(f.name), storage=f.name in (*COMPUTE_FORMATS, *STORAGE_FORMATS))
        for f in FORMATS
    )


def support_table(device: Device) -> Table:
    """One row per format."""
    table = Table(title=f"{device.name} ({device.type})", title_justify="left")
    for name in ("format", "matrix products", "kept for backward"):
        table.add_column(name)
    words = {
        "native": "native",
        "emulated": "emulated: rounded, upcast to fp32, multiplied, rounded",
        "no": "not at all",
    }
    for s in support(device):
        table.add_row(s.format, words[s.arithmetic], "yes" if s.storage else "no")
    return table


def casts_table(device: Device) -> Table:
    """Measured casts: time per million elements, and the bytes read and written per second."""
    table = Table(title="Casts, measured (fp8 includes finding the scale)", title_justify="left")
    table.add_column("cast")
    for name in ("per call", "per million elements", "GB/s"):
        table.add_column(name, justify="right")
    for c in device.casts:
        rate = _bandwidth(c)
        table.add_row(
            f"{c.source} → {c.target}",
            seconds_text(c.seconds_per_call).lstrip("+"),
            seconds_text(c.seconds_per_element * 1e6).lstrip("+"),
            "" if rate is None else f"{rate / 1e9:.1f}",
        )
    return table


def device_data(device: Device) -> dict[str, Any]:
    """Plain data for programs."""
    return {
        "name": device.name,
        "type": device.type,
        "formats": [{"format": s.format, "arithmetic": s.arithmetic, "storage": s.storage} for s in support(device)],
        "casts": [
            {
                "source": c.source,
                "target": c.target,
                "seconds_per_call": c.seconds_per_call,
                "seconds_per_element": c.seconds_per_element,
                "bytes_per_second": _bandwidth(c),
            }
            for c in device.casts
        ],
    }


def _bandwidth(cast: CastTiming) -> float | None:
    """Bytes read and written per second; None where the time was too short to measure."""
    moved = format_named(cast.source).bytes + format_named(cast.target).bytes
    return moved / cast.seconds_per_element if cast.seconds_per_element > 0.0 else None
