"""Which copies may be held in a phase, and on whose account: the material of liveness rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoprec.formats import COMPUTE_FORMATS
from autoprec.planning.codes import bytes_of, copy_of, result_of
from autoprec.planning.uses import Use
from autoprec.planning.values import PlanTensor, Problem

__all__ = ["Demand", "Way", "demands", "kept_copies"]


_Units = tuple[int | None, ...]

#: Compute formats but FP32.
_NARROW = tuple(f for f in COMPUTE_FORMATS if f != "fp32")


@dataclass(frozen=True)
class Way:
    """A copy in a format is held if one unit of each group has that format, and one of `apart` has another that none of
    `but` has (where there are such units). `formats`: only of these; None of all. `unless_stored`: only while the
    tensor is kept as it is."""

    groups: tuple[_Units, ...]
    apart: _Units = ()
    but: _Units = ()
    formats: tuple[str, ...] | None = None
    unless_stored: bool = False


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Copies of one tensor: the one in a format is held if any of the units has that format.

    Attributes:
        tensor: index of the tensor; of a part, of the whole.
        sizes: bytes of the copy by format.
        always: units (None is FP32) that hold it by having the format.
        unless_stored: units that hold it only while the tensor is kept as it is.
        ways: how several units together hold it.
        stored: by storage, bytes that are held exactly if the tensor is kept in it, whatever the units have.
    """

    tensor: int
    sizes: tuple[tuple[str, int], ...] = ()
    always: _Units = ()
    unless_stored: _Units = ()
    ways: tuple[Way, ...] = ()
    stored: tuple[tuple[str, int], ...] = ()


def demands(problem: Problem, phase: int) -> Iterator[Demand]:
    """Every copy, narrow copy, mask and gradient that a choice may hold in a phase."""
    for i, t in enumerate(problem.tensors):
        if problem.phase(t.birth) > phase:
            continue
        always, ways = _read(problem, t, phase)
        if t.part_of is not None:
            always, ways = (), tuple(_alone(t, always, ways))
        savers = [use for use in t.savers if _keeps(problem, t, use, phase)]
        for again in dict.fromkeys((None, *(use.kept_from for use in savers))):  # what is made again is another copy
            keeping, kept = kept_copies(t, [use for use in savers if use.kept_from == again])
            held, how = (always, (*ways, *kept)) if again is None else ((), kept)
            units = [*held, *keeping, *(u for way in how for u in way.groups[0])]
            if sizes := tuple((f, t.bytes_in(f)) for f in _formats(problem, units) if t.bytes_in(f)):
                index = i if t.part_of is None else t.part_of
                yield Demand(tensor=index, sizes=sizes, always=held, unless_stored=_once(keeping), ways=how)
        stored = tuple((f, size) for f in t.storages if (size := _stored_size(problem, t, f, phase)))
        if stored:
            yield Demand(tensor=i, stored=stored)
        yield from _gradients(problem, i, t, phase)


def kept_copies(t: PlanTensor, savers: Iterable[Use]) -> tuple[_Units, tuple[Way, ...]]:
    """What holds copies for savers, of a tensor that is kept as it is: units that hold one by having its format, and
    ways to."""
    if t.part_of is None and not any(use.part for use in savers):
        return _once(copy_of(use.unit) for use in savers), ()
    born, ways = result_of(t.born), list[Way]()
    for use in savers:
        read, narrow = copy_of(use.unit), None if use.copied is None else _NARROW
        if t.part_of is not None:
            ways.append(Way(((read,),), (born,), unless_stored=True))
            if use.copied is not None:
                ways.append(Way(((use.unit,), (use.copied,)), formats=("fp32",), unless_stored=True))
        elif use.part:
            ways.append(Way(((born,), (read,)), formats=narrow, unless_stored=True))
            if use.copied is not None:
                own = (use.unit, use.copied)
                ways.append(Way(((born,), (read,)), own, formats=("fp32",), unless_stored=True))
        else:
            ways.append(Way(((read,),), unless_stored=True))
    return (), tuple(dict.fromkeys(ways))


def _alone(t: PlanTensor, always: _Units, ways: Iterable[Way]) -> Iterator[Way]:
    """Of a part, those of copies that it has alone."""
    yield from (Way(((unit,),), (result_of(t.born),)) for unit in always)
    yield from (Way(way.groups, (result_of(t.born),)) for way in ways)


def _once(units: Iterable[int | None]) -> _Units:
    return tuple(dict.fromkeys(units))


def _formats(problem: Problem, units: Iterable[int | None]) -> list[str]:
    return [*dict.fromkeys(f for u in units for f in problem.formats_of(u))]


def _read(problem: Problem, t: PlanTensor, phase: int) -> tuple[_Units, tuple[Way, ...]]:
    """What holds copies for readers: each one it reads, from where the first with its format has it cast; and the one
    in the format of birth, until all casts are made."""
    born = result_of(t.born)
    begun, reading, later, fresh, cast = (list[int | None]() for _ in range(5))
    ways = list[Way]()
    for use in t.readers:
        at, units = problem.cast_at(t, use), dict.fromkeys((result_of(use.unit), copy_of(use.unit)))
        if use.part:
            if phase <= at:
                reading.append(born)
            elif phase <= problem.phase(use.moment):
                ways.append(Way(((born,), (result_of(use.unit),))))
            continue
        if at > phase:
            later += units
        else:
            begun += units
            reading += units if phase <= problem.phase(use.moment) else ()
        (fresh if at >= phase else cast).append(result_of(use.unit))
    if t.part_of is not None:
        return _once(reading), (Way((_once(begun), _once(later))),) if begun and later else ()
    if not cast and (fresh or phase == problem.phase(t.birth)):
        reading.append(born)
    ways += [Way((_once([born, *begun]), _once(later)))] if later else []
    if cast and fresh:
        ways.append(Way(((born,),), _once(fresh), _once(cast)))
    return _once(reading), tuple(ways)


def _keeps(problem: Problem, t: PlanTensor, use: Use, phase: int) -> bool:
    # A checkpoint keeps what one of its ops reads: there since that was cast.
    if use.part and use.kept_from is None:
        return phase <= problem.phase(problem.backward(use.moment))
    casts = [problem.cast_at(t, one) for one in (use, *t.readers) if one.unit == use.unit]
    first = min(casts) if use.kept_from is None else problem.phase(use.kept_from)
    return first <= phase <= problem.phase(problem.backward(use.moment))


def _gradients(problem: Problem, index: int, t: PlanTensor, phase: int) -> Iterator[Demand]:
    def copies(always: _Units, *ways: Way) -> Demand:
        formats = _formats(problem, [*always, *(u for way in ways for u in way.groups[0])])
        sizes = tuple((f, t.numel * bytes_of(f)) for f in formats)
        return Demand(tensor=index, sizes=sizes, always=always, ways=ways)

    def then(moment: int) -> int:
        return problem.phase(problem.backward(moment))

    born, readers = result_of(t.born), [(use, result_of(use.unit)) for use in t.gradient_readers]
    before = _once(u for use, u in readers if problem.gradient_cast_at(t, use) >= phase)
    cast = _once(u for use, u in readers if problem.gradient_cast_at(t, use) <= phase)
    still = _once(u for use, u in readers if problem.gradient_cast_at(t, use) > phase)
    if phase <= then(t.birth):
        always, ways = [], []
        for use, unit in readers:
            sent, waits = problem.sent_at(use) <= phase, problem.gradient_cast_at(t, use) >= phase
            if not sent and (use.instead is None or problem.own_at(use) > phase):
                continue
            apart = () if sent else (result_of(use.instead[0]),) if use.instead is not None else ()
            if sent and waits:
                always.append(unit)
            else:
                ways += [Way(((unit,),), apart)] if waits else [Way(((unit,), before), apart)] if before else []
                ways.append(Way(((born,), (unit,)), apart))
            if sent and not still:
                always.append(born)
        if cast:
            ways.append(Way(((born,),), cast, still))
        if always or ways:
            yield copies(_once(always), *dict.fromkeys(ways))
    for k, (use, unit) in enumerate(readers[:-1]):
        if problem.added_at(use) == phase:
            ways = [Way(((unit,), _once(u for _, u in readers[k + 1 :])))]
            if cast:
                ways.append(Way(((unit,), (born,)), cast, still))
            yield copies((), *ways)


def _stored_size(problem: Problem, t: PlanTensor, storage: str, phase: int) -> int:
    def held(moment: int) -> bool:
        return problem.phase(moment) <= phase <= problem.phase(problem.backward(moment))

    size = t.stored_bytes(storage) if held(t.stored_by[0]) and not t.in_parts else 0  # of parts: `Program._keep_narrow`
    return size + t.mask_bytes * sum(map(held, t.masks))
