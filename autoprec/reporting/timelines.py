"""Pictures over the steps of a run, as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from autoprec.plans import Event
from autoprec.reporting.curves import Point
from autoprec.reporting.differences import NUMBER
from autoprec.reporting.histories import RunHistory, Span
from autoprec.reporting.pictures import as_svg, bytes_unit
from autoprec.reporting.runs import op_of

__all__ = ["curves_svg", "formats_svg"]

#: Okabe and Ito's, which the colour-blind can tell apart; the fewer bits, the more there is to see.
COLOURS = {
    "fp32": "#dddddd",
    "tf32": "#bbbbbb",
    "bf16": "#e69f00",
    "fp16": "#0072b2",
    "fp8_e4m3": "#009e73",
    "fp8_e5m2": "#56b4e9",
}
_OTHERS = ("#cc79a7", "#f0e442", "#a56cc1", "#7f6d5f")
_BAD = "#d62728"

#: Kind of event → how it is marked in the row of its op.
_MARKS = {"promoted": "^", "demoted": "v", "released": "o"}

#: Inches that a row takes, and rows that a picture has at most.
_ROW_INCHES, _MOST_ROWS = 0.16, 120


def formats_svg(history: RunHistory) -> str:
    """The format of every op's result over the steps, and what changed it. Layers that say the same share a row."""
    rows = _rows(history)
    shown = _chosen(rows)
    colours = _colours_of(history.formats.values())
    steps = max(history.now.steps, 1)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, (_, spans, marks) in enumerate(shown):
            for fmt in dict.fromkeys(s.format for s in spans):
                bars = [(s.begin, s.end - s.begin) for s in spans if s.format == fmt]
                axes.broken_barh(bars, (row - 0.42, 0.84), color=colours[fmt], linewidth=0.0)
            for kind, marker in _MARKS.items():
                at = [step for step, k in marks if k == kind]
                style: dict[str, Any] = {
                    "marker": marker,
                    "s": 16,
                    "c": "white",
                    "edgecolors": "black",
                    "linewidths": 0.6,
                }
                axes.scatter(at, [row] * len(at), zorder=3, **style)
        for e in history.told:
            if e.kind == "bad_step":
                axes.axvline(e.step, color=_BAD, linewidth=0.6)
        axes.set_yticks(range(len(shown)), [label for label, *_ in shown], fontsize=7)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(0, steps)
        axes.set_xlabel("step")
        axes.tick_params(axis="y", length=0)
        handles = _legend(colours, shown, history.told)
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=7
        )

    return as_svg("formats", (9.0, 1.1 + _ROW_INCHES * max(len(shown), 4)), draw)


def curves_svg(history: RunHistory) -> str:
    """Predicted peak against the budget, and the loss scale, over the steps; "" where the file tells neither."""
    peak = history.curves.get("run/predicted_peak_bytes", ())
    scale = history.curves.get("run/loss_scale", ())
    if not peak and not scale:
        return ""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(bool(peak) + bool(scale), 1, sharex=True, squeeze=False)[:, 0]
        if peak:
            budget = history.curves.get("run/budget_bytes", ())
            unit, name = bytes_unit(max(p.value for p in (*peak, *budget)))
            _draw(axes[0], peak, "tab:blue", "predicted peak", unit)
            if budget:
                _draw(axes[0], budget, "black", "budget", unit)
            axes[0].set_ylim(bottom=0.0)
            axes[0].set_ylabel(name)
            axes[0].legend(frameon=False, fontsize=7)
        if scale:
            _draw(axes[-1], scale, "tab:blue", "loss scale", 1.0)
            axes[-1].set_yscale("log", base=2)
            axes[-1].set_ylabel("loss scale")
        axes[-1].set_xlim(0, max(history.now.steps, 1))
        axes[-1].set_xlabel("step")
        for one in axes:
            one.grid(alpha=0.3)

    return as_svg("curves", (9.0, 1.0 + 1.6 * (bool(peak) + bool(scale))), draw)


def _draw(axes: Any, points: Sequence[Point], colour: str, label: str, unit: float) -> None:
    """Each value holds until the next."""
    x, y = [p.step for p in points], [p.value / unit for p in points]
    axes.step(x, y, where="post", color=colour, label=label, marker="." if len(x) == 1 else None)


# -- rows ----------------------------------------------------------------------------------------------------------

_Row = tuple[str, tuple[Span, ...], tuple[tuple[int, str], ...]]


def _rows(history: RunHistory) -> list[_Row]:
    """(label, spans, (step, kind) of what is marked), in the order of the ops."""
    marks = dict[str, list[tuple[int, str]]]()
    for e in history.told:
        if e.kind in _MARKS and e.op:
            marks.setdefault(op_of(e), []).append((e.step, e.kind))
    groups = dict[Any, list[str]]()
    for op, spans in history.formats.items():
        groups.setdefault((NUMBER.sub("*", op), spans, tuple(marks.get(op, ()))), []).append(op)
    found = list[_Row]()
    for (pattern, spans, marked), ops in groups.items():
        label = ops[0] if len(ops) == 1 else f"{pattern} ({len(ops)})"
        found.append((label if len(label) <= 60 else f"{label[:20]}…{label[-39:]}", spans, marked))
    return found


def _chosen(rows: Sequence[_Row]) -> list[_Row]:
    """Those that changed most, where there are more than a picture holds; in their order."""
    ranked = sorted(range(len(rows)), key=lambda i: len(rows[i][2]) + len(rows[i][1]), reverse=True)
    return [rows[i] for i in sorted(ranked[:_MOST_ROWS])]


def _colours_of(found: Iterable[Sequence[Span]]) -> dict[str, str]:
    """In the order of `COLOURS`; formats of a policy's own behind them."""
    used = {s.format for spans in found for s in spans}
    others = iter(_OTHERS * len(used))
    known = {fmt: colour for fmt, colour in COLOURS.items() if fmt in used}
    return known | {fmt: next(others) for fmt in sorted(used - known.keys())}


def _legend(colours: dict[str, str], rows: Sequence[_Row], told: Iterable[Event]) -> list[Any]:
    handles: list[Any] = [Patch(color=colour, label=fmt) for fmt, colour in colours.items()]
    there = {kind for *_, marks in rows for _, kind in marks}
    style: dict[str, Any] = {"linestyle": "", "markersize": 4, "markerfacecolor": "white", "markeredgecolor": "black"}
    handles += [Line2D([], [], marker=m, label=kind, **style) for kind, m in _MARKS.items() if kind in there]
    if any(e.kind == "bad_step" for e in told):
        handles.append(Line2D([], [], color=_BAD, linewidth=0.6, label="step without effect"))
    return handles
