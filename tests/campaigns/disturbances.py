"""A disturbance that comes and goes: `python -m tests.campaigns.disturbances [--only NAME] [--windows 60] [--seed 0]`.

Three small models on real data, a part of each in FP16 by rules. In the first window of every so many, a weight of that
part is so many times as large that what its op makes is beyond what FP16 holds, or close to it; then it is as it was.
Nothing else changes: the learning rate is 0. Per cool-down an op may change its format at most once, up to when the
disturbance ends; after it each op may have its format again, once, the plan is the one of the beginning, and nothing
more is taken. Parameters are bitwise what they were at the end, whatever was skipped. Exit code 1 if anything is
otherwise.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from autoprec.graphs import Role
from autoprec.plans import Event
from autoprec.policies import Monitor
from tests.campaigns.clean import RULED, Training, command, policy, same_bits
from tests.campaigns.clean_tasks import TASKS, Task

WINDOWS, PERIODS, COOLDOWNS = 60, (2, 3, 5, 8), (1, 2, 3)

#: Of the largest number of FP16, what the disturbed op makes at most: beyond, and close.
SIZES = (4.0, 0.9)

_LARGEST = 65504.0

#: Cool-downs for which a format waits at most until it comes back (`autoprec.floors`), and for which nothing may happen
#: once all are back.
_LONGEST_WAIT, _QUIET = 2**8 + 2, 5

#: A format is taken; it comes back, or may: another op's change brought it back then, or will.
TAKEN, BACK = "promoted", ("demoted", "released")


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Every `period` windows one in which the op makes `size` times FP16's largest number at most."""

    period: int
    cooldown: int
    size: float

    def __str__(self) -> str:
        return f"every {self.period}, cool-down {self.cooldown}, {self.size:g} of FP16's largest"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run: changes while it was disturbed and after that, by kind, and what is wrong."""

    disturbed: Counter[str]
    after: Counter[str]
    skipped: int
    seconds: float
    wrong: tuple[str, ...]


class Disturbed:
    """A run whose disturbances come and go. Mutable."""

    def __init__(self, task: Task, cooldown: int, seed: int) -> None:
        self.monitor = Monitor(window_steps=4, interval_steps=2, cooldown_windows=cooldown)
        self.training = Training(task, policy(task, RULED, self.monitor), 10**6, seed)
        self.plan, self.session = self.training.planned(), self.training.session
        for group in self.training.optimizer.param_groups:
            group["lr"] = 0.0
        self.training.schedule.base_lrs = [0.0] * len(self.training.optimizer.param_groups)
        self.op, self.weight = self._narrow_op()
        self.amax = self._amax()
        self.before = self.training.tensors()

    def _narrow_op(self) -> tuple[str, torch.nn.Parameter]:
        """The first product in FP16, and its weight."""
        parameters = dict(self.training.model.named_parameters())
        for binding in self.session.bindings:
            for op in binding.ops:
                name = op.id.rpartition(":")[0].removesuffix(":") + ".weight"
                if self.plan.format_of.get((op.id, Role.OUTPUT)) == "fp16" and Role.GRAD_WEIGHT in op.roles:
                    return op.id, parameters[name]
        raise ValueError(f"no product of {self.training.task.name} is in FP16")

    def _amax(self) -> float:
        """The largest that the op made while it was calibrated."""
        assert self.session.graph is not None and self.session.profile is not None
        (made,) = self.session.graph.op_by_id[self.op].outputs
        seen = next(t.values for t in self.session.profile.tensors if t.id == made)
        assert seen is not None
        return float(seen.amax)

    def window(self, factor: float = 1.0) -> None:
        """One window, with the weight so many times what it is."""
        with torch.no_grad():
            own = self.weight.clone()
            self.weight.mul_(factor)
        end = self.session._stability.floors.windows + 1
        while self.session._stability.floors.windows < end:
            self.training.step()
        with torch.no_grad():
            self.weight.copy_(own)

    def run(self, how: Disturbance, windows: int) -> None:
        """Windows with disturbances."""
        for k in range(windows):
            self.window(how.size * _LARGEST / self.amax if k % how.period == 0 else 1.0)


def disturbed_run(task: Task, how: Disturbance, windows: int, seed: int = 0) -> Row:
    """A run of so many windows with disturbances, and as many as it takes for its formats to come back."""
    begin = time.perf_counter()
    run = Disturbed(task, how.cooldown, seed)
    run.run(how, windows)
    during = changes_in(run.session.events)
    for _ in range(how.cooldown * _LONGEST_WAIT):
        if not run.session._stability.floors.banned:
            break
        run.window()
    for _ in range(how.cooldown * _QUIET):
        run.window()
    after = changes_in(run.session.events)[len(during) :]
    return Row(
        disturbed=Counter(e.kind for e in during),
        after=Counter(e.kind for e in after),
        skipped=run.session.skipped_steps,
        seconds=time.perf_counter() - begin,
        wrong=tuple(what_is_wrong(run, how, windows, during, after)),
    )


def came_back(kinds: Counter[str]) -> int:
    """How many formats."""
    return sum(kinds[kind] for kind in BACK)


def changes_in(events: Iterable[Event]) -> list[Event]:
    """Of formats."""
    return [e for e in events if e.kind in (TAKEN, *BACK)]


def what_is_wrong(
    run: Disturbed, how: Disturbance, windows: int, during: list[Event], after: list[Event]
) -> Iterator[str]:
    """About a run."""
    by_op: defaultdict[str, list[str]] = defaultdict(list)
    for e in during:
        by_op[e.op].append(e.kind)
    if how.size > 1.0 and run.op not in by_op:
        yield f"{run.op} was disturbed and never promoted"
    for op, kinds in by_op.items():
        if len(kinds) > -(-windows // how.cooldown):
            yield f"{op} changed {len(kinds)} times in {windows} windows"
        if any((kind == TAKEN) != (k % 2 == 0) for k, kind in enumerate(kinds)):
            yield f"{op} was {', '.join(kinds)}"
    yield from (f"{e.op} was promoted after the disturbance: {e.evidence}" for e in after if e.kind == TAKEN)
    back = Counter(e.op for e in after if e.kind != TAKEN)
    owed = Counter(op for op, kinds in by_op.items() if kinds[-1] == TAKEN)
    if back != owed:
        yield f"after the disturbance {dict(back)} came back, not {dict(owed)}"
    plan = run.session.plan
    assert plan is not None
    if plan.format_of != run.plan.format_of:
        yield "the formats at the end are not those at the beginning"
    changed = [n for n, x in run.training.tensors().items() if n in dict(run.training.model.named_parameters())
               and not same_bits(x, run.before[n])]  # fmt: skip
    yield from (f"{n} changed" for n in changed)


HEADER = (
    f"{'model':8} {'every':>5} {'cool-down':>9} {'of 65504':>8}  {'promoted':>8} {'back':>8} {'after: promoted':>15}"
    f" {'back':>8} {'skipped':>8} {'seconds':>8}"
)


def show(task: Task, how: Disturbance, row: Row) -> list[str]:
    """Print a row; what is wrong about it."""
    print(
        f"{task.name:8} {how.period:5} {how.cooldown:9} {how.size:8g}  {row.disturbed[TAKEN]:8}"
        f" {came_back(row.disturbed):8} {row.after[TAKEN]:15} {came_back(row.after):8} {row.skipped:8}"
        f" {row.seconds:8.1f}",
        flush=True,
    )
    wrong = [f"{task.name}, {how}: {w}" for w in row.wrong]
    print("".join(f"RED {w}\n" for w in wrong), end="", flush=True)
    return wrong


def campaign(names: Iterable[str], windows: int, seed: int = 0) -> list[str]:
    """What was wrong; prints as it goes."""
    wrong = list[str]()
    print(HEADER, flush=True)
    for task in (TASKS[name] for name in names):
        for how in (Disturbance(period=p, cooldown=c, size=s) for p in PERIODS for c in COOLDOWNS for s in SIZES):
            wrong += show(task, how, disturbed_run(task, how, windows, seed))
    return wrong


if __name__ == "__main__":
    command("disturbances", __doc__, WINDOWS, campaign)
