"""A `Device` for people: which formats it computes, emulates or only stores, and how fast it casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autoprec.devices import CastTiming, Device
from autoprec.formats import FORMATS, format_named, held_as
from autoprec.planning.reasons import seconds_text

__all__ = ["Support", "casts_table", "device_data", "support", "support_table"]


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a device does with one format: arithmetic is "native" or "emulated"; storage: whether tensors are in it."""

    format: str
    arithmetic: str
    storage: bool


def support(device: Device) -> tuple[Support, ...]:
    """Of every format that autoprec knows."""
    return tuple(
        Support(
            format=f.name,
            arithmetic="native" if f.name in device.native else "emulated",
            storage=held_as(f.name) == f.name,
        )
        for f in FORMATS
    )


def support_table(device: Device) -> Table:
    """One row per format."""
    noted = f", fp32 products: {device.fp32_products}" if device.fp32_products else ""
    table = Table(title=f"{device.name} ({device.type}){noted}", title_justify="left")
    for name in ("format", "matrix products", "kept for backward"):
        table.add_column(name)
    for s in support(device):
        emulated = "rounded, upcast to fp32, multiplied, rounded" if s.storage else "rounded, multiplied in fp32"
        products = s.arithmetic if s.arithmetic == "native" else f"emulated: {emulated}"
        table.add_row(s.format, products, "yes" if s.storage else "as fp32")
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
        "fp32_products": device.fp32_products or None,
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
