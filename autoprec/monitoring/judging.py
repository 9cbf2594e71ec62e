"""Which ops of a plan are unstable, and which were well in a format that they left, by the ranges of a window.

Judged before the cast where a wider tensor is read in a narrow format, and on the result where a tensor is born in one
(an overflow shows as a non-finite value there). Gradients inside an FP16 region carry its scale, those outside do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from autoprec.floors import Trends, Verdict
from autoprec.formats import FP32, Format, format_named
from autoprec.graphs import Op, OpGraph, Role
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.plans import Plan
from autoprec.policies import Monitor
from autoprec.profiles import Profile, RangeHistogram, TensorProfile

__all__ = ["judge", "well_in"]

#: Octaves below the format's largest value in which a tensor must stay to count as well.
_HEADROOM_LOG2 = 2

#: A trend that reaches the largest value counts from so many octaves below it.
_NEAR_LOG2 = 6.0


class _Read(NamedTuple):
    """A tensor as a role of an op has it. `scale_log2`: of what was observed, in the op."""

    tensor: str
    what: str
    format: str
    scale_log2: int


def judge(
    plan: Plan,
    graph: OpGraph,
    window: Profile,
    limits: Monitor,
    *,
    before: Profile | None = None,
    trends: Trends | None = None,
) -> tuple[Verdict, ...]:
    """The first verdict of every op, in this order: overflow (non-finite, or beyond the format's largest value before
    the cast); growth (amax reaches that within the next window, by its trend over the last ones); saturation (within
    the top quarter octave of the format); underflow (below half of its smallest number, where that is the cast to it);
    noise (the rounding error in relation to the signal, against that of calibration, `before`)."""
    region = {op: r.scale_log2 for r in plan.regions for op in r.ops}
    judging = _Judging(window, limits, before, trends or Trends(), frozenset(plan.saturating))
    found = []
    for op in graph.ops:
        first: Verdict | None = None
        for read in _reads(op, plan, graph, region):
            verdict = judging.verdict(op, read)
            if verdict is not None and (first is None or _ORDER[verdict.trigger] < _ORDER[first.trigger]):
                first = verdict
        if first is not None:
            found.append(first)
    return tuple(found)


_ORDER = {name: i for i, name in enumerate(("overflow", "growth", "saturation", "underflow", "noise"))}


def _reads(op: Op, plan: Plan, graph: OpGraph, region: Mapping[str, int]) -> Iterator[_Read]:
    forward = plan.format_of.get((op.id, Role.OUTPUT))
    if forward is None:
        return
    backward = [f for r in (Role.GRAD_INPUT, Role.GRAD_WEIGHT) if (f := plan.format_of.get((op.id, r))) is not None]
    for t in dict.fromkeys((*op.outputs, *op.inputs)):
        if t.startswith("buffer:"):
            continue
        yield _Read(t, "value", forward, 0)
        inside = graph.producer.get(t) in region and plan.format_of.get((graph.producer[t], Role.OUTPUT)) == "fp16"
        scale_log2 = 0 if inside else region.get(op.id, 0)
        for f in dict.fromkeys(backward or [forward]):
            yield _Read(t, "gradient", f, scale_log2 if f == "fp16" else 0)


def well_in(op: Op, format_name: str, window: Profile, limits: Monitor, before: Profile | None) -> bool:
    """Whether all that the op reads and makes would be far from every limit in the format: two octaves below its
    largest value, with half the underflow that is allowed, and gradients no larger than in calibration (whose scale a
    new plan chooses)."""
    fmt, judging = format_named(format_name), _Judging(window, limits, before)
    seen = False
    for t in dict.fromkeys((*op.outputs, *op.inputs)):
        found = window.tensor_by_id.get(t)
        if found is not None and not t.startswith("buffer:"):
            seen = True
            if not judging.well(_Read(t, "value", format_name, 0), fmt, found):
                return False
    return seen


class _Judging(NamedTuple):
    window: Profile
    limits: Monitor
    before: Profile | None
    trends: Trends = Trends()
    by_design: frozenset[str] = frozenset()  # tensors whose casts saturate as they should

    def verdict(self, op: Op, read: _Read) -> Verdict | None:
        fmt = format_named(read.format)
        seen = self.window.tensor_by_id.get(read.tensor)
        found = None if seen is None else seen.values if read.what == "value" else seen.gradients
        if found is None:
            return None
        for trigger, evidence in self._problems(read, fmt, found):
            evidence = f"{read.what} of {read.tensor}: {evidence}"
            return Verdict(op=op.id, format=fmt.name, trigger=trigger, evidence=evidence)
        return None

    def well(self, read: _Read, fmt: Format, found: TensorProfile) -> bool:
        """See `well_in`."""
        if any(test(read, fmt, found.values, 0.5) is not None for test in (self.underflow, self.noise)):
            return False
        if self._new_nonfinite(read, found.values):
            return False
        if not _has_small_range(fmt):
            return True
        if found.values.amax > math.ldexp(fmt.max_value, -_HEADROOM_LOG2):
            return False
        if found.gradients is None or self.before is None:  # a plan without calibration has its scales from elsewhere
            return True
        known = self._known(read._replace(what="gradient"))
        return known is not None and found.gradients.amax <= 2.0 * known.amax

    def _new_nonfinite(self, read: _Read, found: RangeHistogram) -> float:
        """A mask's −inf was there in calibration."""
        known = self._known(read)
        return found.nonfinite if known is None or known.nonfinite == 0 else 0.0

    def _problems(self, read: _Read, fmt: Format, found: RangeHistogram) -> Iterable[tuple[str, str]]:
        if _has_small_range(fmt) and not (read.what == "value" and read.tensor in self.by_design):
            largest = math.ldexp(fmt.max_value, -read.scale_log2)
            yield from self._range(read, fmt, found, largest)
            if (text := self.underflow(read, fmt, found, 1.0)) is not None:
                yield "underflow", text
        if fmt.name != "fp32" and (text := self.noise(read, fmt, found, 1.0)) is not None:
            yield "noise", text

    def _range(self, read: _Read, fmt: Format, found: RangeHistogram, largest: float) -> Iterator[tuple[str, str]]:
        elements = max(found.elements, 1.0)
        told = f"amax {found.amax:.4g} against {largest:.6g} of {fmt.name}"
        if read.scale_log2:
            told += f" under the scale 2^{read.scale_log2}"
        if (read.what == "value" and self._new_nonfinite(read, found)) or found.amax > largest:
            overflow_frac = max(found.nonfinite, found.weight_above(largest)) / elements
            yield "overflow", f"{told}, overflow_frac {overflow_frac:.2g}"
        step = self.trends.log2_per_window(read.tensor, read.what)
        if step > 0.0 and found.amax > 0.0:
            room = math.log2(largest) - math.log2(found.amax)
            if room <= min(step, _NEAR_LOG2):
                yield "growth", f"{told}, and grows by {step:.2g} octaves a window"
        top = largest * 0.75
        saturation_frac = found.weight_above(top) / elements if found.amax > top else 0.0
        if saturation_frac > self.limits.saturation_frac:
            yield "saturation", f"saturation_frac {saturation_frac:.2g} above {self.limits.saturation_frac:g} ({told})"

    def underflow(self, read: _Read, fmt: Format, found: RangeHistogram, share: float) -> str | None:
        """More of a tensor is rounded to zero than is allowed, and more than twice as much as in calibration."""
        smallest = math.ldexp(1.0, fmt.min_normal_log2 - fmt.mantissa_bits - 1 - read.scale_log2)
        if fmt.scaled or found.elements <= 0.0:
            return None
        frac = found.weight_below(smallest) / found.elements
        limit = self.limits.underflow_frac * share
        known = self._known(read)
        usual = 0.0 if known is None or known.elements <= 0.0 else known.weight_below(smallest) / known.elements
        if frac <= max(limit, 2.0 * usual):
            return None
        return f"underflow_frac {frac:.2g} above {limit:g}, {usual:.2g} in calibration"

    def noise(self, read: _Read, fmt: Format, found: RangeHistogram, share: float) -> str | None:
        """The ratio of the signal to its rounding noise is worse than in calibration by more decibels than allowed."""
        known = self._known(read)
        if known is None or known.energy <= 0.0 or found.energy <= 0.0:
            return None
        now, usual = (_noise_db(h, fmt, read.scale_log2) for h in (found, known))
        drop, limit = now - usual, self.limits.sqnr_drop_db * share
        if drop <= limit:
            return None
        return f"SQNR {-now:.1f} dB in {fmt.name}, {drop:.1f} dB below calibration's, more than {limit:g}"

    def _known(self, read: _Read) -> RangeHistogram | None:
        known = None if self.before is None else self.before.tensor_by_id.get(read.tensor)
        return None if known is None else known.values if read.what == "value" else known.gradients


def _has_small_range(fmt: Format) -> bool:
    """Whether finite FP32 numbers leave the format: it has no scale, and fewer exponents."""
    return not fmt.scaled and fmt.max_value < FP32.max_value / 2.0


def _noise_db(found: RangeHistogram, fmt: Format, scale_log2: int) -> float:
    """10 log10 of the relative energy of rounding."""
    scale = current_scale_log2(fmt, found.amax) if fmt.scaled else scale_log2
    error = error_energy(found, fmt, scale) / found.energy
    return 10.0 * math.log10(min(max(error, 1e-30), 1.0))
