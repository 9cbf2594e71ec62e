"""Which captured values share memory, change in place, or show more than they are made of."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autoprec.graphs import OpClass
from autoprec.tracing.bindings import Binding

__all__ = ["bases", "changed_in_place", "no_larger", "shared"]


def bases(binding: Binding) -> dict[str, str]:
    """Tensor id → id of the tensor whose values it shows through one view or in-place change."""
    return {
        out: op.inputs[0][1]
        for op in binding.ops
        if op.op_class is OpClass.VIEW and op.inputs
        for out in op.outputs
        if out != op.inputs[0][1]
    }


def shared(binding: Binding) -> dict[str, str]:
    """Of `bases`, those whose memory the tensor is in: a view that copies (`flip`, `reshape` of a transposed tensor) is
    a tensor of its own, kept as its own."""
    node_of = {tensor_id: n for n, tensor_id in binding.tensor_id.items()}

    def memory(tensor_id: str) -> int | None:
        value = node_of[tensor_id].meta.get("example_value") if tensor_id in node_of else None
        return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout is torch.strided else None

    return {out: base for out, base in bases(binding).items() if memory(out) == memory(base)}


def changed_in_place(binding: Binding) -> set[fx.Node]:
    """Roots (views and their copies joined) of every value that an op changes in place."""
    root: dict[fx.Node, fx.Node] = {}
    for node in binding.template.flat.graph.nodes:
        op = binding.op_of.get(node)
        source = op.inputs[0][0] if op is not None and op.inputs and op.op_class is OpClass.VIEW else None
        root[node] = node if source is None else root.get(source, source)
    return {root.get(op.inplace, op.inplace) for op in binding.ops if op.inplace is not None}


def no_larger(base: fx.Node, view: fx.Node) -> bool:
    """Whether a tensor is known to have no more elements than a view of it shows."""
    a, b = base.meta["example_value"], view.meta["example_value"]
    sizes = [*a.shape, *b.shape]
    # Symbolic sizes are not compared: that would add a guard. A cast of the view itself is always right.
    return all(isinstance(s, int) for s in sizes) and a.numel() <= b.numel()
