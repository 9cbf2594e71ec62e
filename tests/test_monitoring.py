"""The monitor's judgement of a window, and what follows from windows: laws, cases counted by hand, and runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import autoprec
from autoprec.errors import StateError
from autoprec.floors import Ban, Floors, Trends, Verdict
from autoprec.graphs import OpClass
from autoprec.monitoring.judging import Judge
from autoprec.plans import Assignment, Plan
from autoprec.profiles import Profile, TensorProfile
from tests.planning.maker import Maker
from tests.windows import LIMITS, NORMAL, X, half, layers, one_op, plan_in, profile, seen


def verdict(trigger: str, op: str = "a", fmt: str = "fp16") -> Verdict:
    return Verdict(op=op, format=fmt, trigger=trigger, evidence="test")


def triggers(fmt: str, now: Tensor, before: Tensor | None = None) -> list[str]:
    graph = one_op()
    known = None if before is None else profile(x=seen(before))
    judge = Judge(plan_in(graph, fmt), graph, profile(x=seen(now)), LIMITS, before=known)
    return [v.trigger for v in judge.verdicts()]


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
        turn = floors.after(verdicts, lambda _, now=now: not now, cooldown)
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
    turn = floors.after([], lambda ban: ban.op == "a" and ban.format == "fp16", 1)
    assert turn.floors.banned == {("a", "bf16"), ("b", "fp16")} and [b.format for b in turn.lifted] == ["fp16"]
    assert turn.floors.with_ban("a", "fp16", "noise").bans[0].times == 2


def test_bans_of_nothing_are_refused() -> None:
    with pytest.raises(StateError, match="op must not be empty"):
        Ban(op="", format="fp16", trigger="noise", changed=0)
    ban = Ban(op="a", format="fp16", trigger="noise", changed=0)
    with pytest.raises(StateError, match="ban"):
        Floors(bans=(ban, ban))


# Runs --------------------------------------------------------------------------------------------------------------


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
