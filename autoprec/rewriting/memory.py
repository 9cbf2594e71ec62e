"""Which captured values share memory, change in place, or show more than they are made of."""

from __future__ import annotations

from torch import fx

from autoprec.graphs import OpClass
from autoprec.tracing.bindings import Binding

__all__ = ["bases", "changed_in_place", "no_larger"]


def bases(binding: Binding) -> dict[str, str]:
    """Tensor id → id of the tensor whose values it shows through one view or in-place change."""
    return {
        out: op.inputs[0][1]
        for op in binding.ops
        if op.op_class is OpClass.VIEW and op.inputs
        for out in op.outputs
        if out != op.inputs[0][1]
    }


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
