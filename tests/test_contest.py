"""Which of the contestants is adopted, by what they measured; and what a plan keeps and shows of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autoprec.graphs import Role
from autoprec.planning.contest import adopt
from autoprec.planning.planner import ask, propose
from autoprec.planning.proposals import SOLVER
from autoprec.plans import Measurement, Plan
from autoprec.serial import read_plan, write_plan
from tests.test_tournament import observed


@pytest.fixture(scope="module")
def proposals():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    session = observed(model, [torch.randn(64, 32) for _ in range(3)])
    device = session.measure_device()
    # Made-up seconds, so that the solver's plan is none of the uniform ones.
    slow = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.7}
    timings = tuple(
        dataclasses.replace(t, seconds=slow[t.format] * (3.0 if "gelu" in t.timing_key and t.format != "fp32" else 1.0))
        for t in device.timings
    )
    policy = session.policy.replaced(noise={"gradient": 1e3, "loss": 1e3}, storage={"formats": ()})
    found = propose(ask(session.graph, session.profile, dataclasses.replace(device, timings=timings), policy))
    assert [p.name for p in found.all] == [SOLVER, "fp32", "bf16", "fp16"]
    return found


def measured(**ratios: float) -> dict[str, Measurement]:
    return {name: Measurement(seconds=r, ratio=r, peak_bytes=100) for name, r in ratios.items()}


def winner(plan: Plan) -> str:
    assert plan.adopted is not None
    return plan.adopted.name


def test_the_fastest_within_the_budgets_wins(proposals) -> None:
    times = measured(fp32=1.0, bf16=0.6, fp16=0.9, solver=0.5)
    plan = adopt(proposals, times, None)
    assert winner(plan) == SOLVER and plan.fingerprint == proposals.decisions(proposals.all[0].solution).fingerprint
    plan = adopt(proposals, times | measured(bf16=0.4), None)
    assert winner(plan) == "bf16" and plan.binding.startswith("measured on a replayed step: fp32 1")
    assert {a.format for a in plan.assignments if a.role is Role.OUTPUT} == {"bf16"}
    assert {c.name: c.verdict for c in plan.contestants}[SOLVER] == "25.0% slower"
    heavy = {"solver": Measurement(seconds=0.5, ratio=0.5, peak_bytes=101)}
    plan = adopt(proposals, times | heavy, 100)
    assert winner(plan) == "bf16"
    assert plan.contestants[0].verdict == "its measured peak exceeds the budget by 1 B" and plan.budget_bytes == 100


def test_of_equally_fast_ones_fp32_then_the_smallest(proposals) -> None:
    heavy = {"fp32": Measurement(seconds=1.0, ratio=1.0, peak_bytes=101)}
    assert winner(adopt(proposals, measured(bf16=0.996, fp16=2.0, solver=0.992) | heavy, None)) == "fp32"
    assert winner(adopt(proposals, measured(fp32=1.0, bf16=0.905, fp16=2.0, solver=0.9), None)) == "bf16"
    times = measured(fp32=1.0, bf16=0.9, fp16=2.0, solver=0.905)
    heavy = {"bf16": dataclasses.replace(times["bf16"], peak_bytes=100 + 2048)}
    plan = adopt(proposals, times | heavy, None)
    assert winner(plan) == SOLVER
    verdicts = {c.name: c.verdict for c in plan.contestants}
    assert verdicts["bf16"] == "as fast within 2%, and takes 2 KiB more"


def test_what_the_rounds_leave_open_decides_nothing(proposals) -> None:
    """A busy machine: a plan that holds more is not adopted for a difference that may be chance."""
    times = measured(fp32=1.0, bf16=0.6, fp16=2.0, solver=0.57)
    assert winner(adopt(proposals, times, None)) == SOLVER
    open_ = {n: dataclasses.replace(m, ratio_margin=0.05 * m.ratio) for n, m in times.items() if n != "fp32"}
    open_[SOLVER] = dataclasses.replace(open_[SOLVER], peak_bytes=100 + (1 << 20))
    plan = adopt(proposals, times | open_, None)
    assert winner(plan) == "bf16"
    assert {c.name: c.verdict for c in plan.contestants}[SOLVER] == "as fast within 7%, and takes 1 MiB more"
    far = {**open_, SOLVER: dataclasses.replace(open_[SOLVER], ratio=0.5)}
    assert winner(adopt(proposals, times | far, None)) == SOLVER
    wide = {n: dataclasses.replace(m, ratio_margin=m.ratio) for n, m in far.items()}
    assert winner(adopt(proposals, times | wide, None)) == SOLVER  # 20 % are 20 %


def test_slower_is_what_is_slower_than_the_fastest(proposals) -> None:
    """Though it is as fast as the one that is adopted, which holds less."""
    times = measured(fp32=2.0, bf16=1.0, fp16=1.015, solver=1.03)
    sizes = {"fp32": 100, "bf16": 100 << 10, "fp16": 90 << 10, "solver": 80 << 10}
    times = {n: dataclasses.replace(m, peak_bytes=sizes[n]) for n, m in times.items()}
    plan = adopt(proposals, times, None)
    assert winner(plan) == "fp16"
    verdicts = {c.name: c.verdict for c in plan.contestants}
    assert verdicts[SOLVER] == "3.0% slower than bf16" and verdicts["bf16"].endswith("and takes 10 KiB more")


def test_what_failed_or_did_not_run_is_not_adopted(proposals) -> None:
    times = measured(fp32=1.0, fp16=0.9) | {"bf16": Measurement(failure="it failed: no kernel")}
    plan = adopt(proposals, times, None)
    verdicts = {c.name: c.verdict for c in plan.contestants}
    assert verdicts == {"solver": "did not run", "fp32": "11.1% slower", "bf16": "it failed: no kernel",
                        "fp16": ""}  # fmt: skip


def test_bytes_first_keeps_the_solvers_plan(proposals) -> None:
    asked = proposals.question
    asked = dataclasses.replace(asked, policy=asked.policy.replaced(objective="bytes"))
    few = dataclasses.replace(proposals, question=asked)
    assert winner(adopt(few, measured(fp32=1.0, bf16=0.6, fp16=0.9, solver=5.0), None)) == SOLVER


def test_the_lowest_peak_first_takes_the_fastest_of_the_lowest(proposals) -> None:
    """Whatever the solver predicted; no budget is said to have been asked for. With one, it is as with any other."""
    fixed = proposals.problem.fixed_bytes
    asked = dataclasses.replace(proposals.question, policy=proposals.question.policy.replaced(objective="peak"))
    low = dataclasses.replace(proposals, question=asked)
    heights = {"fp32": 2000, "bf16": 1019, "fp16": 1021, "solver": 1000}
    times = measured(fp32=0.5, bf16=0.9, fp16=0.6, solver=1.0)
    times = {n: dataclasses.replace(m, peak_bytes=fixed + heights[n]) for n, m in times.items()}
    plan = adopt(low, times, None)
    assert winner(plan) == "bf16" and plan.budget_bytes is None
    verdicts = {c.name: c.verdict for c in plan.contestants}
    assert verdicts["fp16"] == "its measured peak exceeds the lowest by 1 B" and verdicts["solver"] == "11.1% slower"
    assert winner(adopt(low, times | {"bf16": Measurement(failure="no kernel")}, None)) == SOLVER
    policy = asked.policy.replaced(budget=fixed + 1500)
    bounded = dataclasses.replace(low, question=dataclasses.replace(asked.under(fixed + 1500), policy=policy))
    assert winner(adopt(bounded, times, fixed + 1500)) == "fp16"


def test_a_plan_file_keeps_the_contestants(proposals, tmp_path) -> None:
    plan = adopt(proposals, measured(fp32=1.0, bf16=0.6, fp16=0.9, solver=0.5), None)
    write_plan(tmp_path / "plan.yaml", plan)
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_explain_shows_the_contestants(proposals, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from autoprec.cli.planning import show_plan

    plan = adopt(proposals, measured(fp32=1.0, bf16=0.6, fp16=0.9, solver=0.5), None)
    write_plan(tmp_path / "plan.yaml", plan)
    assert show_plan(tmp_path / "plan.yaml", None, None, memory=False, as_json=False) == 0
    said = capsys.readouterr().out
    assert "Which plan was adopted" in said and "20.0% slower" in said and "adopted" in said
    bare = dataclasses.replace(plan, contestants=())
    write_plan(tmp_path / "bare.yaml", bare)
    show_plan(tmp_path / "bare.yaml", None, None, memory=False, as_json=False)
    assert "Which plan was adopted" not in capsys.readouterr().out
