"""What the backward pass of a GEMM holds, as rows of the integer program have it: `Step.backward`, in expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from autoprec.formats import result_format
from autoprec.planning.codes import bytes_of, copy_of, result_of
from autoprec.planning.linear import Linear
from autoprec.planning.pairs import Part, stages
from autoprec.planning.uses import Steps
from autoprec.planning.values import Gemm
from autoprec.plans import RECOMPUTED

if TYPE_CHECKING:
    from autoprec.planning.milp import Program

__all__ = ["Cast", "CopyHeld", "Operand", "backward_of", "most_of", "plain_product"]

#: Copies that are there or not, and their bytes.
CopyHeld = tuple[Linear, float]


class Cast(NamedTuple):
    """A cast that is made or not, to a format."""

    made: Linear
    format: str
    numel: int

    @property
    def held(self) -> CopyHeld:
        """What it makes."""
        return self.held_of(self.numel)

    def held_of(self, numel: int) -> CopyHeld:
        """Of so many of the elements."""
        return self.made, float(numel * bytes_of(self.format))


#: Elements of an operand, and the casts that may be made of it.
Operand = tuple[int, list[Cast]]


def backward_of(program: Program, gemm: Gemm) -> tuple[list[list[CopyHeld]], float]:
    """What is there at each time: while the weight's gradient is made, then the input's, and while the input itself is
    made again; and the most that may be let go of before the second."""
    p = program.problem
    own_input, own_weight = (
        [(Linear().add(k), float(size)) for k, size in zip(program.y[u], p.units[u].workspace, strict=True)]
        for u in (gemm.grad_input, gemm.grad_weight)
    )
    of_input, of_weight = program.of_gemm[gemm.number]
    casts = program.result_casts.get(gemm.number, {})  # when all else is gone
    pieces, spared = dict(gemm.input_pieces), dict(gemm.spared)  # each piece is cast by itself
    cast = [(made, float(gemm.x_numel * bytes_of(h))) for (h, _), made in casts.items() if h not in pieces]
    later = [(made, -float(gemm.x_numel * bytes_of(f))) for (h, f), made in casts.items() if h not in pieces]
    fewer = [(made, -float(spared.get(h, 0))) for (h, _), made in casts.items() if h in pieces]
    plain, made = plain_product(program, gemm), result_of(gemm.output)
    mixed = {f: Linear().add(program.is_in(gemm.output, f)) for f in program.formats(gemm.output)}
    mixed["fp32"] = mixed.get("fp32", Linear()).add(plain, -1.0)
    order = [(case, p.one_after_the_other(gemm, f, plain=False)) for f, case in mixed.items()]
    order.append((plain, p.one_after_the_other(gemm, "fp32", plain=True)))
    early = [(case, float(there)) for case, (there, _) in order]
    late = [(case, -float(not_there)) for case, (_, not_there) in order]
    own, steps = p.remade_for(gemm)
    again = program.remade.get(gemm.x, {}).items()
    late += [(e, float(own * bytes_of(f))) for f, e in again]
    not_yet = [
        (program.is_in(made, f), -float(gemm.x_numel * bytes_of(f))) for f in program.formats(made) if not pieces
    ]
    if gemm.pairs:
        return [[*stage, *early] for stage in _of_two(program, gemm)], 0.0
    gone = _let_go(program, gemm, plain)
    early += gone
    phases = [[*own_input, *_lasting(gemm, of_input, gemm.of_input), *cast, *later, *fewer, *early],
              [*cast, *early], [*own_weight, *_lasting(gemm, of_weight, gemm.of_weight), *late],
              *([brief, *not_yet, *early] for brief in _before(gemm, of_input, gemm.of_input)),
              *([brief, *late] for brief in _before(gemm, of_weight, gemm.of_weight))]  # fmt: skip
    made_again = [(e, -float(p.tensors[gemm.x].numel * bytes_of(f))) for f, e in again]  # counts where it is held
    most = most_of(steps)
    for step in steps:
        there = program.variable(0.0)  # a share of the most that it may be
        expected = program.bytes_of(step).add(Linear(-most)).add(program.s[gemm.x, RECOMPUTED], most)
        program.at_least(there, Linear().add(expected, 1.0 / most))
        phases.append([(Linear().add(there), most), *made_again, *late])
    return phases, max((-size for _, size in gone), default=0.0)


def _let_go(program: Program, gemm: Gemm, plain: Linear) -> list[CopyHeld]:
    """`Step.let_go`, below 0."""
    t, (later, narrow) = program.problem.tensors[gemm.x], program.problem.lets_go(gemm)
    stored, unit, found = program.stores(gemm) or Linear(), copy_of(gemm.output), list[CopyHeld]()
    for f in program.formats(unit) if later is not None else ():
        needed = [stored, *(program.is_in(copy_of(u), f) for u in later or ()), *([plain] if f == "fp32" else [])]
        there = program.all_of([program.is_in(unit, f), *(Linear(1.0).add(e, -1.0) for e in needed)])
        found.append((there, -float(t.bytes_in(f))))
    storages = [f for f in t.storages if f != RECOMPUTED] if narrow else []
    return found + [(Linear().add(program.s[gemm.x, f]), -float(t.stored_bytes(f))) for f in storages]


def most_of(steps: Steps) -> float:
    """Bytes that are there in one of the steps at most, whatever the formats."""
    return 4.0 * max((sum(numel for _, numel in step) for step in steps), default=0)


def plain_product(program: Program, gemm: Gemm) -> Linear:
    """1 where a GEMM is all in FP32 and its input kept as it is."""
    stored = program.stores(gemm) or Linear()
    units = dict.fromkeys((gemm.output, gemm.grad_input, gemm.grad_weight))
    return program.all_of([*(program.is_in(u, "fp32") for u in units), Linear(1.0).add(stored, -1.0)])


def _lasting(gemm: Gemm, operands: list[Operand], there: Callable[[int, str], int]) -> list[CopyHeld]:
    """Casts that are there while the product is made; `there` as `Step.product` has it."""
    lasting = [cast for _, casts in operands for cast in casts if cast.format not in gemm.emulated]
    return [cast.held_of(there(cast.numel, cast.format)) for cast in lasting]


def _before(gemm: Gemm, operands: list[Operand], there: Callable[[int, str], int]) -> list[CopyHeld]:
    """Before an emulated product: a cast, beside the FP32 copy of it and those of the operands before it."""
    found, copies = list[CopyHeld](), 0
    for whole, casts in operands:
        numel = there(whole, "fp32")
        for cast in casts:
            if cast.format in gemm.emulated:
                found.append((cast.made, copies + numel * (4 + bytes_of(cast.format))))
        copies += 4 * numel
    return found


def _of_two(program: Program, gemm: Gemm) -> list[list[CopyHeld]]:
    """`Step.of_two`: bytes per element of each part, where it is there, times elements."""
    (_, arriving), (_, reading), *_ = program.of_gemm[gemm.number][0]  # both operands are read in one format
    makes, made, unit = result_of(gemm.grad_input), result_of(gemm.output), program.problem.units[gemm.grad_input]
    of_format = {f: program.is_in(makes, f) for f in program.formats(makes)}
    wide = [(in_f, 4.0) for f, in_f in of_format.items() if f in gemm.emulated]  # FP32 copies, products in FP32
    rounded, given = list[CopyHeld](), list[CopyHeld]()
    for (h, f), cast in program.result_casts[gemm.number].items():
        if h not in gemm.emulated:
            rounded.append((cast, float(bytes_of(h))))
            given.append((cast, float(bytes_of(f))))
        elif f != "fp32":
            rounded.append((cast, 4.0))
            given.append((cast, float(bytes_of(f))))
    for h in (f for f in of_format if f in gemm.emulated):  # cast from FP32, too, where it is given as it is rounded
        same = Linear().add(of_format[h])
        for (source, _), cast in program.result_casts[gemm.number].items():
            if source == h:
                same.add(cast, -1.0)
        rounded.append((same, 4.0))
        given.append((same, float(bytes_of(h))))

    wide_size = dict(zip(unit.options, unit.workspace, strict=True)).get("fp32", 0)

    def lasting(casts: list[Cast]) -> list[CopyHeld]:
        return [(c.made, float(bytes_of(c.format))) for c in casts if result_format(c.format) not in gemm.emulated]

    def brief(casts: list[Cast]) -> list[CopyHeld]:
        return [(c.made, 4.0 + bytes_of(c.format)) for c in casts if result_format(c.format) in gemm.emulated]

    sizes = {
        Part.MADE: [(program.is_in(made, f), float(bytes_of(f))) for f in program.formats(made)],
        Part.PRODUCT: wide + [(e, float(bytes_of(f))) for f, e in of_format.items() if f not in gemm.emulated],
        Part.ROUNDED: rounded,
        Part.GIVEN: given,
        Part.ARRIVING: wide + lasting(arriving),
        Part.CASTING: brief(arriving),
        Part.OPERAND: wide + lasting(reading),
        Part.READING: brief(reading),
        Part.WORKSPACE: [
            (Linear().add(k), float(wide_size if result_format(f) in gemm.emulated else size))
            for k, size, f in zip(program.y[gemm.grad_input], unit.workspace, unit.options, strict=True)
        ],
    }
    return [
        [(e, sign * numel * size) for part, numel, sign in stage for e, size in sizes[part]]
        for stage in stages(gemm.out_numel, gemm.pairs, gemm.x_numel, 1)
    ]
