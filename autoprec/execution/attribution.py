"""Whose fault is a bad step: the first offender, and whether a narrow format is to blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from autoprec.execution.replay import CallRecord, Offence, first_offence
from autoprec.execution.slots import Slot
from autoprec.graphs import Role
from autoprec.plans import Plan
from autoprec.tracing.bindings import Binding

__all__ = ["Incident", "investigate"]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What a bad step came from. `cause` is the narrow format to blame, "" where FP32 fails as well."""

    op: str
    cause: str
    evidence: str


def investigate(
    calls: Sequence[CallRecord], slots: Sequence[Slot], buffers: Mapping[int, Tensor], bad: Sequence[str]
) -> Incident:
    """Replay the calls of the step, as they ran and, where that fails, as captured (FP32).

    `bad` names the parameters whose gradients were not finite, for when no replay shows an offender.
    """
    what = f"non-finite gradient of {', '.join(bad[:3]) or 'a parameter'}"
    try:
        found, cause = _first(calls, slots, buffers)
    except RuntimeError as error:  # naming the culprit must not end a run that the veto has saved
        return Incident(op="", cause="", evidence=f"{what}; the replay that names the op failed: {error}"[:500])
    if found is None:
        return Incident(op="", cause="", evidence=what)
    what = "result" if found.where == "forward" else "gradient"
    origin = "its inputs were finite" if found.inputs_finite else "what it was given was not finite already"
    evidence = (
        f"{found.op}: {found.nonfinite} of {found.elements} elements of its {what} are not finite; {origin},"
        f" largest input {found.amax:.4g}"
    )
    return Incident(op=found.op, cause=cause, evidence=evidence)


def _first(
    calls: Sequence[CallRecord], slots: Sequence[Slot], buffers: Mapping[int, Tensor]
) -> tuple[Offence | None, str]:
    by_binding = {id(slot.binding): slot for slot in slots}
    for record in calls:
        slot = by_binding[id(record.binding)]
        found = first_offence(record, slot.module, slot.origin, buffers)
        if found is None:
            continue
        if slot.rewritten is None or slot.plan is None:
            return found, ""
        template = record.binding.template
        plain = first_offence(record, template.module, template.flat.origin, buffers)
        if plain is not None and plain.op == found.op:
            return found, ""
        return _blame(found, record.binding, slot.plan)
    return None, ""


def _blame(found: Offence, binding: Binding, plan: Plan) -> tuple[Offence, str]:
    """The offender itself, or the nearest op before it, that runs in a narrow format."""
    ops = {op.id: op for op in binding.ops}
    producer = {t: op.id for op in binding.ops for t in op.outputs}
    queue, seen = [found.op], set()
    while queue:
        op_id = queue.pop(0)
        seen.add(op_id)
        for role in Role:
            fmt = plan.format_of.get((op_id, role), "fp32")
            if fmt != "fp32":
                return replace(found, op=op_id), fmt
        queue += [producer[t] for _, t in ops[op_id].inputs if t in producer and producer[t] not in seen]
    return found, ""
