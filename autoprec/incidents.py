"""What a session does about a bad step: its cause is named and told, and a format that is to blame is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.errors import NonFiniteError
from autoprec.execution.attribution import investigate
from autoprec.replanning import replan

if TYPE_CHECKING:
    from autoprec.sessions import Session

__all__ = ["tell_incident"]


def tell_incident(session: Session, *, own: bool) -> None:
    """Events and, for an overflow, another plan. `own` is False where another model's gradients, stepped by the same
    optimizer, are to blame. Raises `NonFiniteError` where the policy says so."""
    if not own:
        _tell(session, "another model that the same optimizer steps had non-finite gradients")
    elif session._guard.another_rank:
        _tell(session, "a loss or a buffer of another rank; its events say which")
    elif not session._guard.found_bad() and (off := session._losses.off):
        _tell(session, off, trigger="loss_spike")
    else:
        _investigate(session)
        if session.policy.guard.nonfinite == "raise":
            raise NonFiniteError(f"step {session.steps}: {session._incident}; parameters are unchanged")


def _tell(session: Session, evidence: str, trigger: str = "nonfinite") -> None:
    session._incident = evidence
    session._event("bad_step", trigger=trigger, evidence=evidence)


def _investigate(session: Session) -> None:
    calls, buffers = session.calls_to_replay(), session._guard.buffers.values()
    incident = investigate(calls, list(session._slots.values()), buffers, session._guard.watch.largest())
    if session.notice_overwritten():
        lost = "what the step was given is another batch by now, and names no culprit"
        incident = replace(incident, evidence=f"{incident.evidence}; {lost}")
    if incident.trigger == "corruption" and session._log.has("bad_step", op=incident.op, trigger="corruption"):
        incident = replace(incident, trigger="overflow")  # bits do not flip twice in one place
    if not incident.op:  # it may have come by an output that nobody differentiated before
        session._observed.doubted = True
    session._incident = incident.evidence
    told = {"op": incident.op, "role": incident.role, "was": incident.cause, "trigger": incident.trigger}
    session._event("bad_step", **told, evidence="; ".join([incident.evidence, *incident.neighbours]))
    if incident.trigger == "overflow" and session.plan is not None:
        slots = {id(slot.binding): slot for slot in session._slots.values()}
        ran = [(record, slots[id(record.binding)]) for record in calls]
        session._stability.overflowed(incident, session.plan, ran, buffers)
        session._event("promoted", **told, evidence=f"{incident.evidence}; finite in fp32")
        if session.profile is None:  # nothing is solved again, which would let the others leave the format, too
            for op in incident.beyond:
                session._stability.ban(op, incident.cause)
                evidence = f"what it reads or makes in fp32 is beyond {incident.cause} since {incident.op} is"
                session._event("promoted", **(told | {"op": op}), evidence=evidence)
        replan(session)
