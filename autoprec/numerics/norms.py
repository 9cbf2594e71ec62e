"""Norms of narrow tensors whose weights' gradients are added up in FP32.

torch's layer norm adds them up in the input's dtype on a CPU. In BF16 a sum over a thousand rows is off by 4 to 14 %
(docs/measurements/pieces.md); in an FP16 region whose gradients carry 2^s it overflows. Inside such a region the
backward pass recomputes the norm in FP32 from the kept input, with the gradient unscaled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.compilers import is_traced
from autoprec.numerics.double_backward import refuse_double_backward

__all__ = ["NormCall", "layer_norm", "norm", "takes_one_dtype"]

#: Elements of a BF16 layer norm that are differentiated at a time: FP32 copies of so many fit the caches, and up to as
#: many torch's own backward pass takes no less time; a quarter less at 16 times as many (docs/measurements/pieces.md).
_PIECE = 1 << 18


@dataclass(frozen=True, kw_only=True)
class NormCall:
    """Options of one call of layer_norm, group_norm or batch_norm.

    Attributes:
        kind: "layer_norm", "group_norm" or "batch_norm".
        shape: normalized shape (layer_norm), number of groups (group_norm), unused (batch_norm).
        training, momentum: of batch_norm.
        eps: added to the variance.
        scale_log2: gradients of the region carry 2**scale_log2.
    """

    kind: str
    shape: tuple[int, ...] = ()
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5
    scale_log2: int = 0

    def run(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None
    ) -> Tensor:
        """The norm of an FP32 tensor."""
        if self.kind == "layer_norm":
            return F.layer_norm(x, list(self.shape), weight, bias, self.eps)
        if self.kind == "group_norm":
            return F.group_norm(x, self.shape[0], weight, bias, self.eps)
        return F.batch_norm(x, mean, var, weight, bias, self.training, self.momentum, self.eps)


def takes_one_dtype(kind: str, device_type: str) -> bool:
    """Whether plans give torch's norm of a BF16 tensor its weights in BF16: elsewhere than on a CPU there is no fused
    kernel for FP32 ones (docs/measurements/h200.md)."""
    return device_type != "cpu" and kind in ("layer_norm", "group_norm", "rms_norm")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        call: NormCall,
    ) -> Tensor:
        ctx.call = call
        # Training statistics come from the batch; the running ones must not be updated again in the backward pass.
        kept = (None, None) if call.training else (mean, var)
        ctx.save_for_backward(x, weight, bias, *kept)
        return call.run(x.float(), weight, bias, mean, var).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_double_backward(f"a {ctx.call.kind} in fp16")
        call: NormCall = ctx.call
        x, weight, bias, mean, var = ctx.saved_tensors
        scale = 2.0**call.scale_log2
        leaves = [None if t is None else t.detach().float().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            assert leaves[0] is not None
            y = call.run(leaves[0], leaves[1], leaves[2], mean, var)
        wanted = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(y, wanted, grad.float() / scale))
        grads = [None if t is None else next(found) for t in leaves]
        assert grads[0] is not None
        return (grads[0] * scale).to(x.dtype), grads[1], grads[2], None, None, None


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, call: NormCall
) -> Tensor:
    """The norm of `x` in its own dtype, computed in FP32; gradients of weight and bias come back unscaled in FP32."""
    result = _Norm.apply(x, weight, bias, mean, var, call)
    assert isinstance(result, Tensor)
    return result


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        backward, wanted = torch.ops.aten.native_layer_norm_backward, ctx.needs_input_grad
        mask = [wanted[0], wanted[2], wanted[3]]
        if torch.is_grad_enabled():  # torch's own can be differentiated again
            of_x, of_weight, of_bias = backward(grad, x, ctx.shape, mean, rstd, weight, bias, mask)
            return of_x, None, of_weight, of_bias, None
        size = math.prod(ctx.shape)
        rows = max(1, _PIECE // size)
        made = torch.empty_like(x, memory_format=torch.contiguous_format) if mask[0] else None
        parts = [t.reshape(-1, *ctx.shape).split(rows) for t in (x, grad)]
        stats = [t.reshape(-1, *[1] * len(ctx.shape)).split(rows) for t in (mean, rstd)]
        results = itertools.repeat(None) if made is None else made.view(-1, *ctx.shape).split(rows)
        sums = [
            torch.zeros_like(t) if w and t is not None else None for t, w in zip((weight, bias), mask[1:], strict=True)
        ]
        for part, g, m, r, result in zip(*parts, *stats, results, strict=False):
            found = backward(g.float(), part.float(), ctx.shape, m, r, weight, bias, mask)
            if result is not None:
                result.copy_(found[0])
            for total, more in zip(sums, found[1:], strict=True):
                if total is not None:
                    total += more
        return made, None, *sums, None


def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, bitwise the same but for the gradients of an FP32 weight and bias of a BF16 input on a CPU, which
    are added up in FP32."""
    narrow = input.dtype is torch.bfloat16 and weight is not None and weight.dtype is torch.float32
    if not narrow or not input.numel() or input.is_cuda or is_traced(input) or not torch.is_grad_enabled():
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    result = _LayerNorm.apply(input, tuple(normalized_shape), weight, bias, eps)
    assert isinstance(result, Tensor)
    return result
