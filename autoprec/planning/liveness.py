"""Which copies may be held at a moment, and on whose account: the material of liveness rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.planning.values import PlanTensor, Problem, bytes_of

__all__ = ["Demand", "demands"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """`size` bytes of a tensor are held if one of the units has `format`.

    Attributes:
        tensor: index of the tensor.
        format: of the copy.
        size: its bytes.
        always: units (None is FP32) that hold it by having the format.
        unless_packed: units that hold it only while the tensor is not kept in E4M3.
        packed: held exactly if the tensor is kept in E4M3, whatever the units have.
    """

    tensor: int
    format: str
    size: int
    always: tuple[int | None, ...] = ()
    unless_packed: tuple[int | None, ...] = ()
    packed: bool = False


def demands(problem: Problem, moment: int) -> Iterator[Demand]:
    """Every copy, packed copy, mask and gradient that a choice may hold at a moment."""
    for i, t in enumerate(problem.tensors):
        if t.birth > moment:
            continue
        yield from _copies(problem, i, t, moment)
        if t.gemms:
            start = min(problem.gemms[k].moment for k in t.gemms)
            if start <= moment <= problem.backward(start):
                yield Demand(tensor=i, format="", size=t.packed_bytes, packed=True)
            for mask in t.masks:
                if mask <= moment <= problem.backward(mask):
                    yield Demand(tensor=i, format="", size=t.mask_bytes, packed=True)
        until = problem.backward(t.birth)
        if t.gradient_from is not None and problem.backward(t.gradient_from) <= moment <= until:
            for f in _formats(problem, t.born):
                size = t.numel * bytes_of(f)
                yield Demand(tensor=i, format=f, size=size, always=(t.born,))


def _copies(problem: Problem, index: int, t: PlanTensor, moment: int) -> Iterator[Demand]:
    reading = [use.unit for use in t.readers if use.moment >= moment]
    if t.birth == moment:
        reading = [t.born, *(use.unit for use in t.readers)]
    keeping = [use.unit for use in t.savers if problem.backward(use.moment) >= moment]
    for f in dict.fromkeys(f for u in (*reading, *keeping) for f in _formats(problem, u)):
        size = t.bytes_in(f)
        if size:
            yield Demand(
                tensor=index,
                format=f,
                size=size,
                always=tuple(dict.fromkeys(u for u in reading if f in _formats(problem, u))),
                unless_packed=tuple(dict.fromkeys(u for u in keeping if f in _formats(problem, u))),
            )


def _formats(problem: Problem, unit: int | None) -> tuple[str, ...]:
    return ("fp32",) if unit is None else problem.units[unit].options
