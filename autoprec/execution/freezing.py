"""Which frozen parameters live in a narrow format. Mutable; owned by the session.

There is no FP32 copy, so what a parameter was rounded to once is what it is: a plan that comes later leaves it there,
and what gives it back in FP32 (`state_dict`, `unwrap`, a deepcopy) gives the rounded values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autoprec.errors import PlanError
from autoprec.numerics.frozen import NarrowParameter, narrow, widen
from autoprec.numerics.packing import encode
from autoprec.plans import RECOMPUTED, Plan

__all__ = ["FrozenParameters", "rounded_as"]


class FrozenParameters:
    """Attributes:
    living: tensor id (`param:` and the name) → format.
    thawed: tensor ids of those that lived in one, and are trained by now.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], tell: Callable[..., None]) -> None:
        self._parameters, self._tell = parameters, tell
        #: Of tied weights each has several.
        self._owners: dict[int, list[nn.Module]] = {}
        for m in model.modules():
            for p in m.parameters(recurse=False):
                self._owners.setdefault(id(p), []).append(m)
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self.living: dict[str, str] = {}
        self.thawed: set[str] = set()

    def adopt(self, plan: Plan) -> None:
        """Round what the plan wants narrow and is not yet, and tell of it; not what is trained by now.

        Raises `PlanError`, before anything is rounded, where a parameter does not exist.
        """
        named = {t: self._parameters.get(t.removeprefix("param:")) for t in plan.living if t not in self.living}
        self.thawed.update(t for t, p in named.items() if p is not None and p.requires_grad)
        found = self.check(plan)
        new = {t: plan.living[t] for t in found}
        before = sum(p.numel() * 4 for p in found.values())
        for tensor, fmt in new.items():
            narrow(found[tensor], fmt)
            self.living[tensor] = fmt
            for owner in self._owners[id(found[tensor])]:
                if owner not in self._handles:
                    self._handles[owner] = owner.register_state_dict_post_hook(_give_float32)
                    owner._apply = MethodType(_apply, owner)  # type: ignore[method-assign]
        if not new:
            return
        after = sum(p.packed.payload.nbytes for p in found.values() if isinstance(p, NarrowParameter))
        counted = " and ".join(f"{n} in {fmt}" for fmt, n in sorted(Counter(new.values()).items()))
        what = f"frozen parameters live {counted}: {after} bytes instead of {before}. Their FP32 values are gone: "
        self._tell("frozen", evidence=what + "unwrap, state_dict and copies give what they were rounded to")

    def check(self, plan: Plan) -> dict[str, nn.Parameter]:
        """What the plan wants narrow and is not yet, by its tensor id; `PlanError` where a parameter does not exist or
        is not frozen."""
        return {t: self._frozen(t, f) for t, f in plan.living.items() if t not in self.living and t not in self.thawed}

    def _frozen(self, tensor: str, fmt: str) -> nn.Parameter:
        fqn = tensor.removeprefix("param:")
        found = self._parameters.get(fqn)
        if found is None:
            raise PlanError(f"the plan keeps parameter {fqn} in {fmt}, and this model has none of that name")
        if fmt == RECOMPUTED:
            raise PlanError(f"the plan has parameter {fqn} recomputed, and nothing makes it: a format, or as it is")
        if found.requires_grad:
            raise PlanError(
                f"the plan keeps parameter {fqn} in {fmt} for good, as it was frozen, and here it is trained: freeze it"
                " (requires_grad_(False)) before compile, or calibrate this model"
            )
        if type(found) is not nn.Parameter:
            raise PlanError(f"the plan keeps parameter {fqn} in {fmt}, and it is a {type(found).__name__} already")
        return found

    def thaw_trainable(self) -> None:
        """Give FP32 masters to parameters that are trained by now, and tell of it."""
        names = [t for t in self.living if self._parameters[t.removeprefix("param:")].requires_grad]
        for tensor in names:
            widen(self._parameters[tensor.removeprefix("param:")])
            del self.living[tensor]
        self.thawed.update(names)
        if names:
            what = f"{', '.join(names)}: trained from now on, in FP32, from the values that it was rounded to"
            self._tell("warning", trigger="trained", evidence=what)

    def close(self) -> str:
        """All of them in FP32 again. Returns what was rounded, for people, or ""."""
        for tensor in self.living:
            widen(self._parameters[tensor.removeprefix("param:")])
        told = f"{len(self.living)} frozen parameters have the values that they were rounded to" if self.living else ""
        for owner, handle in self._handles.items():
            handle.remove()
            vars(owner).pop("_apply", None)
        self._handles.clear()
        self.living.clear()
        return told


def _give_float32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook: in a state dict nobody meets a class of ours, unless he asks for the parameters themselves."""
    for name, parameter in module._parameters.items():
        held = state.get(prefix + name)
        if isinstance(held, NarrowParameter) and held is not parameter:
            state[prefix + name] = held.clone()


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of a module's own `_apply`, which is behind `to`, `cuda`, `double` and the like: on FP32 parameters,
    which it changes in place. Tensors of other classes it swaps, and refuses to where there are weak references. A
    method, because a deepcopy binds it to the copy."""
    held = {p: p.format for p in self._parameters.values() if isinstance(p, NarrowParameter)}
    for p in held:
        widen(p)
    try:
        return type(self)._apply(self, fn, recurse)
    finally:
        for p, fmt in held.items():
            if p.dtype is torch.float32:
                narrow(p, fmt)


def rounded_as(parameter: Tensor, fmt: str) -> Tensor:
    """A frozen parameter as a plan would have it: held in the format."""
    return parameter if isinstance(parameter, NarrowParameter) else NarrowParameter(encode(parameter, fmt))
