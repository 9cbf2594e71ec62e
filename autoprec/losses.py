"""Spikes of the loss, against the spread of a window. Medians, so that a spike does not hide itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Losses", "Spike"]

#: Losses of a window from which on it is judged, and the most that are kept of one: the latest.
_LEAST, _MOST = 8, 4096

#: Of normal numbers, the standard deviation in median absolute deviations.
_SIGMA = 1.4826

#: A spread is taken to be at least this share of the median: equal batches have none.
_LEAST_FRAC = 1e-3


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The highest loss of a window, `sigmas` spreads above its median."""

    step: int
    loss: float
    median: float
    spread: float
    sigmas: float


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses of the good steps of the window in progress, oldest first, and the number of the first of these steps; of
    the window before, the median and the spread, and where all its losses were above 0 those of their logarithms.

    Losses that are nearly 0 differ by factors from batch to batch: a spike is far from the others by both measures. A
    loss that is not finite is infinite here, always a spike, and no part of the median.
    """

    window: tuple[float, ...] = ()
    first_step: int = 0
    median: float | None = None
    spread: float | None = None
    log_median: float | None = None
    log_spread: float | None = None

    def extended(self, losses: Sequence[float], first_step: int) -> Losses:
        """With more of them, the first of which is of this step."""
        first = self.first_step if self.window else first_step
        window = (*self.window, *(v if math.isfinite(v) else math.inf for v in losses))
        return replace(self, window=window[-_MOST:], first_step=first + max(0, len(window) - _MOST))

    def limit(self, sigmas: float) -> float:
        """What a loss must not be above, by the window before; infinite where that says nothing."""
        if self.median is None or self.spread is None:
            return math.inf
        limit = self.median + sigmas * self.spread
        if self.log_median is None or self.log_spread is None:
            return limit
        return max(limit, math.exp(min(self.log_median + sigmas * self.log_spread, 700.0)))

    def window_over(self, sigmas: float) -> tuple[Losses, Spike | None]:
        """The next window's, and the spike of this one if there was one. A window of few losses goes on: they are
        judged together with those of the next."""
        finite = [v for v in self.window if math.isfinite(v)]
        if len(finite) < _LEAST:
            return self, None
        median, spread = _middle(finite, _LEAST_FRAC)
        after = Losses(median=median, spread=spread)
        if min(finite) > 0.0:
            log_median, log_spread = _middle([math.log(v) for v in finite], 0.0)
            after = replace(after, log_median=log_median, log_spread=max(log_spread, _LEAST_FRAC))
        at = max(range(len(self.window)), key=lambda i: self.window[i])
        loss = self.window[at]
        if loss <= after.limit(sigmas):
            return after, None
        far = (loss - median) / spread
        return after, Spike(step=self.first_step + at, loss=loss, median=median, spread=spread, sigmas=far)


def _middle(values: Sequence[float], least_frac: float) -> tuple[float, float]:
    median = statistics.median(values)
    spread = _SIGMA * statistics.median(abs(v - median) for v in values)
    return median, max(spread, least_frac * abs(median), 1e-30)
