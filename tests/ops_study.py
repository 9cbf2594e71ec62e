"""How well is the peak of a step predicted that is two layers and one of torch's ops? `python -m tests.ops_study
[NAME ...]`

Functions of one or two tensors and reductions, as torch's own tests list them (`op_db`), and others by hand: predicted
over measured peak, all in FP32 and under the policy `bf16`. Prints those that are more than 5 % off, and how many were
not; names print all of theirs. Exit code 1 if one holds over 5 % more than predicted that `LOW` does not name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo, op_db

from autoprec.errors import AutoprecError
from tests.bench.measure import one_thread
from tests.memory_study import predicted_and_measured

OFF = 0.05

Function = Callable[..., Any]

_NOT_OF_TORCH = ("_refs", "ops.", "jiterator", "_native", "_batch")
_UNDEFINED = ("acosh", "mvlgamma")  # between 0.1 and 0.9

#: What is predicted too low, and why: made-up numbers are no positive-definite matrix, and what nobody times (views).
LOW = {"cholesky": "", "gather": "bf16"}

BY_HAND: dict[str, tuple[Function, int]] = {
    "cumsum": (lambda a: a.cumsum(-1), 1),
    "cumprod": (lambda a: a.cumprod(-1), 1),
    "logcumsumexp": (lambda a: a.logcumsumexp(-1), 1),
    "sort": (lambda a: a.sort(-1)[0], 1),
    "topk": (lambda a: a.topk(128, -1)[0], 1),
    "fft": (torch.fft.fft, 1),
    "rfft and irfft": (lambda a: torch.fft.irfft(torch.fft.rfft(a) * (1.0 + 1.0j), n=256), 1),
    "roll": (lambda a: a.roll(1, -1), 1),
    "flip": (lambda a: a.flip(-1), 1),
    "gather": (lambda a: a.gather(-1, torch.zeros(4, 256, 64, dtype=torch.long)), 1),
    "index_select": (lambda a: a.index_select(1, torch.arange(0, 256, 2)), 1),
    "contiguous": (lambda a: a.transpose(1, 2).contiguous(), 1),
    "tril": (torch.tril, 1),
    "diff": (torch.diff, 1),
    "repeat": (lambda a: a.repeat(1, 2, 1), 1),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, -1), 1),
    "pad": (lambda a: F.pad(a, (1, 1)), 1),
    "pad, reflected": (lambda a: F.pad(a, (1, 1), mode="reflect"), 1),
    "interpolate": (lambda a: F.interpolate(a[None], scale_factor=2.0, mode="bilinear"), 1),
    "pixel_shuffle": (lambda a: F.pixel_shuffle(a[None], 2), 1),
    "normalize": (F.normalize, 1),
    "glu": (F.glu, 1),
    "log_softmax": (partial(F.log_softmax, dim=-1), 1),
    "local_response_norm": (partial(F.local_response_norm, size=3), 1),
    "inv": (lambda a: torch.linalg.inv(a @ a.mT + 9.0 * torch.eye(256)), 1),
    "cholesky": (lambda a: torch.linalg.cholesky(a @ a.mT + 9.0 * torch.eye(256)), 1),
    "addcmul": (lambda a, b: torch.addcmul(a, a, b), 2),
    "addcdiv": (lambda a, b: torch.addcdiv(a, b, b), 2),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), 2),
    "cdist": (torch.cdist, 2),
    "cosine_similarity": (partial(F.cosine_similarity, dim=-1), 2),
    "pairwise_distance": (F.pairwise_distance, 2),
    "mse_loss": (F.mse_loss, 2),
    "smooth_l1_loss": (F.smooth_l1_loss, 2),
    "kl_div": (F.kl_div, 2),
    "where": (lambda a, b: torch.where(a > 0.5, a, b), 2),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), 2),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([2], [2])), 2),
    "vecdot": (torch.linalg.vecdot, 2),
    "stack": (lambda a, b: torch.stack([a, b]), 2),
    "scatter_add": (lambda a, b: a.scatter_add(1, torch.zeros(4, 256, 256, dtype=torch.long), b), 2),
    "masked_scatter": (lambda a, b: a.masked_scatter(b > 0.5, b), 2),
}


class Between(nn.Module):
    """Two layers, whose results are between 0.1 and 0.9, and a function of one or both."""

    def __init__(self, function: Function, given: int) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(nn.Linear(16, 256) for _ in range(given)), function

    def forward(self, x: Tensor) -> Tensor:
        made = self.function(*(0.8 * torch.sigmoid(layer(x)) + 0.1 for layer in self.layers))
        y = made if isinstance(made, Tensor) else made[0]
        return (y.abs() if y.is_complex() else y).mean()


def functions() -> dict[str, tuple[Function, int]]:
    """Name → function, and of how many tensors."""
    found: dict[str, tuple[Function, int]] = {}
    for op in op_db:
        if (
            torch.float32 not in op.dtypes
            or not op.supports_autograd
            or op.name.startswith((*_NOT_OF_TORCH, *_UNDEFINED))
        ):
            continue
        name = ".".join(filter(None, (op.name, op.variant_test_name)))
        if isinstance(op, ReductionOpInfo):
            found[name] = (partial(op.op, dim=-1), 1)
        elif isinstance(op, UnaryUfuncInfo):
            options, _ = op.sample_kwargs("cpu", torch.float32, torch.ones(1))
            found[name] = (partial(op.op, **options), 1)
        elif isinstance(op, BinaryUfuncInfo):
            found[name] = (op.op, 2)
    return found | BY_HAND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    known = functions()
    if unknown := [n for n in names if n not in known]:
        parser.error(f"no function {unknown[0]!r}; known: {', '.join(known)}")
    batches = [torch.randn(4, 256, 16) for _ in range(3)]
    within, low = 0, list[str]()
    for name in names or known:
        for plan in ("fp32", "bf16"):
            try:
                model = Between(*known[name])
                predicted, measured = predicted_and_measured(model, batches, lambda m, x: m(x), plan)
            except (TypeError, RuntimeError, AutoprecError) as error:  # it takes more, or other numbers
                print(f"{name:32s} {plan}  not run: {str(error).partition(chr(10))[0][:80]}", flush=True)
                break
            off = predicted / measured - 1.0
            within += abs(off) <= OFF
            if off < -OFF and LOW.get(name) not in ("", plan):
                low.append(f"{name} in {plan}")
            if names or abs(off) > OFF:
                print(f"{name:32s} {plan}  {predicted / measured:.3f}  {predicted} {measured}", flush=True)
    print(f"{within} within {OFF:.0%}")
    print(f"predicted too low: {', '.join(low)}" if low else "none else is predicted too low")
    return 1 if low else 0


if __name__ == "__main__":
    with one_thread():
        sys.exit(main())
