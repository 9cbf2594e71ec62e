"""How a tensor that the plan has made again is made: the calls behind it, back to what others keep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx

from autoprec.errors import PlanError
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.norms import NormCall
from autoprec.numerics.remaking import MadeBefore, Step, Value
from autoprec.numerics.specs import NORM_SIGNATURE
from autoprec.planning.remaking import is_repeatable
from autoprec.rewriting.calls import Method, With

__all__ = ["Shown", "UnmadeError", "Written", "recipe_of"]


class UnmadeError(PlanError):
    """A graph cannot make a tensor again as the plan says: `why`, and what to do about it."""

    def __init__(self, why: str, instead: str = "") -> None:
        super().__init__(f"{why}: {instead}" if instead else why)
        self.why = why


@dataclass(frozen=True, eq=False)
class Written:
    """The call that makes a tensor, as it was rewritten (before what it keeps was), and the op's kind."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """What a node of the rewritten graph stands for: a tensor of the plan's, in a format."""

    tensor: str
    format: str


def recipe_of(
    tensor: str, made_from: Collection[str], written: Mapping[str, Written], shown: Mapping[fx.Node, Shown],
    produced: Collection[str], bases_of: Callable[[str], Collection[str]],
) -> tuple[list[Step], list[fx.Node]]:  # fmt: skip
    """(steps, the values that they read); `produced`: tensors that ops make; `bases_of`: a tensor and all whose
    memory it is in. `UnmadeError` where the tensor cannot be made of those that the plan names."""
    steps: list[Step] = []
    number: dict[str, int] = {}
    sources = frozenset(made_from)
    values: dict[fx.Node, int] = {}

    def make(wanted: str) -> int:
        call = written.get(wanted)
        if call is None or not is_repeatable(call.kind):
            what = "is made by no op that may run again" if call is None else f"is made by {call.kind}"
            why = f"the plan has {tensor} recomputed from {', '.join(made_from)}, but {wanted} {what}"
            raise UnmadeError(why, f"keep {tensor} in a format, or as it is")
        args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), place)
        steps.append(_without_side_effects(call, args, kwargs))
        return len(steps) - 1

    def place(n: fx.Node) -> Any:
        found = shown.get(n)
        if found is None or found.tensor not in produced or not sources.isdisjoint(bases_of(found.tensor)):
            return Value(values.setdefault(n, len(values)))
        if found.tensor not in number:
            number[found.tensor] = make(found.tensor)
        return MadeBefore(number[found.tensor], dtype_of(found.format))

    make(tensor)
    return steps, list(values)


def _without_side_effects(call: Written, args: Any, kwargs: Any) -> Step:
    """The call as a step; norms in training take the statistics of the batch again, and leave the running ones."""
    function = call.target if callable(call.target) else Method(str(call.target))
    if isinstance(function, With) and function.fixed and isinstance(function.fixed[0], NormCall):
        return Step(function, (*args[:3], None, None) if function.fixed[0].training else args, kwargs)
    if call.kind == "batch_norm":
        named = dict(zip(NORM_SIGNATURE["batch_norm"], args, strict=False)) | kwargs
        if named.get("training"):
            named |= {"running_mean": None, "running_var": None}
        return Step(F.batch_norm, (), named)
    return Step(function, tuple(args), kwargs)
