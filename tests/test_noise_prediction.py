"""Predicted against measured noise on trained models: the figures of docs/measurements/noise.md as bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from autoprec.formats import FP8_E4M3, format_named
from autoprec.numerics.histograms import histogram, sample
from autoprec.planning.noise import current_scale_log2, error_energy
from tests import noise_study
from tests.cpus import missed_without_bf16
from tests.noise_study import GradientPair, Pair


@pytest.fixture(scope="module")
def measured() -> tuple[list[Pair], list[GradientPair]]:
    found = noise_study.results(seeds=range(2), text_batches=16, digit_batches=48)
    return [p for r in found for p in r.pairs], [g for r in found for g in r.gradients]


@missed_without_bf16("0.798, not 0.80")
def test_the_loss_change_is_predicted_within_each_format(measured: tuple[list[Pair], list[GradientPair]]) -> None:
    pairs, _ = measured
    assert len(pairs) >= 100
    rho = [r for r, _ in noise_study.within_format(pairs).values()]
    assert np.median(rho) >= 0.90
    assert min(rho) >= 0.80
    everything = spearmanr([p.predicted for p in pairs], [p.measured for p in pairs]).statistic
    assert everything > noise_study.format_only(pairs)


def test_the_size_of_the_loss_change(measured: tuple[list[Pair], list[GradientPair]]) -> None:
    ratios = np.array([p.predicted / p.measured for p in measured[0]])
    assert 0.8 <= np.median(ratios) <= 1.25
    assert np.mean((ratios >= 0.5) & (ratios <= 2.0)) >= 0.95


def test_the_weight_gradient_error(measured: tuple[list[Pair], list[GradientPair]]) -> None:
    groups: dict[tuple[str, str], list[float]] = {}
    for p in measured[1]:
        groups.setdefault((p.study, p.what), []).append(p.predicted / p.measured)
    assert len(groups) == 4
    for ratios in groups.values():
        assert 0.9 <= np.median(ratios) <= 1.1


def test_a_predictor_without_sensitivities_fails(measured: tuple[list[Pair], list[GradientPair]]) -> None:
    """The bounds can fail: shuffled predictions within each format do not pass."""
    rng = np.random.default_rng(0)
    pairs = measured[0]
    shuffled = []
    for fmt in noise_study.FORMATS:
        chosen = [p for p in pairs if p.fmt == fmt]
        order = rng.permutation(len(chosen))
        shuffled += [
            Pair(p.study, p.what, p.name, fmt, chosen[i].predicted, p.measured)
            for p, i in zip(chosen, order, strict=True)
        ]
    assert np.median([r for r, _ in noise_study.within_format(shuffled).values()]) < 0.8


@pytest.mark.parametrize("fmt", noise_study.FORMATS)
def test_sampled_merged_and_exact_agree(fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 50, 128) * torch.rand(128) * 3  # channels of different scales
    g = torch.randn(40, 50, 128).square()
    chosen = format_named(fmt)
    scale = current_scale_log2(chosen, float(x.abs().max()))

    def energy(limit: int) -> float:
        taken = sample(x, limit)
        return error_energy(histogram(taken, taken.pick(g)), chosen, scale)

    exact = energy(x.numel())
    assert energy(1 << 16) == pytest.approx(exact, rel=0.02)
    parts = [(sample(a, x.numel()), b) for a, b in zip(x.split(8), g.split(8), strict=True)]
    merged = histogram(parts[0][0], parts[0][1].reshape(-1))
    for taken, weight in parts[1:]:
        merged = merged.merge(histogram(taken, weight.reshape(-1)))
    assert error_energy(merged, chosen, scale) == pytest.approx(exact, rel=1e-9)
    assert merged.amax == float(x.abs().max())


def test_a_stride_that_meets_every_second_channel_would_not_agree() -> None:
    """Why strides are coprime to the sizes."""
    x = torch.ones(4096, 64)
    x[:, ::2] *= 100.0
    exact = histogram(sample(x, x.numel())).energy
    assert histogram(sample(x, 1 << 12)).energy == pytest.approx(exact, rel=0.05)
    strided = x.reshape(-1)[::64].square().sum() * 64
    assert abs(float(strided) / exact - 1) > 0.5


def test_amax_zero_has_a_price_of_zero() -> None:
    zeros = histogram(sample(torch.zeros(64)))
    assert error_energy(zeros, FP8_E4M3, current_scale_log2(FP8_E4M3, zeros.amax)) == 0.0
