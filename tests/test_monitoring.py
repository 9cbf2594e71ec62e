"""The monitor's judgement of a window, and what follows from windows: laws, cases counted by hand, and runs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import StateError
from autoprec.floors import Ban, Floors, Trends, Verdict
from autoprec.graphs import OpClass, OpGraph
from autoprec.monitoring.judging import Judge
from autoprec.monitoring.scaling import adapted, rescaled
from autoprec.numerics.histograms import histogram, histograms, reading, sample
from autoprec.plans import Assignment, Plan, Region
from autoprec.policies import Monitor
from autoprec.profiles import Profile, RangeHistogram, TensorProfile
from tests.planning.maker import Maker

LIMITS = Monitor()
X, Y = "input:x", "relu0:relu#0"


def verdict(trigger: str, op: str = "a", fmt: str = "fp16") -> Verdict:
    return Verdict(op=op, format=fmt, trigger=trigger, evidence="test")


def seen(values: Tensor, gradients: Tensor | None = None) -> tuple[RangeHistogram, RangeHistogram | None]:
    return histogram(sample(values)), None if gradients is None else histogram(sample(gradients))


def profile(**tensors: tuple[RangeHistogram, RangeHistogram | None]) -> Profile:
    named = {"x": X, "y": "y"}
    found = (TensorProfile(id=named[k], values=v, gradients=g) for k, (v, g) in tensors.items())
    return Profile(graph_fingerprint="", steps=1, tensors=tuple(found))


def one_op() -> OpGraph:
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    out = make.op("relu", OpClass.POINTWISE, (X,), (64, 64))
    return make.graph(out)


def plan_in(graph: OpGraph, fmt: str, scale_log2: int | None = None) -> Plan:
    op = graph.ops[0].id
    regions = () if scale_log2 is None else (Region(ops=(op,), scale_log2=scale_log2, reason="test"),)
    assignments = tuple(Assignment(op=op, role=r, format=fmt, reason="test") for r in graph.ops[0].roles)
    return Plan(assignments=assignments, regions=regions)


def triggers(fmt: str, now: Tensor, before: Tensor | None = None) -> list[str]:
    graph = one_op()
    known = None if before is None else profile(x=seen(before))
    judge = Judge(plan_in(graph, fmt), graph, profile(x=seen(now)), LIMITS, before=known)
    return [v.trigger for v in judge.verdicts()]


NORMAL = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def test_ordinary_values_are_well_in_every_format() -> None:
    for fmt in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp32"):
        assert triggers(fmt, NORMAL, NORMAL) == []
        assert triggers(fmt, NORMAL) == []


@pytest.mark.parametrize(
    ("largest", "trigger"), [(60000.0, None), (65504.0, None), (65600.0, "overflow"), (1e9, "overflow")]
)
def test_one_value_beyond_the_format_is_an_overflow(largest: float, trigger: str | None) -> None:
    x = NORMAL.clone()
    x[3, 5] = largest
    found = [t for t in triggers("fp16", x) if t != "saturation"]
    assert found == ([trigger] if trigger else [])
    assert triggers("bf16", x, x) == []


def test_values_that_are_not_finite_are_an_overflow_unless_calibration_had_them() -> None:
    masked = NORMAL.clone()
    masked[:, 0] = -math.inf
    assert triggers("fp16", masked) == ["overflow"]
    assert triggers("fp16", masked, NORMAL) == ["overflow"]
    assert triggers("fp16", masked, masked) == []


def test_a_crowd_at_the_top_saturates_and_one_value_does_not() -> None:
    crowd, one = torch.full((64, 64), 60000.0), torch.full((256, 256), 2.0)
    one[0, 0] = 60000.0
    assert triggers("fp16", crowd) == ["saturation"] and triggers("fp16", one) == []


def test_what_rounds_to_zero_counts_against_calibration() -> None:
    tiny = NORMAL * 2.0**-26
    assert triggers("fp16", tiny) == ["underflow"]
    assert triggers("fp16", tiny, NORMAL) == ["underflow"]
    assert "underflow" not in triggers("fp16", tiny, tiny)  # it was so when the format was chosen
    assert triggers("bf16", tiny) == []


def test_noise_is_measured_against_calibration() -> None:
    """2^-18 is a subnormal of FP16 with six bits less: worse by 36 dB, and next to nothing of it rounds to zero."""
    small = NORMAL * 2.0**-18
    assert triggers("fp16", small, NORMAL) == ["noise"]
    assert triggers("fp16", small, small) == [] and triggers("fp16", small) == []
    assert triggers("bf16", small, NORMAL) == [] and triggers("fp8_e4m3", small, NORMAL) == []


def test_growth_is_told_before_the_overflow() -> None:
    """amax doubles from window to window: promoted in the last window in which it still fits."""
    trends, graph = Trends(), one_op()
    told = {}
    for k in range(10):
        x = NORMAL * 2.0 ** (k + 6)
        trends = trends.after(profile(x=seen(x)))
        found = Judge(plan_in(graph, "fp16"), graph, profile(x=seen(x)), LIMITS, trends=trends).verdicts()
        told[k] = [v.trigger for v in found]
        if found:
            assert float(x.abs().max()) <= 65504.0 < 2.0 * float(x.abs().max())
            break
    assert [t for t in told.values() if t] == [["growth"]]


def test_a_rise_to_what_was_there_before_is_no_trend() -> None:
    """Three windows that rise are chance, if the largest number has been there before."""
    trends = Trends()
    for factor in (8.0, 1.0, 2.0, 4.0, 8.0):
        trends = trends.after(profile(x=seen(NORMAL * factor)))
        assert trends.log2_per_window(X, "value") == 0.0
    trends = trends.after(profile(x=seen(NORMAL * 16.0)))
    assert trends.log2_per_window(X, "value") == 1.0


def test_another_scale_is_no_trend_of_a_gradient() -> None:
    trends = Trends()
    for scale in (0, 3, 6):
        window = profile(x=seen(NORMAL, NORMAL * 2.0**scale))
        trends = trends.after(window, lambda _, scale=scale: scale)
    assert trends.log2_per_window(X, "gradient") == 0.0


def test_one_jump_is_no_trend() -> None:
    trends = Trends()
    for factor in (1.0, 1.0, 2.0**10):
        trends = trends.after(profile(x=seen(NORMAL * factor)))
    assert trends.log2_per_window(X, "value") == 0.0
    assert trends.log2_per_window("nobody", "value") == 0.0


@pytest.mark.parametrize("scale_log2", [None, 10])
def test_gradients_outside_of_a_region_are_judged_as_the_region_has_them(scale_log2: int | None) -> None:
    graph, plan = one_op(), plan_in(one_op(), "fp16", scale_log2)
    window = profile(x=seen(NORMAL, NORMAL * 100.0))
    found = [v.trigger for v in Judge(plan, graph, window, LIMITS).verdicts()]
    assert found == ([] if scale_log2 is None else ["overflow"])


def test_saturating_by_design_is_no_verdict() -> None:
    graph = one_op()
    x = NORMAL.clone()
    x[0] = -1e30
    plan = Plan(assignments=plan_in(graph, "fp16").assignments, saturating=(X,))
    assert Judge(plan, graph, profile(x=seen(x)), LIMITS).verdicts() == ()
    assert Judge(plan_in(graph, "fp16"), graph, profile(x=seen(x)), LIMITS).verdicts() != ()


def test_well_is_stricter_than_stable() -> None:
    def well(window: Profile, before: Profile | None = None) -> bool:
        graph = one_op()
        return Judge(plan_in(graph, "fp32"), graph, window, LIMITS, before=before).is_well(graph.ops[0].id, "fp16")

    for factor, is_so in ((1.0, True), (2.0**11, True), (2.0**13, False), (2.0**20, False)):
        assert well(profile(x=seen(NORMAL * factor))) == is_so, factor
    assert not well(profile())  # nobody looked
    for factor in (2.0**-30, 1.0, 2.0**30):  # a new plan chooses the scale of gradients
        assert well(profile(x=seen(NORMAL, NORMAL * factor)), profile(x=seen(NORMAL, NORMAL)))
    wide = torch.where(torch.arange(64) % 2 == 0, NORMAL, NORMAL * 2.0**-60)  # of which no scale keeps both halves
    assert not well(profile(x=seen(NORMAL, wide)), profile(x=seen(NORMAL, NORMAL)))


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


@pytest.mark.parametrize("factor_log2", [-40, -28, 3, 4, 12])
def test_gradients_of_another_size_get_another_scale(factor_log2: int) -> None:
    """2^3 is no overflow yet, but less than an octave below one."""
    graph, plan, y = region_of_one(10)
    own = {X: NORMAL, y: NORMAL * 2.0**10}

    def of(factor: float) -> Profile:
        found = (TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(g * factor)[0]) for t, g in own.items())
        return Profile(graph_fingerprint="", steps=1, tensors=tuple(found))

    plain = (TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(NORMAL)[0]) for t in own)
    before = Profile(graph_fingerprint="", steps=1, tensors=tuple(plain))
    assert Judge(plan, graph, of(1.0), LIMITS, before=before).with_better_scales()[0].plan is plan
    judge = Judge(plan, graph, of(2.0**factor_log2), LIMITS, before=before)
    better, (change,) = judge.with_better_scales()
    assert (change.was.scale_log2, change.now.scale_log2) == (10, 10 - factor_log2) and change.verdict.evidence
    assert better.plan.regions[0].scale_log2 == 10 - factor_log2 and better.verdicts() == ()
    assert better.plan.assignments == plan.assignments
    if factor_log2 != 3:
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


@pytest.mark.parametrize("on_cpu", [True, False])
def test_ranges_are_counted_together_as_each_alone(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """On another device (here a CPU that says that it is none) the host waits twice for all of them."""
    shapes: list[tuple[tuple[int, ...], float]] = [((7,), 1.0), ((300, 64), 1e-3), ((3, 100, 200), 1e5), ((0,), 1.0)]
    given = [torch.randn(shape) * size for shape, size in shapes]
    given[1][3, 3], given[2][0, 0, 0] = torch.nan, -torch.inf
    given += [torch.zeros(9), torch.randn(300).bfloat16(), torch.randn(5000).half(), torch.full((3,), torch.nan)]
    given += [torch.tensor([1e300, 2.0], dtype=torch.float64)]  # beyond what a histogram of FP32 numbers has bins for
    alone = [histogram(sample(x, 4096)) for x in given]
    weighted = [histogram(s := sample(x, 4096), torch.ones_like(s.magnitudes)) for x in given]
    waits: list[str] = []
    if not on_cpu:
        monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
            method = getattr(Tensor, name)
            monkeypatch.setattr(Tensor, name, lambda self, *a, _n=name, _m=method: (waits.append(_n), _m(self, *a))[1])
    together = histograms([reading(x, 4096) for x in given])
    assert on_cpu or len(waits) == 2
    for a, b, c in zip(together, alone, weighted, strict=True):
        assert np.array_equal(a.bins, b.bins) and np.array_equal(a.moments, b.moments)
        assert np.array_equal(a.bins, c.bins) and np.allclose(a.moments, c.moments, rtol=1e-12)
        assert (a.amax, a.nonfinite, a.elements) == (b.amax, b.nonfinite, b.elements)
    assert histograms([]) == []


def test_where_no_scale_suits_the_format_has_to_go() -> None:
    graph, plan, y = region_of_one(0)
    wide = torch.where(torch.arange(64) % 2 == 0, NORMAL * 30000.0, NORMAL * 2.0**-60)
    tensors = tuple(TensorProfile(id=t, values=seen(NORMAL)[0], gradients=seen(wide)[0]) for t in (X, y))
    better = Judge(plan, graph, Profile(graph_fingerprint="", steps=1, tensors=tensors), LIMITS).with_better_scales()[0]
    assert better.plan is not plan and {v.trigger for v in better.verdicts()} == {"underflow"}


def test_a_view_is_judged_by_what_it_is_a_view_of() -> None:
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    y = make.op("relu", OpClass.POINTWISE, (X,), (64, 64))
    view = make.op("view", OpClass.VIEW, (y,), (64, 64), base=y)
    graph = make.graph(make.op("relu", OpClass.POINTWISE, (view,), (64, 64)))
    last = graph.ops[-1]
    plan = Plan(assignments=tuple(Assignment(op=last.id, role=r, format="fp16", reason="test") for r in last.roles))
    window = Profile(graph_fingerprint="", steps=1, tensors=(TensorProfile(id=y, values=seen(NORMAL * 1e6)[0]),))
    found = Judge(plan, graph, window, LIMITS).verdicts()
    assert [(v.op, v.trigger) for v in found] == [(last.id, "overflow")]


# What follows ------------------------------------------------------------------------------------------------------


def windows(floors: Floors, disturbed: list[bool], *, trigger: str = "overflow", cooldown: int = 2) -> list[str]:
    """What changes window by window: "-" nothing, "P" promoted, "D" demoted."""
    told = []
    for now in disturbed:
        verdicts = [verdict(trigger)] if now and ("a", "fp16") not in floors.banned else []
        turn = floors.after(verdicts, lambda op, fmt, now=now: not now, cooldown)
        floors = turn.floors
        told.append("P" if turn.banned else "D" if turn.lifted else "-")
    return told


def test_after_a_disturbance_the_format_comes_back() -> None:
    assert "".join(windows(Floors(), [False, True, True, False, False, False, False])) == "-P--D--"


@pytest.mark.parametrize("period", range(2, 9))
@pytest.mark.parametrize("cooldown", [1, 2, 3])
def test_a_periodic_disturbance_makes_at_most_one_change_per_cooldown(period: int, cooldown: int) -> None:
    """And ever fewer: from some time on none, until it ends."""
    disturbed = [k % period == 0 for k in range(200)]
    told = windows(Floors(), disturbed, cooldown=cooldown)
    changes = [k for k, c in enumerate(told) if c != "-"]
    assert len(changes) <= 200 // cooldown
    assert all(k < 60 for k in changes)
    after = windows(Floors(), [*disturbed, *[False] * 400], cooldown=cooldown)
    assert after[:200] == told and after[200:].count("D") == 1 and "P" not in after[200:]


@pytest.mark.parametrize("trigger", ["saturation", "growth", "underflow", "noise"])
def test_what_has_not_left_the_format_waits_for_the_cooldown(trigger: str) -> None:
    floors = Floors(windows=10, bans=(Ban(op="a", format="bf16", trigger="noise", changed=10, lifted=True),))
    told = windows(floors, [True] * 4, trigger=trigger, cooldown=3)
    assert told == ["-", "-", "P", "-"]
    assert windows(floors, [True] * 4, cooldown=3)[0] == "P"


def test_bans_are_told_apart() -> None:
    floors = Floors().with_ban("a", "fp16", "overflow").with_ban("a", "bf16", "noise").with_ban("b", "fp16", "noise")
    assert floors.banned == {("a", "fp16"), ("a", "bf16"), ("b", "fp16")}
    again = floors.with_ban("a", "fp16", "overflow")
    assert [b.times for b in again.bans] == [1, 1, 1]  # it was banned all along
    turn = floors.after([], lambda op, fmt: op == "a" and fmt == "fp16", 1)
    assert turn.floors.banned == {("a", "bf16"), ("b", "fp16")} and [b.format for b in turn.lifted] == ["fp16"]
    assert turn.floors.with_ban("a", "fp16", "noise").bans[0].times == 2


def test_bans_of_nothing_are_refused() -> None:
    with pytest.raises(StateError, match="op must not be empty"):
        Ban(op="", format="fp16", trigger="noise", changed=0)
    ban = Ban(op="a", format="fp16", trigger="noise", changed=0)
    with pytest.raises(StateError, match="ban"):
        Floors(bans=(ban, ban))


# Runs --------------------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def half(**changes: object) -> autoprec.Policy:
    return autoprec.Policy(
        name="half",
        formats=("fp32", "fp16"),
        objective="bytes",
        storage={"formats": ()},
        calibration={"steps": 2},
        monitor={"window_steps": 4, "interval_steps": 1, "cooldown_windows": 2},
    ).replaced(**changes)


def run(sizes: list[float], policy: autoprec.Policy, plan: autoprec.Plan | None = None) -> autoprec.Session:
    """Steps on inputs of these sizes, of which the loss is independent but for the biases."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = autoprec.compile(layers(), policy=policy, plan=plan, events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for size in sizes:
        optimizer.zero_grad()
        (model(torch.randn(64, 16) * size) / size).square().mean().backward()
        optimizer.step()
    return autoprec.session(model)


def test_a_disturbance_promotes_and_its_end_demotes() -> None:
    """Two windows of values near 65504, in three of ten windows each, and then no more."""
    sizes = [1.0] * 12
    for _ in range(3):
        sizes += [3e4] * 8 + [1.0] * 32
    session = run([*sizes, *[1.0] * 200], half())
    assert session.plan is not None
    changes = [e for e in session.events if e.kind in ("promoted", "demoted")]
    ops = {e.op for e in changes if e.kind == "promoted"}
    assert ops and all(e.was and e.now and e.was != e.now for e in changes)
    for op in ops:
        mine = [e.kind for e in changes if e.op == op]
        assert mine == ["promoted", "demoted"] * (len(mine) // 2), op
        assert len(mine) <= len(sizes) // 4 // 2
        assert session.plan.format_of[op, autoprec.Role.OUTPUT] == "fp16"


def test_a_plan_from_a_file_gets_its_formats_back() -> None:
    plan = run([1.0] * 4, half()).plan
    assert plan is not None and not plan.is_identity
    session = run([1.0] * 4 + [3e5] * 8 + [1.0] * 60, half(), plan)
    assert {"promoted", "demoted"} <= {e.kind for e in session.events}
    assert session.plan is not None and session.plan.format_of == plan.format_of


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
    """Two octaves a window of eight steps, in one that nobody judges before its end: an octave before an overflow."""
    policy = half(monitor={"window_steps": 40, "interval_steps": 2, "cooldown_windows": 2})
    session, errors, _ = grow([0.0] * 3 + [k / 4.0 for k in range(60)], policy)
    kinds = [e.kind for e in session.events]
    assert not {"promoted", "bad_step"} & set(kinds) and max(errors) < 0.03
    shifts = [e.step for e in session.events if e.kind == "rescaled"]
    assert len(shifts) >= 4 and session._window_steps == 42  # windows of 40 from the plan on
    window = session._observed.window
    assert window is not None and window.steps == (session.steps - 42) // 2
    region = session.plan.regions[0] if session.plan is not None else None
    assert region is not None
    seen_there = window.tensor_by_id[region.ops[0]].gradients
    assert seen_there is not None and 2.0 <= math.ldexp(seen_there.amax, 0) <= 65504.0


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
    calm, session = grow([0.0] * 5, half())[0].plan, grow([0.0] * 5 + [5.0] * 3, half())[0]
    (lost, *_), plan = [e for e in session.events if e.kind == "bad_step"], session.plan
    assert calm is not None and plan is not None and lost.role != "output" and session.skipped_steps <= 2
    before = {op: r.scale_log2 for r in calm.regions for op in r.ops}
    assert plan.regions and all(r.scale_log2 <= before[op] - 2 for r in plan.regions for op in r.ops)


def test_a_plan_that_is_made_again_keeps_the_scales_that_suit() -> None:
    """Its own first, so that a plan that comes back is the same; then those that run; then the best."""
    graph, plan, y = region_of_one(10)
    again = replace(plan, regions=(replace(plan.regions[0], scale_log2=12),))
    for amax, scale_log2 in (
        (1.0, 12),
        (7.9, 12),
        (0.01, 12),
        (10.0, 10),
        (30.0, 10),
        (40.0, 7),
        (0.003, 21),
        (0.0, 12),
    ):
        found = adapted(again, plan, graph, {X: amax / 2.0, y: amax})
        assert found.regions[0].scale_log2 == scale_log2, amax
    other = replace(plan, regions=())
    assert adapted(again, other, graph, {X: 10.0, y: 10.0}).regions[0].scale_log2 == 9  # nothing runs: the best


def test_a_sum_that_nobody_has_seen_gets_no_larger_scale() -> None:
    """A weight's gradient that FP16 makes: while the product was in FP32, the monitor did not look at it."""
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    graph = make.graph(make.linear(X, 64))
    weight = f"param:{graph.ops[0].weights[0]}"
    plan, small = plan_in(graph, "fp16", 10), {X: 1e-5, graph.ops[0].outputs[0]: 1e-5}
    assert rescaled(plan, graph, small).regions[0].scale_log2 == 10
    assert rescaled(plan, graph, {**small, weight: 1e-3}).regions[0].scale_log2 == 22
    assert rescaled(plan, graph, {t: 100.0 for t in small}).regions[0].scale_log2 == 6


def test_gradients_of_parameters_and_parameters_of_norms_are_not_judged() -> None:
    """They are made in FP32, without the region's scale: what would overflow under it is nothing."""
    make = Maker(np.random.default_rng(0))
    make.tensor(X, (64, 64))
    graph = make.graph(make.norm(X))
    weight = next(t for t in graph.ops[0].inputs if t.startswith("param:"))
    plan = plan_in(graph, "fp16", 20)
    tensors = (
        TensorProfile(id=X, values=seen(NORMAL)[0]),
        TensorProfile(id=weight, values=seen(NORMAL * 1e6)[0], gradients=seen(NORMAL)[0]),
    )
    window = Profile(graph_fingerprint="", steps=1, tensors=tensors)
    assert Judge(plan, graph, window, LIMITS).verdicts() == ()
