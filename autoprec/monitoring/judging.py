"""Which ops of a plan are unstable, and which were well in a format that they left, by the ranges of a window.

Judged before the cast where a wider tensor is read in a narrow format, and on the result where a tensor is born in one
(an overflow shows as a non-finite value there). Gradients inside an FP16 region carry its scale, those outside do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autoprec.floors import Rescaled, Trends, Verdict
from autoprec.formats import FP32, Format, format_named
from autoprec.graphs import Op, OpClass, OpGraph, Role
from autoprec.monitoring.scaling import LEAST_ROOM_LOG2, RegionScales, gradient_ranges, rescaled, usual_scales
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.planning.pricing import fp16_gradient_scale_log2
from autoprec.planning.regions import summed_in_fp16
from autoprec.plans import Plan, Region
from autoprec.policies import Monitor
from autoprec.profiles import Profile, RangeHistogram, TensorProfile

__all__ = ["Judge"]

#: Octaves below the format's largest value in which a tensor must stay to count as well.
_HEADROOM_LOG2 = 2

#: A trend that reaches the largest value counts from so many octaves below it.
_NEAR_LOG2 = 6.0


#: Of what was not zero in calibration, the share below which gradients look rounded to zero. Half, and not measured: it
#: is a reason to choose a scale by the same rule again, which changes nothing where the scale is the right one.
_STARVED = 0.5

#: Ops of a window whose figures are told.
_MOST_FIGURES = 64

_ORDER = {name: i for i, name in enumerate(("overflow", "growth", "saturation", "underflow", "noise"))}


class _Read(NamedTuple):
    """A tensor as a role of an op has it.

    Attributes:
        scale_log2: from what was observed to what the op has.
        usual_log2: from what calibration recorded, to what the op would have with the scale that suited that: with the
            one that it has, gradients that are lost now were lost then.
    """

    tensor: str
    what: str
    format: str
    scale_log2: int = 0
    usual_log2: int = 0


class Judge:
    """A window, under the plan that ran. `before`: what calibration recorded. `scaling`: the policy's mode of loss
    scaling. Where it is "global", gradients are not judged, because that scale grows until it overflows; where it is
    "regional", plans choose the scales of their FP16 regions."""

    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        window: Profile,
        limits: Monitor,
        *,
        before: Profile | None = None,
        trends: Trends | None = None,
        scaling: str = "regional",
    ) -> None:
        self.plan, self.graph, self.window, self.limits = plan, graph, window, limits
        self._before, self._trends, self._scaling = before, trends or Trends(), scaling
        self._scales = self._ran = RegionScales(plan, graph)
        self._usual = usual_scales(plan, graph, before)

    def verdicts(self) -> tuple[Verdict, ...]:
        """The first verdict of every op, in this order: overflow (newly not finite, or beyond the format's largest
        value before the cast); growth (amax reaches that within the next window, by its trend over the last ones);
        saturation (within the top quarter octave of the format); underflow (below half of its smallest number, where
        that is the cast to it); noise (the rounding error in relation to the signal, against that of calibration).

        In the order in which one may be the cause of the next: values as the step runs, then gradients as they arrive.
        """
        found = [min(self._of(op), key=lambda v: _ORDER[v.trigger], default=None) for op in self.graph.ops]
        values = [v for v in found if v is not None and v.role == Role.OUTPUT]
        return (*values, *(v for v in reversed(found) if v is not None and v.role != Role.OUTPUT))

    def with_better_scales(self, *, near_alone: bool = False) -> tuple[Judge, tuple[Rescaled, ...]]:
        """The same window, judged under the plan with new scales for the regions whose gradients have come near to
        FP16's largest value, or (unless `near_alone`) are judged unstable in it; and what that changes. The judge
        itself where no other scale suits them."""
        if self._scaling != "regional" or not self.plan.regions:
            return self, ()
        unstable = () if near_alone else (v for v in self.verdicts() if v.format == "fp16" and v.role != Role.OUTPUT)
        asked = [*unstable, *self._near(), *(() if near_alone else self._starved())]

        def first(region: Region) -> Verdict | None:
            return next((v for v in asked if v.op in region.ops), None)

        ranges = gradient_ranges(self.window, self._ran)
        for t in (t for t, amax in ranges.items() if amax == 0.0):  # of what nothing is left calibration knows the size
            known = self._known(_Read(t, "gradient", "fp16"))
            ranges[t] = 0.0 if known is None else known.amax
        plan = rescaled(self.plan, self.graph, ranges, lambda region: first(region) is not None)
        if plan is self.plan:
            return self, ()
        better = copy.copy(self)
        better.plan, better._scales = plan, RegionScales(plan, self.graph)
        pairs = ((first(was), was, now) for was, now in zip(self.plan.regions, plan.regions, strict=True) if was != now)
        return better, tuple(Rescaled(verdict=v, was=was, now=now) for v, was, now in pairs if v is not None)

    def _near(self) -> Iterator[Verdict]:
        """Gradients that have come too near to FP16's largest number, in the order in which they arrive."""
        for op in reversed(self.graph.ops):
            for read in self._reads(op):
                if read.what == "gradient" and read.format == "fp16" and self._room_log2(read) < LEAST_ROOM_LOG2:
                    nearness = 2.0 ** -self._room_log2(read)
                    told = f"gradient of {read.tensor}: amax is {nearness:.2g} of fp16's largest number"
                    yield Verdict(op=op.id, format="fp16", trigger="range", evidence=told, role=Role.GRAD_INPUT)

    def _starved(self) -> Iterator[Verdict]:
        """Gradients that FP16 made, of which most that calibration saw are exactly zero: too small a scale may have
        rounded them to that, which nobody can tell from the outside. A reason for a scale that suits what is left."""
        for op in self.graph.ops:
            for read in self._reads(op):
                if read.what != "gradient" or read.format != "fp16" or not self._ran.is_made_in_fp16(read.tensor):
                    continue
                known, seen = self._known(read), self._seen(read)
                if known is None or known.elements <= 0.0 or seen.elements <= 0.0:
                    continue
                usual, now = (1.0 - h.zeros / h.elements for h in (known, seen))
                if now < _STARVED * usual:
                    told = f"gradient of {read.tensor}: {1.0 - now:.2g} of it is zero, {1.0 - usual:.2g} in calibration"
                    yield Verdict(op=op.id, format="fp16", trigger="underflow", evidence=told, role=Role.GRAD_INPUT)

    def incidents(self) -> tuple[Verdict, ...]:
        """Ops whose result is zero throughout, which it was not in calibration, though something that they read is
        not: no format is to blame."""
        found = []
        for op in self.graph.ops:
            for t in op.outputs:
                if not self._is_dead(t) or not any(self._is_alive(u) for u in op.inputs):
                    continue
                known = self._known(_Read(t, "value", "fp32"))
                told = f"value of {t}: zero in a whole window, up to {0.0 if known is None else known.amax:.4g} before"
                found.append(Verdict(op=op.id, format="", trigger="zero", evidence=told))
        return tuple(found)

    def _is_dead(self, t: str) -> bool:
        seen, known = self.window.tensor_by_id.get(t), self._known(_Read(t, "value", "fp32"))
        if seen is None or known is None or known.amax == 0.0:
            return False
        return seen.values.elements > 0.0 and seen.values.amax == 0.0 and not seen.values.nonfinite

    def _is_alive(self, t: str) -> bool:
        """An activation, or an input of the model, that was seen and is not zero throughout; of a view, its base."""
        seen = self.window.tensor_by_id.get(self._observed(t))
        return seen is not None and not t.startswith(("param:", "buffer:")) and seen.values.amax > 0.0

    def figures(self) -> tuple[dict[str, str], ...]:
        """Fields of a line for each op in a format of 16 bits or less, those nearest to its largest value first: of its
        result, or of the gradient that arrives there where that is nearer."""
        found = []
        for op in self.graph.ops:
            reads = [r for r in self._reads(op) if r.tensor in op.outputs and r.format not in ("fp32", "tf32")]
            told = [(self._room_log2(read), read) for read in reads]
            if told:
                room, read = min(told, key=lambda pair: pair[0])
                found.append((room, self._figures_of(op, read)))
        return tuple(fields for _, fields in sorted(found, key=lambda pair: pair[0])[:_MOST_FIGURES])

    def _room_log2(self, read: _Read) -> float:
        """Octaves between the largest number and the format's; of a format whose scale follows the numbers, many."""
        fmt, amax = format_named(read.format), self._seen(read).amax
        if fmt.scaled or amax == 0.0:
            return 1000.0
        return math.log2(fmt.max_value) - read.scale_log2 - math.log2(amax)

    def _figures_of(self, op: Op, read: _Read) -> dict[str, str]:
        fmt, seen = format_named(read.format), self._seen(read)
        scale = current_scale_log2(fmt, seen.amax) if fmt.scaled else read.scale_log2
        largest, elements = math.ldexp(fmt.max_value, -scale), max(seen.elements, 1.0)
        smallest = math.ldexp(1.0, fmt.min_normal_log2 - fmt.mantissa_bits - 1 - scale)
        over = 0.0 if fmt.scaled else max(seen.nonfinite, seen.weight_above(largest)) / elements
        top = 0.0 if fmt.scaled else seen.weight_above(0.75 * largest) / elements
        parts = {
            "amax": seen.amax,
            "largest": largest,
            "overflow_frac": over,
            "saturation_frac": top,
            "underflow_frac": seen.weight_below(smallest) / elements,
        }
        role = Role.OUTPUT if read.what == "value" else Role.GRAD_INPUT
        evidence = " ".join(f"{name}={value:.4g}" for name, value in parts.items())
        return {"op": op.id, "role": str(role), "now": read.format, "evidence": evidence}

    def _seen(self, read: _Read) -> RangeHistogram:
        seen = self.window.tensor_by_id[read.tensor]
        found = seen.values if read.what == "value" else seen.gradients
        assert found is not None
        return found

    def is_well(self, op_id: str, format_name: str) -> bool:
        """Whether all that the op reads and makes would be far from every limit in the format: two octaves below its
        largest value, with half of what is allowed to be lost; gradients under the scale that a new plan chooses for
        them. Not, if nobody looked."""
        op, fmt, seen = self.graph.op_by_id.get(op_id), format_named(format_name), False
        for t in () if op is None else self._tensors(op):
            found = self.window.tensor_by_id[t]
            seen = True
            if not self._well(t, fmt, found):
                return False
        return seen

    def _tensors(self, op: Op) -> Iterator[str]:
        """What it makes and reads, as far as it was observed: of a view, what it is a view of."""
        for t in dict.fromkeys(map(self._observed, (*op.outputs, *op.inputs))):
            if t in self.window.tensor_by_id and not t.startswith("buffer:"):
                yield t

    def _observed(self, t: str) -> str:
        """The tensor, or what it is a view of, as far as nobody looked at it."""
        return self.graph.seen_as(t, self.window.tensor_by_id)

    def _of(self, op: Op) -> Iterator[Verdict]:
        for read in self._reads(op):
            yield from self._verdict(op, read)

    def _reads(self, op: Op) -> Iterator[_Read]:
        """Every value and gradient at the op that was observed, in the formats in which its roles have them."""
        forward = self.plan.format_of.get((op.id, Role.OUTPUT))
        if forward is None:
            return
        of_gradients = [self.plan.format_of.get((op.id, r)) for r in (Role.GRAD_INPUT, Role.GRAD_WEIGHT)]
        # A result in 16 bits has its gradient in them as well, whatever the products of the backward pass read it in.
        born = forward if forward in ("fp16", "bf16") or not any(of_gradients) else None
        backward = dict.fromkeys(f for f in (born, *of_gradients) if f is not None)
        summed = summed_in_fp16(op, self.graph, self.plan.format_of)
        for t in self._tensors(op):
            is_parameter = t.startswith("param:")
            if op.op_class is OpClass.GEMM or not is_parameter:  # norms and lookups have their parameters in FP32
                yield _Read(t, "value", forward)
            if self._scaling == "global" or self.window.tensor_by_id[t].gradients is None:
                continue
            carried = self._ran.carried(t)
            # Most gradients of parameters are made with FP32 sums, without the region's scale.
            for f in (("fp16",) if t in summed else ()) if is_parameter else backward:
                own, usual = (s.of(op.id) if f == "fp16" else 0 for s in (self._scales, self._usual))
                yield _Read(t, "gradient", f, own - carried, usual)

    def _verdict(self, op: Op, read: _Read) -> Iterator[Verdict]:
        for trigger, evidence in self._problems(read, format_named(read.format), self._seen(read)):
            evidence = f"{read.what} of {read.tensor}: {evidence}"
            role = Role.OUTPUT if read.what == "value" else Role.GRAD_INPUT
            yield Verdict(op=op.id, format=read.format, trigger=trigger, evidence=evidence, role=role)

    def _well(self, t: str, fmt: Format, found: TensorProfile) -> bool:
        read = _Read(t, "value", fmt.name)
        lost = (test(read, fmt, found.values, 0.5) for test in (self._underflow, self._noise))
        if any(text is not None for text in lost) or self._new_nonfinite(read, found.values):
            return False
        if not _has_small_range(fmt):
            return True
        if found.values.amax > math.ldexp(fmt.max_value, -_HEADROOM_LOG2):
            return False
        if found.gradients is None or self._scaling == "global":
            return True
        carried = self._ran.carried(t)
        amax = math.ldexp(found.gradients.amax, -carried)
        scale = fp16_gradient_scale_log2(amax) if self._scaling == "regional" else 0
        known = self._known(_Read(t, "gradient", fmt.name))
        usual = fp16_gradient_scale_log2(known.amax) if self._scaling == "regional" and known is not None else 0
        read = _Read(t, "gradient", fmt.name, scale - carried, usual)
        lost = (test(read, fmt, found.gradients, 0.5) for test in (self._underflow, self._noise))
        return amax <= math.ldexp(fmt.max_value, -scale - _HEADROOM_LOG2) and not any(lost)

    def _new_nonfinite(self, read: _Read, found: RangeHistogram) -> float:
        """A mask's −inf was there in calibration."""
        known = self._known(read)
        return found.nonfinite if known is None or known.nonfinite == 0 else 0.0

    def _problems(self, read: _Read, fmt: Format, found: RangeHistogram) -> Iterable[tuple[str, str]]:
        if _has_small_range(fmt) and not (read.what == "value" and read.tensor in self.plan.saturating):
            largest = math.ldexp(fmt.max_value, -read.scale_log2)
            yield from self._range(read, fmt, found, largest)
            if (text := self._underflow(read, fmt, found, 1.0)) is not None:
                yield "underflow", text
        if fmt.name != "fp32" and (text := self._noise(read, fmt, found, 1.0)) is not None:
            yield "noise", text

    def _range(self, read: _Read, fmt: Format, found: RangeHistogram, largest: float) -> Iterator[tuple[str, str]]:
        elements = max(found.elements, 1.0)
        told = f"amax {found.amax:.4g} against {largest:.6g} of {fmt.name}"
        if read.scale_log2:
            told += f" under the scale 2^{read.scale_log2}"
        if (read.what == "value" and self._new_nonfinite(read, found)) or found.amax > largest:
            overflow_frac = max(found.nonfinite, found.weight_above(largest)) / elements
            yield "overflow", f"{told}, overflow_frac {overflow_frac:.2g}"
        step = self._trends.log2_per_window(read.tensor, read.what)
        if step > 0.0 and found.amax > 0.0:
            room = math.log2(largest) - math.log2(found.amax)
            if room <= min(step, _NEAR_LOG2):
                yield "growth", f"{told}, and grows by {step:.2g} octaves a window"
        top = largest * 0.75
        saturation_frac = found.weight_above(top) / elements if found.amax > top else 0.0
        if saturation_frac > self.limits.saturation_frac:
            yield "saturation", f"saturation_frac {saturation_frac:.2g} above {self.limits.saturation_frac:g} ({told})"

    def _underflow(self, read: _Read, fmt: Format, found: RangeHistogram, share: float) -> str | None:
        """More of a tensor is rounded to zero than is allowed, and more than twice as much as in calibration."""
        smallest = math.ldexp(1.0, fmt.min_normal_log2 - fmt.mantissa_bits - 1 - read.scale_log2)
        if fmt.scaled or found.elements <= 0.0:
            return None
        frac = found.weight_below(smallest) / found.elements
        limit = self.limits.underflow_frac * share
        known = self._known(read)
        least = math.ldexp(smallest, read.scale_log2 - read.usual_log2)
        usual = 0.0 if known is None or known.elements <= 0.0 else known.weight_below(least) / known.elements
        if frac <= max(limit, 2.0 * usual):
            return None
        return f"underflow_frac {frac:.2g} above {limit:g}, {usual:.2g} in calibration"

    def _noise(self, read: _Read, fmt: Format, found: RangeHistogram, share: float) -> str | None:
        """The ratio of the signal to its rounding noise is worse than in calibration by more decibels than allowed."""
        known = self._known(read)
        if known is None or known.energy <= 0.0 or found.energy <= 0.0:
            return None
        now = _noise_db(found, fmt, read.scale_log2)
        usual = _noise_db(known, fmt, read.usual_log2)
        drop, limit = now - usual, self.limits.sqnr_drop_db * share
        if drop <= limit:
            return None
        return f"SQNR {-now:.1f} dB in {fmt.name}, {drop:.1f} dB below calibration's, more than {limit:g}"

    def _known(self, read: _Read) -> RangeHistogram | None:
        known = None if self._before is None else self._before.tensor_by_id.get(read.tensor)
        return None if known is None else known.values if read.what == "value" else known.gradients


def _has_small_range(fmt: Format) -> bool:
    """Whether finite FP32 numbers leave the format: it has no scale, and fewer exponents."""
    return not fmt.scaled and fmt.max_value < FP32.max_value / 2.0


def _noise_db(found: RangeHistogram, fmt: Format, scale_log2: int) -> float:
    """10 log10 of the relative energy of rounding."""
    scale = current_scale_log2(fmt, found.amax) if fmt.scaled else scale_log2
    error = error_energy(found, fmt, scale) / found.energy
    return 10.0 * math.log10(min(max(error, 1e-30), 1.0))
