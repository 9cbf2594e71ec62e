"""While a compiler traces a graph: which tensors are only traced, and what it must keep for the backward pass or make
again there.

A compiler's partitioner decides by itself what to keep. It honours marks on nodes, those of activation checkpoints,
which tracing takes from `torch.fx.traceback.current_meta`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

#: Under which name a traced node says, among the marks of its own, which tensor of the plan it is about.
OF_TENSOR = "autoprec_tensor"

__all__ = ["OF_TENSOR", "hooks_in_graph", "is_traced", "made_in_backward", "saved_for_backward"]


def is_traced(x: Tensor) -> bool:
    """Whether `x` has no values, because a compiler traces what is done with it."""
    return type(x) is not Tensor and bool(is_fake(x))


@contextmanager
def _marked(policy: CheckpointPolicy, **custom: str) -> Iterator[None]:
    # The process has one, so this is for the thread that traces alone.
    meta = traceback.current_meta
    before = {key: meta[key] for key in ("recompute", "custom") if key in meta}
    meta["recompute"] = policy
    meta["custom"] = {**before.get("custom", {}), **custom}
    try:
        yield
    finally:
        del meta["recompute"], meta["custom"]
        meta.update(before)


def saved_for_backward(x: Tensor, tensor: str) -> AbstractContextManager[None]:
    """Around what makes a storage of `x`, the tensor of that id, which is kept for the backward pass as it is."""
    return _marked(CheckpointPolicy.MUST_SAVE, **{OF_TENSOR: tensor}) if is_traced(x) else nullcontext()


def made_in_backward(x: Tensor) -> AbstractContextManager[None]:
    """Around what must not be kept for the backward pass, but made there, of `x` among others."""
    return _marked(CheckpointPolicy.MUST_RECOMPUTE) if is_traced(x) else nullcontext()


@contextmanager
def hooks_in_graph() -> Iterator[None]:
    """torch passes over hooks on saved tensors while it traces; inside this they are a part of what is traced."""
    tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)
