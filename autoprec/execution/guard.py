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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from autoprec.execution.coming import Coming
from autoprec.execution.ranks import Ranks, may_average

__all__ = [
    "GradientWatch",
    "GradientsLeft",
    "OptimizerSnapshot",
    "PutAside",
    "calls_closure_once",
    "is_torchs_own",
    "leaves_out",
    "numbers_of",
    "squares_gradients",
]


class GradientWatch:
    """Watches the gradients of a model's parameters. Mutable; owned by the session.

    Attributes:
        bad: FQNs of the parameters with a gradient that was non-finite (known at the end of the backward pass on a CPU;
            after `verdict` elsewhere).
        large: FQNs of those that were finite, and so large that FP32 (of FP64 gradients, FP64) does not hold the sum
            of their squares: second moments of an optimizer would be infinite.

    Gradients that a bad step left, and nobody reset, say nothing of the steps after it: they count for an optimizer
    that would read them, and for no other.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ranks: Ranks | None = None,
        averages_are_there: Callable[[], None] | None = None,
    ) -> None:
        """`averages_are_there` is called, and held weakly, at the end of each backward pass that the ranks average."""
        self._ranks = Ranks() if ranks is None else ranks
        self._averages_are_there = weakref.WeakMethod(averages_are_there) if averages_are_there else lambda: None
        self.bad: set[str] = set()
        self.large: set[str] = set()
        self._fresh: set[str] = set()
        #: By FQN, a gradient that was looked at in this step, and its version then; and whose was the last.
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._last = ""
        self._left_bad: dict[str, Tensor] = {}
        self._few: set[str] = set()  # parameters of one dimension and few elements
        #: FQNs of what has arrived and was not looked at, and the backward pass in progress. autograd keeps hooks where
        #: the garbage collector cannot see them: they hold these, and not the parameters.
        self._arrived: list[str] = []
        self._task = [_NO_TASK - 1]
        self._shared: set[str] = set()
        self._coming: list[Coming] = []
        self._norms: dict[str, float] = {}
        self._judged: dict[str, Tensor | None] = {}  # None for one that is gone
        self._handles: list[RemovableHandle] = []
        #: All that torch calls when the gradient of a watched parameter is complete, ours and others'.
        self._hooks: dict[str, Mapping[int, Any]] = {}
        self._unwatched = dict(parameters)
        self._parameters = dict(parameters)
        self._name_of = {id(p): f for f, p in parameters.items()}
        self.look_for_new()

    @property
    def fresh(self) -> set[str]:
        """FQNs of the parameters that received a gradient since the last `clear`."""
        self._fresh.update(self._arrived)
        return self._fresh

    def look_for_new(self) -> None:
        """Watch the parameters that became trainable since the last look."""
        for fqn, p in list(self._unwatched.items()):
            if p.is_leaf and p.requires_grad:
                self._handles.append(p.register_post_accumulate_grad_hook(self._hook(fqn)))
                self._hooks[fqn] = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                if p.ndim == 1 and p.numel() <= _FEW:
                    self._few.add(fqn)
                del self._unwatched[fqn]

    def discarded(self) -> bool:
        """True if there were gradients and the user has reset all of them: that backward pass is void. Zeros are
        looked for only where somebody has written to a gradient since it was looked at."""
        if not self.fresh:
            return False
        if self._last and self._is_as_seen(self._last, self._parameters[self._last].grad):
            return False
        grads = (self._parameters[f].grad for f in self.fresh)
        return all(g is None or not bool(numbers_of(g).any()) for g in grads)

    def _hook(self, fqn: str) -> Any:
        weak_self, arrived, task, shared = weakref.ref(self), self._arrived, self._task, self._shared
        current = torch._C._current_graph_task_id

        def hook(_: Tensor) -> None:  # one for each parameter in each step, so it does next to nothing
            arrived.append(fqn)
            if (current() != task[0] or fqn in shared) and (watch := weak_self()) is not None:
                watch._begins(fqn)

        return hook

    def _begins(self, fqn: str) -> None:
        """Gradients are looked at when the backward pass ends, before the user's next line; those of parameters that
        have hooks of somebody else's, which may change them, at once."""
        task = torch._C._current_graph_task_id()
        if task == _NO_TASK:
            self.look()
            return
        if task != self._task[0]:  # one of a pass that died has not been called
            self._task[0] = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ends)  # type: ignore[no-untyped-call]
            self._shared.clear()
            if max(map(len, self._hooks.values())) > 1:
                self._shared.update(f for f, hooks in self._hooks.items() if len(hooks) > 1)
        if fqn in self._shared:
            self.look()

    def _ends(self) -> None:
        """The backward pass. Hooks of somebody else's may have come after the look."""
        if self._ranks.average:  # by a callback that was queued after this one
            torch.autograd.Variable._execution_engine.queue_callback(self._averages)  # type: ignore[no-untyped-call]
            return
        if self._shared:
            self._arrived += self._shared & self._fresh
        self.look()

    def _averages(self) -> None:
        """Are there. What was not finite is not finite in the mean; what else was found in parts of it does not count,
        since no other process has found it."""
        self.bad.clear()
        self.large.clear()
        self._coming = []
        self._look_again()
        if (told := self._averages_are_there()) is not None:
            told()

    def look_before_update(self) -> None:
        """Where a loop may have averaged gradients over processes since the backward pass, at what came of it."""
        if may_average():
            self._look_again()

    def _look_again(self) -> None:
        """At every gradient since `clear`, as it is now."""
        self._arrived[:] = self.fresh
        self.look()

    def look(self) -> None:
        """At the gradients that have arrived and were not looked at yet. Together, because the code that looks is out
        of the caches each time (docs/measurements/overhead.md); the latest first, which are in them still."""
        if not self._arrived:
            return
        names = self._arrived[::-1]
        self._arrived.clear()
        self._fresh.update(names)
        self._last = names[0]
        self._look_at(names)

    def _is_as_seen(self, fqn: str, g: Tensor | None) -> bool:
        known, version = self._seen.get(fqn, (None, 0))
        return g is not None and g is known and _version(g) == version

    def _look_at(self, names: Iterable[str]) -> None:
        alone, together = list[tuple[str, Tensor]](), list[tuple[str, Tensor]]()
        elsewhere: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for fqn in names:
            if (g := self._parameters[fqn].grad) is None:
                continue
            self._seen[fqn] = g, _version(g)
            if g.dtype is _FP32 and g.is_cpu and g.layout is torch.strided:
                (together if g.ndim == 1 and fqn in self._few else alone).append((fqn, g))
            elif (values := numbers_of(g)).is_cpu:
                alone.append((fqn, values))
            elif values.numel():
                elsewhere.setdefault((values.device, values.dtype), []).append((fqn, values))
        if together and not _has_square(torch.cat([values for _, values in together])):
            alone += together
        for fqn, values in alone:
            if not _has_square(values):
                (self.large if bool(values.isfinite().all()) else self.bad).add(fqn)
        for named in elsewhere.values():
            names, grads = zip(*named, strict=True)
            norms = torch._foreach_norm(grads, ord=2, dtype=_summed_in(grads[0]))
            self._coming.append(Coming(names, torch.stack(list(norms)), grads[0].device))

    def look_at_rest(self, optimizer: Optimizer) -> None:
        """At what an optimizer will read that was not looked at as it is: gradients that the loop has put there itself,
        or written to since the backward pass, and those that are left from steps before. Those that a bad step left
        are bad."""
        self.look()
        rest = [f for f, p in self._read_by(optimizer) if p.grad is not None and not self._is_as_seen(f, p.grad)]
        self._look_at(rest)
        if self._left_bad:
            read = {f: self._left_bad.pop(f) for f, _ in self._read_by(optimizer) if f in self._left_bad}
            self.bad |= self._still_bad(read).keys()

    def _read_by(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        names = self._name_of
        for group in optimizer.param_groups:
            for p in group["params"]:
                if (fqn := names.get(id(p))) is not None:
                    yield fqn, p

    def _still_bad(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of these gradients, those that are there still, and not finite."""
        there = {f: g for f, g in grads.items() if self._parameters[f].grad is g}
        return {f: g for f, g in there.items() if not bool(numbers_of(g).isfinite().all())}

    def verdict(self) -> bool:
        """True if every gradient since `clear` was finite. Waits for the device until it has looked at the last of
        them, and not for what it was asked for after that."""
        self.look()
        for name, norm in _too_large(self._coming).items():
            self._norms[name] = norm
            (self.large if self._is_large(name, norm) else self.bad).add(name)
        self._coming = []
        for fqn in [f for f, g in self._left_bad.items() if self._parameters[f].grad is not g]:
            del self._left_bad[fqn]
        return not self.bad.difference(self._left_bad)

    def flag(self) -> Tensor | None:
        """1.0 where `verdict` would find something bad or large and 0.0 where not, on the device of the gradients,
        which nobody waits for. None where the host knows something already, or gradients are in several places."""
        self.look()
        devices = {norms.values.device for norms in self._coming}
        if self.bad or self.large or self._left_bad or len(devices) != 1:
            return None
        found = [(norms.values <= _LARGEST_NORM[norms.values.dtype]).all() for norms in self._coming]
        good = found[0] if len(found) == 1 else torch.stack(found).all()
        return good.logical_not().float()

    def leave(self) -> GradientsLeft:
        """What `flag` was about, for later; nothing of it is left here."""
        grads = {f: g for f in self.fresh if (g := self._parameters[f].grad) is not None}
        coming, self._coming = self._coming, []
        return GradientsLeft(coming, {f: TensorWeakRef(g) for f, g in grads.items()})

    def take_back(self, left: GradientsLeft, norms: Mapping[str, float]) -> None:
        """A step that was left was bad, by these norms (none, where no gradient was to blame)."""
        self.bad.update(norms)
        self._norms.update(norms)
        self._judged = {f: left.grads[f]() for f in (norms or left.grads) if f in left.grads}

    def _is_large(self, name: str, norm: float) -> bool:
        """Whether a gradient whose squares have no sum is finite: told by a second look. One that was changed
        meanwhile, by clipping, does not say what it was, and counts as bad."""
        if math.isnan(norm) or (g := self._parameters[name].grad) is None:
            return False
        values = numbers_of(g)
        return bool(values.isfinite().all()) and not _has_square(values)

    def largest(self) -> dict[str, float]:
        """The largest magnitude in each bad gradient, as it is now, or at most, if it is gone; NaN where it is not
        finite, and infinite where it is gone and nobody knows."""
        found = {f: self._norms.get(f, math.nan) for f in sorted(self.bad)}
        for f in found:
            p = self._parameters.get(f)
            if p is not None and (g := p.grad) is not None and g.numel() and self._judged.get(f, g) is g:
                size = float(numbers_of(g).abs().max())
                found[f] = size if math.isfinite(size) else math.nan
        return found

    def note_gradients(self) -> None:
        """Remember which gradients a bad verdict is about: all of the step's, which came of one backward pass."""
        names = self.fresh | {f for f in self.bad if f in self._parameters}
        grads = {f: self._parameters[f].grad for f in names}
        self._judged = {f: g for f, g in grads.items() if g is not None}

    def bad_gradients_are_gone(self) -> bool:
        """Whether the user has reset every gradient that a bad verdict was about: set to None, replaced, or zeroed.
        (Looking for finite values is not enough: clipping makes an inf finite.) They are forgotten then."""
        judged = [(self._parameters[f].grad, g) for f, g in self._judged.items()]
        gone = all(g is None or now is not g or not bool(g.any()) for now, g in judged)
        if gone:
            self.bad &= self.fresh - set(self._judged)
            self._judged.clear()
        return gone

    def over(self) -> None:
        """The step is."""
        self._fresh.clear()
        self._seen.clear()

    def next(self) -> None:
        """A new step begins. What is left of a bad one goes on being known."""
        known = {f: g for f, g in self._judged.items() if g is not None and f in self.bad} | self._left_bad
        self.clear()
        self._left_bad = self._still_bad(known)

    def clear(self) -> None:
        """A step begins anew."""
        self._arrived.clear()
        self._fresh.clear()
        self._seen.clear()
        self.bad.clear()
        self.large.clear()
        self._coming = []
        self._norms.clear()
        self._judged.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._unwatched = dict(self._parameters)


class GradientsLeft:
    """Norms of a step's gradients that the host has not read, and the gradients, which this does not keep alive."""

    def __init__(self, coming: Sequence[Coming], grads: Mapping[str, TensorWeakRef]) -> None:
        self._coming, self.grads = coming, grads

    def read(self) -> dict[str, float]:
        """Norms of those that made the step bad, by FQN. Waits for the device."""
        return _too_large(self._coming)


def _too_large(coming: Iterable[Coming]) -> dict[str, float]:
    """Norms that are not finite, or whose squares are not."""
    return {name: n for c in coming for name, n in c.read() if not n <= _LARGEST_NORM[c.values.dtype]}


def _version(g: Tensor) -> int:
    return -1 if g.is_inference() else g._version


_FP32 = torch.float32

#: Outside of any backward pass.
_NO_TASK = -1

#: Elements of gradients of one dimension (of biases, of norms) up to which they are copied to be looked at together.
_FEW = 4096


#: By the dtype of a norm, the largest whose square is finite: in FP32 the one below 2^64, whose square is 2^128, the
#: first that FP32 does not hold; in FP64 the one below 2^512.
_LARGEST_NORM = {torch.float32: 2.0**64 * (1 - 2.0**-24), torch.float64: 2.0**512 * (1 - 2.0**-53)}


def _has_square(values: Tensor) -> bool:
    """Whether all are finite, and the sum of their squares. Of none they are."""
    wide = _summed_in(values)
    return torch.linalg.vector_norm(values, dtype=wide).item() <= _LARGEST_NORM[wide]


def _summed_in(values: Tensor) -> torch.dtype:
    """Where squares of gradients are added up: not in FP16, which has no room for them."""
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def numbers_of(g: Tensor) -> Tensor:
    """The numbers of a gradient, or of a buffer."""
    values = g if g.layout is torch.strided else g.coalesce().values() if g.is_sparse else g.values()
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
    """Copies of an optimizer's parameters and state, and of what it keeps with its groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = [(p, p.detach().clone()) for g in optimizer.param_groups for p in g["params"]]
        self._state = {p: copy.deepcopy(s) for p, s in optimizer.state.items()}
        groups = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
        self._groups = [copy.deepcopy(group) for group in groups]

    def restore(self, optimizer: Optimizer) -> None:
        """Bitwise as it was."""
        with torch.no_grad():
            for p, saved in self._parameters:
                p.copy_(saved)
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - kept.keys() - {"params"}:
                del group[key]
            group.update(kept)


def calls_closure_once(optimizer: Optimizer) -> bool:
    """True for torch's own optimizers other than LBFGS: they call a closure once, before they touch anything."""
    return is_torchs_own(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def leaves_out(optimizer: Optimizer) -> bool:
    """Whether its step changes nothing where `optimizer.found_inf`, on its device, is 1.0: torch's fused Adam and
    AdamW, once every parameter that has a gradient has its state (which a step would make first)."""
    if not (isinstance(optimizer, torch.optim.Adam) and is_torchs_own(optimizer)):
        return False
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        return False
    return all(
        group.get("fused") and all(p.grad is None or optimizer.state.get(p) for p in group["params"])
        for group in optimizer.param_groups
    )


def squares_gradients(optimizer: Optimizer) -> bool:
    """Whether it may keep squares of gradients: all but plain gradient descent."""
    return not isinstance(optimizer, (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop))


def is_torchs_own(optimizer: Optimizer) -> bool:
    """True for the optimizers of torch.optim, which leave parameters without a gradient alone."""
    return type(optimizer).__module__.startswith("torch.optim.")
