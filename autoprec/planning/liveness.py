"""Which copies may be held in a phase, and on whose account: the material of liveness rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.planning.codes import bytes_of, copy_of, result_of
from autoprec.planning.values import PlanTensor, Problem, Use

__all__ = ["Demand", "demands"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Copies of one tensor: the one in a format is held if any of the units has that format.

    Attributes:
        tensor: index of the tensor.
        sizes: bytes of the copy by format.
        always: units (None is FP32) that hold it by having the format.
        unless_stored: units that hold it only while the tensor is kept as it is.
        apart: (unit, other): held in the format of the unit where the other has another format.
        stored: by storage, bytes that are held exactly if the tensor is kept in it, whatever the units have.
    """

    tensor: int
    sizes: tuple[tuple[str, int], ...] = ()
    always: tuple[int | None, ...] = ()
    unless_stored: tuple[int | None, ...] = ()
    apart: tuple[int | None, int | None] | None = None
    stored: tuple[tuple[str, int], ...] = ()


def demands(problem: Problem, phase: int) -> Iterator[Demand]:
    """Every copy, narrow copy, mask and gradient that a choice may hold in a phase."""
    for i, t in enumerate(problem.tensors):
        birth, casts = problem.phase(t.birth), problem.casts_at(t)
        if birth > phase:
            continue
        uses = [use.unit for use in t.readers if casts <= phase <= problem.phase(use.moment)]
        reading = [*map(result_of, uses), *map(copy_of, uses)]
        if phase <= casts:
            reading = [result_of(t.born), *reading]
        keeping = [copy_of(use.unit) for use in t.savers if _keeps(problem, use, casts, phase)]
        if reading or keeping:
            formats = dict.fromkeys(f for u in (*reading, *keeping) for f in problem.formats_of(u))
            yield Demand(
                tensor=i,
                sizes=tuple((f, t.bytes_in(f)) for f in formats if t.bytes_in(f)),
                always=tuple(dict.fromkeys(reading)),
                unless_stored=tuple(dict.fromkeys(keeping)),
            )
        stored = tuple((f, size) for f in t.storages if (size := _stored_size(problem, t, f, phase)))
        if stored:
            yield Demand(tensor=i, stored=stored)
        yield from _gradients(problem, i, t, phase)


def _keeps(problem: Problem, use: Use, casts: int, phase: int) -> bool:
    first = casts if use.kept_from is None else problem.phase(use.kept_from)
    return first <= phase <= problem.phase(problem.backward(use.moment))


def _gradients(problem: Problem, index: int, t: PlanTensor, phase: int) -> Iterator[Demand]:
    def copies(*units: int | None, apart: tuple[int | None, int | None] | None = None) -> Demand:
        formats = dict.fromkeys(f for u in (units if apart is None else apart[:1]) for f in problem.formats_of(u))
        sizes = tuple((f, t.numel * bytes_of(f)) for f in formats)
        return Demand(tensor=index, sizes=sizes, always=tuple(dict.fromkeys(units)), apart=apart)

    def then(moment: int) -> int:
        return problem.phase(problem.backward(moment))

    born, casts = result_of(t.born), problem.gradients_cast_at(t)
    if phase <= then(t.birth):
        sent = [result_of(use.unit) for use in t.gradient_readers if problem.sent_at(use) <= phase]
        waiting = [result_of(use.unit) for use in t.gradient_readers if problem.sent_at(use) > phase]
        if sent and phase == casts:  # those that are still another tensor's are cast, or are that
            yield copies(*sent, born)
        elif sent:
            yield copies(*(sent if phase < casts else [born]))
        for unit in waiting if phase >= casts and not sent else ():
            yield copies(apart=(born, unit))
        for unit in waiting if phase == casts else ():
            yield copies(apart=(unit, born))
    for use in t.gradient_readers[:-1]:
        if then(use.moment) == phase:
            yield copies(result_of(use.unit))
    for view in t.slices:
        if then(view) == phase:
            yield copies(born)


def _stored_size(problem: Problem, t: PlanTensor, storage: str, phase: int) -> int:
    def held(moment: int) -> bool:
        return problem.phase(moment) <= phase <= problem.phase(problem.backward(moment))

    size = t.stored_bytes(storage) if held(t.stored_by[0]) else 0
    return size + t.mask_bytes * sum(map(held, t.masks))
