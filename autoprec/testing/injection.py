"""`inject`: one fault at one op of a compiled model, in steps of one's choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Self

from torch import Tensor, nn

from autoprec.checks import check_amount, check_choice
from autoprec.errors import InputError, nearest
from autoprec.execution.faults import FlippedWeight, ScaledGradient, ScaledResult, flipped, largest_to
from autoprec.formats import format_named, result_format
from autoprec.graphs import Role
from autoprec.numerics.dtypes import dtype_of
from autoprec.plans import Plan
from autoprec.sessions import Session, session_of
from autoprec.tracing.bindings import OpNode
from autoprec.tracing.checkpoints import Change

__all__ = ["KINDS", "Injection", "inject"]

#: Kind of fault → what it does, for people.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "forward_overflow": "the op's result is scaled until its largest number is four times the format's",
        "gradient_overflow": "the gradient that arrives at the op is scaled until it leaves the format",
        "amax_growth": "the op's result doubles from step to step",
        "underflow": "the op's result is scaled until all of it rounds to zero in the format",
        "bit_flip": "the highest exponent bit of one element of a product's weight, as it was cast, flips",
        "zero": "the op's result is zero",
    }
)

#: Kinds that last; the others are over after a step.
_LASTING = ("amax_growth", "underflow", "zero")

#: The largest number of an overflow, in the format's largest; of what rounds to zero, in its smallest.
_BEYOND, _BELOW = 4.0, 0.125


class Injection:
    """A fault and when it is there; `inject` makes it. Also a context manager, which removes it.

    Attributes:
        op, kind: see `inject`.
        first, last: numbers of training steps, bad ones counted, in which it is there.
        applied_steps: the steps in which the op did run with it.
    """

    def __init__(self, session: Session, op: OpNode, kind: str, first: int, last: int) -> None:
        self._session, self._node = session, op
        self.op, self.kind, self.first, self.last = op.id, kind, first, last
        self.applied_steps: list[int] = []

    def change(self, op: OpNode, plan: Plan | None, attempt: int, parameters: Mapping[str, Tensor]) -> Change | None:
        """What happens to an op in a step; None if nothing does (called by the session)."""
        if not self._is_there(op, plan, attempt):
            return None
        if attempt not in self.applied_steps:
            self.applied_steps.append(attempt)
        return self._change(op, plan, attempt - self.first, parameters)

    def _is_there(self, op: OpNode, plan: Plan | None, attempt: int) -> bool:
        here = op.id == self.op and self.first <= attempt <= self.last
        return here and (self.kind != "bit_flip" or _format(op, plan) != "fp32")

    def _change(self, op: OpNode, plan: Plan | None, since: int, parameters: Mapping[str, Tensor]) -> Change:
        name = _format(op, plan)
        fmt = format_named(name)
        if self.kind == "forward_overflow":
            return ScaledResult(largest_to(_BEYOND * fmt.max_value))
        if self.kind == "gradient_overflow":
            return ScaledGradient(largest_to(_BEYOND * fmt.max_value))
        if self.kind == "amax_growth":
            return ScaledResult(lambda _: 2.0 ** (since + 1))
        if self.kind == "underflow":
            smallest = math.ldexp(1.0, fmt.min_normal_log2 - fmt.mantissa_bits)
            return ScaledResult(largest_to(_BELOW * smallest))
        if self.kind == "zero":
            return ScaledResult(lambda _: 0.0)
        weight = parameters[op.weights[0]].detach().reshape(-1)
        index = int(weight.abs().argmax())
        return FlippedWeight(op.kind, index, flipped(float(weight[index]), dtype_of(name)))

    def remove(self) -> None:
        """It does not come any more."""
        if self in self._session.faults:
            self._session.faults.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _format(op: OpNode, plan: Plan | None) -> str:
    """In which its result is born."""
    return "fp32" if plan is None else result_format(plan.format_of.get((op.id, Role.OUTPUT), "fp32"))


def inject(
    model: nn.Module, op: str, kind: str = "forward_overflow", *, step: int | None = None, steps: int | None = None
) -> Injection:
    """Put a fault into training steps to come, at one op of a model that autoprec has compiled.

    The fault is a part of those steps: it is there in whatever replays them, in the plan's formats and in FP32. Nothing
    else is touched, so what happens then is what would happen if the numbers were so by themselves. In steps with a
    fault a graph runs node by node, with `backend="inductor"` too.

    Args:
        model: compiled, and at least one training step old, so that its ops are known.
        op: an id, as in the plan (`encoder.0.linear1:linear#0`).
        kind: one of `KINDS`; "bit_flip" wants a product with a parameter, and does nothing in steps in which that runs
            in FP32: then there is no cast.
        step: the first step, counted from 0 since `compile`, bad steps counted too; None for the next one.
        steps: how many; None for one, or, for kinds that show in a window, up to the end of the monitor's first window
            that has the fault throughout.

    Raises:
        InputError: there is no such op or kind, or the op cannot have that fault.
    """
    session = session_of(model)
    check_choice(kind, tuple(KINDS), "kind", InputError)
    known = {o.id: o for binding in session.bindings for o in binding.ops}
    if not known:
        raise InputError("the ops of this model are not known yet: run one training step before inject()")
    if op not in known:
        raise InputError(f"{op!r} is not an op of this model.{nearest(op, known)}")
    node = known[op]
    if node.inplace is not None or node.transformed:
        raise InputError(
            f"{op} changes a tensor in place, or runs inside torch.func: it cannot have a fault of its own"
        )
    if kind == "bit_flip" and (node.gemm is None or not node.weights):
        products = [o.id for o in known.values() if o.gemm is not None and o.weights]
        raise InputError(f"{op} has no weight whose cast could flip a bit; products have: {', '.join(products[:5])}")
    now = session.steps + session.skipped_steps
    first = now if step is None else step
    check_amount(first, "step", InputError, "step")
    if first < now:
        raise InputError(f"step {first} is over: {now} training steps were taken")
    lasts = 1
    if kind in _LASTING:
        window = session.policy.monitor.window_steps
        begun = (first - now + session.steps - session._window_steps) % window
        lasts = window + (window - begun) % window
    check_amount(steps, "steps", InputError, "steps", least=1)
    made = Injection(session, node, kind, first, first + (steps or lasts) - 1)
    session.faults.append(made)
    return made
