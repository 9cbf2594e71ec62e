"""The state of a run between two steps, as a value: what must be known to go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.checks import check_amount, check_text, check_unique
from autoprec.devices import Device
from autoprec.errors import StateError
from autoprec.floors import Floors, Trends
from autoprec.graphs import OpGraph
from autoprec.losses import Losses
from autoprec.plans import Event, Plan
from autoprec.profiles import Profile

__all__ = ["Counts", "Run", "RunState", "check_same"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of a run: optimizer steps completed, and vetoed; vetoed ones in a row; the step after which the window in
    progress began; calibration steps, and whether a graph was foreseen in one (`Observations`)."""

    steps: int
    skipped_steps: int
    bad_in_row: int
    window_steps: int
    calibration_steps: int
    foreseen: bool
    step_was_skipped: bool

    def __post_init__(self) -> None:
        for name in ("steps", "skipped_steps", "bad_in_row", "window_steps", "calibration_steps"):
            check_amount(getattr(self, name), name, StateError, name)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All but the profiles.

    Attributes:
        parameters: (FQN, "float32[32, 16]") of each, as the model has them.
        policy, policy_fingerprint: what was asked for.
        backend: how graphs run.
        plan: what runs; None while calibrating.
        given: the plan that the session was made with.
        parts: modules that are captured on their own.
        scheduled: numbers of the entries of the policy's schedule that the plan knows; None in an older state, whose
            plan knows those that were due.
        thawed: tensor ids of frozen parameters that lived in a narrow format and are trained since.
        sites: of each (module, kind), the call sites in the order of their numbers, as (source line, occurrence); () in
            an older state, and then the branch that runs first has the first number.
        events: everything that happened; `events_run`: the name of the run in its file, "" in an older state, and then
            `events_before`: lines that the file had before it; `events_written`: lines of it there.
        losses: of the window in progress, and the spread of the one before.
        gradients: (tensor, largest magnitude of its gradient), of the last window that told.
        was_noisy: see `Stability`; doubted: see `Observations`.
        lowered: fingerprints of plans that were compiled.
        uncompiled: (fingerprint, budget in bytes) of plans that would break it compiled.
        takeover_step: after which the plan, which runs as it is until then, runs compiled; None where nothing waits.
    """

    parameters: tuple[tuple[str, str], ...]
    policy: str
    policy_fingerprint: str
    backend: str
    counts: Counts
    floors: Floors
    trends: Trends
    plan: Plan | None = None
    given: Plan | None = None
    graph: OpGraph | None = None
    device: Device | None = None
    parts: tuple[str, ...] = ()
    scheduled: tuple[int, ...] | None = None
    sites: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...] = ()
    thawed: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    events_run: str = ""
    events_before: int = 0
    events_written: int = 0
    losses: Losses = Losses()
    gradients: tuple[tuple[str, float], ...] = ()
    was_noisy: bool = False
    doubted: bool = False
    lowered: tuple[str, ...] = ()
    uncompiled: tuple[tuple[str, int], ...] = ()
    takeover_step: int | None = None

    def __post_init__(self) -> None:
        check_unique([name for name, _ in self.parameters], "the parameter", StateError, "parameters")
        check_amount(self.events_before, "events_before", StateError, "events_before")
        check_amount(self.events_written, "events_written", StateError, "events_written")
        if self.takeover_step is not None:
            check_amount(self.takeover_step, "takeover_step", StateError, "takeover_step")
        check_text(self.policy_fingerprint, "policy_fingerprint", StateError, "policy_fingerprint")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run, what calibration recorded, the window in progress, and what windows taught: (their number, ranges)."""

    run: Run
    calibration: Profile | None = None
    window: Profile | None = None
    learned: tuple[tuple[int, Profile], ...] = ()

    def __post_init__(self) -> None:
        if self.run.graph is None and (self.calibration is not None or self.window is not None):
            raise StateError("there is a profile, but not the graph that it is of", at=("run", "graph"))


def check_same(
    state: Run, *, parameters: Mapping[str, str], policy: str, policy_fingerprint: str, backend: str
) -> None:
    """`StateError` with what differs, if the state is of another model, policy or backend."""
    known = dict(state.parameters)
    for name, shape in parameters.items():
        if known.get(name) != shape:
            was = known.get(name, "no such parameter")
            raise StateError(f"the state is of another model: {name} is {shape} here, and {was} in the state")
    if missing := sorted(set(known) - set(parameters)):
        raise StateError(f"the state is of another model: {missing[0]}, {known[missing[0]]}, is not in this one")
    if state.policy_fingerprint != policy_fingerprint:
        names = f"{state.policy!r}" if state.policy != policy else f"a policy {policy!r} that said something else"
        raise StateError(
            f"the state is of a run under {names}, not under {policy!r} as it is here; compile with that one, and its"
            " budget, or start anew with plan="
        )
    if state.backend != backend:
        raise StateError(f"the state is of a run with backend={state.backend!r}, not {backend!r}")
