"""The price of keeping a tensor narrow: the figures of docs/measurements/storage.md as bounds, on a part of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autoprec.formats import BF16, FP8_E4M3, format_named
from autoprec.planning import saved
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.profiles import RangeHistogram
from tests import storage_study


def ratios_of(pairs: list[storage_study.Kept]) -> np.ndarray:
    return np.array([p.predicted / p.measured for p in pairs])


@pytest.fixture(scope="module")
def pairs() -> list[storage_study.Kept]:
    studies = [(storage_study.language_study(steps=100, batches=4), 1), (storage_study.gated_study(steps=50), 5)]
    return [p for s, n in studies for p in storage_study.kept_pairs(s, storages=("fp8_e4m3",), batches=4, every=n)]


def test_what_is_kept_narrow_costs_about_what_is_predicted(pairs: list[storage_study.Kept]) -> None:
    """Too much is allowed where a mean hides the error, too little is not."""
    assert len(pairs) >= 20
    pointwise = [p for p in pairs if p.kinds in ("gelu", "tanh", "exp+mul", "softplus", "mul+silu")]
    attention = [p for p in pairs if "attention" in p.kinds]
    assert len(pointwise) >= 8 and len(attention) == 12
    assert ratios_of(pairs).min() >= 0.2
    assert 0.5 <= np.median(ratios_of(pointwise)) <= 3.0
    assert 0.5 <= np.median(ratios_of(attention)) <= 2.5 and ratios_of(attention).max() <= 5.0


def test_forgetting_what_ops_pass_on_is_noticed(
    pairs: list[storage_study.Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds can fail: at a hundredth of the price they do not hold."""
    cheap = [dataclasses.replace(p, predicted=p.predicted / 100) for p in pairs]
    assert ratios_of(cheap).min() < 0.2


def histogram_of(values: np.ndarray) -> RangeHistogram:
    dense = np.zeros((1024, 3))
    x = np.abs(values).astype(np.float32)
    bins = x.view(np.uint32) >> 21
    for k in range(3):
        np.add.at(dense[:, k], bins, x.astype(np.float64) ** k)
    return RangeHistogram.from_dense(dense, amax=float(x.max()), elements=float(x.size))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", [*saved._OF_INPUT, *saved._OF_RESULT])
def test_the_relative_variance_is_that_of_the_derivative(kind: str, fmt: str) -> None:
    """Against the derivative at every element, rounded by itself; and where d(s) = s, against the histogram's price."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=20_000)
    is_result = kind in saved._OF_RESULT
    if is_result:
        x = {"tanh": np.tanh, "sigmoid": lambda s: 1 / (1 + np.exp(-s)), "softmax": np.abs}.get(kind, np.exp)(x)
    if kind in saved._POSITIVE:
        x = np.abs(x)
    derivative = (saved._OF_RESULT if is_result else saved._OF_INPUT)[kind]
    chosen, histogram = format_named(fmt), histogram_of(x)
    scale = current_scale_log2(chosen, histogram.amax)
    narrow = np.sign(x) * saved._rounded(np.abs(x), chosen, scale)
    with np.errstate(all="ignore"):
        energy = (derivative(x) ** 2).sum()
        expected = ((derivative(narrow) - derivative(x)) ** 2).sum() / energy if energy else 0.0
    factor = saved._NORM_FRAC if kind in saved._NORMS else 1.0
    found = saved.relative_variance(kind, is_result, histogram, chosen)
    assert found is not None
    if kind not in ("log", "log1p"):  # a few elements near the pole are all of the sum
        assert found == pytest.approx(factor * expected, rel=0.15)
    if derivative is saved._itself:
        assert found == pytest.approx(factor * error_energy(histogram, chosen, scale) / histogram.energy, rel=0.1)


def test_what_is_not_in_the_table_or_does_not_fit_is_kept_as_it_is() -> None:
    x = histogram_of(np.array([1.0, 2.0, 1e38]))
    assert saved.relative_variance("erf", False, x, FP8_E4M3) is None
    assert saved.relative_variance("mul", True, x, FP8_E4M3) is None
    assert saved.relative_variance("mul", False, x, BF16) is not None
    assert saved.relative_variance("mul", False, x, format_named("fp16")) is None
    assert saved.relative_variance("mul", False, histogram_of(np.zeros(4)), FP8_E4M3) == 0.0
