"""Budgets: kept by packing, resolved from percentages, refused with what would help; peaks counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from autoprec.errors import InfeasibleError
from autoprec.graphs import OpClass, TensorKind
from autoprec.planning.evaluator import Step, evaluate
from autoprec.planning.planner import fp32_totals, resolve_budget
from autoprec.planning.problem import build_problem
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import AS_IS, Totals
from autoprec.policies import Budget
from tests.planning.maker import FORMATS, Maker
from tests.planning.planning_cases import (
    Case,
    chain,
    chain_case,
    modelled_device,
    plan_of,
    policy,
    random_case,
    transformer,
)


def test_an_infeasible_budget_says_what_each_limit_costs() -> None:
    """Each change that is named makes its own smallest budget feasible; changes that do not help are not named."""
    rules = [{"match": "b", "pin": "fp32"}, {"match": "nothing*", "floor": "fp32", "optional": True}]
    make, graph = chain()
    case = Case(graph, make.profile(graph), modelled_device(graph), policy(rules=rules, storage={"formats": []}))
    with pytest.raises(InfeasibleError) as caught:
        plan_of(case, budget_bytes=graph.parameter_bytes + graph.gradient_bytes + 1_000_000)
    text = str(caught.value)
    smallest = int(text.split("smallest feasible budget is ")[1].split(" bytes")[0])
    without = int(text.split("without rules[0] (match 'b'): ")[1].split(" bytes")[0])
    stored = int(text.split("with storage.formats [bf16, fp8_e4m3]: ")[1].split(" bytes")[0])
    assert without < smallest and stored < smallest and "rules[1]" not in text
    free = Case(case.graph, case.profile, case.device, policy(rules=[], storage={"formats": []}))
    assert plan_of(free, budget_bytes=without).budget_bytes == without
    narrow = Case(case.graph, case.profile, case.device, policy(rules=rules, storage={"formats": ["bf16", "fp8_e4m3"]}))
    assert plan_of(narrow, budget_bytes=stored).budget_bytes == stored


def test_a_budget_is_kept_by_packing_and_the_peak_is_what_was_asked():
    case = chain_case()
    free = plan_of(case)
    limit = free.predicted.peak_bytes - 1_000_000
    plan = plan_of(case, budget_bytes=limit)
    assert plan.predicted.peak_bytes <= limit and plan.budget_bytes == limit
    assert "fp8_e4m3" in {s.format for s in plan.storages}
    assert plan.predicted.seconds >= free.predicted.seconds
    assert plan.binding.startswith("peak: ")
    packed = next(s for s in plan.storages if s.format == "fp8_e4m3")
    assert packed.reason.startswith("as it is: the peak would exceed its limit by ")


def test_packed_relu_keeps_one_bit_per_element():
    case = chain_case()
    problem = case.problem()
    relu = problem.tensor_index["m:relu#1"]
    tensor = problem.tensors[relu]
    assert [problem.gemms[k].op for k in tensor.gemms] == ["b:linear#2"] and tensor.masks == (1,)
    choice = uniform_choice(problem, "bf16")
    wide = evaluate(problem, choice)
    narrow = evaluate(problem, choice.keeping(relu, "fp8_e4m3"))
    n = tensor.numel
    assert wide.saved_bytes - narrow.saved_bytes == 2 * n - (n + 4 + n // 8)


def test_the_smallest_feasible_budget_is_feasible_and_one_byte_less_is_not():
    case = chain_case()
    with pytest.raises(InfeasibleError, match="smallest feasible budget is") as caught:
        plan_of(case, budget_bytes=1)
    text = str(caught.value)
    smallest = int(text.split("smallest feasible budget is ")[1].split(" bytes")[0])
    assert "held up by the" in text and "parameters, gradients, optimizer state and inputs" in text
    assert plan_of(case, budget_bytes=smallest).predicted.peak_bytes == smallest
    with pytest.raises(InfeasibleError):
        plan_of(case, budget_bytes=smallest - 1)


def test_a_percentage_is_of_what_precision_can_change():
    case = chain_case(budget="70%")
    fp32 = fp32_totals(case.graph, case.profile, case.device, case.policy)
    fixed = build_problem(case.graph, case.profile, case.device, case.policy).fixed_bytes
    expected = fixed + int(0.7 * (fp32.peak_bytes - fixed))
    assert resolve_budget(Budget(percent=70.0), case.graph, fp32) == expected
    assert resolve_budget(Budget(bytes=123), case.graph, fp32) == 123
    assert plan_of(case).budget_bytes == expected
    assert plan_of(case, budget_bytes=fp32.peak_bytes).budget_bytes == fp32.peak_bytes


def test_peak_bytes_by_hand():
    """Three linears in FP32: what is alive at the head's backward, counted on paper."""
    make, graph = chain(rows=8, width=4)
    problem = Case(graph, make.profile(graph), modelled_device(graph), policy(("fp32",))).problem()
    found = evaluate(problem, uniform_choice(problem, "fp32"))
    t = 8 * 4 * 4
    fixed = problem.fixed_bytes
    # Forward: a; a+relu; relu+b; relu+b+gelu; relu+b+gelu+c; the same and the loss.
    assert [b - fixed for b in found.bytes_at[1:12:2]] == [t, 2 * t, 2 * t, 3 * t, 4 * t, 4 * t + 4]
    # Backward, loss: kept relu, b, gelu, c; gradients of the loss (4 bytes) and of c.
    assert found.bytes_at[12] - fixed == 4 * t + t + 4
    assert found.saved_bytes == 4 * t
    # Backward of a: its gradient, and the one of its weight, which is added to the one that is there; the gradient that
    # entered at the loss is kept to the end.
    assert found.bytes_at[22] - fixed == t + 4 * 4 * 4 + 4


def test_gradients_are_held_in_the_formats_in_which_they_are_sent():
    """Linear a in BF16, read by an FP32 product and by itself through a slice: its gradient, counted on paper."""
    make = Maker(np.random.default_rng(0), calm=True)
    x = make.tensor("input:x", (8, 4), kind=TensorKind.INPUT, grad=False)
    a = make.linear(x, 4, fqn="a")
    part = make.op("narrow", OpClass.VIEW, (a,), (8, 2), base=a)
    b = make.op("softmax", OpClass.WIDE, (part,), (8, 2))
    c = make.op("gelu", OpClass.POINTWISE, (a,), (8, 4))
    graph = make.graph(make.op("cross_entropy", OpClass.WIDE, (b, c), (1,)))
    problem = Case(graph, make.profile(graph), modelled_device(graph), policy(("fp32", "bf16"))).problem()
    choice = uniform_choice(problem, "bf16")
    held = Step(problem, choice)
    for tensor in (a, part):
        held.gradients(problem.tensors[problem.tensor_index[tensor]], "bf16")
    n = 8 * 4
    # Moments: linear 0, narrow 1, softmax 2, gelu 3, loss 4; backward 9 to 5; two phases each.
    assert sorted(held.held) == sorted([
        (f"gradient of {a}", 12, 18, 2 * n),  # gelu sends BF16
        (f"gradient of {part}", 14, 15, 4 * n // 2),  # softmax sends FP32, which is cast when it has run
        (f"gradient of {part}", 15, 16, 2 * n // 2),
        (f"sum of the gradient of {a}", 16, 16, 2 * n),  # the slice sends one of the whole, which is added
    ])  # fmt: skip


@pytest.mark.parametrize("layers", [0, 2])
def test_the_peak_never_rises_when_the_budget_falls(layers: int) -> None:
    """Of small random graphs, and of a transformer."""
    for case in map(random_case, range(25)) if not layers else [transformer_case(layers)]:
        top, fixed = totals_of_fp32(case).peak_bytes, case.problem().fixed_bytes
        peaks = []
        for tenths in range(20, 0, -4 if layers else -1):
            try:
                plan = plan_of(case, budget_bytes=fixed + (top - fixed) * tenths // 20)
            except InfeasibleError:
                break
            peaks.append(plan.predicted.peak_bytes)
        assert peaks == sorted(peaks, reverse=True)


def test_fp32_does_not_stay_where_it_breaks_the_budget() -> None:
    """On a graph so small that no format is much faster."""
    make, graph = chain(rows=512, width=128)
    case = Case(graph, make.profile(graph), modelled_device(graph), policy())
    assert "fp32 stays" in plan_of(case).binding
    limit = totals_of_fp32(case).peak_bytes - 1
    assert plan_of(case, budget_bytes=limit).predicted.peak_bytes <= limit


def transformer_case(layers: int) -> Case:
    make, graph = transformer(layers)
    return Case(graph, make.profile(graph), modelled_device(graph), policy(FORMATS))


def totals_of_fp32(case: Case) -> Totals:
    return fp32_totals(case.graph, case.profile, case.device, case.policy)


def test_twelve_layers_under_a_budget() -> None:
    make, graph = transformer(12, width=768, rows=4096)
    tight = policy(noise={"gradient": 0.05, "loss": 0.05}, budget="47%")
    plan = plan_of(Case(graph, make.profile(graph), modelled_device(graph), tight))
    assert plan.gap < 1e-3 and plan.budget_bytes is not None and plan.predicted is not None
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert sum(s.format != AS_IS for s in plan.storages) > 3
