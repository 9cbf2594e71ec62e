"""`autoprec doctor`: what this device does natively, emulated, or not at all."""

from __future__ import annotations

import platform

from rich.text import Text

from autoprec.cli.output import progress_console, show
from autoprec.reporting.devices import casts_table, device_data, support_table

__all__ = ["show_doctor"]


def show_doctor(*, as_json: bool) -> int:
    """Probe the CPU, and the GPU if there is one."""
    import torch
    from torch import __version__ as torch_version

    from autoprec import __version__
    from autoprec.calibration.timing import measure_casts

    types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    with progress_console().status("measuring casts"):
        devices = [measure_casts(t) for t in types]
    data = {
        "autoprec": __version__,
        "torch": torch_version,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "packing": _packing(),
        "devices": [device_data(d) for d in devices],
    }
    head = Text("\n".join(f"{name:9}{data[name]}" for name in ("autoprec", "torch", "python", "threads", "packing")))
    tables = [table(d) for d in devices for table in (support_table, casts_table)]
    show(data, head, *tables, as_json=as_json)
    return 0


def _packing() -> str:
    """What packs tensors on the CPU."""
    from importlib.metadata import version

    from autoprec.numerics import elements

    if elements.is_installed():
        return f"numba {version('numba')}, with up to {elements.MOST_THREADS} threads"
    return "torch; numba is several times as fast: pip install numba"
