"""One loss scale for all FP16 gradients, read off their histograms.

A loss multiplied by S multiplies every gradient by S. FP16 holds magnitudes from 2^-24 to 65504: what is below is lost,
what is above is inf and costs a step. Histograms say both for every S, before the first step is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from autoprec.formats import FP16
from autoprec.profiles import Profile, RangeHistogram

__all__ = ["largest_loss_scale_log2", "overflow_frac", "underflow_frac"]

#: Scales beyond these would not be normal FP32 numbers, or their inverses not.
_MOST_LOG2 = 126


def _gradients(profile: Profile, tensors: Iterable[str] | None) -> list[RangeHistogram]:
    wanted = None if tensors is None else set(tensors)
    found = [t.gradients for t in profile.tensors if wanted is None or t.id in wanted]
    return [h for h in found if h is not None]


def largest_loss_scale_log2(profile: Profile, tensors: Iterable[str] | None = None) -> int:
    """Largest s such that no gradient of calibration, times 2^s, is beyond FP16's largest value; 0 without gradients.

    `tensors`: ids of those that count; None means all of the profile.
    """
    amax = max((h.amax for h in _gradients(profile, tensors)), default=0.0)
    if amax <= 0.0 or not math.isfinite(amax):
        return 0
    mantissa, exponent = math.frexp(FP16.max_value)
    own, own_exponent = math.frexp(amax)
    return max(-_MOST_LOG2, min(_MOST_LOG2, exponent - own_exponent - (own > mantissa)))


def overflow_frac(profile: Profile, scale: float, tensors: Iterable[str] | None = None) -> float:
    """Share of the gradients' elements that are inf in FP16 under a loss scale; bins of a quarter octave."""
    return _share(_gradients(profile, tensors), lambda h: h.weight_above(FP16.max_value / scale))


def underflow_frac(profile: Profile, scale: float, tensors: Iterable[str] | None = None) -> float:
    """Share of the gradients' elements, other than exact zeros, that are 0 in FP16 under a loss scale."""
    return _share(_gradients(profile, tensors), lambda h: h.weight_below(FP16.min_subnormal / 2.0 / scale))


def _share(histograms: list[RangeHistogram], part: Callable[[RangeHistogram], float]) -> float:
    elements = sum(h.total_weight for h in histograms)
    return sum(part(h) for h in histograms) / elements if elements else 0.0
