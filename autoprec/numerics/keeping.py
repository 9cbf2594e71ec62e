"""What an op keeps for its backward pass, kept in a narrow format, or made again there.

autograd hands every tensor that it keeps to a hook. Where the plan says so, the hook keeps a narrow copy instead, made
once per tensor and shared by all that keep it or a view of it, and reads it again in the backward pass; or it keeps
what the tensor is made again of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoprec.numerics.compilers import hooks_in_graph, is_traced, saved_for_backward
from autoprec.numerics.lean import attention
from autoprec.numerics.packing import Packed, decode, encode

__all__ = ["Cell", "Remade", "cast_of_kept", "keep_in", "keeping", "open_cell"]


@dataclass(frozen=True, eq=False)
class Remade:
    """What stands for a tensor until the backward pass: what autograd keeps of it, and what makes it again of that."""

    tensors: tuple[Tensor, ...]
    again: Callable[[Sequence[Tensor]], Tensor]

    def seen(self, as_: Callable[[Tensor], Tensor]) -> Remade:
        """The same for a view of the tensor."""
        again = self.again  # not `self`, which would hold the tensors after autograd has let go of them
        return Remade(self.tensors, lambda kept: as_(again(kept)))


class Place(Protocol):
    """What knows how a tensor is kept: a cell, or a recipe (`numerics.remaking`)."""

    def part(self, x: Tensor) -> Packed | Remade | None:
        """What is kept instead of `x`; None: `x` itself."""


class _Copy:
    """A narrow copy, made when it is first asked for, and the memories that it is of: one, and its casts."""

    def __init__(self) -> None:
        self.packed: Packed | None = None
        self._memories: list[tuple[StorageWeakRef, int]] = []

    def is_of(self, x: Tensor) -> bool:
        """Whether it is of the memory of `x`, as that is now."""
        memory = x.untyped_storage()
        return any(m.cdata == memory._cdata and v == x._version and not m.expired() for m, v in self._memories)

    def add(self, x: Tensor) -> None:
        """The memory of `x` is one of them."""
        self._memories.append((StorageWeakRef(x.untyped_storage()), x._version))


def _bytes(x: Tensor) -> int:
    """`x.nbytes`, which torch does not have of symbolic sizes."""
    return x.numel() * x.element_size()


class Cell:
    """The narrow copies of one tensor: of its memory and its casts, made from what is kept first. A cast of a part has
    a copy, with a scale, of its own."""

    def __init__(self, storage: str, tensor: str = "") -> None:
        self.storage, self.tensor = storage, tensor
        self._numel = -1
        self._copies: list[_Copy] = []
        #: While a compiler traces, what shows all of a memory: nothing is held by that.
        self._wholes: list[Tensor] = []

    def stands_for(self, x: Tensor) -> None:
        """Say which tensor it is."""
        self._numel = x.numel()
        self._shows_all(x)

    def _shows_all(self, x: Tensor) -> None:
        if is_traced(x):
            self._wholes.append(x)

    def is_cast(self, x: Tensor, y: Tensor) -> None:
        """Say that `y` is a cast of `x`: where both are all of a memory, in one order, a narrow copy is of both."""
        if x.stride() == y.stride() and all(t.untyped_storage().nbytes() == _bytes(t) for t in (x, y)):
            self._copy_of(x).add(y)
            self._shows_all(y)

    def _copy_of(self, x: Tensor) -> _Copy:
        for copy in self._copies:
            if copy.is_of(x):
                return copy
        self._copies.append(_Copy())
        self._copies[-1].add(x)
        return self._copies[-1]

    def part(self, x: Tensor) -> Packed | None:
        """The narrow copy of `x`: the tensor, a cast of it or of a part of it, or a view of any. None where `x` lives
        in more memory than the tensor takes (a kernel's padded result), and is then kept as it is."""
        memory = x.untyped_storage()
        numel = memory.nbytes() // x.element_size()
        if not x.numel() or numel > self._numel:
            return None
        copy = self._copy_of(x)
        with saved_for_backward(x, self.tensor):
            if copy.packed is None:
                copy.packed = _encode_memory(self._whole_of(x).detach(), numel, self.storage)
            return _seen_as(copy.packed, x)

    def _whole_of(self, x: Tensor) -> Tensor:
        """While a compiler traces, what shows all of the memory that `x` shows a part of, if that is known. Compilers
        may give a part a memory of its own: reaching from it into what lies around it would read anything."""
        memory = x.untyped_storage()._cdata
        return next((w for w in self._wholes if w.untyped_storage()._cdata == memory), x)


def _encode_memory(x: Tensor, numel: int, storage: str) -> Packed:
    """The narrow copy of the memory, of so many elements, that `x` shows; of `x`'s shape where that is all of it."""
    if x.numel() == numel:
        if x.is_contiguous():
            return encode(x, storage)
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if (dense := x.permute(order)).is_contiguous():
            packed = encode(dense, storage)
            return packed._replace(payload=packed.payload.permute([order.index(d) for d in range(x.dim())]))
    return encode(x.as_strided((numel,), (1,), 0), storage)


def _seen_as(packed: Packed, x: Tensor) -> Packed:
    """The part of a narrow copy of a memory that `x` shows of the memory; repeated elements are there once."""
    if packed.payload.shape == x.shape and packed.payload.stride() == x.stride():
        return packed
    sizes = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return packed._replace(payload=packed.payload.as_strided(sizes, x.stride(), x.storage_offset()))


class _Kept:
    """What stands in autograd's graph for a tensor: its narrow copy, or what the next hook made of it."""

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor | None = x
        self.outer: list[Any] = []
        self.packed: Packed | None = None
        self.again: Callable[[Sequence[Tensor]], Tensor] | None = None
        self.shape, self.dtype = x.shape, x.dtype

    def close(self, instead: Packed | Remade | None, outer_pack: Callable[[Tensor], Any]) -> None:
        """Let go of the tensor. The hook that was in force before ours sees what is kept instead."""
        assert self.tensor is not None
        kept: Sequence[Tensor] = (self.tensor,)
        if isinstance(instead, Remade):
            self.again, kept = instead.again, instead.tensors
        elif instead is not None:
            self.packed, kept = instead, (instead.payload,)
        self.outer, self.tensor = [outer_pack(x) for x in kept], None

    def read(self, outer_unpack: Callable[[Any], Tensor]) -> Tensor:
        """The tensor, or what is left of it after rounding."""
        if self.tensor is not None:
            return self.tensor
        kept = [outer_unpack(x) for x in self.outer]
        if self.again is not None:
            return self.again(kept).to(self.dtype).expand(self.shape)
        if self.packed is None:
            return kept[0]
        return decode(self.packed._replace(payload=kept[0]), self.dtype).expand(self.shape)


def keeping(
    own: Cell | None,
    cells: Sequence[Place],
    reads: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    function: Callable[..., Any],
) -> Any:
    """`function(*args, **kwargs)`, where autograd keeps the tensors `reads` in their `cells`, and the result in `own`,
    which is its cell from now on."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_alone, _unchanged)
    cell_of = {x.untyped_storage()._cdata: cell for cell, x in zip(cells, reads, strict=True)}
    waiting: list[_Kept] = []
    # autograd holds `pack` until the op's backward pass is over, so what `pack` sees must not keep narrow copies alive
    # that others have done with: whether there is a cell of its own, not the cell; the others' cells while it runs.
    wait = own is not None

    def pack(x: Tensor) -> Any:
        cell = cell_of.get(x.untyped_storage()._cdata)
        if cell is None and function is attention:
            x = _apart(x)
        if cell is None and not wait:
            return outer_pack(x)
        kept = _Kept(x)
        if cell is not None:
            kept.close(cell.part(x), outer_pack)
        else:
            waiting.append(kept)
        return kept

    def unpack(kept: Any) -> Tensor:
        return kept.read(outer_unpack) if isinstance(kept, _Kept) else outer_unpack(kept)

    with hooks_in_graph(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = function(*args, **kwargs)
    if own is not None:
        own.stands_for(result)
        for kept in waiting:
            assert kept.tensor is not None
            mine = kept.tensor.untyped_storage()._cdata == result.untyped_storage()._cdata
            kept.close(own.part(kept.tensor) if mine else None, outer_pack)
    cell_of.clear()
    return result


class _AsItWas(NamedTuple):
    """A tensor that is kept as it is, and its version then; None where nobody counts."""

    tensor: Tensor
    version: int | None


def _alone(x: Tensor) -> Tensor | _AsItWas:
    """The tensor without the graph that it comes from. autograd hands over what an op keeps of its own result as that
    result: kept so, it would keep the op alive and the op it, for ever if no backward pass comes along."""
    return x if is_traced(x) else _AsItWas(x.detach(), None if x.is_inference() else x._version)


def _unchanged(kept: Tensor | _AsItWas) -> Tensor:
    """That tensor. autograd counts no versions of what goes through hooks, so its error is ours to raise."""
    if isinstance(kept, Tensor):
        return kept
    x, version = kept
    if version is not None and x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{x.dtype}, shape {list(x.shape)}] is at version {x._version}; expected version {version}"
        )
    return x


def _apart(x: Tensor) -> Tensor:
    """What attention that runs op by op keeps as it is, beside what it keeps narrow: of a part of a larger memory in
    FP32 a copy, as torch's own does, so that the rest of the memory can go. In the same order, for the same bits."""
    if is_traced(x) or x.dtype is not torch.float32 or x.untyped_storage().nbytes() <= _bytes(x):
        return x
    return x.detach().clone()


def open_cell(x: Tensor | None, storage: str, tensor: str = "") -> Cell:
    """A cell for a tensor, or for one that is still to be made; `tensor` is its name, for compilers."""
    cell = Cell(storage, tensor)
    if x is not None:
        cell.stands_for(x)
    return cell


def cast_of_kept(x: Tensor, cell: Cell, make: Callable[..., Tensor], *how: Any) -> Tensor:
    """`make(x, *how)`, a cast of a tensor that is kept in a cell: what keeps the cast shares the narrow copy."""
    y = make(x, *how)
    if not torch.is_grad_enabled():  # nothing is kept, and of tensors in inference mode nobody knows when they change
        return y
    cell.is_cast(x, y)
    if y.dtype is torch.float16 and x.dtype is not torch.float16:
        cell.part(x)  # the narrow copy is of the tensor, not of what FP16 leaves of it, whoever keeps it first
    return y


def keep_in(cell: Cell, x: Tensor, storage: str) -> Packed | None:
    """The narrow copy of `x` that a GEMM keeps, shared with whoever else keeps the tensor; None where no backward will
    come."""
    if not torch.is_grad_enabled():
        return None
    with saved_for_backward(x, cell.tensor):
        part = cell.part(x)
        if part is None:
            return encode(x, storage)
        return part if part.payload.shape == x.shape else part._replace(payload=part.payload.expand(x.shape))
