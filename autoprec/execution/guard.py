"""No bad update: what it takes to see a non-finite gradient in time and to make a step without effect.

Gradients are looked at where they leave the graph, by post-accumulate hooks and at the end of the backward pass, so
that clipping cannot launder an inf. A vetoed step finds every gradient set to None, which torch's optimizers answer by
changing nothing; the gradients come back afterwards. Optimizers that may call a closure more than once are snapshotted
as well.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = [
    "BufferSnapshot",
    "GradientWatch",
    "OptimizerSnapshot",
    "PutAside",
    "calls_closure_once",
    "is_torchs_own",
    "squares_gradients",
]


class GradientWatch:
    """Watches the gradients of a model's parameters. Mutable; owned by the session.

    Attributes:
        fresh: FQNs of the parameters that received a gradient since the last `clear`.
        bad: FQNs of those among them that were non-finite (known at the end of the backward pass on a CPU; after
            `verdict` elsewhere).
        large: FQNs of those that were finite, and so large that FP32 (of FP64 gradients, FP64) does not hold the sum
            of their squares: second moments of an optimizer would be infinite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.fresh: set[str] = set()
        self.bad: set[str] = set()
        self.large: set[str] = set()
        self._pending: list[tuple[str, Tensor]] = []
        self._task = -1
        self._norms: list[tuple[str, tuple[Tensor, Tensor]]] = []
        self._judged: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._unwatched = dict(parameters)
        self._parameters = dict(parameters)
        self.look_for_new()

    def look_for_new(self) -> None:
        """Watch the parameters that became trainable since the last look."""
        for fqn, p in list(self._unwatched.items()):
            if p.is_leaf and p.requires_grad:
                self._handles.append(p.register_post_accumulate_grad_hook(self._hook(fqn)))
                del self._unwatched[fqn]

    def discarded(self) -> bool:
        """True if there were gradients and the user has set all of them to None: that backward pass is void."""
        return bool(self.fresh) and all(self._parameters[f].grad is None for f in self.fresh)

    def _hook(self, fqn: str) -> Any:
        # autograd keeps these hooks where the garbage collector cannot see them: they must not hold the parameters.
        weak_self = weakref.ref(self)

        def arrived(p: Tensor) -> None:
            if (watch := weak_self()) is not None:
                watch.fresh.add(fqn)
                if (g := p.grad) is not None:
                    watch._arrived(fqn, g, alone=len(p._post_accumulate_grad_hooks) == 1)  # type: ignore[attr-defined]

        return arrived

    def _arrived(self, fqn: str, g: Tensor, *, alone: bool) -> None:
        """It is looked at when the backward pass ends, before the user's next line; at once where somebody else has a
        hook that may change it."""
        self._pending.append((fqn, g))
        task = torch._C._current_graph_task_id()
        if not alone or task == -1:
            self.look()
        elif task != self._task:  # one of a pass that died has not been called
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.look)  # type: ignore[no-untyped-call]

    def look(self) -> None:
        """At the gradients that have arrived and were not looked at yet. Together, because the code that looks is out
        of the caches each time (docs/measurements/overhead.md); the latest first, which are in them still."""
        pending, self._pending = self._pending, []
        elsewhere: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for fqn, g in reversed(pending):
            if g.is_cpu and g.layout is torch.strided and _is_fine(g):
                continue
            values = _values(g)
            if values.numel() and not values.is_cpu:
                elsewhere.setdefault(_summed_in(values), []).append((fqn, values))
            elif not math.isfinite(float(torch.linalg.vector_norm(values, dtype=_summed_in(values)))):
                (self.large if bool(values.isfinite().all()) else self.bad).add(fqn)
        for dtype, named in elsewhere.items():
            names, grads = zip(*named, strict=True)
            largest, norms = (torch._foreach_norm(grads, ord=order, dtype=dtype) for order in (math.inf, 2))
            self._norms += zip(names, zip(largest, norms, strict=True), strict=True)

    def verdict(self) -> bool:
        """True if every gradient since `clear` was finite. Waits for the device once."""
        self.look()
        if self._norms:
            device = self._norms[0][1][0].device
            norms = [n.to(device) for _, found in self._norms for n in found]
            widest = torch.float64 if any(n.dtype is torch.float64 for n in norms) else torch.float32
            read = torch.stack([n.to(widest) for n in norms]).tolist()
            for (name, _), largest, norm in zip(self._norms, read[::2], read[1::2], strict=True):
                if not math.isfinite(norm):
                    (self.large if math.isfinite(largest) else self.bad).add(name)
            self._norms = []
        return not self.bad

    def largest(self) -> dict[str, float]:
        """The largest magnitude in each bad gradient, as it is now; infinite where it is not finite."""
        grads = {f: self._parameters[f].grad for f in sorted(self.bad) if f in self._parameters}
        found = {f: float(_values(g).abs().max()) for f, g in grads.items() if g is not None and g.numel()}
        return {f: math.inf if math.isnan(found.get(f, math.inf)) else found.get(f, math.inf) for f in sorted(self.bad)}

    def note_gradients(self) -> None:
        """Remember which gradients a bad verdict is about; all of the step's, where no gradient was to blame."""
        names = [f for f in self.bad if f in self._parameters] or self.fresh
        grads = {f: self._parameters[f].grad for f in names}
        self._judged = {f: g for f, g in grads.items() if g is not None}

    def bad_gradients_are_gone(self) -> bool:
        """Whether the user has reset every gradient that a bad verdict was about: set to None, replaced, or zeroed.
        (Looking for finite values is not enough: clipping makes an inf finite.) They are forgotten then."""
        gone = all(self._parameters[f].grad is not g or not bool(g.any()) for f, g in self._judged.items())
        if gone:
            self.bad &= self.fresh - set(self._judged)
            self._judged.clear()
        return gone

    def clear(self) -> None:
        """A new step begins."""
        self.fresh.clear()
        self.bad.clear()
        self.large.clear()
        self._pending = []
        self._norms = []
        self._judged.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unwatched = dict(self._parameters)


#: Elements up to which a norm costs as much as a sum on a CPU; of a million it costs twice as much or more.
_SHORT = 1 << 12

#: Numbers whose squares leave FP32 sum up to more than this, also where they cancel: to their rounding errors.
_LARGE_SUM = 1e6


def _is_fine(g: Tensor) -> bool:
    """Whether one read shows that all is finite and far from too large; if not, the norm has to be looked at."""
    if g.dtype.is_complex:
        return False
    found = torch.linalg.vector_norm(g) if g.numel() <= _SHORT else g.sum()
    return -_LARGE_SUM <= found.item() <= _LARGE_SUM


def _summed_in(values: Tensor) -> torch.dtype:
    """Where squares of gradients are added up: not in FP16, which has no room for them."""
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def _values(g: Tensor) -> Tensor:
    """The numbers of a gradient."""
    values = g.coalesce().values() if g.is_sparse else g
    return torch.view_as_real(values) if values.is_complex() else values


class PutAside:
    """The gradients of an optimizer, set to None until `restore`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._grads: list[tuple[Tensor, Tensor]] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._grads.append((p, p.grad))
                    p.grad = None

    def restore(self) -> None:
        """Put them back, where nobody has written a new one."""
        for p, g in self._grads:
            if p.grad is None:
                p.grad = g
        self._grads.clear()


class OptimizerSnapshot:
    """Copies of an optimizer's parameters and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = [(p, p.detach().clone()) for g in optimizer.param_groups for p in g["params"]]
        self._state = {p: copy.deepcopy(s) for p, s in optimizer.state.items()}

    def restore(self, optimizer: Optimizer) -> None:
        """Bitwise as it was."""
        with torch.no_grad():
            for p, saved in self._parameters:
                p.copy_(saved)
        optimizer.state.clear()
        optimizer.state.update(self._state)


#: Buffers up to this size are copied at every step; larger ones (masks, position tables) once they were seen to change.
_SMALL_BUFFER_BYTES = 1 << 20


class BufferSnapshot:
    """Copies of the buffers that steps change, taken at the first forward of a step.

    Version counters do not show every change (batch norm writes its running statistics without moving them), so large
    buffers are compared with their copy once, at the second step, and by version from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._takes = 0
        self._constant: dict[str, int] = {}
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self._known = list[tuple[str, nn.Module, list[nn.Module | None]]]()

    def _buffers(self) -> dict[str, Tensor]:
        """As `named_buffers`, but the tree of modules is walked again only where it has changed."""
        model = self._model()
        if model is None:
            return {}
        if not self._known or any(list(m._modules.values()) != children for _, m, children in self._known):
            named = model.named_modules()
            self._known = [(f"{name}." if name else "", m, list(m._modules.values())) for name, m in named]
        found: dict[str, Tensor] = {}
        seen = set[int]()
        for prefix, m, _ in self._known:
            for key, b in m._buffers.items():
                if b is not None and id(b) not in seen:
                    seen.add(id(b))
                    found[f"{prefix}{key}"] = b
        return found

    def take(self) -> None:
        """Copy what may change in the step that begins."""
        buffers = self._buffers()
        if self._takes == 1:
            for name, (buffer, saved) in self._copies.items():
                if saved.nbytes > _SMALL_BUFFER_BYTES and torch.equal(buffer, saved):
                    self._constant[name] = buffer._version
        self._takes += 1
        wanted = [n for n, b in buffers.items() if self._constant.get(n) != b._version]
        self._copies = {n: (buffers[n], buffers[n].detach().clone()) for n in wanted}

    def restore(self) -> None:
        """Bitwise as at `take`; the buffers are the same objects again, also where the step put others in their
        place."""
        model = self._model()
        with torch.no_grad():
            for name, (buffer, saved) in self._copies.items():
                buffer.copy_(saved)
                if model is not None:
                    owner, _, key = name.rpartition(".")
                    model.get_submodule(owner)._buffers[key] = buffer

    def turned_nonfinite(self) -> list[str]:
        """Names of buffers that were finite at `take` and are not now (a statistic can overflow before a gradient)."""
        if not self._copies:
            return []
        now = self._buffers()
        return [
            name
            for name, (buffer, saved) in ((n, (now.get(n, b), s)) for n, (b, s) in self._copies.items())
            if buffer.is_floating_point()
            and not math.isfinite(float(buffer.sum()))
            and not bool(buffer.isfinite().all())
            and bool(saved.isfinite().all())
        ]

    def values(self) -> dict[int, Tensor]:
        """id(buffer) → its value at `take`."""
        return {id(buffer): saved for buffer, saved in self._copies.values()}


def calls_closure_once(optimizer: Optimizer) -> bool:
    """True for torch's own optimizers other than LBFGS: they call a closure once, before they touch anything."""
    return is_torchs_own(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def squares_gradients(optimizer: Optimizer) -> bool:
    """Whether it may keep squares of gradients: all but plain gradient descent."""
    return not isinstance(optimizer, (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop))


def is_torchs_own(optimizer: Optimizer) -> bool:
    """True for the optimizers of torch.optim, which leave parameters without a gradient alone."""
    return type(optimizer).__module__.startswith("torch.optim.")
