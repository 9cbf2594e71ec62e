"""Which copies may be held at a moment, and on whose account: the material of liveness rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.planning.codes import bytes_of, copy_of, result_of
from autoprec.planning.values import PlanTensor, Problem

__all__ = ["Demand", "demands"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Copies of one tensor: the one in a format is held if any of the units has that format.

    Attributes:
        tensor: index of the tensor.
        sizes: bytes of the copy by format.
        always: units (None is FP32) that hold it by having the format.
        unless_stored: units that hold it only while the tensor is kept as it is.
        stored: by storage, bytes that are held exactly if the tensor is kept in it, whatever the units have.
    """

    tensor: int
    sizes: tuple[tuple[str, int], ...] = ()
    always: tuple[int | None, ...] = ()
    unless_stored: tuple[int | None, ...] = ()
    stored: tuple[tuple[str, int], ...] = ()


def demands(problem: Problem, moment: int) -> Iterator[Demand]:
    """Every copy, narrow copy, mask and gradient that a choice may hold at a moment."""
    for i, t in enumerate(problem.tensors):
        if t.birth > moment:
            continue
        uses = [use.unit for use in t.readers if t.birth == moment or use.moment >= moment]
        reading = [*map(result_of, uses), *map(copy_of, uses)]
        if t.birth == moment:
            reading = [result_of(t.born), *reading]
        live = [u for u in t.savers if (u.kept_from or 0) <= moment <= problem.backward(u.moment)]
        keeping = [copy_of(use.unit) for use in live]
        if reading or keeping:
            formats = dict.fromkeys(f for u in (*reading, *keeping) for f in problem.formats_of(u))
            yield Demand(
                tensor=i,
                sizes=tuple((f, t.bytes_in(f)) for f in formats if t.bytes_in(f)),
                always=tuple(dict.fromkeys(reading)),
                unless_stored=tuple(dict.fromkeys(keeping)),
            )
        stored = tuple((f, size) for f in t.storages if (size := _stored_size(problem, t, f, moment)))
        if stored:
            yield Demand(tensor=i, stored=stored)
        yield from _gradients(problem, i, t, moment)


def _gradients(problem: Problem, index: int, t: PlanTensor, moment: int) -> Iterator[Demand]:
    def copies(units: tuple[int | None, ...]) -> Demand:
        formats = dict.fromkeys(f for u in units for f in problem.formats_of(u))
        return Demand(tensor=index, sizes=tuple((f, t.numel * bytes_of(f)) for f in formats), always=units)

    until = problem.backward(t.birth)
    sent = [result_of(use.unit) for use in t.gradient_readers if problem.backward(use.moment) <= moment <= until]
    if sent:
        yield copies(tuple(dict.fromkeys([*sent, result_of(t.born)] if moment == until else sent)))
    for use in t.gradient_readers[:-1]:
        if problem.backward(use.moment) == moment:
            yield copies((result_of(use.unit),))
    for view in t.slices:
        if problem.backward(view) == moment:
            yield copies((result_of(t.born),))


def _stored_size(problem: Problem, t: PlanTensor, storage: str, moment: int) -> int:
    start, _ = t.stored_by
    size = t.stored_bytes(storage) if start <= moment <= problem.backward(start) else 0
    return size + t.mask_bytes * sum(mask <= moment <= problem.backward(mask) for mask in t.masks)
