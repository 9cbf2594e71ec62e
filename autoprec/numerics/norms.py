"""Norms of FP16 tensors inside a scaled region: FP32 inside, and only the FP16 input is kept.

torch's own kernels add a weight's gradient up in the input's dtype; in a region whose gradients carry 2^s that
overflows FP16. Here the backward pass recomputes the norm in FP32 from the kept input, with the gradient unscaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.double_backward import refuse_double_backward

__all__ = ["NormCall", "norm"]


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
