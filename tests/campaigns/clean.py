"""Clean runs are left alone: `python -m tests.campaigns.clean [--windows 2000] [--only NAME] [--seed 0]`.

Three small models are trained on real data, each under a plan whose formats rules chose (a part in FP16, the rest in
BF16, E4M3 for what is kept) and, for a tenth as many windows, under one that the planner chose among all of them; one
of them also under one that the planner chose once and that was disturbed (norms, sums and lookups in FP16). The
monitor observes every other step and judges windows of 20. Nothing disturbs these runs: no format may be taken or given
back, and no step skipped; FP16 regions may get other gradient scales, which is told. One of them runs once more under
the monitor's default settings. And what a monitored run computes is bitwise what the same plan computes unmonitored,
for as long as it has that plan. Exit code 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.optim.lr_scheduler import LambdaLR

import autoprec
from autoprec.plans import AS_IS, Event, Plan
from autoprec.policies import Monitor, Policy, Rule
from autoprec.serial import load_policy
from tests.bench.measure import one_thread
from tests.campaigns.clean_tasks import TASKS, Task, learning_rate

WINDOWS, DEFAULT_WINDOWS, BITWISE_STEPS = 2000, 20, 300

#: Of the windows, what plans get that rules for whole modules did not choose.
CHOSEN_SHARE = 10

#: What runs under the monitor's default settings as well.
BY_DEFAULT = "text"

#: Of the campaign: as short as windows of ten observed steps can be.
SHORT = Monitor(window_steps=20, interval_steps=2)

#: A monitor that no run lives long enough to see.
NEVER = Monitor(window_steps=10**9, interval_steps=10**9)

#: Kinds of event that a clean run has none of.
CHANGES = ("promoted", "demoted", "released")

#: A loss went down: the mean of the last tenth of the steps is below this share of that of the first hundred. It stays
#: down: that mean is not above the lowest of all tenths by more than so many standard errors.
_LEARNT, _MOST_ERRORS = 0.9, 4.0

#: Changes of a run that are told, and incidents.
_MOST_CHANGES, _MOST_INCIDENTS = 200, 10


#: How the formats of a plan come about.
RULED, CHOSEN, BY_KIND = "ruled", "chosen", "by kind"


def policy(task: Task, how: str, monitor: Monitor) -> Policy:
    """The fewest bytes, so that what takes how long here decides next to nothing. Pins must not fail on a noise limit
    (as in policies/bf16.yaml); what the planner chooses by itself keeps the default ones."""
    asked = load_policy("balanced").replaced(
        formats=("fp32", "bf16", "fp16"), objective="bytes", rules=(), monitor=monitor.model_dump()
    )
    if how == CHOSEN:
        return asked
    rules = task.rules
    if how == BY_KIND:
        first = Rule(kinds=task.kinds, pin="fp16", optional=True)
        rules = (first, Rule(pin="fp32", optional=True))
    return asked.replaced(rules=rules, noise={"gradient": 1000.0, "loss": 1000.0})


# Training ------------------------------------------------------------------------------------------------------------


class Training:
    """A run step by step. Mutable.

    Attributes:
        observed: steps that the monitor looked at.
    """

    def __init__(self, task: Task, asked: Policy, steps: int, seed: int, plan: Plan | None = None) -> None:
        torch.manual_seed(seed)
        torch._dynamo.reset()
        self.task, self.model = task, task.build()
        self.generator = Generator().manual_seed(seed)
        self.optimizer = task.optimizer(self.model.parameters())
        self.schedule = LambdaLR(self.optimizer, lambda step: learning_rate(step, steps))
        autoprec.compile(self.model, policy=asked, plan=plan, events=None)
        self.session = autoprec.session(self.model)
        self.observed = 0

    def step(self) -> float:
        """The loss of one step; a number, because tensors that are kept would break up the heap for all others."""
        inputs, wanted = self.task.batch(self.generator)
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), wanted)
        self.session.note_loss(loss)
        self.observed += self.session.plan is not None and self.session._observed.observer is not None
        loss.backward()
        self.optimizer.step()
        if not self.session.step_was_skipped:
            self.schedule.step()
        return float(loss.detach())

    def planned(self) -> Plan:
        """Calibrate until there is a plan."""
        while self.session.plan is None:
            self.step()
        return self.session.plan

    def state(self) -> dict[str, Any]:
        """All but what the session knows."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        return copy.deepcopy(parts) | {"rng": torch.get_rng_state(), "generator": self.generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        self.generator.set_state(state["generator"])

    def tensors(self) -> dict[str, Tensor]:
        """Copies of parameters and buffers."""
        return copy.deepcopy(dict(self.model.state_dict()))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise the same."""
    kinds = (a.dtype, a.shape) == (b.dtype, b.shape)
    return kinds and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


# What a clean run shows ----------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """Of some losses, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, as the table has it. `wrong`: what is not as it must be; `events`: all but "planned"."""

    name: str
    formats: str
    windows: int
    observed: int
    changes: Counter[str]
    skipped: int
    seconds: float
    losses: tuple[Mean, ...]
    events: tuple[Event, ...] = ()
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = "".join(f"{self.changes[kind]:>10}" for kind in CHANGES)
        first, *_, last = self.losses
        return (
            f"{self.name:22} {self.windows:7} {self.observed:9}{told} {self.skipped:8} {self.changes['incident']:10}"
            f" {first.value:9.4g} {last.value:9.4g} {self.seconds:8.0f}  {self.formats}"
        )


HEADER = (
    f"{'model, plan':22} {'windows':>7} {'observed':>9}{'promoted':>10}{'demoted':>10}{'released':>10} {'skipped':>8}"
    f" {'incidents':>10} {'loss':>9} {'to':>9} {'seconds':>8}  formats of the plan"
)


def formats_of(plan: Plan) -> str:
    """What a plan has, for people."""
    roles = Counter(a.format for a in plan.assignments)
    kept = Counter(s.format for s in plan.storages if s.format != AS_IS)
    regions = f" in {len(plan.regions)} regions" if plan.regions else ""
    computed = (f"{n} {fmt}{regions if fmt == 'fp16' else ''}" for fmt, n in sorted(roles.items()))
    return f"roles: {', '.join(computed)}; kept: {', '.join(f'{n} {fmt}' for fmt, n in sorted(kept.items()))}"


def clean_run(task: Task, how: str, monitor: Monitor, windows: int, seed: int = 0) -> Row:
    """A run of so many windows, with what is wrong about it."""
    begin = time.perf_counter()
    steps = windows * monitor.window_steps
    training = Training(task, policy(task, how, monitor), steps, seed)
    plan, session = training.planned(), training.session
    losses = []
    for k in range(steps):
        if k == steps - monitor.window_steps:
            before = training.tensors()
        losses.append(training.step())
    changes = Counter(e.kind for e in session.events)
    row = Row(
        name=f"{task.name}, {how}",
        formats=formats_of(plan),
        windows=session._stability.floors.windows,
        observed=training.observed,
        changes=changes,
        skipped=session.skipped_steps,
        seconds=time.perf_counter() - begin,
        losses=course(losses),
        events=tuple(e for e in session.events if e.kind != "planned"),
    )
    frozen = [n for n, x in training.model.named_parameters() if same_bits(x.detach(), before[n])]
    wrong = [*narrowness(plan, how), *disturbances(row, windows, steps // monitor.interval_steps), *health(row.losses)]
    return replace(row, wrong=wrong + [f"{n} did not move in the last window" for n in frozen])


def course(losses: Sequence[float]) -> tuple[Mean, ...]:
    """Of the first hundred losses (or of the first tenth, where that is less), and of each tenth."""
    tenth = max(len(losses) // 10, 1)
    parts = [losses[: min(tenth, 100)], *(losses[i * tenth : (i + 1) * tenth] for i in range(10))]
    return tuple(Mean(float(np.mean(part)), float(np.std(part)) / math.sqrt(len(part))) for part in parts)


def health(losses: tuple[Mean, ...]) -> list[str]:
    """The loss of a run that learns goes down, and stays down."""
    first, *tenths = losses
    last, lowest = tenths[-1], min(tenths)
    told = f"the loss went from {first.value:.4g} over {', '.join(f'{x.value:.4g}' for x in tenths)}"
    if not all(math.isfinite(x.value) for x in losses) or not last.value < _LEARNT * first.value:
        return [f"{told}: it did not go down"]
    chance = _MOST_ERRORS * math.hypot(last.error, lowest.error)
    return [f"{told}: it did not stay down"] if last.value - lowest.value > chance else []


def narrowness(plan: Plan, how: str) -> list[str]:
    """A plan without narrow formats could not be disturbed."""
    used = set(plan.formats_used())
    wanted = [{"bf16"}, {"fp16"}] if how == RULED else [{"fp16", "bf16"}]
    missing = [" or ".join(sorted(w)) for w in (*wanted, {"fp8_e4m3 storage"}) if not w & used]
    return [f"the plan has no {', '.join(missing)}: {formats_of(plan)}"] if missing else []


def disturbances(row: Row, windows: int, observed: int) -> list[str]:
    """What the monitor or the guard did, and what they did not look at."""
    wrong = [f"{row.changes[kind]} {kind}" for kind in CHANGES if row.changes[kind]]
    if row.skipped or row.changes["bad_step"]:
        wrong.append(f"{row.skipped} skipped steps, {row.changes['bad_step']} reported")
    if not wrong and (row.windows, row.observed) != (windows, observed):
        wrong.append(f"{row.windows} windows and {row.observed} observed steps, not {windows} and {observed}")
    return wrong


# Bitwise -------------------------------------------------------------------------------------------------------------


def unlike_unmonitored(task: Task, how: str, steps: int, seed: int = 0) -> tuple[int, list[str]]:
    """A monitored run goes on from its plan; another one has the same weights, random state and plan, and no monitor.
    How many steps they had that plan, and what differs after those: losses of steps, parameters, buffers."""
    watched = Training(task, policy(task, how, SHORT), steps, seed)
    plan = watched.planned()
    state = watched.state()
    alone_policy = policy(task, how, NEVER)
    losses = []
    while len(losses) < steps and watched.session.plan is plan:
        losses.append(watched.step())
    alone = Training(task, alone_policy, steps, seed, plan)
    alone.load(state)
    others = [alone.step() for _ in losses]
    wrong = []
    if how == RULED and len(losses) < steps:
        wrong.append(f"the plan changed after {len(losses)} steps: {line(watched.session.events[-1])}")
    if (watched.observed, alone.observed) != (len(losses) // SHORT.interval_steps, 0):
        wrong.append(f"{watched.observed} observed steps, and {alone.observed} without a monitor")
    return len(losses), wrong + differences(losses, others, watched.tensors(), alone.tensors())


def differences(a: list[float], b: list[float], x: dict[str, Tensor], y: dict[str, Tensor]) -> list[str]:
    """The first of two series of losses that differ, and of the tensors at their ends."""
    pairs = enumerate(zip(map(repr, a), map(repr, b), strict=True))  # all digits, so that NaN is NaN
    losses = (f"step {k}: losses {m} and {n}" for k, (m, n) in pairs if m != n)
    tensors = [name for name in x if not same_bits(x[name], y[name])]
    named = [f"{len(tensors)} parameters and buffers, the first: {tensors[0]}"] if tensors else []
    return [*islice(losses, 1), *named]


# The campaign --------------------------------------------------------------------------------------------------------


def line(e: Event) -> str:
    """What happened, for people."""
    now = f" {e.was} → {e.now}" if e.was or e.now else ""
    return f"step {e.step}: {e.kind} {e.op}{now} ({e.trigger}): {e.evidence}"


def told(row: Row) -> Iterator[str]:
    """A row, and below it what happened in the run and what is wrong."""
    yield str(row)
    yield f"{'':4}loss: {' '.join(f'{x.value:.4g}' for x in row.losses)}"
    incidents = [e for e in row.events if e.kind == "incident"]
    others = [e for e in row.events if e.kind != "incident"]
    yield from (f"{'':4}{line(e)}" for e in (*others[:_MOST_CHANGES], *incidents[:_MOST_INCIDENTS]))
    yield from (f"RED {row.name}: {w}" for w in row.wrong)


def show(row: Row) -> list[str]:
    """Print a row; what is wrong about it."""
    print("\n".join(told(row)), flush=True)
    return [f"{row.name}: {w}" for w in row.wrong]


def show_differences(task: Task, how: str, seed: int) -> list[str]:
    """Print what a monitor changes; all of it is wrong."""
    steps, found = unlike_unmonitored(task, how, BITWISE_STEPS, seed)
    print(f"{'':4}{steps} steps under this plan, monitored and not: {len(found)} differences", flush=True)
    print("".join(f"RED {task.name}, {how}: {w}\n" for w in found), end="", flush=True)
    return [f"{task.name}, {how}: {w}" for w in found]


def campaign(names: Iterable[str], windows: int, seed: int = 0) -> list[str]:
    """What was wrong; prints as it goes."""
    wrong = list[str]()
    print(HEADER, flush=True)
    for task in (TASKS[name] for name in names):
        few = max(windows // CHOSEN_SHARE, 1)
        for how, count in ((RULED, windows), (CHOSEN, few), *([(BY_KIND, few)] if task.kinds else [])):
            wrong += show(clean_run(task, how, SHORT, count, seed))
            wrong += show_differences(task, how, seed)
        if task.name == BY_DEFAULT:
            print("under the monitor's default settings:")
            wrong += show(clean_run(task, RULED, Monitor(), DEFAULT_WINDOWS, seed))
    return wrong


def command(
    name: str, description: str | None, windows: int, run: Callable[[Iterable[str], int, int], list[str]]
) -> None:
    """What the command line asks for, and exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaigns.{name}", description=description)
    parser.add_argument("--windows", type=int, default=windows)
    parser.add_argument("--only", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with one_thread():
        wrong = run([given.only] if given.only else TASKS, given.windows, given.seed)
    print(f"{len(wrong)} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    command("clean", __doc__, WINDOWS, campaign)
