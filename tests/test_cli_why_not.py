"""`autoprec explain PLAN OP --why-not FORMAT`: what a plan recorded of its alternatives is what the evaluator says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoprec.devices import NoKernel
from autoprec.errors import InfeasibleError
from autoprec.graphs import OpClass, Role, TensorKind
from autoprec.planning.evaluator import evaluate
from autoprec.planning.planner import make_plan
from autoprec.planning.solutions import Choice
from autoprec.planning.values import Problem
from autoprec.plans import AS_IS, RECOMPUTED, Alternative, Plan
from autoprec.policies import Policy
from autoprec.serial import read_plan, write_plan
from tests.planning.maker import Maker, histogram
from tests.planning.planning_cases import Case, modelled_device, random_case, transformer

Run = Callable[..., tuple[int, str, str]]


def plan_of(case: Case, budget: int | None = None) -> Plan:
    return make_plan(
        case.graph, case.profile, case.device, case.policy, banned=case.banned, budget_bytes=budget, relative_gap=0.0
    )


def choice_of(problem: Problem, plan: Plan) -> Choice:
    chosen = {(u.op, u.role): plan.living.get(u.op, "fp32") for u in problem.units if u.is_parameter} | plan.format_of
    kept = ((t, f) for t, f in plan.storage_of.items() if f != AS_IS and t not in plan.living)
    return Choice(
        options=tuple(u.options.index(chosen[u.op, u.role]) for u in problem.units),
        stored=frozenset((problem.tensor_index[t], f) for t, f in kept),
    )


def with_format(problem: Problem, choice: Choice, unit: int, name: str) -> Choice:
    """Another format for a unit and for all that are tied to it, directly or not."""
    tied = {unit}
    while more := {u for pair in problem.ties if tied & set(pair) for u in pair} - tied:
        tied |= more
    options = tuple(u.options.index(name) if i in tied else k for i, (u, k) in enumerate(zip(problem.units, choice.options, strict=True)))  # fmt: skip # noqa: E501
    return dataclasses.replace(choice, options=options)


def check_price(problem: Problem, choice: Choice, changed: Choice, recorded: Alternative) -> None:
    """Against the evaluator, which knows nothing of how alternatives were found."""
    mine, theirs = evaluate(problem, choice), evaluate(problem, changed)
    scale = 1e-5 * abs(theirs.seconds - mine.seconds) + 1e-9 * mine.seconds
    assert abs(recorded.seconds - (theirs.seconds - mine.seconds)) <= scale
    assert recorded.saved_bytes == theirs.saved_bytes - mine.saved_bytes
    assert recorded.peak_bytes == theirs.peak_bytes - mine.peak_bytes
    assert recorded.noise == pytest.approx(theirs.noise - mine.noise, rel=1e-4, abs=1e-6 * (1 + abs(theirs.noise)))
    assert {v.kind for v in recorded.broken} == {v.kind for v in theirs.violations}
    for v in recorded.broken:
        worst = max(w.value / w.limit for w in theirs.violations if w.kind == v.kind)
        assert v.value / v.limit == pytest.approx(worst, rel=1e-4)


def test_every_format_of_the_policy_is_accounted_for_at_the_evaluators_price() -> None:
    seen = {"priced": 0, "broken": 0, "dropped": 0, "storages": 0, "tied": 0, "frozen": 0}
    for seed in range(60):
        case = dataclasses.replace(random_case(seed), strided=False, pieces=0)  # plans are made without
        try:
            full = plan_of(case)
            budget = None if seed % 2 else full.predicted.peak_bytes  # type: ignore[union-attr]
            plan = plan_of(case, budget)
        except InfeasibleError:
            continue
        problem = case.problem(budget)
        choice = choice_of(problem, plan)
        ops = [u for u in problem.units if not u.is_parameter]
        assert problem.units[: len(ops)] == tuple(ops)
        for i, (unit, a) in enumerate(zip(ops, plan.assignments, strict=True)):
            assert a.alternatives is not None
            named = [a.format, *(x.format for x in a.alternatives), *(d.format for d in a.dropped)]
            assert sorted(named) == sorted({*case.policy.formats, a.format}), (seed, unit.op)
            for other in a.alternatives:
                check_price(problem, choice, with_format(problem, choice, i, other.format), other)
                seen["broken" if other.broken else "priced"] += 1
                seen["tied"] += any(i in pair for pair in problem.ties)
            seen["dropped"] += len(a.dropped)
        for s in plan.storages:
            assert s.alternatives is not None
            if s.tensor.startswith("param:"):
                named = [s.format, *(x.format for x in s.alternatives), *(d.format for d in s.dropped)]
                assert sorted(named) == sorted({AS_IS, *case.policy.storage.frozen}), (seed, s.tensor)
                unit = problem.unit_index[s.tensor, Role.OUTPUT]
                for other in s.alternatives:
                    name = "fp32" if other.format == AS_IS else other.format
                    check_price(problem, choice, with_format(problem, choice, unit, name), other)
                    seen["frozen"] += 1
                continue
            named = [s.format, *(x.format for x in s.alternatives), *(d.format for d in s.dropped)]
            assert sorted(named) == sorted({AS_IS, RECOMPUTED, *case.policy.storage.formats}), (seed, s.tensor)
            for other in s.alternatives:
                storage = None if other.format == AS_IS else other.format
                changed = choice.keeping(problem.tensor_index[s.tensor], storage)
                check_price(problem, choice, changed, other)
                seen["storages"] += 1
    assert min(seen.values()) > 5, seen


def test_alternatives_are_best_first() -> None:
    make, graph = transformer(1)
    policy = Policy(name="x", formats=["fp32", "bf16", "fp16"], objective="time")
    plan = make_plan(graph, make.profile(graph), modelled_device(graph), policy)
    for a in plan.assignments:
        broken = [bool(x.broken) for x in a.alternatives or ()]
        assert broken == sorted(broken)


def stripped(plan: Plan) -> Plan:
    """As an older autoprec wrote it."""
    return dataclasses.replace(
        plan,
        assignments=tuple(dataclasses.replace(a, alternatives=None, dropped=()) for a in plan.assignments),
        storages=tuple(dataclasses.replace(s, alternatives=None, dropped=()) for s in plan.storages),
    )


@pytest.fixture(scope="module")
def large() -> Plan:
    """100 ops with decisions, and every format and storage there is."""
    make, graph = transformer(13)
    policy = Policy(name="x", formats=["fp32", "bf16", "fp16"], objective="bytes")
    plan = make_plan(graph, make.profile(graph), modelled_device(graph), policy, relative_gap=0.1)
    assert len({a.op for a in plan.assignments}) >= 100
    return plan


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_alternatives_are_stored_and_are_no_decisions(large: Plan, name: str) -> None:
    write_plan(name, large)
    assert read_plan(name) == large
    assert stripped(large) != large and stripped(large).fingerprint == large.fingerprint
    write_plan(f"old.{name}", stripped(large))
    assert read_plan(f"old.{name}") == stripped(large)
    if name == "plan.yaml":  # one line each, so that a person can still read it
        assert Path(name).stat().st_size < 3 * Path(f"old.{name}").stat().st_size
        lines = [line for line in Path(name).read_text().splitlines() if line.startswith("  - {")]
        recorded = [x for d in (*large.assignments, *large.storages) for x in (*(d.alternatives or ()), *d.dropped)]
        assert len(lines) == len(recorded)


# The command ---------------------------------------------------------------------------------------------------------


def made_case() -> Case:
    """Linears under rules, one that overflows FP16, one without a kernel, a GELU, a sum that is not kept."""
    make = Maker(np.random.default_rng(0), calm=True)
    rows, width = 256, 64
    x = make.tensor("input:x", (rows, width), kind=TensorKind.INPUT, grad=False)
    h = make.linear(x, width, fqn="first")
    h = make.op("gelu", OpClass.POINTWISE, (h,), (rows, width), saves=(h,), fqn="act")
    h = make.linear(h, width, fqn="ruled")
    h = make.op("add", OpClass.POINTWISE, (h, h), (rows, width), fqn="sum")
    h = make.linear(h, 2 * width, fqn="wide")
    graph = make.graph(make.op("cross_entropy", OpClass.WIDE, (h,), (1,), saves=(h,), fqn="loss"))
    profile = make.profile(graph)
    huge = tuple(
        dataclasses.replace(t, values=histogram(np.array([1e6, 1.0])), loss=None) if "wide" in t.id and "linear" in t.id else t  # noqa: E501
        for t in profile.tensors
    )  # fmt: skip
    lacking = NoKernel(timing_key=f"gelu{(rows, width)}", format="fp16", reason="not implemented")
    policy = Policy.model_validate({
        "name": "mine",
        "formats": ["fp32", "bf16", "fp16"],
        "noise": {"gradient": 0.5, "loss": 10.0},
        "rules": [{"match": "ruled", "floor": "fp32", "why": "said so"}],
        "storage": {"formats": ["fp8_e4m3"]},
    })  # fmt: skip
    device = dataclasses.replace(modelled_device(graph), no_kernels=(lacking,))
    return Case(graph, dataclasses.replace(profile, tensors=huge), device, policy)


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan_of(made_case())


def asked(run: Run, plan: Plan, op: str, name: str) -> tuple[dict[str, dict[str, Any]], str]:
    write_plan("plan.yaml", plan)
    code, out, err = run("explain", "plan.yaml", op, "--why-not", name, "--json")
    assert (code, err) == (0, "")
    text_code, text, _ = run("explain", "plan.yaml", op, "--why-not", name)
    assert text_code == 0
    return {a["decision"]: a for a in json.loads(out)["answers"]}, " ".join(text.split())


def test_each_way_in_which_a_format_is_not_there(made: Plan, run: Run) -> None:
    answers, text = asked(run, made, "ruled:linear#2", "bf16")
    assert {a["verdict"] for a in answers.values()} == {"dropped"} and list(answers) == [str(r) for r in Role]
    assert "rule (match 'ruled': said so)" in answers["output"]["why"] and "said so" in text
    answers, text = asked(run, made, "wide", "fp16")
    assert answers["output"]["verdict"] == "dropped" and "fp16 overflows: amax 1e+06" in answers["output"]["why"]
    answers, _ = asked(run, made, "act", "fp16")
    assert "modelled cannot run it: not implemented" in answers["output"]["why"]
    answers, _ = asked(run, made, "first", "fp16")
    assert answers["grad_input"]["why"].endswith("nobody asks for this gradient")
    answers, text = asked(run, made, "first:*", made.format_of["first:linear#0", Role.OUTPUT])
    assert answers["output"]["verdict"] == "chosen" and "already" in text
    # bf16 is a format and a storage: both are answered, and the policy does not name the storage.
    answers, text = asked(run, made, "first", "bf16")
    assert answers["kept: first:linear#0"]["verdict"] == "no candidate"
    assert "not among the storages of the policy 'mine'" in text
    answers, text = asked(run, made, "sum", "fp8_e4m3")
    assert answers["kept: sum:add#3"]["verdict"] in ("chosen", "allowed", "forbidden")
    answers, text = asked(run, made, "wide", "fp8_e4m3")
    assert answers[""]["verdict"] == "undecided" and "can only be kept as it is" in text


def test_prices_and_broken_limits_are_told_beside_the_next_best(run: Run) -> None:
    case = made_case()
    tight = dataclasses.replace(case, policy=case.policy.replaced(noise={"gradient": 1e-6, "loss": 10.0}))
    answers, text = asked(run, plan_of(tight), "first", "bf16")
    output = answers["output"]
    assert output["verdict"] == "forbidden" and output["chosen"] == "fp32"
    assert output["price"]["broken"][0]["kind"] == "gradient" and "times its limit" in text
    assert output["next_best"]["format"] in ("bf16", "fp16")
    loose = dataclasses.replace(case, policy=case.policy.replaced(objective="bytes"))
    plan = plan_of(loose)
    tensor = next(s for s in plan.storages if s.format == "fp8_e4m3")
    answers, text = asked(run, plan, tensor.tensor, AS_IS)
    answer = answers[f"kept: {tensor.tensor}"]
    assert answer["verdict"] == "allowed" and answer["price"]["saved_bytes"] > 0
    assert "as it is: it keeps every limit, at this price" in text


def test_a_budget_is_broken_by_so_many_bytes(run: Run) -> None:
    case = made_case()
    free = plan_of(case)
    assert free.predicted is not None
    plan = plan_of(case, free.predicted.peak_bytes)
    peaks = [(a, v) for d in (*plan.assignments, *plan.storages) for a in d.alternatives or () for v in a.broken]
    assert peaks and plan.predicted is not None
    for a, v in peaks:
        assert v.kind == "peak" and v.limit == plan.budget_bytes
        assert v.value == plan.predicted.peak_bytes + a.peak_bytes > v.limit


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_format_whose_noise_has_no_bound_is_no_alternative(name: str, run: Run) -> None:
    case = made_case()
    huge = tuple(
        dataclasses.replace(t, gradient_weight_grad=histogram(np.array([1e6, 1.0]))) if t.id == "first:linear#0" else t
        for t in case.profile.tensors
    )
    policy = case.policy.replaced(loss_scaling={"mode": "none"})
    plan = plan_of(dataclasses.replace(case, profile=dataclasses.replace(case.profile, tensors=huge), policy=policy))
    write_plan(name, plan)
    assert read_plan(name) == plan
    answers, text = asked(run, plan, "first", "fp16")
    assert answers["output"]["verdict"] == "dropped" and "its noise would have no bound" in text


def test_a_plan_that_recorded_nothing_says_how_to_get_it(made: Plan, run: Run) -> None:
    write_plan("old.yaml", stripped(made))
    code, out, err = run("explain", "old.yaml", "ruled", "--why-not", "bf16")
    assert (code, out) == (2, "") and "old.yaml: ruled:linear#2: this plan does not record" in err
    assert "autoprec plan PROFILE -o PLAN" in err
    code, out, _ = run("explain", "old.yaml", "ruled", "--why-not", "fp32")
    assert code == 0 and "it is fp32 already" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ruled", "--why-not", "fp8"), "unknown format 'fp8'. Did you mean 'fp8_e5m2' or 'fp8_e4m3'?"),
        (("ruled", "--why-not", "bf61"), "Did you mean 'bf16'?"),
        (("ruled", "--why-not", ""), "Valid: bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, tf32."),
        (("ruled", "--why-not", "as-is"), "Did you mean 'as_is'?"),
        (("--why-not", "bf16"), "name one, or a glob"),
        (("rulde", "--why-not", "bf16"), "Did you mean 'ruled'?"),
    ],
)
def test_questions_that_are_none(made: Plan, run: Run, arguments: tuple[str, ...], words: str) -> None:
    write_plan("plan.yaml", made)
    code, out, err = run("explain", "plan.yaml", *arguments)
    assert (code, out) == (2, "") and words in err
