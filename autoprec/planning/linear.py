"""Linear expressions over numbered variables."""

from __future__ import annotations

__all__ = ["Linear"]


class Linear:
    """Σ coefficient·variable + constant."""

    def __init__(self, constant: float = 0.0) -> None:
        self.terms: dict[int, float] = {}
        self.constant = constant

    def add(self, other: Linear | int, factor: float = 1.0) -> Linear:
        """Add a variable (by number) or another expression, times `factor`."""
        if isinstance(other, int):
            self.terms[other] = self.terms.get(other, 0.0) + factor
        else:
            for k, v in other.terms.items():
                self.terms[k] = self.terms.get(k, 0.0) + factor * v
            self.constant += factor * other.constant
        return self
