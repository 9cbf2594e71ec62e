"""Is what a user's function sends back proportional to the gradient that it is given? Only then may that carry a
factor, as it does in an FP16 region: clipped, its sign taken or a number added to it, it is another gradient."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from autoprec.graphs import OpClass
from autoprec.tracing.kinds import changes_mode, class_of, inplace_target, kind_of

__all__ = ["is_proportional"]


class _Is(Enum):
    """What a value is when all gradients are multiplied by a number above 0."""

    SAME = "same"
    ZERO = "zero"
    MULTIPLIED = "multiplied"
    OTHER = "other"


_ZEROS = {"zeros_like", "new_zeros", "zeros"}

#: Of one gradient: f(c·g) = c·f(g) for every c above 0.
_OF_ONE = {"neg", "to", "clone", "contiguous", "detach", "sum", "mean", "abs", "relu", "float", "type", "type_as"}

_SUMS = {"add", "sub"}


def is_proportional(forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
    """Whether every gradient that the backward body of a function makes is multiplied by a number above 0 when those
    that it is given are. Not where nobody can tell."""
    results = next(n.args[0] for n in forward.graph.nodes if n.op == "output")
    made = results[0] if isinstance(results, (tuple, list)) else results
    left = len(made) if isinstance(made, (tuple, list)) else 1
    known: dict[fx.Node, _Is] = {}
    for node in backward.graph.nodes:
        if node.op == "placeholder":  # the gradients, then what was kept
            known[node] = _Is.MULTIPLIED if left > 0 else _Is.SAME
            left -= 1
        elif node.op == "output":
            return all(x in (_Is.MULTIPLIED, _Is.ZERO) for x in _sent(node, known))
        elif not changes_mode(node):
            known[node] = _made(node, known)
            if (target := inplace_target(node)) is not None:
                known[target] = known[node]
    return False


def _sent(output: fx.Node, known: dict[fx.Node, _Is]) -> Iterator[_Is]:
    for x in pytree.tree_leaves(output.args[0]):
        if x is not None:
            yield _of(x, known)


def _of(x: Any, known: dict[fx.Node, _Is]) -> _Is:
    if isinstance(x, fx.Node):
        return known.get(x, _Is.OTHER)
    return _Is.ZERO if isinstance(x, (int, float)) and not isinstance(x, bool) and x == 0 else _Is.SAME


def _made(node: fx.Node, known: dict[fx.Node, _Is]) -> _Is:
    kind, found = kind_of(node), [_of(x, known) for x in node.args]
    given = {known.get(n, _Is.OTHER) for n in node.all_input_nodes}
    if _Is.OTHER in given:
        return _Is.OTHER
    if kind in _ZEROS:
        return _Is.ZERO
    if _Is.MULTIPLIED not in given:
        return _Is.SAME
    first, *rest = found or [_Is.OTHER]
    alone = first is _Is.MULTIPLIED and all(known.get(n) is not _Is.MULTIPLIED for n in node.all_input_nodes[1:])
    parts = {_Is.MULTIPLIED, _Is.ZERO}
    holds = {
        "mul": sorted(x.value for x in found[:2]) == [_Is.MULTIPLIED.value, _Is.SAME.value] or _Is.ZERO in found[:2],
        "div": alone and len(found) == 2,
        "where": len(found) == 3 and first is _Is.SAME and set(rest) <= parts,
        "masked_fill": alone and len(found) == 3 and found[2] is _Is.ZERO,
    }
    if kind in _SUMS:
        return _Is.MULTIPLIED if set(found) <= parts else _Is.OTHER
    one = (kind in _OF_ONE or class_of(kind) is OpClass.VIEW) and alone
    return _Is.MULTIPLIED if one or holds.get(kind, False) else _Is.OTHER
