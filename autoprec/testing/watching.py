"""Training steps, and whether a bad one changed anything: told without a word from the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Seen", "Watch", "same_bits", "state_of"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One step.

    Attributes:
        loss: before the step.
        bad: whether a gradient, or a buffer that was finite before, was not finite when the optimizer was called; where
            that keeps squares, also whether FP32 did not hold the sum of a gradient's.
        changed: names of parameters, buffers and optimizer state of which a bad step changed a bit, or any step made a
            finite one not finite.
    """

    loss: float
    bad: bool
    changed: tuple[str, ...]


class Watch:
    """Takes steps of a plain training loop, and compares every bit of the state before and after bad ones."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def step(self, loss_of: Callable[[], Tensor]) -> Seen:
        """One step on what `loss_of()` returns, a scalar."""
        before = state_of(self._model, self._optimizer)
        self._optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        holds = _is_finite if isinstance(self._optimizer, torch.optim.SGD) else _has_squares
        bad = any(p.grad is not None and not holds(p.grad) for p in self._model.parameters())
        bad = bad or any(
            not _is_finite(b) and _is_finite(before[f"buffer {n}"]) for n, b in self._model.named_buffers()
        )
        self._optimizer.step()
        after = state_of(self._model, self._optimizer)
        changed = [n for n in {**before, **after} if bad and not same_bits(before.get(n), after.get(n))]
        changed += [n for n, x in after.items() if n in before and _is_finite(before[n]) and not _is_finite(x)]
        return Seen(loss=float(loss.detach()), bad=bad, changed=tuple(dict.fromkeys(changed)))


def state_of(model: nn.Module, optimizer: Optimizer) -> Mapping[str, Tensor]:
    """Copies of parameters, buffers and the optimizer's state."""
    found: dict[str, Tensor] = {f"parameter {n}": p for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b for n, b in model.named_buffers()}
    names = {id(p): n for n, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        found |= {f"state {names.get(id(p), '')} {k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return {name: x.detach().clone() for name, x in found.items()}


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """NaN equals NaN here, and 0.0 does not equal −0.0."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _is_finite(x: Tensor) -> bool:
    values = x.detach().coalesce().values() if x.is_sparse else x.detach()
    return bool(values.isfinite().all())


def _has_squares(g: Tensor) -> bool:
    """Whether FP32 holds the sum of its squares."""
    values = g.detach().coalesce().values() if g.is_sparse else g.detach()
    return float(values.double().square().sum()) <= torch.finfo(torch.float32).max
