"""What the monitor has found so far: formats that ops must not have for now, and how amax grows.

A format that proved unstable is banned from an op. It comes back when the op has been well in it for so many windows in
a row as a cool-down has; for twice as many the next time, so that a disturbance that comes again and again soon finds
nobody to disturb. What has not left the format yet waits until the last change of the op is a cool-down ago.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from autoprec.checks import check_amount, check_text, check_unique
from autoprec.errors import StateError
from autoprec.plans import KEPT, Plan, Region
from autoprec.profiles import Profile

__all__ = ["Ban", "Floors", "Rescaled", "Trends", "Turn", "Verdict"]

#: Doublings of the windows that an op must be well for, at most.
_MOST_DOUBLINGS = 8

#: Windows that a trend is read off.
_WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An op that must leave a format, and why.

    Attributes:
        trigger: "overflow", "growth", "saturation", "underflow" or "noise"; "noise_budget" of an op that has a part in
            what the plan as a whole rounds away; of an incident, "zero"; of gradients that have come near to the
            largest number, "range".
        role: "output" of what a value shows, "grad_input" of what a gradient does; "kept" of how a tensor is kept: `op`
            is its id then.
        urgent: whether values have left the format already: then no cool-down counts.
    """

    op: str
    format: str
    trigger: str
    evidence: str
    role: str = "output"

    @property
    def key(self) -> tuple[str, ...]:
        """Of the ban that follows (`Ban.key`)."""
        return (self.op, self.format, KEPT) if self.role == KEPT else (self.op, self.format)

    @property
    def urgent(self) -> bool:
        """See above."""
        return self.trigger == "overflow"


@dataclass(frozen=True, kw_only=True)
class Ban:
    """What happened to an op and a format, or to a tensor and one that it was kept in.

    Attributes:
        role: "kept" of how a tensor is kept, `op` is its id then; "" of all roles of an op.
        trigger: of the verdict that banned it last.
        changed: number of the window in which it was banned or came back last.
        times: how often it was banned.
        well: windows in a row in which the op would have been well in it, up to when it came back.
        lifted: whether it may be used again; it is remembered for the next time.
    """

    op: str
    format: str
    trigger: str
    changed: int
    times: int = 1
    well: int = 0
    lifted: bool = False
    role: str = ""

    def __post_init__(self) -> None:
        check_text(self.op, "op", StateError, "op")
        check_text(self.format, "format", StateError, "format")
        for name in ("changed", "times", "well"):
            check_amount(getattr(self, name), name, StateError, name)

    @property
    def key(self) -> tuple[str, ...]:
        """What no plan may have: (op id, format), or (tensor id, format, "kept")."""
        return (self.op, self.format, self.role) if self.role else (self.op, self.format)


@dataclass(frozen=True, kw_only=True)
class Rescaled:
    """An FP16 region that gets another gradient scale, and the first verdict on its gradients that this answers."""

    verdict: Verdict
    was: Region
    now: Region


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a window changes: formats that are banned, with the verdicts, bans that are lifted, and the plan, if some of
    its FP16 regions get other scales, with why. And what is told of it: incidents that no format is to blame for, and
    figures of ops near a limit, as fields of events."""

    floors: Floors
    banned: tuple[Verdict, ...] = ()
    lifted: tuple[Ban, ...] = ()
    rescaled: tuple[Rescaled, ...] = ()
    plan: Plan | None = None
    incidents: tuple[Verdict, ...] = ()
    figures: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Frozen. `windows`: how many were judged."""

    windows: int = 0
    bans: tuple[Ban, ...] = ()

    def __post_init__(self) -> None:
        check_amount(self.windows, "windows", StateError, "windows")
        check_unique([" ".join(b.key) for b in self.bans], "the ban", StateError, "bans")

    @property
    def banned(self) -> frozenset[tuple[str, ...]]:
        """What no plan may have (`Ban.key`)."""
        return frozenset(b.key for b in self.bans if not b.lifted)

    def with_ban(self, op: str, format_name: str, trigger: str, role: str = "") -> Floors:
        """With a format banned from now on, whatever was before."""
        ban = Ban(op=op, format=format_name, trigger=trigger, changed=self.windows, role=role)
        known = {b.key: b for b in self.bans}
        if (before := known.get(ban.key)) is not None:
            times = before.times + (1 if before.lifted else 0)
            ban = replace(before, trigger=trigger, changed=self.windows, times=times, well=0, lifted=False)
        return replace(self, bans=tuple((known | {ban.key: ban}).values()))

    def after(self, verdicts: Iterable[Verdict], is_well: Callable[[Ban], bool], cooldown_windows: int) -> Turn:
        """One more window. `is_well`: whether an op, or a tensor, would have been well in a banned format."""
        now = replace(self, windows=self.windows + 1)
        changed = dict[str, int]()
        for ban in self.bans:
            changed[ban.op] = max(changed.get(ban.op, 0), ban.changed)
        banned = []
        for v in verdicts:
            rests = v.op in changed and now.windows - changed[v.op] < cooldown_windows
            if v.urgent or not rests:
                op, fmt, *role = v.key
                now = now.with_ban(op, fmt, v.trigger, *role)
                banned.append(v)
        new = {v.key for v in banned}
        bans, lifted = [], []
        for ban in now.bans:
            if ban.lifted or ban.key in new:
                bans.append(ban)
                continue
            well = ban.well + 1 if is_well(ban) else 0
            long_enough = well >= cooldown_windows * 2 ** min(ban.times - 1, _MOST_DOUBLINGS)
            if long_enough and now.windows - ban.changed >= cooldown_windows:
                ban = replace(ban, well=well, lifted=True, changed=now.windows)
                lifted.append(ban)
            else:
                ban = replace(ban, well=well)
            bans.append(ban)
        return Turn(floors=replace(now, bans=tuple(bans)), banned=tuple(banned), lifted=tuple(lifted))


@dataclass(frozen=True, kw_only=True)
class Trends:
    """log2 of amax over the last windows, oldest first, by (tensor id, "value" or "gradient"); frozen.

    Attributes:
        last: ((tensor, what), (log2 amax, …)), of tensors that had a non-zero amax in each of them.
        records: ((tensor, what), log2 of the largest amax of the windows before those).
    """

    last: tuple[tuple[tuple[str, str], tuple[float, ...]], ...] = ()
    records: tuple[tuple[tuple[str, str], float], ...] = ()

    def after(self, window: Profile, carried: Callable[[str], int] = lambda _: 0) -> Trends:
        """With one more window. `carried`: log2 of the scale that the gradient of a tensor was observed with."""
        before, found = self._by_key, list[tuple[tuple[str, str], tuple[float, ...]]]()
        records = dict(self.records)
        for t in window.tensors:
            for what, seen, scale in (("value", t.values, 0), ("gradient", t.gradients, carried(t.id))):
                if seen is None or seen.amax <= 0.0:
                    continue
                key = (t.id, what)
                known = (*before.get(key, ()), math.log2(seen.amax) - scale)
                for past in known[:-_WINDOWS]:
                    records[key] = max(past, records.get(key, past))
                found.append((key, known[-_WINDOWS:]))
        return Trends(last=tuple(found), records=tuple(records.items()))

    def log2_per_window(self, tensor: str, what: str) -> float:
        """Octaves that amax grew by in each of the last windows: the least of them, so that one jump is no trend; 0
        where it did not grow in each, where it was as large before, or where too few windows are known."""
        known = self._by_key.get((tensor, what), ())
        if len(known) < _WINDOWS or known[-1] <= self._record.get((tensor, what), -math.inf):
            return 0.0
        return max(0.0, min(b - a for a, b in zip(known, known[1:], strict=False)))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str], tuple[float, ...]]:
        return dict(self.last)

    @cached_property
    def _record(self) -> dict[tuple[str, str], float]:
        return dict(self.records)
