"""Which op a fault is to be blamed on, told without autoprec: the model's own FP32 run, function call by function call.

Of a plan only the formats and the scales of its regions are read. An op is where a step goes wrong if it is the first
whose result, or what it reads, is beyond its format's largest number or not finite; in the backward pass the last one
that is given, or makes, such a gradient. Attention alone is run in its format as well, because of what it has inside.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoprec.formats import format_named, result_format
from autoprec.graphs import Role
from autoprec.numerics.dtypes import dtype_of
from autoprec.plans import Plan

KINDS = {"__add__": "add", "__radd__": "add", "__iadd__": "add", "__mul__": "mul", "__rmul__": "mul"}


@dataclass
class Call:
    """One function call: the largest magnitudes of what it reads and makes, and of the gradients that arrive at it and
    that it sends on; infinite where one is not finite."""

    op: str
    read: float
    made: float
    arriving: float = 0.0
    sent: float = 0.0


def largest(x: Tensor) -> float:
    values = x.detach()
    if not bool(values.isfinite().all()):
        return math.inf
    return float(values.abs().max()) if values.numel() else 0.0


def tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    torch.utils._pytree.tree_map_only(Tensor, found.append, tree)
    return [x for x in found if x.is_floating_point()]


class Recorder(TorchFunctionMode):
    """Notes every call that makes a floating-point tensor inside a module, by the id that the op would have."""

    def __init__(self, model: nn.Module, plan: Plan, factors: Mapping[str, float]) -> None:
        super().__init__()
        self._plan = plan
        self._factors = factors
        self._buffers = {id(b) for b in model.buffers()}
        self.calls: list[Call] = []
        self._stack: list[str] = []
        self._numbers: Counter[str] = Counter()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _m, _x, name=name: self._stack.append(name))
            module.register_forward_hook(lambda _m, _x, _y: self._leave())

    def _attend(self, call: Call, func: Any, args: Any, kwargs: Any, y: Tensor) -> None:
        """What attention has inside, its kernel alone knows: it runs in the plan's format, too."""
        fmt = self._plan.format_of.get((call.op, Role.OUTPUT), "fp32")
        scale = 2.0 ** max((r.scale_log2 for r in self._plan.regions if call.op in r.ops), default=0)
        mine = [x.detach().to(dtype_of(fmt)).requires_grad_() for x in args[:3]]
        with torch.enable_grad():
            narrow = func(*mine, *args[3:], **kwargs)
        call.made = max(call.made, largest(narrow))

        def backward(g: Tensor) -> None:
            with torch.enable_grad():
                sent = torch.autograd.grad(narrow, mine, (g * scale).to(narrow.dtype))
            call.sent = max(call.sent, *(largest(x) / scale for x in sent))

        if y.requires_grad:
            y.register_hook(backward)

    def _leave(self) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        made = tensors(result)
        read = tensors((args, kwargs or {}))
        places = {x.untyped_storage().data_ptr() for x in read}
        if not self._stack or not made or all(y.untyped_storage().data_ptr() in places for y in made):
            return result  # a view, or an attribute
        key = f"{self._stack[-1]}:{KINDS.get(name, name)}"
        op = f"{key}#{self._numbers[key]}"
        if op in self._factors:
            made[0].data.mul_(self._factors[op])
        # Norms have their parameters and statistics in FP32, whatever they compute in.
        cast = [x for x in read if id(x) not in self._buffers and not ("norm" in name and isinstance(x, nn.Parameter))]
        call = Call(op, max(map(largest, cast), default=0.0), max(map(largest, made)))
        self._numbers[key] += 1
        self.calls.append(call)
        for y in made:
            if y.requires_grad:
                y.register_hook(lambda g: setattr(call, "arriving", max(call.arriving, largest(g))))
        # What an addition sends on is what arrives, and the gradient of what it reads is other readers' as well.
        if name == "scaled_dot_product_attention":
            self._attend(call, func, args, kwargs or {}, made[0])
        for x in cast if not key.endswith(":add") else ():
            if x.requires_grad and not isinstance(x, nn.Parameter):
                x.register_hook(lambda g: setattr(call, "sent", max(call.sent, largest(g))))
        return result


def recorded(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    plan: Plan,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> list[Call]:
    """The calls of a step, forward and backward, of a copy of the model in FP32. `factors`: by op, what its result is
    times, its gradient aside."""
    plain = copy.deepcopy(model)
    recorder = Recorder(plain, plan, factors)
    with torch.random.fork_rng(), recorder:
        loss = loss_of(plain)
    if loss.requires_grad:
        loss.backward()
    return recorder.calls


def blamed(calls: Sequence[Call], plan: Plan) -> str:
    """The id of the op that the step goes wrong at; "" if it goes well."""

    def largest_of(op: str, role: Role = Role.OUTPUT) -> float:
        name = plan.format_of.get((op, role)) or plan.format_of.get((op, Role.OUTPUT), "fp32")
        return format_named(result_format(name)).max_value / (2.0 ** scale.get(op, 0) if role != Role.OUTPUT else 1.0)

    scale = {op: r.scale_log2 for r in plan.regions for op in r.ops}
    for call in calls:
        if max(call.read, call.made) > largest_of(call.op):
            return call.op
    for call in reversed(calls):
        born = largest_of(call.op) / 2.0 ** scale.get(call.op, 0)  # gradients have the format of what they are of
        if call.arriving > min(born, largest_of(call.op, Role.GRAD_INPUT)) or call.sent > born:
            return call.op
    # Finite, and too large for an optimizer to square: where it comes in.
    large = max((call.arriving for call in calls), default=0.0)
    reached = [call.op for call in calls if call.arriving >= 2.0**-20 * large]
    return reached[-1] if large**2 > format_named("fp32").max_value else ""
