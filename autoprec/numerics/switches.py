"""torch's switches for the arithmetic of FP32 products on CUDA. They belong to the process, so a product in TF32 sets
them for itself and puts back what it found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["fp32_arithmetic", "tf32_products"]

_TF32 = "tf32"

#: torch has "none" where nobody has said anything, which is as good as "ieee".
_UNSAID = "none"


@contextmanager
def tf32_products() -> Iterator[None]:
    """FP32 matrix products and convolutions that start meanwhile, on CUDA, round their operands to TF32."""
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    changed = [(switch, switch.fp32_precision) for switch in switches if switch.fp32_precision != _TF32]
    try:
        for switch, _ in changed:
            switch.fp32_precision = _TF32
        yield
    finally:
        for switch, before in changed:
            switch.fp32_precision = before


def fp32_arithmetic(device_type: str) -> str:
    """How torch computes FP32 products here, as its switches stand: "ieee", or what narrower format it rounds the
    operands of matrix products and of convolutions to ("conv: tf32", "matmul: bf16, conv: bf16")."""
    backends: dict[str, Any] = {"matmul": torch.backends.mkldnn.matmul, "conv": torch.backends.mkldnn.conv}
    if device_type == "cuda":
        backends = {"matmul": torch.backends.cuda.matmul, "conv": torch.backends.cudnn.conv}
    said = {what: str(switch.fp32_precision) for what, switch in backends.items()}
    narrow = [f"{what}: {how}" for what, how in said.items() if how not in ("ieee", _UNSAID)]
    return ", ".join(narrow) or "ieee"
