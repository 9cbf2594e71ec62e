"""Faults on purpose, so that what a run promises can be proven on one's own model."""

from autoprec.testing.injection import KINDS, Injection, inject

__all__ = ["KINDS", "Injection", "inject"]
