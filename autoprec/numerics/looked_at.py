"""Gradients of parameters that whoever made them has looked at: what is known to be finite nobody has to read again.

A gradient in BF16 is cast to FP32 as fast with a look as without one, on a CPU with few threads. What was seen is kept
for one backward pass: by parameter, which the graph keeps alive, with the place of the gradient in memory and its
version, which tell whether it is still the same when the pass is over. Nothing is attached to the gradient itself:
autograd takes a tensor over, and adds to it in place, only while nobody else knows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoprec.numerics import elements

__all__ = ["is_known", "leaf", "widened"]

#: With more threads torch casts and looks as fast (docs/measurements/overhead.md).
_MOST_THREADS = 2

#: Squares of smaller numbers, as many as there may be (2^46), have a sum that FP32 holds.
_LARGEST = 2.0**40

#: Numbers after which numba is imported, which takes half a second. A run that has had so many (80 steps of the suite's
#: transformer) is taken to go on for the eight times as many whose reading takes as long
#: (docs/measurements/overhead.md).
_ENOUGH = 1 << 28


@dataclass
class _Seen:
    """In this process: autograd calls products, which know of no session. `found`: of the backward pass `task`, by
    parameter; `numbers`: that could have been looked at."""

    task: int = -1
    found: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    numbers: int = 0


_seen = _Seen()


def leaf(parameter: Tensor | None) -> int | None:
    """As what the gradients of a parameter are known; None if it is none, but computed."""
    return id(parameter) if parameter is not None and parameter.is_leaf else None


def widened(x: Tensor, dtype: torch.dtype, parameter: int | None) -> Tensor:
    """`x`, the gradient of that `leaf` in the backward pass that runs, in `dtype`: if it is FP32 of BF16, on a CPU with
    few threads, with a look."""
    if parameter is None or x.dtype is not torch.bfloat16 or dtype is not torch.float32 or not _looks(x):
        return x.to(dtype)
    made, largest = elements.widened(x)
    task = torch._C._current_graph_task_id()
    if task != _seen.task:
        _seen.task = task
        _seen.found.clear()
    if largest < _LARGEST:  # not of NaN
        _seen.found[parameter] = (task, made.data_ptr(), made._version)
    else:
        _seen.found.pop(parameter, None)
    return made


def _looks(x: Tensor) -> bool:
    if torch.get_num_threads() > _MOST_THREADS or not elements.serve(x):
        return False
    _seen.numbers += x.numel()
    return _seen.numbers > _ENOUGH or elements.is_loaded()


def is_known(parameter: Tensor, grad: Tensor, task: int) -> bool:
    """Whether the numbers of `parameter.grad`, and the sum of their squares, are finite in FP32 as far as is known
    without a look: it was made in that backward pass by `widened`, and nobody has changed it since. (Whoever writes
    through `.data` moves no version.)"""
    found = _seen.found.get(id(parameter))
    return found is not None and found == (task, grad.data_ptr(), grad._version)
