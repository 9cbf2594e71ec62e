"""Whose fault is a bad step: the op at which it began, and whether its format is to blame.

The calls of the step are replayed as they ran and, where that is not finite, as captured (FP32). The one to look at is
the first whose forward pass fails or, if none does, the last whose backward pass does: backward passes run the other
way round, and what a later call or the loss made of a failure arrives in all of them. The op to name is the first whose
numbers leave those of FP32 behind. Its format is to blame if FP32's numbers there are beyond it; if they are not, and
the op is a product, what it read was not what the master weight says: a bit flipped in the cast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from autoprec.execution.looking import Extent, Look, Offence, look_at
from autoprec.execution.ranks import may_average
from autoprec.execution.replay import CallRecord
from autoprec.execution.slots import Slot
from autoprec.formats import format_named
from autoprec.graphs import OpClass, Role
from autoprec.plans import Plan
from autoprec.tracing.bindings import Binding

__all__ = ["Incident", "investigate"]

#: Numbers so many times those of FP32 are others: rounding, of FP8 too, does not double a tensor's largest element
#: often, and what overflows or was corrupted is beyond any factor.
_ASTRAY = 8.0

#: An FP32 run's largest number may differ from the rounded run's by so much, when it is asked whether it left a format.
_NEARLY = 0.5

#: Of the largest gradient of a weight, what the gradients that it is made of may be.
_SHARE = 2.0**-20

#: Where a bad step is finite when it is run again, gradients from here on are taken for too large to be squared (FP32
#: ends below the square of 2^64), and smaller ones are not.
_LARGE = 2.0**64 * _SHARE

#: What may be to blame where a pass fails: a gradient arrives in the format of the result, and is read in the others.
_ROLES = {"forward": (Role.OUTPUT,), "backward": (Role.GRAD_INPUT, Role.GRAD_WEIGHT, Role.OUTPUT)}

#: Ops before and after the named one whose ranges are told.
_NEIGHBOURS = 2


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What a bad step came from.

    Attributes:
        op: where it began, "" where no replay shows it.
        trigger: "overflow" of a format, which `cause` names; "corruption", what FP32 does not explain;
            "nonfinite", where FP32 fails as well.
        role: "output", or "grad_input" where it began in the backward pass.
        beyond: the other ops in that format whose numbers, in the forward pass, it does not hold either.
        arrived: whether the gradient was not finite when it came to the graph, from the loss or from a later one.
        neighbours: for people, a line for the op and each of those around it: format, largest number as it ran and in
            FP32, and what the format holds.
    """

    op: str
    trigger: str
    evidence: str
    cause: str = ""
    role: str = ""
    beyond: tuple[str, ...] = ()
    arrived: bool = False
    neighbours: tuple[str, ...] = ()


def investigate(
    calls: Sequence[CallRecord], slots: Sequence[Slot], buffers: Mapping[int, Tensor], bad: Mapping[str, float]
) -> Incident:
    """Replay the calls of the step. `bad` names the parameters whose gradients were not finite, with the largest number
    in each (`GradientWatch.largest`), for when no replay shows an offender."""
    what = f"non-finite gradient of {', '.join(list(bad)[:3]) or 'a parameter'}"
    by_binding = {id(slot.binding): slot for slot in slots}
    finite = bool(bad) and all(map(math.isfinite, bad.values()))
    narrow, backward = False, list[Incident]()
    try:
        for record in calls:
            slot = by_binding[id(record.binding)]
            narrow = narrow or slot.rewritten is not None
            found = _of_large_gradient(record, slot, buffers, bad) if finite else _of_call(record, slot, buffers, bad)
            if found is not None and found.role == Role.OUTPUT:
                return found
            if found is not None:
                backward.append(found)
    except RuntimeError as error:  # naming the culprit must not end a run that the veto has saved
        told = f"{what}; the replay that names the op failed: {error}"[:500]
        return Incident(op="", trigger="nonfinite", evidence=told)
    if backward:
        return ([i for i in backward if not i.arrived] or backward)[-1]
    if finite:
        return Incident(op="", trigger="nonfinite", evidence=_large(bad))
    if not calls or not narrow or not _has_gradients(calls):
        return Incident(op="", trigger="nonfinite", evidence=what)
    told = (
        f"{what}; the same step, run again, is finite: the gradient was changed outside of the captured graph, or a"
        " fault has passed, such as a flipped bit"
    )
    if may_average():
        told += "; or it came from another rank, whose events say so"
    return Incident(op="", trigger="nonfinite", evidence=told)


def _large(bad: Mapping[str, float]) -> str:
    name = max(bad, key=lambda fqn: bad[fqn])
    return (
        f"the gradient of {name} is up to {bad[name]:.4g}: finite, but FP32 does not hold the sum of its squares, and"
        " an optimizer's second moments would be infinite"
    )


def _of_large_gradient(
    record: CallRecord, slot: Slot, buffers: Mapping[int, Tensor], bad: Mapping[str, float]
) -> Incident | None:
    """All is finite and too large to be squared."""
    return _told_large(*_looks(record, slot, buffers), record, slot, bad)


def _told_large(seen: Look, plain: Look, record: CallRecord, slot: Slot, bad: Mapping[str, float]) -> Incident | None:
    """The first op that is far from FP32's, or else the last of the graph that has so large a gradient."""
    op = _first_astray(list(seen.extents), seen, plain)
    large = max(bad.values()) * _SHARE
    reached = [o for o, e in seen.extents.items() if max(e.gradient, e.arriving) >= large]
    if not op and not reached:
        return None
    role = Role.OUTPUT if op else Role.GRAD_INPUT
    op = op or reached[-1]
    causes: tuple[str, ...] = ()
    if role == Role.OUTPUT and slot.plan:
        op, causes = _blame(op, record.binding, slot.plan, _ROLES["forward"])
    cause = causes[0] if causes else ""
    trigger = "corruption" if cause else "nonfinite"
    lines = _neighbours(op, "result" if role == Role.OUTPUT else "gradient", seen, plain, slot.plan)
    return Incident(op=op, trigger=trigger, evidence=f"{op}: {_large(bad)}", cause=cause, role=role, neighbours=lines)


def _looks(record: CallRecord, slot: Slot, buffers: Mapping[int, Tensor]) -> tuple[Look, Look]:
    """A call as it ran, and in FP32."""
    seen = look_at(record, slot.module, slot.origin, buffers, slot.faults)
    if slot.rewritten is None or slot.plan is None:
        return seen, seen
    template = record.binding.template
    whatever_the_format = {node: change for node, change in slot.faults.items() if not change.in_cast}
    return seen, look_at(record, template.module, template.flat.origin, buffers, whatever_the_format)


def _has_gradients(calls: Sequence[CallRecord]) -> bool:
    """Whether the whole backward pass could be replayed."""
    return all(record.output_gradients for record in calls)


def _of_call(
    record: CallRecord, slot: Slot, buffers: Mapping[int, Tensor], bad: Mapping[str, float]
) -> Incident | None:
    seen, plain = _looks(record, slot, buffers)
    if (found := seen.offence) is None:
        largest = max((max(e.gradient, e.arriving) for e in seen.extents.values()), default=0.0)
        if largest < _LARGE or math.inf not in bad.values():
            return None
        return _told_large(seen, plain, record, slot, dict.fromkeys(bad, largest))  # gone before it was looked at
    if slot.rewritten is None or slot.plan is None:
        return _told(found, "nonfinite", "", seen, seen, None)
    # The gradients that entered are of the step as it ran: of a forward pass that failed they say nothing.
    same = plain.forward if found.where == "forward" else plain.offence
    if same is not None and same.op == found.op:
        return _told(found, "nonfinite", "", seen, plain, slot.plan)
    ids = list(seen.extents)
    before = ids[: ids.index(found.op) + 1] if found.where == "forward" else ids
    astray = _first_astray(before, seen, plain) or found.op
    op, causes = _blame(astray, record.binding, slot.plan, _ROLES[found.where])
    if not causes:
        return _told(found, "nonfinite", "", seen, plain, slot.plan)
    explained = [f for f in causes if _explained(op, f, found.where, plain, record.binding, slot.plan)]
    if not explained:
        return _told(found, "corruption", causes[0], seen, plain, slot.plan, op)
    told = _told(found, "overflow", explained[0], seen, plain, slot.plan, op)
    return replace(told, beyond=_beyond(told, plain, slot.plan) if found.where == "forward" else ())


def _beyond(incident: Incident, plain: Look, plan: Plan) -> tuple[str, ...]:
    """The other ops in the format that is to blame whose numbers in FP32 are beyond it."""
    largest = format_named(incident.cause).max_value
    ops = [op for op, e in plain.extents.items() if op != incident.op and max(e.result, e.read) > largest]
    return tuple(op for op in ops if plan.format_of.get((op, Role.OUTPUT)) == incident.cause)


def _first_astray(ops: Sequence[str], seen: Look, plain: Look) -> str:
    """The first of these ops with a result that is far from FP32's; "" if none has."""
    for op in ops:
        ours, theirs = seen.extents[op], plain.extents.get(op, Extent())
        if (ours.nonfinite and not theirs.nonfinite) or ours.result > _ASTRAY * theirs.result > 0.0:
            return op
    return ""


def _blame(op: str, binding: Binding, plan: Plan, roles: Sequence[Role]) -> tuple[str, tuple[str, ...]]:
    """The op, or the nearest before it, that has a narrow format in one of the roles, and those formats."""
    ops = {op.id: op for op in binding.ops}
    producer = {t: op.id for op in binding.ops for t in op.outputs}
    queue, seen = [op], set()
    while queue:
        op_id = queue.pop(0)
        seen.add(op_id)
        formats = dict.fromkeys(plan.format_of.get((op_id, role), "fp32") for role in roles)
        if narrow := tuple(f for f in formats if f != "fp32"):
            return op_id, narrow
        queue += [producer[t] for _, t in ops[op_id].inputs if t in producer and producer[t] not in seen]
    return op, ()


def _explained(op_id: str, fmt: str, where: str, plain: Look, binding: Binding, plan: Plan) -> bool:
    """Whether FP32's numbers at the op are beyond the format. Only a product with a parameter is asked: what other ops
    have inside (the logits of attention) nobody sees."""
    op = next(o for o in binding.ops if o.id == op_id)
    failed = plain.forward if where == "forward" else plain.offence
    if op.op_class is not OpClass.GEMM or not op.weights or failed is not None:
        return True
    extent = plain.extents.get(op_id, Extent())
    largest = max(extent.result, extent.read)
    if where == "backward":
        scale = max((r.scale_log2 for r in plan.regions if op_id in r.ops), default=0)
        largest = max(largest, math.ldexp(max(extent.gradient, extent.arriving), scale))
    return largest >= _NEARLY * format_named(fmt).max_value


def _told(
    found: Offence, trigger: str, cause: str, seen: Look, plain: Look, plan: Plan | None, op: str = ""
) -> Incident:
    what = "result" if found.where == "forward" else "gradient"
    origin = "its inputs were finite" if found.inputs_finite else "what it was given was not finite already"
    if arrived := found.where == "backward" and not seen.entered_finite:
        origin = "the gradient that came from outside of the graph, from the loss, was not finite already"
    op = op or found.op
    evidence = f"{found.op}: {found.nonfinite} of {found.elements} elements of its {what} are not finite; {origin}"
    if found.where == "forward" or found.amax:  # what comes back from the loss has no numbers that were looked at
        evidence += f", largest input {found.amax:.4g}"
    if op != found.op:
        evidence = f"began at {op}; {evidence}"
    if trigger == "corruption":
        extent = plain.extents.get(op, Extent())
        evidence += (
            f"; in fp32 its largest number is {max(extent.result, extent.read, extent.gradient):.4g}, which {cause}"
            f" holds ({format_named(cause).max_value:.6g}): no overflow, but a weight that is not its master's cast"
        )
    role = Role.OUTPUT if found.where == "forward" else Role.GRAD_INPUT
    lines = _neighbours(op, what, seen, plain, plan)
    return Incident(
        op=op, trigger=trigger, evidence=evidence, cause=cause, role=role, arrived=arrived, neighbours=lines
    )


def _neighbours(op: str, what: str, seen: Look, plain: Look, plan: Plan | None) -> tuple[str, ...]:
    ids, lines = list(seen.extents), []
    at = ids.index(op) if op in ids else 0
    for name in ids[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]:
        roles = _ROLES["forward" if what == "result" else "backward"]
        fmt = "fp32" if plan is None else next((f for r in roles if (f := plan.format_of.get((name, r)))), "fp32")
        ours, theirs = seen.extents[name], plain.extents.get(name, Extent())
        lost = ours.nonfinite if what == "result" else ours.nonfinite_gradient
        a, b = (ours.result, theirs.result) if what == "result" else (ours.gradient, theirs.gradient)
        top = f"up to {a:.4g}" if a or not lost else "without a finite number"
        told = f"{name} {fmt}: {what} {top}, in fp32 {b:.4g}, of {format_named(fmt).max_value:.4g}"
        lines.append(f"{told}; {lost} not finite" if lost else told)
    return tuple(lines)
