"""What rounding costs, read off a histogram.

For a format with m mantissa bits, smallest normal exponent e_min, largest value M, and a power-of-two scale 2^a, the
bin with lower edge 2^E·(1+k/4) has the step q = 2^(max(E+a, e_min) − m − a). With the bin's Σw, Σw|x|, Σwx² its
rounding-error energy is

    Σw·q²/12                              in range (uniform error, standard)
    Σw·x²                                 flushed: the bin's upper edge ≤ half the smallest subnormal
    Σw·x² − 2M'Σw|x| + M'²Σw              saturated: lower edge ≥ M' = M/2^a

Source: autoprec's design, measured on trained models (docs/measurements). One float32 pass therefore prices every
format at every scale.
"""

from __future__ import annotations

import math

import numpy as np

from autoprec.formats import Format
from autoprec.profiles import RangeHistogram, bin_lower_edges

__all__ = [
    "current_scale_log2",
    "error_energy",
    "ordinary",
    "relative_error",
    "saturated_weight",
    "saturates_by_design",
]


def current_scale_log2(fmt: Format, amax: float) -> int:
    """Largest a such that amax·2^a ≤ `fmt.max_value`: the power-of-two scale of current scaling.

    0 for formats that carry no scale, and for amax = 0 (nothing to scale). Kept within ±126 so that 2^a is a normal
    float32.
    """
    if not fmt.scaled or amax <= 0.0 or not math.isfinite(amax):
        return 0
    mantissa, exponent = math.frexp(fmt.max_value / amax)  # ratio = mantissa·2^exponent, mantissa in [0.5, 1)
    return max(-126, min(126, exponent - 1))


def error_energy(histogram: RangeHistogram, fmt: Format, scale_log2: int = 0) -> float:
    """E Σw·(round(x) − x)² when every element is rounded to `fmt` after multiplication by 2^`scale_log2`.

    Units: those of Σw·x². FP32 costs nothing by definition (the histograms are of float32 values). A format that
    overflows to inf has infinite cost as soon as a weighted element lies beyond its maximum.
    """
    if histogram.bins.size == 0 or fmt.mantissa_bits >= 23:
        return 0.0
    lower = bin_lower_edges(histogram.bins)
    upper = bin_lower_edges(histogram.bins + 1)
    w, wx, wxx = histogram.moments.T
    limit = math.ldexp(fmt.max_value, -scale_log2)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.where(lower > 0, lower, 2.0**-149)))
    step_log2 = np.maximum(exponent + scale_log2, fmt.min_normal_log2) - fmt.mantissa_bits - scale_log2
    energy = w * np.exp2(2.0 * step_log2) / 12.0
    flushed = upper <= math.ldexp(fmt.min_subnormal, -scale_log2) / 2.0
    energy = np.where(flushed, wxx, energy)
    beyond = lower >= limit
    if fmt.overflow == "inf":
        if float(w[beyond].sum()) > 0.0 and histogram.amax > limit:
            return math.inf
    else:
        energy = np.where(beyond, np.maximum(wxx - 2.0 * limit * wx + limit * limit * w, 0.0), energy)
    # A bin of exact zeros rounds exactly.
    return float(np.where(wx > 0.0, np.minimum(energy, wxx), 0.0).sum())


def relative_error(histogram: RangeHistogram | None, fmt: Format) -> float:
    """E‖round(x) − x‖² / E‖x‖² under current scaling, at most 1; 0.0 where nothing was observed."""
    if histogram is None or histogram.energy <= 0.0:
        return 0.0
    return min(1.0, error_energy(histogram, fmt, current_scale_log2(fmt, histogram.amax)) / histogram.energy)


def saturated_weight(histogram: RangeHistogram, fmt: Format, scale_log2: int = 0) -> float:
    """Σw over the elements beyond the format's largest value."""
    return histogram.weight_above(math.ldexp(fmt.max_value, -scale_log2))


def saturates_by_design(histogram: RangeHistogram, fmt: Format) -> bool:
    """Whether what leaves the format is a mask's or constant's huge value: far from all ordinary ones.

    True if elements beyond the format's maximum exist and the four octaves below it are empty.
    """
    if histogram.amax <= fmt.max_value:
        return False
    edges = bin_lower_edges(histogram.bins)
    near = (edges >= fmt.max_value / 16) & (bin_lower_edges(histogram.bins + 1) <= fmt.max_value)
    return not bool((histogram.moments[near, 0] > 0.0).any())


def ordinary(histogram: RangeHistogram, fmt: Format) -> RangeHistogram:
    """Without the values that saturate by design: a mask's huge value means the same after it was rounded."""
    limit = fmt.max_value / 16
    below = bin_lower_edges(histogram.bins) < limit
    return RangeHistogram(
        bins=histogram.bins[below],
        moments=histogram.moments[below],
        amax=min(histogram.amax, limit),
        nonfinite=histogram.nonfinite,
        elements=histogram.elements,
    )
