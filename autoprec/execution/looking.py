"""A replayed call, looked at op by op: how large results and gradients are, and the first that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from autoprec.execution.replay import CallRecord, shadow, shadow_arguments
from autoprec.graphs import OpClass
from autoprec.tracing.bindings import Binding, OpNode
from autoprec.tracing.checkpoints import Change, GraphInterpreter

__all__ = ["Extent", "Look", "Offence", "look_at"]

#: Kinds whose job is to write non-finite values.
_MASKING = {"masked_fill", "where", "full", "full_like", "new_full", "tril", "triu", "fill", "setitem", "log"}


@dataclass(frozen=True, kw_only=True)
class Offence:
    """The first op whose result (`where="forward"`) or whose gradient (`"backward"`) was not finite.

    `inputs_finite` tells whether what it was given still was; `amax` is the largest finite magnitude among its inputs.
    """

    op: str
    where: str
    nonfinite: int
    elements: int
    inputs_finite: bool
    amax: float


@dataclass
class Extent:
    """Of one op: the largest finite magnitudes of its result, of what it reads, of the gradient that arrives at its
    result, and of those that it sends to what it reads; and how many elements of result and those are not finite."""

    result: float = 0.0
    read: float = 0.0
    arriving: float = 0.0
    gradient: float = 0.0
    nonfinite: int = 0
    nonfinite_gradient: int = 0


@dataclass
class Look:
    """What was seen. `extents`: by op id, in the order of execution. The backward pass is looked at only if the forward
    pass stayed finite.

    Attributes:
        offence: the first, None where all was finite.
        entered_finite: whether the gradients that entered from outside of the graph were.
    """

    extents: dict[str, Extent] = field(default_factory=dict)
    forward: Offence | None = None
    backward: Offence | None = None
    entered_finite: bool = True

    @property
    def offence(self) -> Offence | None:
        """See above."""
        return self.forward or self.backward


def look_at(
    record: CallRecord,
    module: fx.GraphModule,
    origin: Mapping[fx.Node, fx.Node],
    buffers: Mapping[int, Tensor],
    changes: Mapping[fx.Node, Change] | None = None,
) -> Look:
    """Replay a call through `module` (the captured graph or its rewritten form)."""
    looking = _Looking(module, origin, record.binding, changes)
    try:
        return _look(record, looking, shadow_arguments(record, buffers))
    finally:
        looking.remove_hooks()


def _look(record: CallRecord, looking: _Looking, arguments: Sequence[Any]) -> Look:
    seen = looking.seen
    with shadow(record), torch.enable_grad():
        outputs = looking.run(*arguments)
        if seen.forward is not None:
            return seen
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        pairs = [(outputs[i], g) for i, g in record.output_gradients.items() if outputs[i].requires_grad]
        seen.entered_finite = all(bool(g.isfinite().all()) for _, g in pairs)
        leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        if pairs and leaves:
            torch.autograd.grad([y for y, _ in pairs], leaves, [g.to(y.dtype) for y, g in pairs], allow_unused=True)
    return seen


class _Looking(GraphInterpreter):
    """Notes what it sees in `seen`."""

    def __init__(
        self,
        module: fx.GraphModule,
        origin: Mapping[fx.Node, fx.Node],
        binding: Binding,
        changes: Mapping[fx.Node, Change] | None,
    ) -> None:
        super().__init__(module, origin, changes)
        self.op_of, self.seen = binding.op_of, Look()
        self._hooks: list[RemovableHandle] = []

    def remove_hooks(self) -> None:
        """Python does not see what hooks hold: a tensor with one that leads back to it would never be let go of."""
        for hook in self._hooks:
            hook.remove()

    def run_node(self, n: fx.Node) -> Any:
        captured = self.origin.get(n)
        op = self.op_of.get(captured) if captured is not None else None
        result = super().run_node(n)
        if op is not None and not op.transformed and op.op_class is not OpClass.VIEW:  # those make no numbers
            # Inside a checkpoint nothing that looks may be counted, or saved for the backward pass.
            with _disable_current_modes() if self.inside else nullcontext(), torch.no_grad():
                self._look(n, op, result)
        return result

    def _look(self, n: fx.Node, op: OpNode, result: Any) -> None:
        seen, extent = self.seen, self.seen.extents.setdefault(op.id, Extent())
        inputs = _floats(self.fetch_args_kwargs_from_env(n))
        extent.read = max([extent.read, *(_amax(x) for x in inputs)])
        for y in (v for v in (result if isinstance(result, (tuple, list)) else (result,)) if _is_float(v)):
            lost = _nonfinite(y)
            extent.result = max(extent.result, _amax(y))
            extent.nonfinite += lost
            if lost and seen.forward is None and op.kind not in _MASKING:
                seen.forward = _offence(op, "forward", lost, y, inputs)
            if y.requires_grad and not y.is_leaf:
                self._hooks.append(y.register_hook(lambda g: self._look_at_arriving(extent, g)))
                for x in inputs:
                    if x.requires_grad:
                        self._hooks.append(x.register_hook(lambda g: self._look_back(op, extent, g)))

    def _look_at_arriving(self, extent: Extent, g: Tensor) -> None:
        extent.arriving = max(extent.arriving, _amax(g))

    def _look_back(self, op: OpNode, extent: Extent, g: Tensor) -> None:
        # The readers of a value are heard in the order of its hooks; the first of them in the program is named.
        lost = _nonfinite(g)
        extent.gradient = max(extent.gradient, _amax(g))
        extent.nonfinite_gradient += lost
        if lost and self.seen.backward is None:
            self.seen.backward = _offence(op, "backward", lost, g, [])


def _is_float(v: Any) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()


def _floats(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    fx.node.map_aggregate(tree, lambda v: found.append(v) if _is_float(v) else None)
    return found


def _dense(x: Tensor) -> Tensor:
    return x.detach().coalesce().values() if x.is_sparse else x.detach()


def _nonfinite(x: Tensor) -> int:
    x = _dense(x)
    return 0 if math.isfinite(float(x.sum())) else int((~x.isfinite()).sum())


def _amax(x: Tensor) -> float:
    """Of the finite elements."""
    x = _dense(x).abs()
    largest = float(x.max()) if x.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = x[x.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _offence(op: OpNode, where: str, lost: int, y: Tensor, inputs: Sequence[Tensor]) -> Offence:
    return Offence(
        op=op.id,
        where=where,
        nonfinite=lost,
        elements=y.numel(),
        inputs_finite=all(_nonfinite(x) == 0 for x in inputs),
        amax=max((_amax(x) for x in inputs), default=0.0),
    )
