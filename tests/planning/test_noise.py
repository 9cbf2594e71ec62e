"""`error_energy` against rounding every element: an independent rounding of 12 lines is the judge."""

from __future__ import annotations

import numpy as np
import pytest

from autoprec.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, Format
from autoprec.planning.noise import current_scale_log2, error_energy, saturated_weight
from tests.planning.maker import histogram

SAMPLES = 200_000


def rounded(x: np.ndarray, exponent_bits: int, mantissa_bits: int, largest: float, saturates: bool) -> np.ndarray:
    """Round to nearest even, with subnormals, in float64."""
    lowest = 2 - 2 ** (exponent_bits - 1)
    _, exponent = np.frexp(x)
    quantum = np.exp2(np.maximum(exponent - 1, lowest) - mantissa_bits)
    y = np.rint(x / quantum) * quantum
    return np.clip(y, -largest, largest) if saturates else np.where(np.abs(y) > largest, np.copysign(np.inf, y), y)


def measured(x: np.ndarray, w: np.ndarray, fmt: Format, scale_log2: int) -> float:
    scale = 2.0**scale_log2
    saturates = fmt.overflow == "saturate"
    y = rounded(x * scale, fmt.exponent_bits, fmt.mantissa_bits, fmt.max_value, saturates) / scale
    return float((w * (y - x) ** 2).sum())


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=SAMPLES)


def lognormal(rng: np.random.Generator) -> np.ndarray:
    return rng.lognormal(0.0, 1.0, SAMPLES) * rng.choice([-1.0, 1.0], SAMPLES)


def uniform(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-3.0, 3.0, SAMPLES)


def heavy(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_t(5, SAMPLES)


def half_zero(rng: np.random.Generator) -> np.ndarray:
    return np.maximum(rng.normal(size=SAMPLES), 0.0)


@pytest.mark.parametrize("draw", [normal, lognormal, uniform, heavy, half_zero])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("fmt", "moved_log2"),
    [
        (BF16, 0),
        (FP16, 0),
        (FP16, -18),  # into FP16's subnormals
        (FP8_E4M3, 0),
        (FP8_E4M3, 3),  # saturates
        (FP8_E4M3, -12),  # flushes
        (FP8_E5M2, 0),
        (FP8_E5M2, 2),
        (FP8_E5M2, -24),
    ],
)
def test_energy_matches_rounding(draw, weighted, fmt, moved_log2):
    rng = np.random.default_rng(7)
    x = draw(rng).astype(np.float32).astype(np.float64)
    w = rng.gamma(0.5, size=x.size) * (1.0 + x**2) if weighted else np.ones_like(x)
    scale = current_scale_log2(fmt, float(np.abs(x).max())) + moved_log2
    predicted = error_energy(histogram(x, w), fmt, scale)
    assert 0.8 < predicted / measured(x, w, fmt, scale) < 1.25


def test_the_rounding_itself_matches_numpy_half():
    x = np.random.default_rng(0).normal(size=10_000) * 10.0 ** np.random.default_rng(1).uniform(-9, 4, 10_000)
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded(x, 5, 10, 65504.0, False), x.astype(np.float16).astype(np.float64))


def test_fp32_is_free_and_empty_is_zero():
    assert error_energy(histogram(np.ones(4)), FP32) == 0.0
    assert error_energy(histogram(np.zeros(0)), BF16) == 0.0
    assert error_energy(histogram(np.zeros(5)), FP8_E4M3) == 0.0


def test_overflow_is_infinite_only_where_the_format_overflows():
    x = np.array([1.0, 1e5])
    assert error_energy(histogram(x), FP16) == np.inf
    assert error_energy(histogram(x), FP16, -2) < np.inf
    assert error_energy(histogram(x), FP8_E4M3) < np.inf
    assert saturated_weight(histogram(x), FP16) == 1.0


@pytest.mark.parametrize("amax", [1e-30, 0.37, 1.75, 448.0, 449.0, 3e38])
def test_current_scale_is_the_largest_that_fits(amax):
    a = current_scale_log2(FP8_E4M3, amax)
    assert amax * 2.0**a <= 448.0
    assert amax * 2.0 ** (a + 1) > 448.0 or a == 126
    assert current_scale_log2(FP8_E4M3, 0.0) == 0
    assert current_scale_log2(FP16, amax) == 0
