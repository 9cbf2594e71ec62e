"""The suite's bars that do not depend on the machine's speed, on its smallest workload."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from autoprec.demo.tasks import ByteTransformer
from autoprec.graphs import Role
from tests.bench import budgets, categories, lowering
from tests.bench.__main__ import OBSERVED_PEAK, misses, rows_of
from tests.bench.binding import uniform_e5m2, widely
from tests.bench.earns import narrowed, study
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.mixtures import ratios
from tests.bench.workloads import WORKLOADS
from tests.cpus import missed_without_bf16

PRODUCT_ROLES = (Role.OUTPUT, Role.GRAD_INPUT, Role.GRAD_WEIGHT)


@cache
def calibrated() -> Calibrated:
    """The smallest workload."""
    with one_thread():
        return calibrate(WORKLOADS["mlp"])


def test_peaks_and_budgets() -> None:
    with one_thread():
        rows, costs = rows_of(WORKLOADS["mlp"])
    missed = [m for m in misses(rows, {"mlp": costs}) if "peak" in m or "budget" in m]
    assert not missed
    assert costs["observed_peak"] <= OBSERVED_PEAK
    by_name = {r.contestant: r for r in rows}
    (tight,) = (r for r in rows if r.budget_bytes is not None)
    assert tight.live.peak_bytes < by_name["fp32"].live.peak_bytes
    assert by_name["balanced"].adopted_from and tight.adopted_from


def test_default_limits_forbid_e5m2_for_everything_and_allow_a_mixture() -> None:
    found = calibrated()
    loss, gradient = uniform_e5m2(found)
    assert loss > 1.0 and gradient > 1.0
    proposals = widely(found)
    plan = proposals.plan(proposals.best.solution)
    assert len({a.format for a in plan.assignments}) > 1 and plan.binding.startswith("loss noise: ")
    # And what the other choices are made of: half of the units in the order given, none twice.
    problem = proposals.problem
    order = range(len(problem.units))
    fp32, some = narrowed(problem, order, lambda e: True), narrowed(problem, order, lambda e: False)
    assert set(fp32.options) == {0} and sum(k > 0 for k in some.options) > len(problem.units) // 2


def test_planning_earns_its_keep() -> None:
    """On the smallest workload: against choices by size and by chance."""
    with one_thread():
        found = study(WORKLOADS["mlp"], orders=11, calibration=16, batches=32, exhaustive=0)
    assert not found.misses


def test_no_measured_peak_rises_when_the_budget_falls() -> None:
    with one_thread():
        points = budgets.descent(
            calibrated(), range(100, 0, -25)
        )  # the last that fits binds: 50 %, or 75 % without BF16
    assert len(points) > 1 and points[-1].measured_bytes < points[0].measured_bytes
    assert budgets.misses("mlp", points) == []
    up, down = [replace(p, slower=()) for p in points[::-1]], points[-1:]
    assert "the peak rises" in budgets.misses("mlp", up)[0]
    faster = [replace(up[0], adopted="bf16"), replace(up[-1], slower=("bf16",))]
    assert (
        budgets.misses("mlp", faster) == [] != budgets.misses("mlp", [replace(faster[0], adopted="solver"), faster[1]])
    )
    assert "of it" in budgets.misses("mlp", [replace(down[0], budget_bytes=down[0].measured_bytes // 2)])[0]


def test_every_category_of_bytes_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated()
    with one_thread():
        assert [c.miss for c in categories.of_workload(found) if c.miss] == []
        monkeypatch.setattr(categories, "optimizer_bytes", lambda kind, size: size)
        assert {c.name for c in categories.of_workload(found) if c.miss} == {"optimizer state"}


@missed_without_bf16("a peak of 15.0 MB against 10.9", run=False)
def test_torchs_fp8_by_size_has_the_larger_error_at_the_higher_peak() -> None:
    """Both through inductor, with one of the transformer's four layers; `python -m tests.bench.lowering --rivals` has
    the rest, convolutions, and seconds."""
    one_layer = partial(ByteTransformer, width=256, heads=4, depth=1, context=128)
    used = replace(WORKLOADS["transformer"], build=one_layer)
    with one_thread():
        found = calibrate(used)
        plan = found.planned("memory")
        assert plan is not None
        exact, runs = lowering.contestants(found, plan, lowering.BY_SIZE, lowering.OWN)
    own, theirs = runs[lowering.OWN], runs[lowering.BY_SIZE]
    assert own.peak_bytes < theirs.peak_bytes and own.error(exact) < theirs.error(exact)
    assert not lowering.beaten_by_size(exact, runs)


def test_the_planner_knows_what_compiled_convolutions_take() -> None:
    """Other than in eager mode, where few images are copied at a time, and in another order."""
    with one_thread():
        found = calibrate(WORKLOADS["cnn"])
        compiled, eager = (found.proposals("memory", compiled=c).problem for c in (True, False))
    known = found.device.compiled_workspace_by_key  # of formats that the CPU has
    key_of = {op.id: op.timing_key for op in found.session.graph.ops if op.kind == "conv2d"}
    assert {(key, role, "fp32") for key in key_of.values() for role in PRODUCT_ROLES} <= known.keys()
    for unit, other in zip(compiled.units, eager.units, strict=True):
        if unit.op in key_of and unit.needed:
            for f, size in zip(unit.options, unit.workspace, strict=True):
                assert size == known.get((key_of[unit.op], unit.role, f), size)
            assert unit.workspace != other.workspace


@pytest.mark.parametrize("formats", ["fp32 bf16", "fp32 bf16 fp16"])
def test_of_random_mixtures_no_predicted_peak_is_far_too_low(formats: str) -> None:
    with one_thread():
        assert min(ratios(calibrated(), 8, formats.split())) > 0.95
