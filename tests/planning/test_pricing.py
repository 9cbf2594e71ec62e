"""What a profile says about formats with a scale and about FP16 under one loss scale, by hand."""

from __future__ import annotations

import pytest

from autoprec.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, Format
from autoprec.planning.loss_scaling import largest_loss_scale_log2
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.planning.pricing import Prices
from autoprec.planning.roots import resolve_roots
from autoprec.profiles import RangeHistogram
from tests.planning.planning_cases import Case, chain_case


def prices_of(case: Case) -> Prices:
    return Prices(case.graph, resolve_roots(case.graph), case.profile, case.policy)


def error(histogram: RangeHistogram | None, fmt: Format, of: RangeHistogram | None = None) -> float:
    """Of the histogram's tensor, or of another `of` it, under the scale of the step."""
    assert histogram is not None
    return error_energy(histogram, fmt, current_scale_log2(fmt, (of or histogram).amax))


def test_beside_e5m2_the_weight_is_e4m3() -> None:
    case = chain_case(formats=("fp32", "bf16", "fp8_e5m2"))
    prices, steps = prices_of(case), case.profile.steps
    weight, x = (case.profile.tensor_by_id[t] for t in ("param:b.weight", "m:relu#1"))
    assert prices.loss_noise(weight.id, FP8_E5M2) == pytest.approx(error(weight.loss, FP8_E4M3, weight.values) / steps)
    assert prices.loss_noise(x.id, FP8_E5M2) == pytest.approx(error(x.loss, FP8_E5M2, x.values) / steps)


@pytest.mark.parametrize(
    ("fmt", "beside"),
    [(FP8_E5M2, FP8_E4M3), (FP8_E4M3, FP8_E4M3), (BF16, None)],
    ids=["fp8_e5m2", "fp8_e4m3", "bf16"],
)
def test_a_gradient_that_is_passed_on_has_the_noise_of_both_operands(fmt: Format, beside: Format | None) -> None:
    case = chain_case(formats=("fp32", fmt.name))
    by_id = case.profile.tensor_by_id
    arriving, weight = by_id["b:linear#2"].gradients, by_id["param:b.weight"].values
    assert arriving is not None
    expected = error_energy(arriving, fmt, current_scale_log2(fmt, arriving.amax) if fmt.scaled else 0)
    expected /= arriving.energy
    if beside is not None:
        expected += error(weight, beside) / weight.energy
    op = case.graph.op_by_id["b:linear#2"]
    assert prices_of(case).relative_variance(op, fmt) == pytest.approx(expected)


@pytest.mark.parametrize("init", ["auto", 2.0**40, 16.0])
def test_under_one_loss_scale_gradients_are_rounded_where_it_puts_them(init: str | float) -> None:
    """An initial scale that overflows is backed off from, to the largest that does not."""
    case = chain_case(formats=("fp32", "bf16", "fp16"), loss_scaling={"mode": "global", "init": init})
    largest = largest_loss_scale_log2(case.profile)
    scale = 4 if init == 16.0 else largest
    assert 4 < largest < 40
    arriving = case.profile.tensor_by_id["b:linear#2"].gradients
    assert arriving is not None
    op = case.graph.op_by_id["b:linear#2"]
    expected = error_energy(arriving, FP16, scale) / arriving.energy
    assert prices_of(case).relative_variance(op, FP16) == pytest.approx(expected)
    assert expected != pytest.approx(error_energy(arriving, FP16, 0) / arriving.energy)  # and it matters
