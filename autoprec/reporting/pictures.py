"""Pictures, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable

import matplotlib
from matplotlib.figure import Figure

from autoprec.planning.reasons import bytes_text
from autoprec.planning.tradeoffs import Tradeoffs

__all__ = ["as_svg", "bytes_unit", "tradeoffs_svg"]


def tradeoffs_svg(found: Tradeoffs, title: str) -> str:
    """Predicted step time (or bytes kept, by objective) over predicted peak, with FP32 and the chosen point."""
    timed = found.objective == "time"
    totals = [p.predicted for p in found.points]
    byte_unit, byte_name = bytes_unit(max(found.fp32.peak_bytes, *(t.peak_bytes for t in totals)))
    time_unit, time_name = _seconds_unit(max(found.fp32.seconds, *(t.seconds for t in totals)))
    x = [t.peak_bytes / byte_unit for t in totals]
    y = [t.seconds / time_unit if timed else t.saved_bytes / byte_unit for t in totals]
    fp32_y = found.fp32.seconds / time_unit if timed else found.fp32.saved_bytes / byte_unit

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.step(x, y, where="post", color="0.7", linewidth=1.0, zorder=1)
        axes.scatter(x, y, s=30, color="tab:blue", label="plans", zorder=2)
        axes.scatter([found.fp32.peak_bytes / byte_unit], [fp32_y], s=50, marker="x", color="black", label="fp32")
        if found.chosen is not None:
            label = "the budget" if found.why == "budget" else "the knee"
            at = [x[found.chosen]], [y[found.chosen]]
            axes.scatter(*at, s=140, facecolors="none", edgecolors="tab:orange", linewidths=2.0, label=label, zorder=3)
        for p, at_x, at_y in zip(found.points, x, y, strict=True):
            budget = "no budget" if p.budget_bytes is None else bytes_text(p.budget_bytes)
            axes.annotate(budget, (at_x, at_y), xytext=(5, 5), textcoords="offset points", fontsize=7)
        axes.set_xlabel(f"predicted peak of a step ({byte_name})")
        axes.set_ylabel(f"predicted step time ({time_name})" if timed else f"predicted bytes kept ({byte_name})")
        axes.set_ylim(bottom=0.0)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)

    return as_svg("autoprec", (7.0, 4.5), draw)


def as_svg(name: str, inches: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """What `draw` puts on a figure. Text stays text, and the same values give the same file; pictures of different
    names can stand in one page."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False}):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def bytes_unit(largest: float) -> tuple[float, str]:
    """In which so many bytes are a number that can be read, and its name."""
    return next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if largest >= u), (1.0, "bytes"))


def _seconds_unit(largest: float) -> tuple[float, str]:
    return next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if largest >= u), (1e-9, "ns"))
