"""From a tensor to a `RangeHistogram`.

A sample of at most `SAMPLE_LIMIT` elements is taken with a fixed stride that shares no factor with the tensor's sizes,
so that it visits every channel; smaller tensors are exact. Weights of a sample are scaled up to the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoprec.numerics.packing import largest_of
from autoprec.profiles import BINS, RangeHistogram

__all__ = ["SAMPLE_LIMIT", "Reading", "Sample", "histogram", "histograms", "reading", "sample", "stride_for", "thinned"]

#: Elements beyond which a tensor is sampled in calibration: the size from which the design samples.
SAMPLE_LIMIT = 1 << 16


class Sample(NamedTuple):
    """What is kept of a tensor until its gradient arrives: copied when seen, because in-place ops change it later.

    magnitudes (k,) float32: every `stride`-th element of the flattened tensor; numel, amax and nonfinite of the whole.
    """

    magnitudes: Tensor
    stride: int
    numel: int
    amax: float
    nonfinite: float

    def pick(self, other: Tensor) -> Tensor:
        """The sampled elements of a tensor of the same shape."""
        return other.reshape(-1)[:: self.stride]

    def rows(self, row_length: int) -> Tensor:
        """For every sampled element, the number of its row of `row_length` elements."""
        return torch.arange(0, self.numel, self.stride, device=self.magnitudes.device) // row_length


class Reading(NamedTuple):
    """A sample without weights.

    magnitudes (k,) float32, of elements evenly far apart in memory; numel of the whole; extremes: the largest finite
    magnitude of the whole, and how many elements of it are not finite: two numbers, or (2,) float64 on a device that
    the host need not wait for yet. There it may be (1,) as well: the largest magnitude, not finite where one is not.
    """

    magnitudes: Tensor
    numel: int
    extremes: Tensor | tuple[float, float]


def stride_for(shape: torch.Size, limit: int) -> int:
    """Smallest stride that leaves at most `limit` elements and is coprime to every size above 1."""
    numel = shape.numel()
    if numel <= limit:
        return 1
    stride = -(-numel // limit)
    while any(math.gcd(stride, size) > 1 for size in shape if size > 1):
        stride += 1
    return stride


def thinned(taken: Sample, x: Tensor, limit: int) -> Sample:
    """A sample of fewer elements of the same tensor; amax and nonfinite stay those of the whole."""
    stride = stride_for(x.shape, limit)
    if stride == taken.stride:
        return taken
    return taken._replace(magnitudes=x.detach().reshape(-1)[::stride].float().abs(), stride=stride)


def sample(x: Tensor, limit: int = SAMPLE_LIMIT) -> Sample:
    """Sample |x| for later weighting; the amax and the count of non-finite elements are of all of x."""
    flat, stride = x.detach().reshape(-1), stride_for(x.shape, limit)
    amax, nonfinite = largest_of(flat), 0.0
    if not math.isfinite(amax):
        amax, nonfinite = _extremes(flat).tolist()
    return Sample(flat[::stride].float().abs(), stride, flat.numel(), amax, nonfinite)


def reading(x: Tensor, limit: int = SAMPLE_LIMIT, *, masked: bool = False) -> Reading:
    """Sample |x|; a device is not waited for. `masked`: elements that are not finite are expected, and the largest
    magnitude of the others is asked for at once: six passes over x on a device, where one is enough for all others."""
    lies = _as_it_lies(x.detach())
    flat, numel = lies.reshape(-1), x.numel()
    magnitudes = flat[:: stride_for(lies.shape, limit)].float().abs()
    if numel == 0:
        return Reading(magnitudes, 0, (0.0, 0.0))
    if flat.is_cpu:
        amax = largest_of(flat)
        if math.isfinite(amax):
            return Reading(magnitudes, numel, (amax, 0.0))
    elif not masked:
        low, high = torch.aminmax(flat)
        return Reading(magnitudes, numel, torch.maximum(-low, high).double().reshape(1))
    times = torch.tensor([1.0, numel / flat.numel()], dtype=torch.float64, device=flat.device)
    return Reading(magnitudes, numel, _extremes(flat) * times)


def _extremes(flat: Tensor) -> Tensor:
    """The largest finite magnitude, and how many elements are not finite: (2,) float64."""
    finite = flat.isfinite()
    return torch.stack([torch.where(finite, flat, 0.0).abs().amax().double(), (~finite).sum().double()])


def _as_it_lies(x: Tensor) -> Tensor:
    """The numbers of x, each as often as any other, in the order in which they lie in memory: what is transposed or
    expanded need not be copied to be read in one piece."""
    if x.is_contiguous() or x.layout is not torch.strided or x.numel() == 0:
        return x
    y = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return y[tuple(slice(1) if step == 0 else slice(None) for step in y.stride())]


def histograms(readings: Sequence[Reading]) -> list[RangeHistogram]:
    """The histogram of each. A device is waited for twice, however many there are."""
    if not readings:
        return []
    sizes = np.array([r.magnitudes.numel() for r in readings])
    x = torch.cat(_in_one_place([r.magnitudes for r in readings])).cpu().numpy()
    parts = np.split(x, np.cumsum(sizes)[:-1])
    extremes = [
        known if math.isfinite(known[0]) else _extremes_of_sample(r.numel, part)
        for r, part, known in zip(readings, parts, _arrived(readings), strict=True)
    ]
    places = x.view(np.int32) >> 21
    places += np.repeat(np.arange(len(readings), dtype=np.int32) * BINS, sizes)
    if not (finite := np.isfinite(x)).all():
        x, places = x[finite], places[finite]
    wide = x.astype(np.float64)
    sums = np.stack([np.bincount(places), np.bincount(places, wide), np.bincount(places, wide * wide)], axis=1)
    there = np.flatnonzero(sums[:, 0])
    sums = sums[there]
    ends = np.searchsorted(there, np.arange(1, len(readings)) * BINS)
    return [
        RangeHistogram(
            bins=bins - i * BINS,
            moments=moments * (r.numel / max(size, 1)),
            amax=amax,
            nonfinite=nonfinite,
            elements=float(r.numel),
        )
        for i, (r, size, bins, moments, (amax, nonfinite)) in enumerate(
            zip(readings, sizes.tolist(), np.split(there, ends), np.split(sums, ends), extremes, strict=True)
        )
    ]


def _arrived(readings: Sequence[Reading]) -> list[tuple[float, float]]:
    """The extremes of each, of which the largest may be not finite."""
    waiting = {i: r.extremes for i, r in enumerate(readings) if isinstance(r.extremes, Tensor)}
    read = iter(torch.cat(_in_one_place(list(waiting.values()))).tolist() if waiting else [])
    late = {i: (next(read), next(read) if len(extremes) == 2 else 0.0) for i, extremes in waiting.items()}
    return [r.extremes if isinstance(r.extremes, tuple) else late[i] for i, r in enumerate(readings)]


def _extremes_of_sample(numel: int, magnitudes: np.ndarray) -> tuple[float, float]:
    """Of a tensor of which nobody expected that some elements are not finite, as its sample has it."""
    finite = magnitudes[np.isfinite(magnitudes)]
    nonfinite = (magnitudes.size - finite.size) * (numel / magnitudes.size)
    return float(finite.max(initial=0.0)), max(nonfinite, 1.0)


def _in_one_place(parts: list[Tensor]) -> list[Tensor]:
    return parts if len({p.device for p in parts}) == 1 else [p.cpu() for p in parts]


def histogram(taken: Sample, weights: Tensor | None = None) -> RangeHistogram:
    """The histogram of a sample, weighted by `weights` (k,) ≥ 0 (ones if None); non-finite entries are left out."""
    magnitudes = taken.magnitudes
    k = magnitudes.numel()
    if k == 0:
        return RangeHistogram.empty()
    if weights is None:
        return histograms([Reading(magnitudes, taken.numel, (taken.amax, taken.nonfinite))])[0]
    x, w = magnitudes.double(), weights.double()
    bad = ~(x.isfinite() & w.isfinite())
    if bool(bad.any()):
        x, w = torch.where(bad, 0.0, x), torch.where(bad, 0.0, w)
        magnitudes = torch.where(bad, 0.0, magnitudes)
    bins = (magnitudes.view(torch.int32) >> 21).long()
    w = w * (taken.numel / k)
    wx = w * x
    dense = torch.stack([torch.bincount(bins, m, minlength=BINS) for m in (w, wx, wx * x)], dim=1)
    return RangeHistogram.from_dense(
        np.ascontiguousarray(dense.cpu().numpy()),
        amax=taken.amax,
        nonfinite=taken.nonfinite,
        elements=float(taken.numel),
    )
