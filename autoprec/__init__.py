"""autoprec: an adaptive per-layer precision scheduler for PyTorch training.

`model = autoprec.compile(model)` and the training loop does not change. Importing this package imports no torch;
names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "compile": "autoprec.api",
    "session": "autoprec.api",
    "unwrap": "autoprec.api",
    "Session": "autoprec.sessions",
    "GradScaler": "autoprec.scaler",
    "DynamicPrecisionScheduler": "autoprec.dynamic",
    "Format": "autoprec.formats",
    "Role": "autoprec.graphs",
    "Op": "autoprec.graphs",
    "OpGraph": "autoprec.graphs",
    "TensorSpec": "autoprec.graphs",
    "RangeHistogram": "autoprec.profiles",
    "Profile": "autoprec.profiles",
    "Device": "autoprec.devices",
    "Policy": "autoprec.policies",
    "Rule": "autoprec.policies",
    "Plan": "autoprec.plans",
    "Assignment": "autoprec.plans",
    "Event": "autoprec.plans",
    "AutoprecError": "autoprec.errors",
    "DeviceError": "autoprec.errors",
    "InfeasibleError": "autoprec.errors",
    "InputError": "autoprec.errors",
    "NonFiniteError": "autoprec.errors",
    "NotCapturedError": "autoprec.errors",
    "PlanError": "autoprec.errors",
    "PolicyError": "autoprec.errors",
    "ProfileError": "autoprec.errors",
    "SolverError": "autoprec.errors",
    "UnsupportedError": "autoprec.errors",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("autoprec.testing")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'autoprec' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
