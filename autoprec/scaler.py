"""`GradScaler`: torch's own, with a floor, hysteresis, a validated state, and a first scale that needs no search.

torch's halves its scale without end: 166 overflows in a row bring it to 0, and the next good step divides by it and
writes NaN into the weights. It also takes whatever a state dict holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.api import session as session_of
from autoprec.checks import described
from autoprec.errors import InputError, NonFiniteError
from autoprec.planning.loss_scaling import largest_loss_scale_log2
from autoprec.sessions import Session

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Scales the loss for FP16 gradients; a `torch.amp.GradScaler` in every way, and with the same arguments.

    With a `model` that `autoprec.compile` was called on, what is not given here comes from `loss_scaling` of its
    policy, and an `init_scale` of "auto" is read off the gradient histograms: 1 while calibrating, which is in FP32,
    then the largest power of two with which no gradient of calibration overflows.

    Args:
        device: "cuda" or "cpu"; None is that of the model, or "cuda" where there is one.
        init_scale, growth_factor, backoff_factor, growth_interval: as torch's: 2^16, 2, 1/2, 2000 good steps.
        enabled: False makes every method do nothing, and `step` the optimizer's.
        min_scale: the scale never falls below it; 2^-14 makes a gradient of 1 the smallest normal number of FP16.
        hysteresis: so many overflows since the scale last grew before it falls; torch's is 1.
        patience_steps: so many overflows in a row at `min_scale` are an error, because scaling has nothing to do with
            them. It is looked at once in so many updates, so that nobody waits for a GPU in between.
        model: see above.

    Raises `InputError` for an argument or a state that is not valid, by name; `NonFiniteError` when patience is out:
    parameters and optimizer state are then as before the first of those steps.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float | str | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-14,
        hysteresis: int = 1,
        patience_steps: int = 20,
        model: nn.Module | None = None,
    ) -> None:
        self._session: Session | None = None
        if model is not None:
            self._session = session_of(model)
            scaling = self._session.policy.loss_scaling
            init_scale = scaling.init if init_scale is None else init_scale
            growth_factor = scaling.growth if growth_factor is None else growth_factor
            backoff_factor = scaling.backoff if backoff_factor is None else backoff_factor
            growth_interval = scaling.interval_steps if growth_interval is None else growth_interval
            device = next(model.parameters()).device.type if device is None else device
        if init_scale == "auto" and model is None:
            raise InputError('init_scale "auto" is read off a calibration: GradScaler(model=model) says whose')
        self._waits = init_scale == "auto" and enabled
        settings = {
            "scale": 1.0 if self._waits else 2.0**16 if init_scale is None else init_scale,
            "growth_factor": 2.0 if growth_factor is None else growth_factor,
            "backoff_factor": 0.5 if backoff_factor is None else backoff_factor,
            "growth_interval": 2000 if growth_interval is None else growth_interval,
            "_growth_tracker": 0,
            "min_scale": min_scale,
            "hysteresis": hysteresis,
            "patience_steps": patience_steps,
        }
        _check(settings, "GradScaler()", {"scale": "init_scale"})
        self._min_scale, self._hysteresis, self._patience_steps = float(min_scale), hysteresis, patience_steps
        # On the device beside the scale: overflows since the scale grew, and in a row at the floor.
        self._init_overflows = (0, 0)
        self._overflows: Tensor | None = None
        self._updates = 0
        super().__init__(
            device=("cuda" if torch.cuda.is_available() else "cpu") if device is None else device,
            init_scale=float(settings["scale"]),
            growth_factor=float(settings["growth_factor"]),
            backoff_factor=float(settings["backoff_factor"]),
            growth_interval=int(settings["growth_interval"]),
            enabled=enabled,
        )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's, within the floor. A `new_scale` must be finite and at least `min_scale`."""
        if not self._enabled:
            return
        if new_scale is not None:
            value = new_scale.item() if isinstance(new_scale, Tensor) and new_scale.numel() == 1 else new_scale
            if not isinstance(value, Tensor):
                _check({"scale": value, "min_scale": self._min_scale}, "update()", {"scale": "new_scale"})
                new_scale = new_scale if isinstance(new_scale, Tensor) else float(value)
            super().update(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        found = [f.to(scale.device).reshape(()) for s in states for f in s["found_inf_per_device"].values()]
        bad = torch.stack(found).sum() > 0 if found else None
        before = scale.clone()
        super().update()
        assert bad is not None  # or torch would have complained
        self._limit(before, bad)
        self._read_first_scale()

    def _limit(self, before: Tensor, bad: Tensor) -> None:
        """What torch did to the scale, undone until the hysteresis is used up, and never below the floor."""
        assert self._scale is not None
        if self._overflows is None:
            self._overflows = torch.tensor(self._init_overflows, dtype=torch.int32, device=before.device)
        since_growth, at_floor = self._overflows.unbind()
        grew = self._scale > before
        since_growth = torch.where(grew.reshape(()), 0, since_growth + bad.int())
        waits = bad & (since_growth < self._hysteresis)
        self._scale.copy_(torch.where(waits, before, self._scale).clamp(min=self._min_scale))
        at_floor = torch.where(bad, at_floor + (before <= self._min_scale).reshape(()).int(), 0)
        self._overflows = torch.stack([since_growth, at_floor]).int()
        self._updates += 1
        if self._updates % self._patience_steps == 0 and (in_row := int(at_floor)) >= self._patience_steps:
            raise NonFiniteError(
                f"gradients were inf or NaN in {in_row} steps in a row at the smallest loss scale,"
                f" {self._min_scale:.3g} (patience_steps {self._patience_steps}): it is not the scale. Parameters and"
                " optimizer state are as before those steps; look at the data, the learning rate, and"
                " autoprec.session(model).events, which name the op"
            )

    def _read_first_scale(self) -> None:
        """The scale that calibration advises, once there is a plan."""
        session = self._session
        if not self._waits or session is None or session.plan is None or session.profile is None:
            return
        self._waits = False
        assert self._scale is not None
        advised = 2.0 ** largest_loss_scale_log2(session.profile)
        self._scale.fill_(max(self._min_scale, advised))

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and ours; {} if not enabled. Either class loads what the other one saved."""
        if not self._enabled:
            return {}
        overflows = self._init_overflows if self._overflows is None else tuple(self._overflows.tolist())
        return super().state_dict() | {
            "min_scale": self._min_scale,
            "hysteresis": self._hysteresis,
            "patience_steps": self._patience_steps,
            "_overflows": list(overflows),
            "_waits": self._waits,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, ours or torch's. `InputError` naming the entry that is missing or not valid;
        nothing is loaded then."""
        if not self._enabled:
            return
        if not state_dict:
            raise InputError("the state of the GradScaler is empty: it was saved by one that was not enabled")
        ours = {
            "min_scale": self._min_scale,
            "hysteresis": self._hysteresis,
            "patience_steps": self._patience_steps,
            "_overflows": [0, 0],
            "_waits": False,
        }
        state = ours | dict(state_dict)
        _check(state, "the state of the GradScaler", {})
        super().load_state_dict(state)
        self._min_scale, self._hysteresis = float(state["min_scale"]), state["hysteresis"]
        self._patience_steps, self._waits = state["patience_steps"], state["_waits"]
        self._init_overflows = (state["_overflows"][0], state["_overflows"][1])
        self._overflows = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and self._overflows is not None:
            state["_init_overflows"], state["_overflows"] = tuple(self._overflows.tolist()), None
        return state


#: What an entry must be: whole number or not, above, at most.
_VALID: dict[str, tuple[bool, float, float]] = {
    "scale": (False, 0.0, math.inf),
    "growth_factor": (False, 1.0, math.inf),
    "backoff_factor": (False, 0.0, 1.0),
    "growth_interval": (True, 0, math.inf),
    "_growth_tracker": (True, -1, math.inf),
    "min_scale": (False, 0.0, math.inf),
    "hysteresis": (True, 0, math.inf),
    "patience_steps": (True, 0, math.inf),
}


def _check(state: Mapping[str, Any], what: str, names: Mapping[str, str]) -> None:
    """Raise `InputError` for the first entry that is not valid; all of `_VALID` must be there but in an update."""
    for key, (whole, above, most) in _VALID.items():
        if key not in state:
            if "update" in what:
                continue
            raise InputError(f"{what}: {names.get(key, key)} is missing")
        value, kind = state[key], "whole number" if whole else "number"
        numeric = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not numeric or not above < value < most:
            limits = f"above {above:g}" + ("" if most == math.inf else f" and below {most:g}")
            raise InputError(f"{what}: {names.get(key, key)} must be a finite {kind} {limits}, not {described(value)}")
    if state["scale"] < state["min_scale"]:
        name = names.get("scale", "scale")
        raise InputError(f"{what}: {name} {state['scale']:g} is below min_scale {state['min_scale']:g}")
    counts = state.get("_overflows", [0, 0])
    if not (isinstance(counts, (list, tuple)) and [type(c) for c in counts] == [int, int] and min(counts) >= 0):
        raise InputError(f"{what}: _overflows must be two whole numbers of at least 0, not {described(counts)}")
    if not isinstance(state.get("_waits", False), bool):
        raise InputError(f"{what}: _waits must be true or false, not {described(state['_waits'])}")
