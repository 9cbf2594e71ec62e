"""Everything that autoprec raises on purpose.

    AutoprecError
    ├── InputError                 a file, a name or an argument is not valid       exit code 2
    │   ├── PolicyError            a policy file or object
    │   ├── PlanError              a plan file, or a plan made for something else
    │   ├── ProfileError           a profile file
    │   ├── DeviceError            a device file
    │   └── StateError             the saved state of a run, or one of another run
    ├── InfeasibleError            no plan keeps the budgets                         exit code 1
    ├── SolverError                a solver ended without a proven answer            exit code 1
    ├── NotCapturedError           parameters were trained outside the captured graph
    ├── NonFiniteError             too many bad steps in a row, or guard: raise
    └── UnsupportedError           this model, device or torch cannot do it          exit code 3

A message says what is wrong, where, measured against allowed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AutoprecError",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "NonFiniteError",
    "NotCapturedError",
    "PlanError",
    "PolicyError",
    "ProfileError",
    "SolverError",
    "StateError",
    "UnsupportedError",
    "nearest",
]


class AutoprecError(Exception):
    """Base of every error that autoprec raises on purpose."""

    exit_code = 1


class InputError(AutoprecError):
    """A file, a name or an argument is not valid; `at` says in which part of a value (fields and positions)."""

    exit_code = 2

    def __init__(self, message: str, *, at: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.at = at


class PolicyError(InputError):
    """A policy is not valid; the message gives file:line:column where there is a file."""


class PlanError(InputError):
    """A plan is not valid, or was made for another model."""


class ProfileError(InputError):
    """A profile is not valid, or was made for another model."""


class DeviceError(InputError):
    """A device file is not valid."""


class StateError(InputError):
    """The state of a run is not valid, or belongs to another run."""


class InfeasibleError(AutoprecError):
    """No plan keeps the budgets; the message gives the smallest feasible one.

    Attributes:
        smallest_bytes: that budget; None where no budget would help.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class SolverError(AutoprecError):
    """A solver ended without a proven answer."""


class NotCapturedError(AutoprecError):
    """Parameters received gradients outside the graph that autoprec captured."""


class NonFiniteError(AutoprecError):
    """Non-finite gradients, by policy (`guard.nonfinite: raise`) or too often in a row."""


class UnsupportedError(AutoprecError):
    """This model, device or torch version cannot do what was asked."""

    exit_code = 3


def nearest(name: str, valid: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest valid name, or the list of all of them."""
    options = sorted(valid)
    close = difflib.get_close_matches(name, options, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Valid: {', '.join(options)}." if options else ""
