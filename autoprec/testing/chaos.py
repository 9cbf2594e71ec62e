"""A campaign of injected faults against one model, as it would train.

The model is calibrated and planned once. Each fault then gets a run of its own, which goes on from the state that was
saved then (as a resumed run does), so that no fault meets what another one left behind.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autoprec
from autoprec.errors import InputError
from autoprec.formats import format_named
from autoprec.graphs import OpClass, Role
from autoprec.plans import Event
from autoprec.policies import Policy
from autoprec.reporting.trials import Trial
from autoprec.sessions import Session, session_of
from autoprec.testing.injection import KINDS, inject
from autoprec.testing.watching import Seen, Watch
from autoprec.tracing.bindings import OpNode

__all__ = ["Outcome", "Run", "Start", "at_hand", "chaos", "first_told", "monitored", "outcome_of"]

Loss = Callable[[nn.Module, Any], Tensor]

#: Windows short enough to see what comes of a fault.
WINDOW_STEPS, INTERVAL_STEPS = 8, 2

#: Steps of every run before its fault, so that ops are known.
STEPS_BEFORE = 2


def monitored(policy: Policy) -> Policy:
    """The policy with the windows of a campaign."""
    monitor = {**policy.monitor.model_dump(), "window_steps": WINDOW_STEPS, "interval_steps": INTERVAL_STEPS}
    return policy.replaced(monitor=monitor)


@dataclass(frozen=True, eq=False)
class Start:
    """A planned run at its beginning, to go on from as often as one likes."""

    model: nn.Module
    state: dict[str, Any]
    policy: Policy
    optimizer: Callable[[Any], Optimizer]
    batches: Sequence[Any]
    loss_fn: Loss
    backend: str = "eager"

    @classmethod
    def planned(
        cls,
        model: nn.Module,
        policy: Policy,
        batches: Sequence[Any],
        loss_fn: Loss,
        optimizer: Callable[[Any], Optimizer],
        backend: str = "eager",
    ) -> Start:
        """Calibrate and plan; the weights stay as they are."""
        if not batches:
            raise InputError("there is no batch to train on")
        plain = copy.deepcopy(model)
        again = [batches[i % len(batches)] for i in range(max(policy.calibration.steps, len(batches)))]
        compiled = autoprec.compile(
            model,
            policy=policy,
            batches=again,
            loss_fn=loss_fn,
            events=None,
            backend=backend,  # type: ignore[arg-type]
        )
        state = session_of(compiled).state_dict()
        autoprec.unwrap(compiled)
        return cls(plain, state, policy, optimizer, batches, loss_fn, backend)

    def again(self) -> Run:
        """A new run from here."""
        torch._dynamo.reset()
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model.parameters())
        autoprec.compile(model, policy=self.policy, events=None, backend=self.backend)  # type: ignore[arg-type]
        session = session_of(model)
        session.load_state_dict(self.state)
        return Run(model, optimizer, session, self, Watch(model, optimizer))


@dataclass(eq=False)
class Run:
    """A run of a `Start`."""

    model: nn.Module
    optimizer: Optimizer
    session: Session
    start: Start
    watch: Watch

    def step(self, number: int, loss_fn: Loss | None = None, batch: Any = None) -> Seen:
        """One watched step on the batch with this number, or on another."""
        given = self.start.batches[number % len(self.start.batches)] if batch is None else batch
        return self.watch.step(lambda: (loss_fn or self.start.loss_fn)(self.model, given))

    def ops(self) -> list[OpNode]:
        """Ops whose results a fault can change."""
        found = [op for binding in self.session.bindings for op in binding.ops]
        wanted = (op for op in found if op.roles and op.inplace is None and not op.transformed and op.outputs)
        return [op for op in wanted if op.op_class is not OpClass.VIEW]


#: What may be told of a fault; a gradient scale that follows tells of one only where nothing else does.
_TOLD, _ALSO_TOLD = ("bad_step", "promoted", "incident"), ("rescaled",)


def first_told(session: Session, since: int, kinds: Sequence[str] = _TOLD) -> Event | None:
    """The first thing that was told of a fault, of events from the one with this number on."""
    return next((e for e in session.events[since:] if e.kind in kinds), None)


def chaos(
    start: Start, *, count: int, seed: int = 0, run_name: str = "", kinds: Sequence[str] = tuple(KINDS)
) -> Iterator[Trial]:
    """So many faults: every kind in turn, at ops and steps by chance."""
    chance = random.Random(seed)
    first = start.again()
    for k in range(STEPS_BEFORE):
        first.step(k)
    ops = first.ops()
    if not ops:
        raise InputError("the model has no op whose format is decided")
    casts = [op for op in ops if op.gemm is not None and op.weights and _format(first.session, op) != "fp32"]
    kinds = [k for k in kinds if k != "bit_flip" or casts]
    for i in range(count):
        kind = kinds[i % len(kinds)]
        fitting = casts if kind == "bit_flip" else ops
        # A format that can hold less than FP32 is what most faults are about; where there is none, any op.
        narrow = [op for op in fitting if _format(first.session, op) not in ("fp32", "bf16")]
        yield _trial(start, chance.choice(narrow or fitting), kind, chance.randrange(WINDOW_STEPS), run_name)


def _format(session: Session, op: OpNode) -> str:
    plan = session.plan
    return "fp32" if plan is None else plan.format_of.get((op.id, Role.OUTPUT), "fp32")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of some steps: see `Trial`."""

    bad_steps: int
    skipped_steps: int
    noticed: str
    told: Event | None
    changed: tuple[str, ...]


def outcome_of(session: Session, steps: Iterable[Seen]) -> Outcome:
    """Of steps that are taken one by one, until something is told."""
    events, skipped = len(session.events), session.skipped_steps
    bad, noticed, changed, told = 0, "", list[str](), None
    for seen in steps:
        bad += seen.bad
        changed += seen.changed
        told = first_told(session, events)
        if told is not None:
            noticed = "step" if seen.bad and session.step_was_skipped else "window"
            break
    if told is None and (told := first_told(session, events, _ALSO_TOLD)) is not None:
        noticed = "window"
    return Outcome(
        bad_steps=bad,
        skipped_steps=session.skipped_steps - skipped,
        noticed=noticed,
        told=told,
        changed=tuple(changed),
    )


def _trial(start: Start, op: OpNode, kind: str, delay: int, run_name: str) -> Trial:
    run = start.again()
    before = STEPS_BEFORE + delay
    for number in range(before):
        run.step(number)
    session = run.session
    fmt, fault = _format(session, op), inject(run.model, op.id, kind)
    # A sudden fault is over at once; a lasting one is seen at the end of the first window that is wholly its own.
    lasts = 1 if fault.first == fault.last else WINDOW_STEPS + (-session.steps % WINDOW_STEPS)
    fault.last = fault.first + lasts - 1
    found = outcome_of(session, (run.step(before + k) for k in range(lasts)))
    fault.remove()
    # A plan that is FP32 throughout is not observed: it has no format to lose.
    watched = session.plan is not None and not session.plan.is_identity
    drifts = watched and (kind in ("underflow", "zero") or (kind == "amax_growth" and _small(fmt, lasts)))
    return Trial(
        kind=kind,
        by="injected",
        run=run_name,
        op=op.id,
        format=fmt,
        step=fault.first,
        bad_steps=found.bad_steps,
        skipped_steps=found.skipped_steps,
        noticed=found.noticed,
        wanted=found.bad_steps > 0 or drifts,
        named="" if found.told is None else found.told.op,
        trigger="" if found.told is None else found.told.trigger,
        evidence="" if found.told is None else found.told.evidence,
        right=None if found.told is None else found.told.op in (at_hand(run, op) if kind == "amax_growth" else {op.id}),
        changed=found.changed,
    )


def at_hand(run: Run, op: OpNode) -> set[str]:
    """The op and whoever reads its result: of numbers that grow, or an op that is not narrow itself, it is a reader
    that leaves its format first."""
    views, readers = {*op.outputs}, set[str]()
    for other in (o for binding in run.session.bindings for o in binding.ops):
        if views & {t for _, t in other.inputs}:
            readers.add(other.id)
            views |= set(other.outputs) if other.op_class is OpClass.VIEW else set()
    return {op.id, *readers}


def _small(fmt: str, doublings: int) -> bool:
    """Whether growth by so many doublings is sure to leave a format, from wherever it began in FP16."""
    return not format_named(fmt).scaled and format_named(fmt).max_value < 2.0**doublings
