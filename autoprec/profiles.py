"""What calibration and monitoring record: histograms, tensor and weight profiles, `Profile`.

A histogram bin is `bits(|x|) >> 21` of the float32 pattern: the exponent and two mantissa bits, 1024 quarter-octave
bins. Two mantissa bits are needed so that 448 = 1.75·2⁸ and 57344 = 1.75·2¹⁵ are bin edges. Bin 0…3 hold zeros and
float32 subnormals. Histograms add: across micro-batches, steps, ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from autoprec.checks import check_amount, check_unique
from autoprec.errors import ProfileError

__all__ = [
    "BINS",
    "LossProfile",
    "Profile",
    "RangeHistogram",
    "TensorProfile",
    "WeightProfile",
    "bin_lower_edges",
]

BINS = 1024

_PER_OCTAVE = 4

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def bin_lower_edges(bins: IntArray) -> Float64Array:
    """Lower edge |x| of each bin: the float32 whose pattern is `bin << 21`."""
    edges = (bins.astype(np.uint32) << np.uint32(21)).view(np.float32)
    return edges.astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeHistogram:
    """Weighted moments of |x| per quarter-octave bin; only occupied bins are kept.

    Attributes:
        bins: occupied bin numbers, ascending, int64, shape (n,).
        moments: Σw, Σw·|x|, Σw·x² per bin, float64, shape (n, 3), read-only. Finite elements only.
        amax: largest finite |x| seen, sampled or not (0.0 if none).
        nonfinite: number of inf or NaN elements seen.
        elements: number of elements that the moments stand for (sampling scaled up).
    """

    bins: IntArray
    moments: Float64Array
    amax: float
    nonfinite: float = 0.0
    elements: float = 0.0

    def __post_init__(self) -> None:
        if self.bins.ndim != 1 or self.moments.shape != (self.bins.size, 3):
            raise ProfileError(
                f"histogram: bins {self.bins.shape} and moments {self.moments.shape} must be (n,) and (n, 3)"
            )
        bins = self.bins
        if bins.size and (bins[0] < 0 or bins[-1] >= BINS or not (bins[1:] > bins[:-1]).all()):
            raise ProfileError(f"histogram: bins must ascend within 0..{BINS - 1}")
        if not np.isfinite(self.moments).all():
            raise ProfileError("histogram: moments must be finite")
        self.bins.flags.writeable = False
        self.moments.flags.writeable = False

    @classmethod
    def from_dense(
        cls, dense: Float64Array, *, first: int = 0, amax: float, nonfinite: float = 0.0, elements: float
    ) -> Self:
        """From the (n, 3) moments of n bins in a row, of which `first` is the first."""
        rows = np.flatnonzero(dense.any(axis=1)).astype(np.int64)
        return cls(bins=rows + first, moments=dense[rows], amax=amax, nonfinite=nonfinite, elements=elements)

    @classmethod
    def empty(cls) -> Self:
        """The neutral element of `merge`."""
        return cls(bins=np.zeros(0, np.int64), moments=np.zeros((0, 3)), amax=0.0)

    def merge(self, other: RangeHistogram) -> RangeHistogram:
        """The histogram of both sets of elements together."""
        there = [h for h in (self, other) if h.bins.size]
        first = min((int(h.bins[0]) for h in there), default=0)
        dense = np.zeros((max((int(h.bins[-1]) + 1 for h in there), default=first) - first, 3))
        for h in there:
            dense[h.bins - first] += h.moments
        return RangeHistogram.from_dense(
            dense,
            first=first,
            amax=max(self.amax, other.amax),
            nonfinite=self.nonfinite + other.nonfinite,
            elements=self.elements + other.elements,
        )

    def shifted(self, log2: int) -> RangeHistogram:
        """Of the same elements times 2^log2. Zeros stay where they are, and float32 subnormals."""
        factor = np.array([1.0, math.ldexp(1.0, log2), math.ldexp(1.0, 2 * log2)])
        moved = np.where(
            self.bins < _PER_OCTAVE, self.bins, np.clip(self.bins + _PER_OCTAVE * log2, _PER_OCTAVE, BINS - 1)
        )
        dense = np.zeros((BINS, 3))
        np.add.at(dense, moved, self.moments * factor)
        return RangeHistogram.from_dense(
            dense, amax=math.ldexp(self.amax, log2), nonfinite=self.nonfinite, elements=self.elements
        )

    def scaled(self, factor: float) -> RangeHistogram:
        """The same with every weight multiplied by `factor` ≥ 0."""
        return RangeHistogram(
            bins=self.bins,
            moments=self.moments * factor,
            amax=self.amax,
            nonfinite=self.nonfinite,
            elements=self.elements,
        )

    @property
    def total_weight(self) -> float:
        """Σw."""
        return float(self.moments[:, 0].sum())

    @property
    def energy(self) -> float:
        """Σw·x²."""
        return float(self.moments[:, 2].sum())

    def weight_above(self, limit: float) -> float:
        """Σw over |x| > limit (the bin that holds `limit` counts unless `limit` is within its lower edge)."""
        edges = bin_lower_edges(self.bins)
        return float(self.moments[edges >= limit, 0].sum()) if self.amax > limit else 0.0

    @property
    def zeros(self) -> float:
        """Σw over exact zeros, and over the bin that has them, where anything else is in it."""
        return float(self.moments[self.bins == 0, 0].sum())

    def weight_below(self, limit: float) -> float:
        """Σw over 0 < |x| < limit, bins wholly below `limit`; exact zeros are not counted."""
        upper = bin_lower_edges(self.bins + 1)
        keep = (upper <= limit) & (self.moments[:, 1] > 0)
        return float(self.moments[keep, 0].sum())


def _merged(a: RangeHistogram | None, b: RangeHistogram | None) -> RangeHistogram | None:
    if a is None or b is None:
        return a if b is None else b
    return a.merge(b)


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorProfile:
    """Ranges of one tensor and of its gradient; a histogram is None where it was not observed.

    Sums run over `steps` of the profile; divide by it for a per-step mean.

    Attributes:
        id: tensor id of the graph.
        values: weight 1 over x.
        loss: weight g² over x, g = ∂L/∂x (relative to the gradient entering the graph's outputs).
        gradients: weight 1 over g.
        input_weight_grad: if this is the output of a GEMM with a weight: over the elements x of that GEMM's *input*,
            weight ‖g_row‖², the squared norm of the output-gradient row(s) that meet x in the weight gradient.
        gradient_weight_grad: if this is the output of a GEMM with a weight: weight ‖x_row‖² over its gradient g.
    """

    id: str
    values: RangeHistogram
    loss: RangeHistogram | None = None
    gradients: RangeHistogram | None = None
    input_weight_grad: RangeHistogram | None = None
    gradient_weight_grad: RangeHistogram | None = None

    def merge(self, other: TensorProfile) -> TensorProfile:
        """Profiles of the same tensor over both sets of steps."""
        if self.id != other.id:
            raise ProfileError(f"cannot merge the profiles of tensors {self.id!r} and {other.id!r}")
        return TensorProfile(
            id=self.id,
            values=self.values.merge(other.values),
            loss=_merged(self.loss, other.loss),
            gradients=_merged(self.gradients, other.gradients),
            input_weight_grad=_merged(self.input_weight_grad, other.input_weight_grad),
            gradient_weight_grad=_merged(self.gradient_weight_grad, other.gradient_weight_grad),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightProfile:
    """First and second moments of one parameter's gradient over steps, on a sample of its elements.

    Attributes:
        fqn: the parameter.
        grad_sum: Σ over steps of ∇W at the sampled elements, float64, shape (k,), read-only.
        grad_square_sum: Σ over steps of the sampled ‖∇W‖².
        fraction: sampled elements / all elements, to scale up.
        steps: number of gradients seen.
    """

    fqn: str
    grad_sum: Float64Array
    grad_square_sum: float
    fraction: float
    steps: int

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ProfileError(f"weight {self.fqn}: sampled fraction {self.fraction} is outside (0, 1]")
        self.grad_sum.flags.writeable = False

    def merge(self, other: WeightProfile) -> WeightProfile:
        """Moments over both sets of steps."""
        if self.fqn != other.fqn or self.grad_sum.shape != other.grad_sum.shape:
            raise ProfileError(f"cannot merge the profiles of weights {self.fqn!r} and {other.fqn!r}")
        return WeightProfile(
            fqn=self.fqn,
            grad_sum=self.grad_sum + other.grad_sum,
            grad_square_sum=self.grad_square_sum + other.grad_square_sum,
            fraction=self.fraction,
            steps=self.steps + other.steps,
        )

    @property
    def energy(self) -> float:
        """E‖∇W‖² per step, over all elements."""
        return self.grad_square_sum / self.steps / self.fraction

    @property
    def spread(self) -> float:
        """E‖∇W − mean‖² per step, over all elements: (Σ‖g‖² − ‖Σg‖²/n)/(n−1); 0.0 for one step."""
        if self.steps < 2:
            return 0.0
        centred = self.grad_square_sum - float(self.grad_sum @ self.grad_sum) / self.steps
        return max(centred, 0.0) / (self.steps - 1) / self.fraction


@dataclass(frozen=True, kw_only=True)
class LossProfile:
    """Moments of the loss over steps, where it is visible."""

    steps: int
    total: float
    square_total: float

    def merge(self, other: LossProfile) -> LossProfile:
        """Moments over both sets of steps."""
        return LossProfile(
            steps=self.steps + other.steps,
            total=self.total + other.total,
            square_total=self.square_total + other.square_total,
        )

    @property
    def mean(self) -> float:
        """Mean loss."""
        return self.total / self.steps

    @property
    def spread(self) -> float:
        """Standard deviation of the loss over steps (n − 1); 0.0 for one step."""
        if self.steps < 2:
            return 0.0
        centred = self.square_total - self.total**2 / self.steps
        return float(np.sqrt(max(centred, 0.0) / (self.steps - 1)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Everything that calibration or a monitoring window recorded. `merge` is a commutative monoid.

    Attributes:
        graph_fingerprint: of the `OpGraph` that was observed.
        steps: observed training steps; histogram sums divided by it are per-step means.
        tensors, weights: one entry per observed tensor / parameter, by id.
        loss: None where the loss is not visible.
    """

    graph_fingerprint: str
    steps: int
    tensors: tuple[TensorProfile, ...]
    weights: tuple[WeightProfile, ...] = ()
    loss: LossProfile | None = None

    def __post_init__(self) -> None:
        check_amount(self.steps, "profile: steps", ProfileError, "steps")
        check_unique([t.id for t in self.tensors], "profile: the tensor", ProfileError, "tensors")
        check_unique([w.fqn for w in self.weights], "profile: the weight", ProfileError, "weights")

    @cached_property
    def tensor_by_id(self) -> dict[str, TensorProfile]:
        """Tensor profiles by tensor id."""
        return {t.id: t for t in self.tensors}

    @cached_property
    def weight_by_fqn(self) -> dict[str, WeightProfile]:
        """Weight profiles by parameter FQN."""
        return {w.fqn: w for w in self.weights}

    def merge(self, other: Profile) -> Profile:
        """The profile of both sets of steps; entries seen in one only are kept."""
        if self.graph_fingerprint != other.graph_fingerprint:
            raise ProfileError(
                f"cannot merge profiles of different graphs ({self.graph_fingerprint} and {other.graph_fingerprint})"
            )
        tensors = dict(self.tensor_by_id)
        for t in other.tensors:
            tensors[t.id] = tensors[t.id].merge(t) if t.id in tensors else t
        weights = dict(self.weight_by_fqn)
        for w in other.weights:
            weights[w.fqn] = weights[w.fqn].merge(w) if w.fqn in weights else w
        loss = self.loss
        if other.loss is not None:
            loss = other.loss if loss is None else loss.merge(other.loss)
        return Profile(
            graph_fingerprint=self.graph_fingerprint,
            steps=self.steps + other.steps,
            tensors=tuple(tensors[k] for k in sorted(tensors)),
            weights=tuple(weights[k] for k in sorted(weights)),
            loss=loss,
        )
