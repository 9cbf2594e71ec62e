"""What casts with a scale, and products of what they give, take in code that a compiler makes for a GPU.

In eager mode such a cast is a dozen kernels. A compiler makes two passes of them: one that finds the largest magnitude
and one that casts (docs/devices.md). Kernels of torch that read and write the same are timed in their place; nothing is
compiled to be timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from autoprec.formats import other_operand
from autoprec.graphs import Role
from autoprec.numerics.contractions import Contraction, Layout
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.packing import Packed, amax_of, encode
from autoprec.numerics.products import scaled_product

__all__ = ["packs", "product_runs", "unpacks"]


def packs(x: Tensor, format_name: str) -> object:
    """The passes over `x` into a format with a scale: it is read twice, and written once."""
    return amax_of(x), x.to(dtype_of(format_name))


def unpacks(payload: Tensor, format_name: str, dtype: torch.dtype) -> object:
    """Out of it: read and written once."""
    return payload.view(dtype_of(format_name)).to(dtype)


def product_runs(x: Tensor, weight: Tensor, how: Layout, format_name: str) -> dict[Role, Callable[[], object]] | None:
    """Of a product of rows x (…, K) with a matrix, in FP8, by role, when the input is packed already. The largest
    magnitude of the weight is found once, in the forward pass, that of the gradient with the input's gradient. None for
    other products.
    """
    if not isinstance(how, Contraction) or not how.is_by_rows or weight.dim() != 2:
        return None
    x, w = x.detach().reshape(-1, x.shape[-1]), weight.detach()
    w = w if how.weight[-1] == how.summed else w.t()
    other, born = other_operand(format_name), torch.bfloat16
    g = torch.randn(x.shape[0], w.shape[0], dtype=born, device=x.device)
    rows, matrix = encode(x, format_name), encode(w, other)
    gradient, transposed = encode(g, format_name), encode(w.t().contiguous(), other)
    flipped, columns = _flipped(gradient), _flipped(encode(x, other))
    narrow = dtype_of(format_name)

    def output() -> object:
        return packs(w, other), scaled_product(rows, matrix, born)

    def grad_input() -> object:
        return packs(g, format_name), w.t().to(dtype_of(other)), scaled_product(gradient, transposed, born)

    def grad_weight() -> object:
        made = scaled_product(flipped, columns, torch.float32)
        return g.t().to(narrow, memory_format=torch.contiguous_format), _flipped(rows), made

    return {
        Role.OUTPUT: partial(_without_graph, output),
        Role.GRAD_INPUT: partial(_without_graph, grad_input),
        Role.GRAD_WEIGHT: partial(_without_graph, grad_weight),
    }


@torch.no_grad()
def _without_graph(run: Callable[[], object]) -> object:
    return run()


def _flipped(packed: Packed) -> Packed:
    """Rows for columns, written anew: FP8 kernels read rows."""
    return packed._replace(payload=packed.payload.t().contiguous())
