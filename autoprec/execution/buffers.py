"""Buffers that steps change, as they were at the first forward pass of a step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor, nn

from autoprec.execution.coming import Coming
from autoprec.execution.guard import numbers_of

__all__ = ["BufferSnapshot"]

#: Buffers up to this size are copied at every step; larger ones (masks, position tables) once they were seen to change.
_SMALL_BUFFER_BYTES = 1 << 20

#: Copies up to which a device puts them back by itself: two kernels of some microseconds each, where a host that waits
#: for a verdict leaves a GPU without work for 1.3 milliseconds (docs/measurements/h200.md).
_FEW = 64

#: Numbers whose squares have a sum in FP64, if they are finite.
_SUMMED_IN_FP64 = {torch.float32, torch.bfloat16, torch.float16}


class BufferSnapshot:
    """Copies of the buffers that steps change, taken at the first forward of a step.

    Version counters do not show every change (batch norm writes its running statistics without moving them), so large
    buffers are compared with their copy once, at the second step, and by version from then on. The host keeps that
    copy, for the step in which they change after all. Parameters that a forward pass writes to (the codes of a
    quantizer, an embedding's rows of too large a norm) are as buffers, once it is known.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._takes = 0
        self._constant: dict[str, _Constant] = {}
        self._there: frozenset[str] = frozenset()  # names at `take`, and of places that were empty then
        self._empty: frozenset[str] = frozenset()
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._coming: Coming | None = None
        self._written: dict[str, nn.Parameter] = {}
        self._names: list[str] = []
        self._own: list[Mapping[str, Tensor | None]] = []
        self._children: list[Mapping[str, nn.Module | None]] = []
        self._seen: list[Mapping[str, nn.Module | None]] = []

    def _buffers(self) -> dict[str, Tensor]:
        """As `named_buffers`, but the tree of modules is walked again only where it has changed."""
        model = self._model()
        if model is None:
            return {}
        if not self._names or self._children != self._seen:
            named = dict(model.named_modules())
            self._names = [f"{name}." if name else "" for name in named]
            self._own = [m._buffers for m in named.values()]
            self._children = [m._modules for m in named.values()]
            self._seen = [dict(children) for children in self._children]
        found: dict[str, Tensor] = dict(self._written)
        seen: set[int] = set()
        for name, b in self._places():
            if b is not None and id(b) not in seen:
                seen.add(id(b))
                found[name] = b
        return found

    def _places(self) -> Iterator[tuple[str, Tensor | None]]:
        """Names of buffers, and what is there."""
        for prefix, own in compress(zip(self._names, self._own, strict=True), self._own):  # few modules have any
            for key, b in own.items():
                yield f"{prefix}{key}", b

    def watch(self, written: Mapping[str, nn.Parameter]) -> None:
        """Parameters that a forward pass is about to write to, in this step and in all that follow."""
        for name, p in written.items():
            if name not in self._written:
                self._written[name] = p
                self._copies[name] = (p, p.detach().clone())
                self._there |= {name}

    def take(self, *, again: bool = False) -> None:
        """Copy what may change in the step that begins. `again`: a call before it, without gradients, belongs to it: of
        what that made non-finite the copy from before it stays."""
        spoilt = {n: self._copies[n] for n in self.turned_nonfinite() if n in self._copies} if again else {}
        self._sums.clear()
        self._coming = None
        buffers = self._buffers()
        if self._takes == 1:
            for name, (buffer, saved) in self._copies.items():
                large = saved.layout is torch.strided and saved.nbytes > _SMALL_BUFFER_BYTES and saved is not buffer
                if large and torch.equal(buffer, saved):
                    self._constant[name] = _Constant(buffer, buffer._version, saved.cpu())
        self._takes += 1
        for name in [name for name, known in self._constant.items() if known.changed(buffers.get(name))]:
            del self._constant[name]
        wanted = [n for n in buffers if n not in self._constant]
        self._copies = {n: (b := buffers[n], b if b.is_inference() else b.detach().clone()) for n in wanted}
        self._copies |= {n: pair for n, pair in spoilt.items() if buffers.get(n) is pair[0]}
        self._there = frozenset(buffers)
        self._empty = frozenset(name for name, b in self._places() if b is None)

    def restore(self) -> None:
        """Bitwise as at `take`; the buffers are the same objects again, also where the step put others in their
        place, and there are no more of them."""
        model, now = self._model(), self._buffers()
        changed = {n: (c.buffer, c.saved) for n, c in self._constant.items() if c.changed(now.get(n))}
        with torch.no_grad():
            for name, (buffer, saved) in {**self._copies, **changed}.items():
                if not _is_fixed(buffer):
                    buffer.copy_(saved)
                if model is not None and name not in self._written:
                    owner, _, key = name.rpartition(".")
                    model.get_submodule(owner)._buffers[key] = buffer
        for name in now.keys() - self._there if model is not None else ():
            owner, _, key = name.rpartition(".")
            module = model.get_submodule(owner)
            if name in self._empty:
                module._buffers[key] = None
            else:
                delattr(module, key)

    @property
    def hold_numbers(self) -> bool:
        """Whether any buffer could become non-finite."""
        return any(b.is_floating_point() for b in self._buffers().values())

    def leave(self, flag: Tensor) -> Tensor | None:
        """That flag, raised as well where a buffer that was finite at `take` is not now: then `restore_where` and
        `turned_nonfinite` need no host. None where they do."""
        now = self._now()
        if now.keys() - self._there or any(c.changed(now.get(n)) for n, c in self._constant.items()):
            return None
        if len(self._copies) > _FEW or any(
            now.get(name) is not buffer or not _can_be_put_back(buffer, saved, flag.device)
            for name, (buffer, saved) in self._copies.items()
        ):
            return None
        floating = {n: pair for n, pair in self._copies.items() if pair[0].is_floating_point()}
        if any(buffer.dtype not in _SUMMED_IN_FP64 for buffer, _ in floating.values()):
            return None
        if not floating:
            return flag
        after, before = (
            torch.stack(torch._foreach_norm([pair[k] for pair in floating.values()], ord=2, dtype=torch.float64))
            for k in (0, 1)
        )
        turned = ~after.isfinite() & before.isfinite()
        self._coming = Coming(list(floating), turned, flag.device)
        return flag.maximum(turned.any())

    def left(self) -> Coming | None:
        """What `leave` asked for; nothing of it is left here."""
        coming, self._coming = self._coming, None
        return coming

    def restore_where(self, flag: Tensor) -> None:
        """Bitwise as at `take`, if the flag is raised; the device alone reads it. For autograd nothing has changed: it
        has not, in a good step."""
        raised = flag.bool()
        buffers = tuple(buffer for buffer, _ in self._copies.values())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffers):
            for buffer, saved in self._copies.values():
                buffer.copy_(torch.where(raised, saved, buffer))

    def ask(self) -> None:
        """For what `turned_nonfinite` will read, of a device that the host need not wait for yet."""
        self._coming = None
        self._sums = {n: b.sum() for n, b, _ in self._floating() if not b.is_cpu}

    def _now(self) -> dict[str, Tensor]:
        """The buffers, where there can be any."""
        return self._buffers() if self._copies or self._written or any(self._own) else {}

    def _floating(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Names, buffers as they are now, and copies, of those that may have become non-finite; no copy of new ones."""
        now = self._now()
        for name, (buffer, saved) in self._copies.items():
            if (b := now.get(name, buffer)).is_floating_point():
                yield name, b, saved
        for name, known in self._constant.items():
            if known.changed(b := now.get(name, known.buffer)) and b.is_floating_point():
                yield name, b, known.saved
        for name in now.keys() - self._there:
            if now[name].is_floating_point():
                yield name, now[name], None

    def turned_nonfinite(self) -> list[str]:
        """Names of buffers that were finite at `take` and are not now (a statistic can overflow before a gradient)."""
        if self._coming is not None:
            return self._coming.raised()
        by_place: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, total in self._sums.items():
            by_place.setdefault((total.device, total.dtype), []).append(name)
        sums: dict[str, float] = {}
        for names in by_place.values():
            sums |= zip(names, torch.stack([self._sums[n] for n in names]).tolist(), strict=True)
        self._sums.clear()
        return [
            name
            for name, b, saved in self._floating()
            if not math.isfinite(sums[name] if name in sums else float(b.sum()))
            and not bool(numbers_of(b).isfinite().all())
            and (saved is None or bool(numbers_of(saved).isfinite().all()))
        ]

    def values(self) -> dict[int, Tensor]:
        """id(buffer) → its value at `take`."""
        return {id(buffer): saved for buffer, saved in self._copies.values()}


@dataclass(frozen=True)
class _Constant:
    """A large buffer that did not change, as it was."""

    buffer: Tensor
    version: int
    saved: Tensor

    def changed(self, now: Tensor | None) -> bool:
        """Whether the buffer of that name is another, or has been written to."""
        return now is not self.buffer or now._version != self.version


def _can_be_put_back(buffer: Tensor, saved: Tensor, device: torch.device) -> bool:
    """In one kernel, whatever the flag says: not what is sparse, was resized, or cannot be written to."""
    strided = buffer.layout is torch.strided and buffer.device == device and buffer.shape == saved.shape
    return strided and not _is_fixed(buffer)


def _is_fixed(buffer: Tensor) -> bool:
    """Whether it cannot be written to: made in inference mode, or with one place for several elements."""
    if buffer.is_inference():
        return True
    return buffer.layout is torch.strided and bool(torch._debug_has_internal_overlap(buffer))
