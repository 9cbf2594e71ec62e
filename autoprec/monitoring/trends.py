"""How the largest magnitudes of tensors grow from window to window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autoprec.profiles import Profile

__all__ = ["Trends"]

#: Windows that a trend is read off.
_WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Trends:
    """log2 of amax over the last windows, oldest first, by (tensor id, "value" or "gradient"); frozen.

    Attributes:
        last: ((tensor, what), (log2 amax, …)), of tensors that had a non-zero amax in each of them.
    """

    last: tuple[tuple[tuple[str, str], tuple[float, ...]], ...] = ()

    def after(self, window: Profile) -> Trends:
        """With one more window."""
        before, found = dict(self.last), list[tuple[tuple[str, str], tuple[float, ...]]]()
        for t in window.tensors:
            for what, seen in (("value", t.values), ("gradient", t.gradients)):
                if seen is not None and seen.amax > 0.0:
                    known = before.get((t.id, what), ())
                    found.append(((t.id, what), (*known, math.log2(seen.amax))[-_WINDOWS:]))
        return Trends(last=tuple(found))

    def log2_per_window(self, tensor: str, what: str) -> float:
        """Octaves that amax grew by in each of the last windows: the least of them, so that one jump is no trend; 0
        where it did not grow in each, or too few windows are known."""
        known = self._by_key.get((tensor, what), ())
        if len(known) < _WINDOWS:
            return 0.0
        return max(0.0, min(b - a for a, b in zip(known, known[1:], strict=False)))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str], tuple[float, ...]]:
        return dict(self.last)
