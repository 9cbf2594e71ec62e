"""Replaying a recorded call in the shadow: `.grad`, buffers and random state stay bitwise as they were.

The arguments of a call are kept by reference, with the random state at its start and the gradients that entered its
outputs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from autoprec.execution.measuring import mark_gradient, mark_outputs
from autoprec.tracing.bindings import Binding

__all__ = [
    "CallRecord",
    "in_backward",
    "keep_gradients",
    "record_call",
    "shadow",
    "shadow_arguments",
    "written_to",
]

_ticks = itertools.count()
_NOTHING: Mapping[int, Tensor] = {}

#: With `max_norm`, behind the first three arguments, they write to the rows that they look up.
_LOOKUPS = {"embedding", "embedding_bag"}

#: Of the largest element of a gradient, what sums of a few FP32 terms in another order may differ by.
_ROUNDING = 1e-6


@dataclass(eq=False)
class CallRecord:
    """One training call of a graph. `started` and `returned` order the forward and backward passes of a step; `entered`
    are the outputs that a gradient came to; `retained` tells whether more may come, and `waiting` is there while some
    may; `twice` tells whether gradients were made to be differentiated themselves."""

    binding: Binding
    arguments: Sequence[Any]
    rng: Tensor
    cuda_rng: Tensor | None
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    started: int = field(default_factory=lambda: next(_ticks))
    returned: int = -1
    retained: bool = False
    twice: bool = False
    waiting: weakref.ref[_Waiting] | None = None

    @property
    def is_over(self) -> bool:
        """Whether its backward pass is."""
        return self.returned >= 0 and not self.retained

    @property
    def is_given_up(self) -> bool:
        """Whether there will be no backward pass: nobody has its outputs."""
        return self.returned < 0 and self.waiting is not None and self.waiting() is None


class _Waiting:
    """Held by what waits for the gradients of a call, and by nothing else."""


def keep_gradients(
    record: CallRecord,
    outputs: Any,
    covered: set[frozenset[str]],
    *,
    unused: Collection[int] = (),
    apart: bool = False,
) -> None:
    """Note the gradients that will enter the outputs of a call, in the first backward pass through it or in a later
    one, and that its parameters are covered then.

    Those of `unused` outputs are not held. The gradient of an output that the graph goes on with is the sum of what the
    graph sends itself and of what comes from outside: `apart`, which walks the graph of autograd, notes the latter.
    """

    waiting = _Waiting()
    record.waiting = weakref.ref(waiting)

    def keep(index: int, sent: list[Tensor], waiting: _Waiting, g: Tensor) -> None:
        record.retained = torch._C._autograd._get_current_graph_task_keep_graph()
        record.twice |= torch.is_grad_enabled()  # in a backward pass: with create_graph
        if record.returned < 0:
            record.returned = next(_ticks)
            mark_gradient()
        if index not in unused and (outside := _without(g, sent)) is not None:
            record.output_gradients[index] = outside
            record.entered.add(index)
        covered.add(record.binding.covers)

    given = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    known: set[int] = set()
    for i, y in enumerate(given):
        if isinstance(y, Tensor) and y.requires_grad and not y.is_leaf and id(y) not in known:
            known.add(id(y))  # returned twice, its gradient enters once
            sent: list[Tensor] = []
            for node, k in _senders(y, given) if apart else ():
                node.register_hook(partial(_note, sent, k))
            y.register_hook(partial(keep, i, sent, waiting))
    mark_outputs()


def _senders(y: Tensor, outputs: Iterable[Any]) -> Iterator[tuple[Node, int]]:
    """What sends a gradient to `y` in the backward pass of `outputs`, and as which of its results."""
    waiting = [z.grad_fn for z in outputs if isinstance(z, Tensor)]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node is y.grad_fn:
            continue
        seen.add(node)
        for k, (following, number) in enumerate(node.next_functions):
            if following is y.grad_fn and number == y.output_nr:
                yield node, k
            waiting.append(following)


def _note(sent: list[Tensor], k: int, results: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
    if (g := results[k]) is not None:
        sent.append(g)


def _without(g: Tensor, sent: list[Tensor]) -> Tensor | None:
    """What is left of a gradient without its known terms; None where that is within the rounding of sums."""
    if not sent:
        return g
    rest = g.detach().clone()
    while sent:
        rest -= sent.pop()
    return None if bool(rest.abs().max() <= _ROUNDING * g.abs().max()) else rest


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread: what runs forward now is recomputation."""
    return torch._C._current_graph_task_id() != -1


def record_call(binding: Binding, arguments: Sequence[Any]) -> CallRecord:
    """Before the call runs."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    # Values that carry a graph (pieces between graph breaks) are kept without it.
    kept = list(arguments)
    for i in binding.template.value_positions:
        if isinstance(a := kept[i], Tensor) and a.grad_fn is not None:
            kept[i] = a.detach().requires_grad_()
    return CallRecord(binding=binding, arguments=kept, rng=torch.get_rng_state(), cuda_rng=cuda)


@contextmanager
def shadow(record: CallRecord) -> Iterator[None]:
    """The random state at the start of the call, for as long as the replay runs."""
    rng = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if record.cuda_rng is not None else None
    torch.set_rng_state(record.rng)
    if record.cuda_rng is not None:
        torch.cuda.set_rng_state(record.cuda_rng)
    try:
        yield
    finally:
        torch.set_rng_state(rng)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def shadow_arguments(
    record: CallRecord, buffers: Mapping[int, Tensor], instead: Mapping[int, Tensor] = _NOTHING
) -> tuple[Any, ...]:
    """Leaves of the replay's own (no hooks, no `.grad`), buffers as they were at the start of the step. Parameters are
    shared, but for those that the graph writes to; `instead`, by the identity of a parameter, what it is replaced by.
    """
    binding = record.binding
    written = {binding.template.placeholders.index(node) for node in written_to(binding)}

    def copy(i: int, x: Any) -> Any:
        if id(x) in instead:
            return instead[id(x)]
        if isinstance(x, nn.Parameter) or (isinstance(x, Tensor) and x.requires_grad):
            own = buffers.get(id(x), x).detach()
            own = own.clone() if i in written else own
            return own.requires_grad_(x.requires_grad)
        if isinstance(x, Tensor):
            return buffers[id(x)].clone() if id(x) in buffers else _copied(x.detach())
        return x

    return tuple(copy(i, a) for i, a in enumerate(record.arguments))


def _copied(x: Tensor) -> Tensor:
    """A copy in the same layout, for which graphs are compiled; `clone` closes the gaps of a slice."""
    same = x.clone()
    if x.layout is not torch.strided or same.stride() == x.stride():
        return same
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((extent,), (1,)).clone().as_strided(x.shape, x.stride(), 0)


def written_to(binding: Binding) -> set[fx.Node]:
    """Parameters that an in-place op may change: those at the beginning of the chain of its first argument, whatever
    stands between, because a copy too many does no harm."""
    found = set()
    for op in binding.ops:
        node = op.inplace
        while node is not None and node.op != "placeholder":
            node = next(iter(node.all_input_nodes), None)
        if node in binding.parameters:
            found.add(node)
        if op.kind in _LOOKUPS and (*op.node.args[3:4], op.node.kwargs.get("max_norm"), None)[0] is not None:
            found.update(n for n in op.node.all_input_nodes if n in binding.parameters)
    return found
