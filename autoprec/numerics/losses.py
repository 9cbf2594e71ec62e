"""Cross entropy that keeps its logits in a narrow format, and nothing beside them.

torch's keeps the logarithms of the probabilities in FP32, as large as the logits, and makes two more tensors of that
size in its backward pass. Ours keeps the narrow copy, makes the probabilities of it again, and goes a few rows at a
time in both directions, so that of such tensors there is the gradient alone. Forward it is torch's, bit for bit; its
gradient is that of torch's on the rounded logits. (With class weights both sums are taken in another order.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.compilers import is_traced, made_in_backward
from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.packing import Packed, decode, piece_numel

__all__ = ["LossOptions", "cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of `F.cross_entropy`; targets are classes."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, kept: Packed | None, options: LossOptions
) -> Tensor:
    """`F.cross_entropy` of logits (N, C, …) and classes (N, …), float32, whose backward pass reads `kept`, a narrow
    copy of the logits; without one, torch's. `UnsupportedError` where the backward pass is differentiated."""
    if kept is None:
        return _torchs(x, target, weight, options)
    result = _CrossEntropy.apply(x, target, weight, kept, options)
    assert isinstance(result, Tensor)
    return result


def _torchs(x: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    return F.cross_entropy(
        x,
        target,
        weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, kept: Packed, options: LossOptions
    ) -> Tensor:
        ctx.kept_as, ctx.options, ctx.dtype = kept.format, options, x.dtype
        total = _total(target, weight, options) if options.reduction == "mean" else None
        ctx.save_for_backward(kept.payload, kept.inverse_scale, target, weight, total)
        if is_traced(x):
            return _torchs(x, target, weight, options)
        parts = [_losses(x[rows], target[rows], weight, options) for rows in _rows(x)]
        result = _reduced(torch.cat([losses for losses, _ in parts]), target, weight, total, options)
        if not options.label_smoothing:
            return result
        smooth = torch.cat([sums for _, sums in parts if sums is not None])
        if options.reduction != "none":
            smooth = smooth.sum() if total is None else smooth.sum() / total
        of_target, of_each = _shares(x, options)
        return of_target * result + smooth * of_each

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross entropy that keeps its logits in a narrow format")
        payload, inverse_scale, target, weight, total = ctx.saved_tensors
        packed, options = Packed(payload, inverse_scale, ctx.kept_as), ctx.options
        if is_traced(payload):
            x = decode(packed, ctx.dtype)
            with made_in_backward(payload):
                logs = torch.log_softmax(x, 1)
                return _gradient(logs, target, weight, total, grad, options), None, None, None, None
        made = torch.empty(payload.shape, dtype=ctx.dtype, device=payload.device)
        for rows in _rows(payload):
            part = grad[rows] if options.reduction == "none" else grad
            logs = torch.log_softmax(decode(packed._replace(payload=payload[rows]), ctx.dtype), 1)
            made[rows] = _gradient(logs, target[rows], weight, total, part, options)
        return made, None, None, None, None


def _rows(x: Tensor) -> Iterator[slice]:
    """A few rows at a time."""
    step = max(1, piece_numel(x) // max(1, x[:1].numel()))
    yield from (slice(begin, begin + step) for begin in range(0, max(1, x.shape[0]), step))


def _shares(x: Tensor, options: LossOptions) -> tuple[float, float]:
    """What label smoothing leaves the target, and what every class has besides."""
    return 1.0 - options.label_smoothing, options.label_smoothing / max(1, x.shape[1])


def _losses(x: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> tuple[Tensor, Tensor | None]:
    """Of each target: the loss without label smoothing, and with that the sum of those of all classes."""
    logs = torch.log_softmax(x, 1)
    losses = F.nll_loss(logs, target, weight, ignore_index=options.ignore_index, reduction="none")
    if not options.label_smoothing:
        return losses, None
    sums = logs.sum(1) if weight is None else (logs * _by_class(weight, logs)).sum(1)
    return losses, sums.neg_().masked_fill_(target == options.ignore_index, 0.0)


def _reduced(
    losses: Tensor, target: Tensor, weight: Tensor | None, total: Tensor | None, options: LossOptions
) -> Tensor:
    if options.reduction == "none":
        return losses
    if weight is not None:
        return losses.sum() if total is None else losses.sum() / total
    # torch adds them up in an order of its own: as the logarithms of the only class there is.
    only = (target == options.ignore_index).to(target.dtype).mul_(-100)
    return F.nll_loss(losses.neg().unsqueeze(1), only, reduction=options.reduction)


def _by_class(weight: Tensor, x: Tensor) -> Tensor:
    return weight.view(1, -1, *[1] * (x.dim() - 2))


def _total(target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """What a mean divides by: the targets that count, or their weights."""
    counts = target != options.ignore_index
    if weight is None:
        return counts.sum().to(torch.float32)
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0.0).sum()


def _gradient(
    logs: Tensor, target: Tensor, weight: Tensor | None, total: Tensor | None, grad: Tensor, options: LossOptions
) -> Tensor:
    """Of the sum of losses, or of each, over `total`, times what arrives, by the logarithms of the probabilities: as
    torch's own kernels make it, one after the other."""
    counts = target != options.ignore_index
    at = torch.where(counts, target, 0)
    of_target, of_each = _shares(logs, options)

    def shared(share: float) -> Tensor:
        return grad * share if total is None else grad * share / total

    mine = shared(of_target)
    factor = -mine.expand(target.shape) if weight is None else -mine * weight[at]
    factor = torch.where(counts, factor, 0.0).unsqueeze(1)
    arriving = torch.zeros_like(logs).scatter_(1, at.unsqueeze(1), factor)
    if options.label_smoothing:
        every = torch.where(counts, -shared(of_each).expand(target.shape), 0.0).unsqueeze(1)
        arriving += every if weight is None else every * _by_class(weight, logs)
    return torch.ops.aten._log_softmax_backward_data(arriving, logs, 1, logs.dtype)
