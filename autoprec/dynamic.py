"""`DynamicPrecisionScheduler`: a session behind the interface that some training code is written against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from autoprec.api import EVENTS_FILE, compile, unwrap
from autoprec.api import session as session_of
from autoprec.errors import InputError
from autoprec.formats import format_named
from autoprec.policies import Policy
from autoprec.serial import load_policy
from autoprec.sessions import Session

__all__ = ["DynamicPrecisionScheduler"]

_PRECISIONS = (8, 16, 32)

#: Noise limits that refuse nothing that trains: who says "no more than 16 bits" wants that whatever it costs.
_NO_LIMIT = 1000.0


class DynamicPrecisionScheduler:
    """Schedules the precision of one model between two numbers of bits.

    `model` is compiled at once, or, without one, the outermost module with parameters that is called inside of a
    `precision_context` is, when it is called. From then on the model is scheduled wherever it runs, inside of the
    context or not.

    Args:
        min_precision, max_precision: 8, 16 or 32 bits. An op that can take none of the formats between them is computed
            in FP32. Below a `max_precision` of 32 the noise limits of the policy do not count.
        monitor_window: steps whose statistics are judged together. Every 50th is observed, or every tenth of a window
            where that is more often.
        model: the model, if it is there already.
        policy: everything else; its formats outside of the two bounds are left out.
        events: as in `autoprec.compile`.

    Raises `InputError` for other numbers, and as `autoprec.compile` does.
    """

    def __init__(
        self,
        min_precision: int = 8,
        max_precision: int = 32,
        monitor_window: int = 500,
        *,
        model: nn.Module | None = None,
        policy: str | Path | Policy = "dynamic",
        events: str | Path | None = EVENTS_FILE,
    ) -> None:
        for name, bits in (("min_precision", min_precision), ("max_precision", max_precision)):
            if bits not in _PRECISIONS or isinstance(bits, bool):
                raise InputError(f"{name} must be 8, 16 or 32 bits, not {bits!r}")
        if min_precision > max_precision:
            raise InputError(f"min_precision {min_precision} is above max_precision {max_precision}")
        self.policy = _bounded(load_policy(policy), min_precision, max_precision, monitor_window)
        self.model: nn.Module | None = None
        self._events = events
        if model is not None:
            self._adopt(model)

    @property
    def session(self) -> Session:
        """The session of the model. `InputError` before there is one."""
        if self.model is None:
            raise InputError(
                "no model was called in precision_context() yet; give it as DynamicPrecisionScheduler(model=model)"
            )
        return session_of(self.model)

    @contextmanager
    def precision_context(self) -> Iterator[DynamicPrecisionScheduler]:
        """Adopts the model that is called first, if there is none yet. Torch's call of modules is as before on leaving
        it, and as soon as a model was adopted."""
        if self.model is not None:
            yield self
            return
        plain = nn.Module.__call__

        def adopting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.model is None and next(module.parameters(), None) is not None:
                nn.Module.__call__ = plain  # type: ignore[method-assign]
                self._adopt(module)
            return plain(module, *args, **kwargs)

        nn.Module.__call__ = adopting  # type: ignore[method-assign, assignment]
        try:
            yield self
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]

    def close(self) -> None:
        """The model is plain again (`autoprec.unwrap`)."""
        if self.model is not None:
            unwrap(self.model)
            self.model = None

    def _adopt(self, model: nn.Module) -> None:
        self.model = compile(model, policy=self.policy, events=self._events)


def _bounded(policy: Policy, least: int, most: int, window: Any) -> Policy:
    """The policy within two numbers of bits. FP32 stays a candidate, for ops that can take no other."""
    formats = [f for f in policy.formats if f == "fp32" or least <= format_named(f).bits <= most]
    storages = [f for f in policy.storage.formats if least <= format_named(f).bits]
    interval = policy.monitor.interval_steps
    if isinstance(window, int):
        interval = max(1, min(interval, window // 10))
    changes: dict[str, Any] = {
        "formats": tuple(formats),
        "storage": {"formats": tuple(storages)},
        "monitor": policy.monitor.model_dump() | {"window_steps": window, "interval_steps": interval},
    }
    if most < 32:
        ceiling = {"match": "*", "ceiling": "bf16" if most == 16 else "fp8_e5m2", "optional": True,
                   "why": f"max_precision is {most}"}  # fmt: skip
        changes["rules"] = (*policy.rules, ceiling)
        changes["noise"] = {"gradient": _NO_LIMIT, "loss": _NO_LIMIT}
    return policy.replaced(**changes)
