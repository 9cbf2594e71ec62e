"""The state of a session as a value, and a session from such a value.

What is not in it comes again by itself: graphs are captured and rewritten at their first call, and calls of ops, which
timing needs before the first plan, are collected in the calibration steps that are left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from autoprec.checks import check_kind
from autoprec.errors import PlanError, StateError
from autoprec.serial import read_state, state_from_parts, state_parts, write_state
from autoprec.serial.trees import Source
from autoprec.states import Counts, Run, RunState, check_same
from autoprec.tracing.sites import SiteRegister

if TYPE_CHECKING:
    from autoprec.sessions import Session

__all__ = ["Resumable"]


class Resumable:
    """What a session has for checkpoints. The model, the optimizer and random states are the user's to save."""

    def state_dict(self: Session) -> dict[str, Any]:  # type: ignore[misc]
        """Plan, floors, window and counters: text and tensors, for torch.save. Of a step that has only run forward, as
        before it. `StateError` where gradients wait for their update."""
        return _as_dict(_take(self))

    def load_state_dict(self: Session, state: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Go on from there, before the first step. `StateError` with what differs, if it is of another model, policy or
        backend, and for what is no state; the session is then as it was."""
        _give(self, _from_dict(state))

    def save(self: Session, path: str | os.PathLike[str]) -> None:  # type: ignore[misc]
        """Write `state_dict` as one .safetensors file, wholly or not at all."""
        check_kind(path, (str, os.PathLike), "path", "a file")
        write_state(path, _take(self))

    def load(self: Session, path: str | os.PathLike[str]) -> None:  # type: ignore[misc]
        """`load_state_dict` of what `save` wrote; `StateError` also for another or a damaged file."""
        check_kind(path, (str, os.PathLike), "path", "a file")
        _give(self, read_state(path))


def _take(session: Session) -> RunState:
    """The state between two steps. `StateError` where gradients wait for their update."""
    session.settle()
    if session._guard.waits:
        raise StateError(
            "a step is in progress: save the state after optimizer.step() (or session.step()), or set gradients to None"
            " that nobody will step by (model.zero_grad())"
        )
    if session._guard.in_step and session._calls.are_given_up:
        session._guard.give_up()  # what nobody will finish is no part of the run; what somebody may is of its next step
    observed, stability = session._observed, session._stability
    return RunState(
        run=Run(
            **_identity(session),
            counts=Counts(
                steps=session.steps,
                skipped_steps=session.skipped_steps,
                bad_in_row=session._bad_in_row,
                window_steps=session._window_steps,
                calibration_steps=observed.steps,
                foreseen=observed.foreseen,
                step_was_skipped=session.step_was_skipped,
            ),
            floors=stability.floors,
            trends=stability.trends,
            plan=session.plan,
            given=session._scheduler.given,
            graph=observed.graph,
            device=session.device,
            parts=tuple(session._parts.names),
            scheduled=tuple(sorted(session._raised)),
            sites=session._sites.known,
            thawed=tuple(sorted(session._frozen.thawed)),
            events=tuple(session.events),
            events_run=session._log.run,
            events_written=session._log.written,
            losses=session._losses.known,
            gradients=stability.gradients,
            was_noisy=stability.was_noisy,
            doubted=observed.doubted,
            lowered=tuple(sorted(session.lowering.known)),
            uncompiled=tuple(sorted(session.lowering.left_uncompiled.items())),
            takeover_step=session._takeover.due_step,
        ),
        calibration=observed.profile,
        window=observed.window,
        learned=observed.learned,
    )


def _give(session: Session, state: RunState) -> None:
    """Go on from a state. `StateError`, with the session as it was, if it is of another run, or this one has begun."""
    run = state.run
    if session.steps or session.skipped_steps or not session.is_between_steps() or session.graph is not None:
        raise StateError("this session has begun already: load the state before its first step")
    mine = _identity(session)
    check_same(run, **{**mine, "parameters": dict(mine["parameters"])})
    _check_parts(session, run)
    # From here on nothing can fail. What an evaluation bound before is bound anew, under the plan.
    session._slots.clear()
    session._sites = SiteRegister(run.sites)
    counts, observed, stability = run.counts, session._observed, session._stability
    session.steps, session.skipped_steps = counts.steps, counts.skipped_steps
    session._bad_in_row, session.step_was_skipped = counts.bad_in_row, counts.step_was_skipped
    observed.graph, observed.profile, observed.learned = run.graph, state.calibration, state.learned
    observed.steps, observed.foreseen = counts.calibration_steps, counts.foreseen
    observed.doubted = run.doubted
    stability.floors, stability.trends, stability.gradients = run.floors, run.trends, run.gradients
    session._scheduler.device, session._scheduler.given = run.device, run.given
    session._given_plan = False  # it ran before
    session._ops_of_state = () if run.graph is None else tuple(op.id for op in run.graph.ops if op.roles)
    session._raised = frozenset(run.scheduled or ())
    if run.scheduled is None and run.plan is not None:
        session._raised = session._schedule.due(run.counts.steps, ())
    session._parts.capture(session.model, run.parts)
    session.lowering.known_before = frozenset(run.lowered)
    session.lowering.left_uncompiled = dict(run.uncompiled)
    if run.plan is not None:
        session.adopt(run.plan)
    if run.plan is not None and run.takeover_step is not None and run.takeover_step > run.counts.steps:
        session._takeover.goes_on(run.plan, run.takeover_step)
    stability.was_noisy = run.was_noisy
    session._window_steps, observed.window = counts.window_steps, state.window
    session._losses.known = run.losses
    wrote = {"run": run.events_run, "before": run.events_before, "written": run.events_written}
    session._log.begin_with(run.events, **wrote)


def _check_parts(session: Session, run: Run) -> None:
    """`StateError` where the model has not all that the state speaks of, or trains what lives in a narrow format."""
    known = dict(session.model.named_modules())
    if missing := [name for name in run.parts if name not in known]:
        raise StateError(f"the state is of another model: it has the module {missing[0]}, and this one does not")
    if run.plan is not None:
        session._frozen.thawed = set(run.thawed)
        try:
            session._frozen.check(run.plan)
        except PlanError as error:
            session._frozen.thawed = set()
            raise StateError(f"the state does not fit this model: {error}") from error


def _identity(session: Session) -> dict[str, Any]:
    shapes = {f: f"{str(p.dtype).removeprefix('torch.')}{[*p.shape]}" for f, p in session._parameters.items()}
    return {
        "parameters": tuple(shapes.items()),
        "policy": session.policy.name,
        "policy_fingerprint": session.policy.fingerprint,
        "backend": session.lowering.backend,
    }


def _as_dict(state: RunState) -> dict[str, Any]:
    """For torch.save: text and tensors, which `weights_only` loads."""
    header, arrays = state_parts(state)
    return {"autoprec": header, **{name: torch.from_numpy(a.copy()) for name, a in arrays.items()}}


def _from_dict(given: Mapping[str, Any]) -> RunState:
    """What `as_dict` was given; `StateError` for anything else."""
    source = Source("the state", StateError)
    header = given.get("autoprec") if isinstance(given, Mapping) else None
    if not isinstance(header, str):
        raise StateError("the state is not one that session.state_dict() gave: it has no text under 'autoprec'")
    rest = {name: x for name, x in given.items() if name != "autoprec"}
    if wrong := [name for name, x in rest.items() if not isinstance(x, torch.Tensor)]:
        raise StateError(f"the state is not one that session.state_dict() gave: {wrong[0]!r} is no tensor")
    return state_from_parts(header, {name: x.detach().cpu().numpy() for name, x in rest.items()}, source)
