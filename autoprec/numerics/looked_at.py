"""Gradients that whoever made them has looked at: what is known to be finite nobody has to read again."""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.numerics import elements

__all__ = ["is_known", "widened"]

#: With more threads torch casts and looks as fast (docs/measurements/overhead.md).
_MOST_THREADS = 2

#: Squares of smaller numbers, as many as there may be (2^46), have a sum that FP32 holds.
_LARGEST = 2.0**40

_MARK = "_autoprec_finite"


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, which nobody else has, in `dtype`. FP32 of BF16 is looked at on the way, on a CPU with few threads."""
    wanted = x.dtype is torch.bfloat16 and dtype is torch.float32
    if not wanted or torch.get_num_threads() > _MOST_THREADS or not elements.serve(x):
        return x.to(dtype)
    made, largest = elements.widened(x)
    if largest < _LARGEST:  # not of NaN
        # On the memory itself: autograd makes another tensor of it. Who writes to it moves its version.
        setattr(made.untyped_storage(), _MARK, made._version)
    return made


def is_known(x: Tensor) -> bool:
    """Whether all numbers of `x`, and the sum of their squares, are finite in FP32 as far as is known without a look:
    it was made by `widened`, and nobody has changed it since."""
    return x.layout is torch.strided and getattr(x.untyped_storage(), _MARK, None) == x._version
