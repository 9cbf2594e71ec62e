"""Which tensors are one: views and in-place results belong to a root."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.graphs import Op, OpClass, OpGraph, TensorKind

__all__ = ["Roots", "resolve_roots"]

#: Kinds that cast; in an FP32 model they return their input itself, in a narrower one a tensor of their own.
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as"})


@dataclass(frozen=True, kw_only=True)
class Roots:
    """Views of a graph, resolved.

    Attributes:
        root_of: tensor id → id of the root whose memory and format it shares.
        copied_from: root that a VIEW op made as a copy (a view output without a base: `contiguous`, `clone`,
            `reshape` of a transposed tensor) → the root whose values, and therefore whose format, it has.
        wide_views: VIEW ops whose float32 inputs have several roots (or none): they read and give FP32.
    """

    root_of: dict[str, str]
    copied_from: dict[str, str]
    wide_views: frozenset[str]

    def is_view(self, op: Op) -> bool:
        """Whether the op carries the format of its one input."""
        return op.op_class is OpClass.VIEW and op.id not in self.wide_views


def resolve_roots(graph: OpGraph) -> Roots:
    """Follow `base`, and the inputs of VIEW ops, to the tensors that have formats of their own."""
    specs = graph.tensor_by_id
    root_of: dict[str, str] = {}
    copied_from: dict[str, str] = {}
    wide: set[str] = set()
    own = {t for op in graph.ops if op.kind in _CASTS and op.op_class is not OpClass.VIEW for t in op.outputs}

    def root(tensor: str) -> str:
        chain: list[str] = []
        while tensor not in root_of:
            # A graph is given FP32, whatever the one before made it in.
            apart = tensor in own or specs[tensor].kind is TensorKind.INPUT
            base = None if apart else specs[tensor].base
            if base is None or base not in specs or tensor in chain:
                root_of[tensor] = tensor
                break
            chain.append(tensor)
            tensor = base
        for t in chain:
            root_of[t] = root_of[tensor]
        return root_of[tensor]

    for spec in graph.tensors:
        root(spec.id)
    for op in graph.ops:
        if op.op_class is not OpClass.VIEW:
            continue
        floats = [t for t in op.outputs if specs[t].is_float32]
        sources = {root_of[t] for t in op.inputs if specs[t].is_float32}
        if len(sources) != 1:
            if floats or sources:
                wide.add(op.id)
            continue
        (source,) = sources
        for t in floats:
            if root_of[t] == t:
                copied_from[t] = source
    return Roots(root_of=root_of, copied_from=copied_from, wide_views=frozenset(wide))
