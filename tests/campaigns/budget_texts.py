"""Which budgets are valid, told without the parser."""

from __future__ import annotations

from typing import Any

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "": 1}


def valid(value: Any) -> bool:
    """Null, whole bytes from 1 to below 2^63, or digits with a unit or a per cent sign (above 0, at most 100). Not a
    fraction of a byte."""
    if value is None:
        return True
    if type(value) is int:
        return 1 <= value < 2**63
    if not isinstance(value, str) or not value.isascii():
        return False
    text = value.strip(" \t\n\r\f\v").lower()
    unit = text.lstrip("0123456789.").strip(" \t\n\r\f\v")
    digits = text[: len(text) - len(unit)].strip(" \t\n\r\f\v")
    whole, point, rest = digits.partition(".")
    if not whole.isdigit() or len(whole) > 18 or (point and not rest.isdigit()) or len(rest) > 18:
        return False
    amount = int(whole + rest)  # in units of 10^-len(rest)
    if unit == "%":
        return 0 < amount <= 100 * 10 ** len(rest)
    if unit in ("", "b") and rest.strip("0"):
        return False
    return unit in _UNITS and 1 <= amount * _UNITS[unit] // 10 ** len(rest) < 2**63
