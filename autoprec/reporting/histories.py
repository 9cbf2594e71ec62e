"""A run from its first step to its newest: what its file of events says of all of them, as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoprec.graphs import Role
from autoprec.plans import Event
from autoprec.reporting.curves import Curves, Point, is_told
from autoprec.reporting.runs import WatchedRun, follow

__all__ = ["RunHistory", "Span", "history_of", "spans_of"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """From step `begin` up to step `end` an op gave its result in a format."""

    begin: int
    end: int
    format: str


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The newest run of a file that has a plan.

    Attributes:
        now: the run as it stands.
        formats: op → spans of its result, in the order in which the plan names the ops; without those of no length.
        curves: "run/…" → its points, as `reporting.curves` has them.
        told: what happened, oldest first, figures aside.
        counts: kind of event → how often it happened.
    """

    now: WatchedRun
    formats: Mapping[str, tuple[Span, ...]]
    curves: Mapping[str, tuple[Point, ...]]
    told: tuple[Event, ...]
    counts: Mapping[str, int]


def history_of(events: Sequence[Event]) -> RunHistory:
    """Of a file's events. Raises `InputError` for an event whose figures are none; `at` says which it is."""
    now = follow(WatchedRun(), events)
    own = events[_beginning(events) :]
    told = tuple(filter(is_told, own))
    curves = dict[str, list[Point]]()
    for point in Curves().after(own):
        if point.name.startswith("run/"):
            curves.setdefault(point.name, []).append(point)
    return RunHistory(
        now=now,
        formats=spans_of(own, now.steps),
        curves={name: tuple(points) for name, points in curves.items()},
        told=told,
        counts=dict(Counter(event.kind for event in told)),
    )


def _beginning(events: Sequence[Event]) -> int:
    """Where the newest run begins: with its first plan, and what its calibration told before."""
    first = max((i for i, e in enumerate(events) if e.is_first_plan), default=0)
    while first and is_told(before := events[first - 1]) and before.step <= events[first].step:
        first -= 1
    return first


def spans_of(events: Iterable[Event], steps: int) -> dict[str, tuple[Span, ...]]:
    """Op → spans of a run of so many steps, by its events; one of no length where it has no others. Until its plan is
    there a run calibrates in FP32."""
    known = dict[str, list[tuple[int, str]]]()
    for e in events:
        if e.kind == "assigned" and e.role == Role.OUTPUT:
            known.setdefault(e.op, [(0, "fp32")]).append((e.step, e.now))
    found = dict[str, tuple[Span, ...]]()
    for op, changes in known.items():
        ends = [*(step for step, _ in changes[1:]), steps]
        spans = [Span(begin=b, end=e, format=f) for (b, f), e in zip(changes, ends, strict=True) if e > b]
        found[op] = tuple(spans) or (Span(begin=steps, end=steps, format=changes[-1][1]),)
    return found
