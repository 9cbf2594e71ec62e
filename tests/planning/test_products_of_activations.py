"""Products of two activations have two roles; what the planner knows of the second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoprec.graphs import OpClass, OpGraph, Role, TensorKind
from autoprec.planning.evaluator import Step, evaluate
from autoprec.planning.solutions import Choice
from autoprec.planning.uniform import uniform_choice
from autoprec.planning.values import Problem
from tests.planning.maker import Maker, histogram
from tests.planning.planning_cases import Case, modelled_device, plan_of, policy

SCORES = "m:matmul#1"


def case(*, left_grad: bool = True, largest: float = 1.0) -> Case:
    """linear(x)·zᵀ, with z of (3, 6) given, whose largest value is `largest`."""
    make = Maker(np.random.default_rng(0), calm=True)
    x = make.tensor("input:x", (4, 5), kind=TensorKind.INPUT, grad=False)
    z = make.tensor("input:z", (3, 6), kind=TensorKind.INPUT, grad=False)
    h = make.linear(x, 6, fqn="a")
    pair = (h, z) if left_grad else (z, h)
    graph: OpGraph = make.graph(make.op("matmul", OpClass.GEMM, pair, (4, 3), saves=pair))
    found = make.profile(graph)
    tensors = tuple(
        replace(t, values=histogram(np.linspace(-largest, largest, 64))) if t.id == z else t for t in found.tensors
    )
    return Case(graph, replace(found, tensors=tensors), modelled_device(graph), policy(("fp32", "bf16", "fp16")))


def options(problem: Problem, role: Role) -> tuple[str, ...]:
    return next(u.options for u in problem.units if u.op == SCORES and u.role is role)


@pytest.mark.parametrize("left_grad", [True, False])
def test_gradients_are_computed_where_either_operand_wants_one(left_grad: bool) -> None:
    problem = case(left_grad=left_grad).problem()
    unit = next(u for u in problem.units if u.op == SCORES and u.role is Role.GRAD_INPUT)
    assert unit.needed and unit.options == ("fp32", "bf16", "fp16") and min(unit.seconds) > 0.0


@pytest.mark.parametrize("left_grad", [True, False])
def test_the_gradients_read_both_operands_again(left_grad: bool) -> None:
    """What leaves FP16 can be read in it for neither."""
    for role in (Role.OUTPUT, Role.GRAD_INPUT):
        assert options(case(left_grad=left_grad).problem(), role) == ("fp32", "bf16", "fp16")
        assert options(case(left_grad=left_grad, largest=1e6).problem(), role) == ("fp32", "bf16")


def test_casts_of_a_role_of_its_own_by_hand() -> None:
    """Behind a BF16 product, FP32 gradients: the arriving gradient (4·3) and the operand that it is multiplied with
    (3·6) are cast to FP32, the result (4·6) to BF16."""
    made = case()
    problem = made.problem()
    narrow = uniform_choice(problem, "bf16")
    place = next(i for i, u in enumerate(problem.units) if u.op == SCORES and u.role is Role.GRAD_INPUT)
    chosen = list(narrow.options)
    chosen[place] = problem.units[place].options.index("fp32")
    mixed = Choice(options=tuple(chosen), stored=narrow.stored)
    found = evaluate(problem, mixed).seconds - evaluate(problem, narrow).seconds
    own = dict(zip(problem.units[place].options, problem.units[place].seconds, strict=True))
    casts = [("bf16", "fp32", 12), ("bf16", "fp32", 18), ("fp32", "bf16", 24)]
    expected = own["fp32"] - own["bf16"] + sum(made.device.cast_seconds(*cast) for cast in casts)
    assert found == pytest.approx(expected)


def test_a_tensor_that_is_multiplied_by_itself() -> None:
    make = Maker(np.random.default_rng(0), calm=True)
    h = make.linear(make.tensor("input:x", (4, 5), kind=TensorKind.INPUT, grad=False), 4, fqn="a")
    graph = make.graph(make.op("matmul", OpClass.GEMM, (h,), (4, 4), saves=(h,)))
    problem = Case(graph, make.profile(graph), modelled_device(graph), policy(("fp32", "bf16"))).problem()
    (gemm,) = (g for g in problem.gemms if g.pairs)
    assert gemm.pairs == ((16, 16), (16, 16)) and gemm.x_numel == 16
    # FP32 gradients of a BF16 product: the second beside the first, which is cast by then. One of them is counted.
    step, workspace = step_of(problem, "bf16", "fp32")
    assert step.of_two(gemm) == 4 * 16 + 4 * 16 + workspace + 4 * 16 + 2 * 16 - 2 * 16


def step_of(problem: Problem, formats: str, gradients: str) -> tuple[Step, int]:
    """Everything in one format, but the gradients of the product; the workspace of those."""
    place = next(i for i, u in enumerate(problem.units) if u.op == SCORES and u.role is Role.GRAD_INPUT)
    unit, options = problem.units[place], list(uniform_choice(problem, formats).options)
    options[place] = unit.options.index(gradients)
    return Step(problem, Choice(options=tuple(options))), unit.workspace[options[place]]


def test_bytes_of_a_role_of_its_own_by_hand() -> None:
    """Casts of the arriving gradient (4·3) and of the other operand (3·6), and the result (4·6); what that is cast to
    counts elsewhere, and is not there before. The copy of the operand is gone while the result is cast."""
    problem = case().problem()
    (gemm,) = (g for g in problem.gemms if g.pairs)
    step, workspace = step_of(problem, "bf16", "fp32")
    assert step.of_two(gemm) == 4 * 12 + 4 * 18 + 4 * 24 + workspace - 2 * 24
    step, workspace = step_of(problem, "fp32", "bf16")
    assert step.of_two(gemm) == max(2 * 12 + 2 * 18 + 2 * 24 + workspace, 2 * 12 + 2 * 24 + 4 * 24) - 4 * 24


def attention(*rules: dict[str, object], largest: float = 1.0) -> Case:
    make = Maker(np.random.default_rng(0), calm=True)
    x = make.tensor("input:x", (4, 5), kind=TensorKind.INPUT, grad=False)
    q, k, v = (make.linear(x, 6, fqn=name) for name in "qkv")
    out = make.op("scaled_dot_product_attention", OpClass.GEMM, (q, k, v), (4, 6), saves=(q, k, v))
    graph = make.graph(out)
    found = make.profile(graph)
    wide = histogram(np.linspace(-largest, largest, 64))
    tensors = tuple(replace(t, gradients=wide) if t.id == out else t for t in found.tensors)
    return Case(graph, replace(found, tensors=tensors), modelled_device(graph), policy(("fp32", "bf16"), rules=rules))


def test_the_gradients_of_a_kernel_follow_it() -> None:
    """One kernel makes both: whatever is chosen for one holds for the other."""
    problem = attention().problem()
    output, gradients = (i for i, u in enumerate(problem.units) if "attention" in u.op)
    assert (output, gradients) in problem.ties
    by_role = {a.role: a.format for a in plan_of(attention()).assignments if "attention" in a.op}
    assert len(set(by_role.values())) == 1
    for role in ("output", "grad_input"):
        floor = attention({"match": "*", "kinds": ["scaled_dot_product_attention"], "roles": [role], "floor": "bf16"})
        assert {u.options for u in floor.problem().units if "attention" in u.op} == {("fp32", "bf16")}


def test_a_rule_makes_two_of_a_kernel_at_the_price_of_running_it_again() -> None:
    rule = {"match": "*", "kinds": ["scaled_dot_product_attention"], "roles": ["grad_input"], "pin": "fp32"}
    plain, apart = attention().problem(), attention(rule).problem()
    output, gradients = (i for i, u in enumerate(apart.units) if "attention" in u.op)
    assert not apart.ties and apart.units[output].options == ("fp32", "bf16")
    assert apart.units[gradients].options == ("fp32",)
    wide, narrow = plain.units[output].seconds
    assert apart.units[output].seconds == (wide, pytest.approx(narrow + wide))
