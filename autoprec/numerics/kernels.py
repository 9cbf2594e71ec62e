"""Products inside kernels of torch (attention, einsum) whose gradients have a format of their own.

Such a kernel keeps what its backward pass reads in the format that it ran in. For gradients in another one it runs once
more, in that, on the operands as it read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoprec.numerics.casts import saturating_cast
from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.products import GemmSpec

__all__ = ["kernel"]


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], spec: GemmSpec, *operands: Tensor) -> Tensor:
        ctx.run, ctx.spec = run, spec
        ctx.save_for_backward(*operands)
        # Detached, because torch lets nobody change a view in place that a custom function returns.
        return run(*operands).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_double_backward("a kernel whose gradients have a format of their own")
        spec: GemmSpec = ctx.spec
        fmt, operands = spec.grad_input, ctx.saved_tensors
        wanted = [i for i in range(len(operands)) if ctx.needs_input_grad[2 + i]]
        again = list(operands)
        for i, x in enumerate(operands):
            if i in wanted:
                again[i] = x.detach().to(dtype_of(fmt)).requires_grad_()
            elif x.is_floating_point():  # a mask: its huge values must not become −inf, and a masked row NaN
                again[i] = saturating_cast(x, dtype_of(fmt))
        with torch.enable_grad():
            y = ctx.run(*again)
        arriving = spec.gradient(grad, fmt).to(y.dtype)
        found = torch.autograd.grad(y, [again[i] for i in wanted], arriving, allow_unused=True)
        gradients: list[Tensor | None] = [None] * len(operands)
        for i, g in zip(wanted, found, strict=True):
            gradients[i] = None if g is None else spec.product(g, fmt, operands[i].dtype)
        return None, None, *gradients


def kernel(*args: Any, function: Callable[..., Tensor], spec: GemmSpec, **kwargs: Any) -> Tensor:
    """`function(*args, **kwargs)` on operands in `spec.output`, its gradients computed in `spec.grad_input`.

    `function` must be deterministic: it runs again in the backward pass. `UnsupportedError` if that is differentiated.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*operands: Tensor) -> Tensor:
        given = list(leaves)
        for i, x in zip(places, operands, strict=True):
            given[i] = x
        own_args, own_kwargs = pytree.tree_unflatten(given, tree)
        return function(*own_args, **own_kwargs)

    operands = [leaves[i] for i in places]
    leaves = [None if i in places else leaf for i, leaf in enumerate(leaves)]  # autograd alone keeps the operands
    result = _Kernel.apply(run, spec, *operands)
    assert isinstance(result, Tensor)
    return result
