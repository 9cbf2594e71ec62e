"""What would it save to cast each weight once per step? `python -m tests.weight_cast_study`

Products cast their weights in the forward pass and again in the backward pass, so that no copy is kept in between. Here
the same steps run in pairs, with and without a cache of those casts that lives for one step: an upper bound of what
caching can save, because looking for stale copies costs nothing here. Medians of the ratio over rounds, its quartiles,
and the bytes that the cache holds at the end of the forward pass.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

import autoprec
from autoprec.numerics.packing import Packed
from autoprec.numerics.products import GemmSpec
from tests.bench.measure import calibrate, one_thread, train_on
from tests.bench.workloads import WORKLOADS

ROUNDS = 40


class Cache:
    """Casts of leaves, by memory and format."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, torch.Size, str], Tensor] = {}
        self.on = False

    def operand(self, spec: GemmSpec, x: Tensor | Packed, fmt: str) -> Tensor:
        weight = isinstance(x, Tensor) and x.dtype is torch.float32 and fmt == "bf16" and x.dim() == 2
        if not (self.on and weight and isinstance(x, Tensor) and x.data_ptr() in self.leaves):
            return plain(spec, x, fmt)
        key = (x.data_ptr(), x.shape, str(x.stride()))
        if key not in self.made:
            transposed = (x.data_ptr(), x.t().shape, str(x.t().stride()))
            self.made[key] = self.made[transposed].t() if transposed in self.made else plain(spec, x, fmt)
        return self.made[key]

    leaves: set[int] = set()


plain = GemmSpec.operand


def main() -> None:
    cache = Cache()
    GemmSpec.operand = lambda self, x, fmt: cache.operand(self, x, fmt)  # type: ignore[method-assign]
    print("workload     ms per step  cached / not: lower quartile, median, upper  MB of casts", flush=True)
    with one_thread():
        for name in ("transformer", "mlp", "encoder"):
            found = calibrate(WORKLOADS[name])
            plan = found.planned("speed")
            torch._dynamo.reset()
            autoprec.compile(found.model, plan=plan, events=None)
            Cache.leaves = {p.data_ptr() for p in found.model.parameters()}
            taken: dict[bool, list[float]] = {False: [], True: []}
            size = 0
            for k in range(ROUNDS + 3):
                for on in (False, True) if k % 2 else (True, False):
                    cache.on = on
                    cache.made.clear()
                    begin = time.perf_counter()
                    train_on(found.workload, found.model, found.batches[k % len(found.batches)])
                    if k >= 3:
                        taken[on].append(time.perf_counter() - begin)
                    size = max(size, sum(t.nbytes for t in cache.made.values()))
            ratios = [a / b for a, b in zip(taken[True], taken[False], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{name:12} {1e3 * statistics.median(taken[False]):11.1f} {low:20.3f} {middle:7.3f} {high:6.3f}"
                  f" {size / 2 / 2**20:12.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
