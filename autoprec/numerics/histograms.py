"""From a tensor to a `RangeHistogram`.

A sample of at most `SAMPLE_LIMIT` elements is taken with a fixed stride that shares no factor with the tensor's sizes,
so that it visits every channel; smaller tensors are exact. Weights of a sample are scaled up to the whole tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoprec.numerics.packing import amax_of
from autoprec.profiles import BINS, RangeHistogram

__all__ = ["SAMPLE_LIMIT", "Sample", "histogram", "sample", "stride_for", "thinned"]

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
    flat = x.detach().reshape(-1)
    stride = stride_for(x.shape, limit)
    if flat.numel() == 0:
        return Sample(flat.float(), 1, 0, 0.0, 0.0)
    amax = float(amax_of(flat))
    nonfinite = 0.0
    if not math.isfinite(amax):
        finite = flat.isfinite()
        nonfinite = float(flat.numel() - int(finite.sum()))
        kept = flat[finite]
        amax = float(kept.abs().max()) if kept.numel() else 0.0
    return Sample(flat[::stride].float().abs(), stride, flat.numel(), amax, nonfinite)


def histogram(taken: Sample, weights: Tensor | None = None) -> RangeHistogram:
    """The histogram of a sample, weighted by `weights` (k,) ≥ 0 (ones if None); non-finite entries are left out."""
    magnitudes = taken.magnitudes
    k = magnitudes.numel()
    if k == 0:
        return RangeHistogram.empty()
    if weights is None and not taken.nonfinite:
        return _counted(taken)
    x = magnitudes.double()
    w = torch.ones_like(x) if weights is None else weights.double()
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


def _counted(taken: Sample) -> RangeHistogram:
    """Without weights, of finite elements: by numpy, over the bins that there are; a third of the time."""
    x = taken.magnitudes.cpu().numpy()
    bins = x.view(np.int32) >> 21
    first = int(bins.min())
    bins = bins - first
    wide = x.astype(np.float64)
    sums = np.stack([np.bincount(bins), np.bincount(bins, wide), np.bincount(bins, wide * wide)], axis=1)
    there = np.flatnonzero(sums[:, 0])
    return RangeHistogram(
        bins=there + first,
        moments=np.ascontiguousarray(sums[there]) * (taken.numel / x.size),
        amax=taken.amax,
        elements=float(taken.numel),
    )
