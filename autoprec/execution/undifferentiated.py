"""Gradients that nobody asked for: compiled code makes zeros where autograd makes none.

A compiled graph has one backward pass for all of its outputs. Where the loss of a step does not read one of them, the
code is given zeros for it and gives zeros to the parameters behind it, which an optimizer with momentum or weight decay
moves; eager mode gives those no gradient. Here they have none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import Node

__all__ = ["Reach"]

#: What torch calls the node of a compiled graph.
_COMPILED = "CompiledFunctionBackward"


class Reach:
    """Which outputs of a graph the value of an input may come to."""

    def __init__(self, graph: fx.Graph, differentiable: Sequence[int]) -> None:
        """`differentiable`: outputs to which a gradient may come back."""
        sources: dict[fx.Node, frozenset[int]] = {}
        places = count()
        for node in graph.nodes:
            if node.op == "placeholder":
                sources[node] = frozenset([next(places)])
            else:
                sources[node] = frozenset().union(*(sources.get(n, ()) for n in node.all_input_nodes))
        (results,) = graph.output_node().args
        assert isinstance(results, (tuple, list))
        self._behind = {i: sources[n] for i in differentiable if isinstance(n := results[i], fx.Node)}

    @cached_property
    def differs(self) -> bool:
        """Whether some inputs reach fewer outputs than others."""
        return len(set(self._behind.values())) > 1

    def watch(self, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
        """See to it that the backward pass of a call gives nothing to what no output reads that is differentiated."""
        numbers: dict[Node, dict[int, int]] = {}
        for i in self._behind:
            y = outputs[i]
            if isinstance(y, Tensor) and y.grad_fn is not None and y.grad_fn.name() == _COMPILED:
                numbers.setdefault(y.grad_fn, {})[y.output_nr] = i
        for node, outputs_of in numbers.items():
            if set(outputs_of.values()) != set(self._behind):
                continue  # an output that is a view of another has a node of its own: nobody knows what comes there
            entered = list[int]()
            node.register_prehook(partial(_note, entered, outputs_of))
            node.register_hook(partial(self._without_zeros, _places(node, arguments), entered))

    def _without_zeros(
        self, places: Sequence[int | None], entered: list[int], gradients: Sequence[Tensor | None], _: Any
    ) -> tuple[Tensor | None, ...] | None:
        if len(entered) == len(self._behind):
            return None
        reached = frozenset[int]().union(*(self._behind[i] for i in entered))
        return tuple(
            None if g is not None and i is not None and i not in reached and not bool(g.any()) else g
            for g, i in zip(gradients, places, strict=True)
        )


def _note(entered: list[int], outputs_of: dict[int, int], gradients: Sequence[Tensor | None]) -> None:
    """Which outputs a gradient comes to, in the backward pass that begins."""
    entered[:] = [i for k, i in outputs_of.items() if gradients[k] is not None]


def _places(node: Node, arguments: Sequence[Any]) -> list[int | None]:
    """Of what a node sends gradients to, the places among the arguments; None for what is none of them."""
    known = {}
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor) and x.requires_grad:
            known[(x.grad_fn, x.output_nr) if x.grad_fn is not None else id(x)] = i
    found = list[int | None]()
    for following, number in node.next_functions:
        leaf = getattr(following, "variable", None)
        found.append(known.get(id(leaf) if leaf is not None else (following, number)))
    return found
