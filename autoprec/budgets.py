"""Limits of a step's peak, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from autoprec.checks import described
from autoprec.errors import PolicyError

__all__ = ["BUDGET_PATTERN", "LARGEST_BUDGET_BYTES", "Budget", "parse_budget"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A limit of the peak: in bytes, or in percent of the part that precision can change."""

    bytes: int | None = None
    percent: float | None = None


_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_AMOUNT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]{0,3}|%)\s*", re.ASCII)
#: The same for JSON schemas.
BUDGET_PATTERN = (
    r"^[ \t\n\r\f\v]*[0-9]{1,18}((\.0{1,18})?[ \t\n\r\f\v]*[bB]?|(\.[0-9]{1,18})?[ \t\n\r\f\v]*([kKmMgGtT][iI]?[bB]|%))"
    r"[ \t\n\r\f\v]*$"
)
LARGEST_BUDGET_BYTES = 2**63 - 1
_BUDGETS = 'valid: null, whole bytes, or text such as "6GiB", "512 MiB", "1.5GB", "60%"'


def parse_budget(value: str | int | None) -> Budget | None:
    """Bytes ("6GiB", "1.5GB", 6442450944) or a percentage ("60%"); None stays None."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        amount, unit = Fraction(value), "b"
    else:
        found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
        if not found or found[2] != "%" and found[2].lower() not in _UNITS:
            raise PolicyError(f"budget {described(value)} is not valid; {_BUDGETS}")
        amount, unit = Fraction(found[1]), found[2].lower()
    if unit == "%":
        if not 0 < amount <= 100:
            raise PolicyError(f"budget {described(value)} must be above 0% and at most 100%")
        return Budget(percent=float(amount))
    if _UNITS[unit] == 1 and amount.denominator > 1:
        raise PolicyError(f"budget {described(value)} is a fraction of a byte; {_BUDGETS}")
    size = int(amount * _UNITS[unit])
    if not 1 <= size <= LARGEST_BUDGET_BYTES:
        raise PolicyError(f"budget {described(value)} must be at least 1 byte and less than 8 EiB")
    return Budget(bytes=size)
