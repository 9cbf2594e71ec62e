"""States of runs that somebody has written to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["edited"]


def edited(state: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """With this header, and without a digest, as a version that had none would have written it."""
    return {**state, "autoprec": json.dumps({name: x for name, x in header.items() if name != "sha256"})}
