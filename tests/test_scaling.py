"""Gradient scales of FP16 regions: chosen anew from what the monitor sees, as laws on made-up windows and in runs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autoprec
from autoprec.graphs import OpClass, OpGraph
from autoprec.monitoring.judging import Judge
from autoprec.monitoring.scaling import adapted, rescaled
from autoprec.planning.pricing import fp16_gradient_scale_log2
from autoprec.plans import Assignment, Plan, Region
from autoprec.profiles import Profile, TensorProfile
from tests.planning.maker import Maker
from tests.windows import LIMITS, NORMAL, X, half, layers, plan_in, seen


def region_of_one(scale_log2: int) -> tuple[OpGraph, Plan, str]:
    """Two ops, of which the first is a region of FP16; the second is not in FP16 any more."""
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    y = make.op("relu", OpClass.POINTWISE, (X,), (64, 64))
    graph = make.graph(make.op("relu", OpClass.POINTWISE, (y,), (64, 64)))
    formats = zip(graph.ops, ("fp16", "fp32"), strict=True)
    assignments = tuple(Assignment(op=op.id, role=r, format=f, reason="test") for op, f in formats for r in op.roles)
    region = Region(ops=(graph.ops[0].id,), scale_log2=scale_log2, reason="test")
    return graph, Plan(assignments=assignments, regions=(region,)), y


def test_gradients_inside_of_a_region_carry_its_scale_and_calibrations_do_not() -> None:
    graph, plan, y = region_of_one(12)
    small = NORMAL * 2.0**-20  # of which FP16 keeps little without the scale
    ids = {X: small, y: small * 2.0**12}
    tensors = (TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(g)[0]) for t, g in ids.items())
    window = Profile(graph_fingerprint="", steps=1, tensors=tuple(tensors))
    plain = (TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(small)[0]) for t in ids)
    before = Profile(graph_fingerprint="", steps=1, tensors=tuple(plain))
    judge = Judge(plan, graph, window, LIMITS, before=before)
    assert judge.verdicts() == ()
    assert judge.is_well(graph.ops[1].id, "fp16")  # although what it sends is 2^12 times as large as in calibration
    lost = replace(window, tensors=tuple(replace(t, gradients=seen(small * 2.0**-8)[0]) for t in window.tensors))
    assert {v.trigger for v in Judge(plan, graph, lost, LIMITS, before=before).verdicts()} == {"underflow"}
    assert Judge(plan, graph, lost, LIMITS, before=before, scaling="global").verdicts() == ()


@pytest.mark.parametrize("factor_log2", [-40, -23, 5, 9, 12])
def test_gradients_of_another_size_get_another_scale(factor_log2: int) -> None:
    """2^5 is no overflow yet, but less than four octaves below one."""
    graph, plan, y = region_of_one(5)
    own = {X: NORMAL, y: NORMAL * 2.0**5}

    def of(factor: float) -> Profile:
        found = (TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(g * factor)[0]) for t, g in own.items())
        return Profile(graph_fingerprint="", steps=1, tensors=tuple(found))

    plain = (TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(NORMAL)[0]) for t in own)
    before = Profile(graph_fingerprint="", steps=1, tensors=tuple(plain))
    assert Judge(plan, graph, of(1.0), LIMITS, before=before).with_better_scales()[0].plan is plan
    judge = Judge(plan, graph, of(2.0**factor_log2), LIMITS, before=before)
    better, (change,) = judge.with_better_scales()
    assert (change.was.scale_log2, change.now.scale_log2) == (5, 5 - factor_log2) and change.verdict.evidence
    assert better.plan.regions[0].scale_log2 == 5 - factor_log2 and better.verdicts() == ()
    assert better.plan.assignments == plan.assignments
    if factor_log2 != 5:
        assert judge.verdicts() != ()
    for scaling in ("none", "global"):
        other = Judge(plan, graph, of(2.0**factor_log2), LIMITS, before=before, scaling=scaling)
        assert other.with_better_scales() == (other, ())


@pytest.mark.parametrize("log2", [-30, -3, 0, 1, 17])
def test_a_shifted_histogram_is_that_of_shifted_numbers(log2: int) -> None:
    x = NORMAL.clone()
    x[0], x[1, 1] = 0.0, torch.inf
    shifted, made = seen(x)[0].shifted(log2), seen(x * 2.0**log2)[0]
    assert np.array_equal(shifted.bins, made.bins) and np.array_equal(shifted.moments, made.moments)
    assert (shifted.amax, shifted.nonfinite, shifted.elements) == (made.amax, made.nonfinite, made.elements)


def test_where_no_scale_suits_the_format_has_to_go() -> None:
    graph, plan, y = region_of_one(0)
    wide = torch.where(torch.arange(64) % 2 == 0, NORMAL * 30000.0, NORMAL * 2.0**-60)
    tensors = tuple(TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(wide)[0]) for t in (X, y))
    better = Judge(plan, graph, Profile(graph_fingerprint="", steps=1, tensors=tensors), LIMITS).with_better_scales()[0]
    assert better.plan is not plan and {v.trigger for v in better.verdicts()} == {"underflow"}


def grow(factors_log2: list[float], policy: autoprec.Policy) -> tuple[autoprec.Session, list[float], nn.Module]:
    """Steps of which the loss has these factors, without an effect on the weights."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = autoprec.compile(layers(), policy=policy, events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    for factor in factors_log2:
        optimizer.zero_grad()
        x = torch.randn(64, 16)
        (model(x).square().mean() * 2.0**factor).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        plain = copy.deepcopy(model)
        plain.zero_grad()
        (plain(x).square().mean() * 2.0**factor).backward()
        wanted = [p.grad for p in plain.parameters() if p.grad is not None]
        distance = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
        errors.append(math.sqrt(distance / sum(float(b.square().sum()) for b in wanted)))
    return autoprec.session(model), errors, model


def test_within_a_window_scales_follow_and_the_window_goes_on() -> None:
    """An octave from one observed step to the next, in a window that nobody judges before its end."""
    policy = half(monitor={"window_steps": 40, "interval_steps": 2, "cooldown_windows": 2})
    session, errors, _ = grow([0.0] * 3 + [k / 2.0 for k in range(60)], policy)
    kinds = [e.kind for e in session.events]
    assert not {"promoted", "bad_step"} & set(kinds) and max(errors) < 0.03
    shifts = [e.step for e in session.events if e.kind == "rescaled"]
    assert len(shifts) >= 4 and session._window_steps == 42  # windows of 40 from the plan on
    window = session._observed.window
    assert window is not None and window.steps == (session.steps - 42) // 2
    region = session.plan.regions[0] if session.plan is not None else None
    assert region is not None
    seen_there = window.tensor_by_id[region.ops[0]].gradients
    assert seen_there is not None and 2.0 <= seen_there.amax <= 65504.0
    assert 42 not in shifts  # what was seen before a shift counts as if it had had the new scale all along


@pytest.mark.parametrize("direction", [1, -1])
def test_a_run_whose_gradients_change_by_thousands_keeps_fp16(direction: int) -> None:
    """An octave a window: the scales follow, no format is taken, no step is lost, and no bit of FP16's precision."""
    factors = [0.0] * 6 + [direction * k / 4.0 for k in range(4 * 24)]
    session, errors, _ = grow(factors, half())
    kinds = [e.kind for e in session.events]
    assert "rescaled" in kinds and not {"promoted", "bad_step", "demoted"} & set(kinds)
    assert session.plan is not None and "fp16" in session.plan.formats_used()
    shifts = [e for e in session.events if e.kind == "rescaled"]
    assert all(
        e.op
        and e.was.startswith("2^")
        and e.was != e.now
        and "in a window" in e.evidence
        and e.trigger in ("range", "growth", "noise")
        for e in shifts
    )
    assert max(errors) < 0.03


def test_a_jump_of_the_gradients_costs_a_step_and_the_rest_of_the_region_gets_a_smaller_scale() -> None:
    calm, session = grow([0.0] * 5, half())[0].plan, grow([0.0] * 5 + [10.0] * 3, half())[0]
    (lost, *_), plan = [e for e in session.events if e.kind == "bad_step"], session.plan
    assert calm is not None and plan is not None and lost.role != "output" and session.skipped_steps <= 2
    before = {op: r.scale_log2 for r in calm.regions for op in r.ops}
    assert plan.regions and all(r.scale_log2 <= before[op] - 2 for r in plan.regions for op in r.ops)


def test_a_plan_that_is_made_again_keeps_the_scales_that_suit() -> None:
    """Its own first, so that a plan that comes back is the same; then those that run; then the best."""
    graph, plan, y = region_of_one(10)
    again = replace(plan, regions=(replace(plan.regions[0], scale_log2=12),))
    for amax, scale_log2 in ((0.99, 12), (0.001, 12), (1.5, 10), (3.9, 10), (40.0, 2), (2e-5, 23), (0.0, 12)):
        found = adapted(again, plan, graph, {X: amax / 2.0, y: amax})
        assert found.regions[0].scale_log2 == scale_log2, amax
    other = replace(plan, regions=())
    assert adapted(again, other, graph, {X: 10.0, y: 10.0}).regions[0].scale_log2 == 4  # nothing runs: the best


@pytest.mark.parametrize("amax_log2", [-30, 0, 9])
@pytest.mark.parametrize(("smaller_log2", "room_log2"), [(0, 8), (5, 8), (11, 8), (12, 7), (14, 5), (16, 3), (40, 3)])
def test_room_ends_where_another_tensor_of_the_region_needs_it(
    amax_log2: int, smaller_log2: int, room_log2: int
) -> None:
    """A tensor that is smaller by more than 2^12 is not pushed among FP16's last numbers."""
    amax = 1.5 * 2.0**amax_log2
    scale = fp16_gradient_scale_log2(amax, amax * 2.0**-smaller_log2)
    assert amax * 2.0**scale <= 65504 / 2**room_log2 < amax * 2.0 ** (scale + 1)
    graph, plan, y = region_of_one(0)
    found = rescaled(plan, graph, {X: amax * 2.0**-smaller_log2, y: amax}).regions[0]
    assert found.scale_log2 == scale


def test_a_sum_that_nobody_has_seen_gets_no_larger_scale() -> None:
    """A weight's gradient that FP16 makes: while the product was in FP32, the monitor did not look at it."""
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    graph = make.graph(make.linear(X, 64))
    weight = f"param:{graph.ops[0].weights[0]}"
    plan, small = plan_in(graph, "fp16", 10), {X: 1e-5, graph.ops[0].outputs[0]: 1e-5}
    assert rescaled(plan, graph, small).regions[0].scale_log2 == 10
    assert rescaled(plan, graph, {**small, weight: 1e-3}).regions[0].scale_log2 == 17
    assert rescaled(plan, graph, {t: 100.0 for t in small}).regions[0].scale_log2 == 1
