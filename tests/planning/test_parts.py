"""Parts of tensors, by hand: what is held of them, and of their gradients, and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from autoprec.errors import InputError
from autoprec.graphs import OpClass, OpGraph, Role, TensorKind
from autoprec.planning.cases import Case
from autoprec.planning.evaluator import Step, evaluate
from autoprec.planning.neighbours import Neighbours
from autoprec.planning.problem import build_problem
from autoprec.planning.relaxation import Relaxation
from autoprec.planning.solutions import Choice
from autoprec.planning.values import Problem
from autoprec.policies import Policy
from tests.planning.maker import Maker
from tests.planning.planning_cases import random_case
from tests.planning.test_neighbours import agree
from tests.planning.test_scale import domain_sizes, random_values
from tests.planning.test_solvers import program_says, random_choice

WIDE, BOTH = (
    Policy.model_validate({
        "name": "test", "formats": formats, "storage": {"formats": ("bf16",)}, "noise": {"gradient": 1e6, "loss": 1e6}
    })
    for formats in (("fp32",), ("fp32", "bf16"))
)  # fmt: skip

#: Of eight rows of three, the first two, and the others.
WHOLE, FEW, MANY = 8 * 3, 2 * 3, 6 * 3


def split_linear() -> tuple[Maker, str, str, str]:
    """linear(x), and the two parts of it."""
    make = Maker(np.random.default_rng(0), calm=True)
    x = make.tensor("input:x", (8, 3), kind=TensorKind.INPUT, grad=False)
    h = make.linear(x, 3, fqn="a")
    return make, h, *make.split(h, 2)


def gelu(make: Maker, x: str) -> str:
    return make.op("gelu", OpClass.POINTWISE, (x,), make.tensors[x].shape, saves=(x,))


def cat(make: Maker, *parts: str) -> OpGraph:
    return make.graph(make.op("cat", OpClass.POINTWISE, parts, (8, 3)))


def problem_of(make: Maker, graph: OpGraph, policy: Policy = WIDE) -> Problem:
    return build_problem(graph, make.profile(graph), make.device(graph), policy)


def step(problem: Problem, formats: Mapping[str, str], stored: Mapping[str, str] | None = None) -> Step:
    """All in FP32 but the ops that are named."""
    wanted = [(u.options, formats.get(u.op, "fp32")) for u in problem.units]
    options = tuple(among.index(f) if f in among else 0 for among, f in wanted)  # not every role may be asked for
    index = {t.id: i for i, t in enumerate(problem.tensors)}
    kept = frozenset((index[t], f) for t, f in (stored or {}).items())
    return Step(problem, Choice(options=options, stored=kept)).whole()


def held(found: Step, *names: str) -> dict[tuple[str, str], tuple[str, str, int]]:
    """By (what, kind): first and last phase, and bytes, of what is held of these tensors."""
    p = found.problem
    wanted = {*names, *(f"gradient of {n}" for n in names), *(f"sum of the gradient of {n}" for n in names)}
    rows = zip(found.held, found.kinds, strict=True)
    return {
        (what, kind): (p.phase_name(first), p.phase_name(last), size)
        for (what, first, last, size), kind in rows
        if what in wanted
    }


GRADIENTS = "gradients of activations"


def test_a_part_has_a_gradient_of_its_own_until_the_view_runs_backward() -> None:
    make, h, few, many = split_linear()
    g, k = gelu(make, few), gelu(make, many)
    graph = cat(make, g, k)
    found = held(step(problem_of(make, graph), {}), h, few, many)
    split = "backward of m:split#1"
    assert found == {
        (h, "activations, fp32"): (f"forward of {h}", f"backward of {g}", 4 * WHOLE),
        (f"gradient of {few}", GRADIENTS): (f"backward of {g}", split, 4 * FEW),
        (f"gradient of {many}", GRADIENTS): (f"backward of {k}", split, 4 * MANY),
        (f"gradient of {h}", GRADIENTS): (split, f"backward of {h}", 4 * WHOLE),
    }


def test_what_nobody_reads_is_filled_up_with_zeros() -> None:
    make, h, few, many = split_linear()
    found = held(step(problem_of(make, make.graph(gelu(make, few))), {}), h, few, many)
    split = "backward of m:split#1"
    assert found[f"gradient of {many}", GRADIENTS] == (split, split, 4 * MANY)
    assert found[f"gradient of {h}", GRADIENTS] == (split, f"backward of {h}", 4 * WHOLE)


def test_what_is_not_split_for_anybody_has_no_gradient() -> None:
    make, h, few, many = split_linear()
    found = held(step(problem_of(make, make.graph(gelu(make, h))), {}), few, many)
    assert found == {}


def test_a_slice_beside_the_whole_is_added_to_it() -> None:
    make, h, few, many = split_linear()
    g, k = gelu(make, few), gelu(make, h)
    found = held(step(problem_of(make, cat(make, g, k)), {}), h, many)
    split = "backward of m:split#1"
    assert found[f"gradient of {h}", GRADIENTS] == (f"backward of {k}", f"backward of {h}", 4 * WHOLE)
    assert found[f"sum of the gradient of {h}", GRADIENTS] == (split, split, 4 * WHOLE)


def test_a_cast_copies_the_part_alone() -> None:
    """The whole lives as long as somebody reads it as it was born, or has yet to cast it."""
    make, h, few, many = split_linear()
    g, k = gelu(make, few), gelu(make, many)
    problem = problem_of(make, cat(make, g, k), BOTH)
    one = held(step(problem, {g: "bf16"}), h, few, many)
    assert one[few, "activations, bf16"] == (f"casts of the forward of {g}", f"backward of {g}", 2 * FEW)
    assert one[h, "activations, fp32"] == (f"forward of {h}", f"backward of {k}", 4 * WHOLE)
    assert (many, "activations, bf16") not in one and (h, "activations, bf16") not in one
    both = held(step(problem, {g: "bf16", k: "bf16"}), h, few, many)
    assert both[h, "activations, fp32"] == (f"forward of {h}", f"casts of the forward of {k}", 4 * WHOLE)
    assert both[many, "activations, bf16"] == (f"casts of the forward of {k}", f"backward of {k}", 2 * MANY)


def test_the_gradient_of_a_part_is_cast_before_that_of_the_whole_is_made() -> None:
    make, h, few, many = split_linear()
    g, k = gelu(make, few), gelu(make, many)
    found = step(problem_of(make, cat(make, g, k), BOTH), {g: "bf16"})
    p, (split, then) = found.problem, (p_phase(found, "m:split#1"), p_phase(found, g))
    rows = sorted((first, last, size) for what, first, last, size in found.held if what == f"gradient of {few}")
    assert rows == [(then, then + 1, 2 * FEW), (then + 1, split, 4 * FEW)]
    assert p.phase_name(then + 1) == f"casts of the backward of {g}"


def p_phase(found: Step, op: str) -> int:
    p = found.problem
    return p.phase(p.backward(p.ops.index(op)))


def test_a_product_in_fp32_keeps_copies_of_parts_and_ours_the_whole() -> None:
    make, h, few, many = split_linear()
    product = make.copying_product(few, few, (2, 3))
    problem = problem_of(make, make.graph(product), BOTH)
    plain = held(step(problem, {}), h, few)
    assert plain[h, "activations, fp32"][1] == f"forward of {product}"
    assert plain[few, "activations, fp32"] == (f"casts of the forward of {product}", f"backward of {product}", 4 * FEW)
    roles = {u.role: i for i, u in enumerate(problem.units) if u.op == product}
    options = [0] * len(problem.units)
    options[roles[Role.GRAD_INPUT]] = problem.units[roles[Role.GRAD_INPUT]].options.index("bf16")
    ours = held(Step(problem, Choice(options=tuple(options))).whole(), h, few)
    assert ours[h, "activations, fp32"][1] == f"backward of {product}" and (few, "activations, fp32") not in ours


def test_of_a_tensor_kept_narrow_in_parts_each_copy_is_kept() -> None:
    """A cast of a part has a narrow copy of its own; what is read as it was born has one of the whole."""
    make, h, few, many = split_linear()
    g, k = gelu(make, few), gelu(make, many)
    problem = problem_of(make, cat(make, g, k), BOTH)
    as_born = held(step(problem, {}, {h: "bf16"}), h, few, many)
    assert as_born[h, "activations, bf16"] == (f"forward of {g}", f"backward of {g}", 2 * WHOLE)
    assert as_born[h, "activations, fp32"][1] == f"forward of {k}"
    assert (few, "activations, bf16") not in as_born
    one = step(problem, {g: "bf16"}, {h: "bf16"})
    narrow = [(problem.phase_name(first), problem.phase_name(last), size) for (what, first, last, size), kind
              in zip(one.held, one.kinds, strict=True) if what == few and kind == "activations, bf16"]  # fmt: skip
    cast = (f"casts of the forward of {g}", f"forward of {g}", 2 * FEW)
    assert narrow == [(f"forward of {g}", f"backward of {g}", 2 * FEW), cast]
    assert held(one, h)[h, "activations, bf16"] == (f"forward of {k}", f"backward of {k}", 2 * WHOLE)
    both = held(step(problem, {g: "bf16", k: "bf16"}, {h: "bf16"}), h, many)
    assert (h, "activations, bf16") not in both and both[h, "activations, fp32"][2] == 4 * WHOLE
    rows = [size for what, _, last, size in step(problem, {g: "bf16", k: "bf16"}, {h: "bf16"}).held if what == many
            and problem.phase_name(last) == f"backward of {k}"]  # fmt: skip
    assert rows == [2 * MANY]


def test_what_was_expanded_has_a_gradient_in_the_format_of_its_reader() -> None:
    """What it is made of is cast, not it."""
    make = Maker(np.random.default_rng(0), calm=True)
    x = make.tensor("input:x", (1, 3), kind=TensorKind.INPUT, grad=False)
    h = make.linear(x, 3, fqn="a")
    many = make.op("expand", OpClass.VIEW, (h,), (8, 3), base=h)
    g = gelu(make, many)
    found = step(problem_of(make, make.graph(g), BOTH), {g: "bf16"})
    rows = {what: {size for w, *_, size in found.held if w == what} for what, *_ in found.held}
    assert rows[f"gradient of {many}"] == {2 * WHOLE}
    assert rows[f"gradient of {h}"] == {2 * 3, 4 * 3}
    assert rows[h] == {2 * 3, 4 * 3} and many not in rows


def test_what_a_sum_sends_is_a_view_until_it_is_cast_or_added_to() -> None:
    make, h, *_ = split_linear()
    total = make.op("sum", OpClass.WIDE, (h,), (1,))
    problem = problem_of(make, make.graph(total), BOTH)
    assert f"gradient of {h}" not in {what for what, *_ in step(problem, {}).held}
    found = held(step(problem, {"a:linear#0": "bf16"}), h)
    assert found[f"gradient of {h}", GRADIENTS] == (f"casts of the backward of {total}", f"backward of {h}", 2 * WHOLE)
    make, h, *_ = split_linear()
    g = gelu(make, h)
    total = make.op("sum", OpClass.WIDE, (h,), (1,))
    graph = make.graph(make.op("mul", OpClass.WIDE, (g, total), (8, 3)))
    added = held(step(problem_of(make, graph), {}), h)
    assert added[f"gradient of {h}", GRADIENTS] == (f"backward of {g}", f"backward of {h}", 4 * WHOLE)


def test_parts_of_what_is_not_there_are_refused() -> None:
    make, h, few, many = split_linear()
    problem = problem_of(make, cat(make, gelu(make, few), gelu(make, many)))
    part = next(i for i, t in enumerate(problem.tensors) if t.part_of is not None)
    for whole, words in ((99, "99"), (part, "whole")):
        tensors = list(problem.tensors)
        tensors[part] = replace(tensors[part], part_of=whole)
        with pytest.raises(InputError, match=words):
            Case(problem=replace(problem, tensors=tuple(tensors)))


def with_parts(count: int) -> Iterator[tuple[int, Problem]]:
    """Random problems with parts, every other one with copies that torch's own product keeps of them; no limits."""
    found = {True: 0, False: 0}
    for seed in itertools.count():
        problem = random_case(seed, most=4096).problem()
        copied = any(use.copied is not None for t in problem.tensors for use in t.savers)
        if not any(t.part_of is not None and t.readers for t in problem.tensors) or 2 * found[copied] >= count:
            continue
        found[copied] += 1
        rows = tuple(replace(r, limit=1e30) for r in problem.rows)
        yield seed, replace(problem, loss_limit=None, rows=rows, ties=())
        if sum(found.values()) == count:
            return


def test_program_tables_and_neighbours_say_of_parts_what_the_evaluator_says() -> None:
    """Whatever each of their readers, and what makes them, is changed to."""
    for seed, problem in with_parts(6):
        chance = np.random.default_rng([seed, 3])
        centre = random_choice(problem, chance)
        near, tables = Neighbours(problem, centre), Relaxation(problem)
        concerned = {t.born for t in problem.tensors if t.part_of is not None}
        for t in problem.tensors:
            if t.part_of is not None:
                concerned |= {u for use in (*t.readers, *t.savers) for u in (use.unit, use.copied)}
        changed = [replace(centre, options=(*centre.options[:u], k, *centre.options[u + 1 :]))
                   for u in sorted(concerned - {None}) for k in range(len(problem.units[u].options))]  # fmt: skip
        changed += [centre.keeping(t, f) for t in problem.storable if problem.tensors[t].in_parts
                    for f in (None, *problem.tensors[t].storages)]  # fmt: skip
        for choice in changed:
            expected, said = evaluate(problem, choice), program_says(problem, choice)
            assert said is not None, seed
            assert said[0] == pytest.approx(expected.objective, rel=1e-8), seed
            assert np.allclose(np.array(said[1]) + problem.fixed_bytes, expected.bytes_at, atol=0.01, rtol=0), seed
            assert agree(near.evaluate(choice), expected), seed
        for _ in range(20 if tables.exact else 0):
            values = random_values(domain_sizes(tables), chance)
            expected, totals = evaluate(problem, tables.choice(values)), tables.totals(values)
            assert tuple(totals.bytes_at.tolist()) == expected.bytes_at, seed
            assert totals.objective == pytest.approx(expected.objective, rel=1e-9), seed
