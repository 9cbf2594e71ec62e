"""A tensor that is not kept for the backward pass of those who read it, but made again there from what others keep.

A recipe stands where the cell of a narrow copy stands (`numerics.keeping`). What it reads is kept by the ops that it
runs again, for their own backward pass, which comes later than that of everybody who needs the result: so nothing is
held for its sake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoprec.numerics.compilers import is_traced, made_in_backward
from autoprec.numerics.keeping import Cell, Remade
from autoprec.numerics.packing import Packed, decode

__all__ = ["Held", "Kept", "MadeBefore", "Recipe", "Remade", "Step", "Value", "hold", "made_again", "open_recipe"]


#: Outside of any backward pass.
_NO_TASK = -1


class Value(NamedTuple):
    """In a step's arguments: one of the values that a recipe is opened with."""

    place: int


class MadeBefore(NamedTuple):
    """In a step's arguments: what an earlier step made, in a dtype."""

    step: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Step:
    """One call: no random numbers, nothing changed in place, one tensor made."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Held:
    """What is kept of a value that a recipe will read, so that the value itself need not wait for the recipe."""

    kept: Tensor | Packed
    dtype: torch.dtype
    shape: torch.Size


#: What a product keeps instead of the tensor that it read.
Kept = Packed | Remade


class Recipe:
    """Steps, and the values that they read, or what is held of them. Some are numbers."""

    def __init__(self, steps: Sequence[Step], values: Sequence[Any], like: Tensor) -> None:
        # Sizes, and numbers that change from call to call, are no tensors.
        self._numbers = {i: v for i, v in enumerate(values) if not isinstance(v, (Tensor, Held))}
        self._places = {i: k for k, i in enumerate(i for i in range(len(values)) if i not in self._numbers)}
        held = [v if isinstance(v, Held) else Held(v, v.dtype, v.shape) for v in (values[i] for i in self._places)]
        self._kept, self._read_as = [h.kept for h in held], [(h.dtype, h.shape) for h in held]
        self._numel = like.numel()
        self._making = _Making(steps, like.new_empty(0), like.shape, like.stride())

    def part(self, x: Tensor) -> Remade | None:
        """How to make `x` again: the tensor, a cast of it, or a view of either. None where `x` lives in other memory
        than that, and is then kept as it is."""
        if not x.numel() or x.untyped_storage().nbytes() != self._numel * x.element_size():
            return None
        kept, read_as, numbers, places = self._kept, self._read_as, self._numbers, self._places
        shape, stride, offset = x.shape, x.stride(), x.storage_offset()
        templates = [k._replace(payload=k.payload.new_empty(0)) if isinstance(k, Packed) else None for k in kept]
        making = self._making
        making.uses += 1

        def again(tensors: Sequence[Tensor]) -> Tensor:
            def read(value: int) -> Any:
                if value in numbers:
                    return numbers[value]
                place = places[value]
                how, (dtype, of_shape) = templates[place], read_as[place]
                if how is None:
                    return tensors[place]
                return decode(how._replace(payload=tensors[place]), dtype).expand(of_shape)

            made = making.result(read)
            # A compiler may lay out what it makes in another way than it says, and looks at it as it is then.
            seen = made.shape == shape and made.stride() == stride and not offset
            return made if seen else made.as_strided(shape, stride, offset)

        return Remade(tuple(k.payload if isinstance(k, Packed) else k for k in kept), again)


class _Making:
    """The steps, run once for all who need the result of one backward pass. Holds no value between the passes."""

    def __init__(self, steps: Sequence[Step], like: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.uses = 0
        self._steps, self._like, self._shape, self._stride = steps, like, shape, stride
        self._made: Tensor | None = None
        self._left = 0

    def result(self, read: Callable[[int], Any]) -> Tensor:
        """The tensor; held until so many have asked for it as keep it. `read`: the values, by their places."""
        if self._made is None:
            with torch.no_grad(), made_in_backward(self._like):
                self._made, self._left = self._in_its_layout(self._run(read)), self.uses
            self._forget_at_the_end()
        found, self._left = self._made, self._left - 1
        if self._left == 0:
            self._made = None
        return found

    def _forget_at_the_end(self) -> None:
        """Of the backward pass, in which some of those who keep it may not be differentiated."""
        if not is_traced(self._like) and torch._C._current_graph_task_id() != _NO_TASK:
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)  # type: ignore[no-untyped-call]

    def _forget(self) -> None:
        self._made = None

    def _in_its_layout(self, made: Tensor) -> Tensor:
        made = made.to(self._like.dtype)
        if made.shape == self._shape and made.stride() == self._stride:
            return made
        return self._like.new_empty_strided(self._shape, self._stride).copy_(made)

    def _run(self, read: Callable[[int], Any]) -> Tensor:
        values: dict[int, Any] = {}  # each from its first reader to its last
        results: dict[int, Tensor] = {}

        def given(a: Any) -> Any:
            if isinstance(a, Value):
                if a.place not in values:
                    values[a.place] = read(a.place)
                return values[a.place]
            if isinstance(a, MadeBefore) and a not in casts:
                waiting[a.step] -= 1  # of what is cast for the last time, the cast alone is there while the step runs
                casts[a] = (results[a.step] if waiting[a.step] else results.pop(a.step)).to(a.dtype)
            return casts[a] if isinstance(a, MadeBefore) else a

        waiting = Counter(p.step for s in self._steps for p in set(_places(s)) if isinstance(p, MadeBefore))
        for k, step in enumerate(self._steps):
            casts: dict[MadeBefore, Tensor] = {}
            results[k] = step.function(*_each(step.args, given), **_each(dict(step.kwargs), given))
            for i in {p.place for p in _places(step) if isinstance(p, Value)} - self._read_after(k):
                del values[i]
        return results[len(self._steps) - 1]

    def _read_after(self, step: int) -> set[int]:
        return {p.place for s in self._steps[step + 1 :] for p in _places(s) if isinstance(p, Value)}


def _places(step: Step) -> list[Value | MadeBefore]:
    """The places in a step's arguments."""
    found: list[Value | MadeBefore] = []
    _each((step.args, dict(step.kwargs)), found.append)
    return found


def _each(arguments: Any, read: Callable[[Any], Any]) -> Any:
    """Arguments with their places filled in. (fx would look into the places, which are tuples.)"""
    if isinstance(arguments, (Value, MadeBefore)):
        return read(arguments)
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_each(a, read) for a in arguments)
    if isinstance(arguments, dict):
        return {k: _each(v, read) for k, v in arguments.items()}
    return arguments


def hold(cell: Cell, x: Tensor) -> Held | None:
    """The narrow copy of `x`, for a recipe; None where no backward will come."""
    return Held(cell.part(x) or x, x.dtype, x.shape) if torch.is_grad_enabled() else None


def open_recipe(values: Sequence[Any], like: Tensor, steps: Sequence[Step]) -> Recipe | None:
    """A recipe for `like`, opened as soon as that is made; None where no backward will come."""
    return Recipe(steps, values, like) if torch.is_grad_enabled() else None


def made_again(recipe: Recipe | None, x: Tensor) -> Remade | None:
    """What a product keeps instead of `x`; None where no backward will come, or none was foreseen: it keeps `x`."""
    return recipe.part(x) if recipe is not None and torch.is_grad_enabled() else None
