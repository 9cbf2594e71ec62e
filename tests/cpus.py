"""What the tests expect of CPUs without BF16 instructions."""

from __future__ import annotations

import pytest

from autoprec.numerics.dtypes import native_formats

__all__ = ["HAS_BF16", "missed_without_bf16"]

HAS_BF16 = "bf16" in native_formats("cpu")


def missed_without_bf16(measured: str, *, run: bool = True) -> pytest.MarkDecorator:
    """The test shows what does not hold there yet (docs/limitations.md). `measured`: by how much, on AVX2. Not strict:
    another CPU without these instructions may hold it."""
    return pytest.mark.xfail(not HAS_BF16, reason=f"without BF16 instructions: {measured}", run=run, strict=False)
