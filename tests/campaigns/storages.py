"""Every op that torch tests, with everything that it keeps for its backward pass kept narrow.

`python -m tests.campaigns.storages [--samples N] [NAME ...]` runs the first N FP32 samples of each op of torch's own
`op_db` (all with `--samples 0`) behind a product with 1, so that the op keeps activations, under plans that compute in
FP32 and keep whatever may be in BF16, or in E4M3; it ends with exit code 1 if a law is broken: outputs are bitwise the
op's, and gradients are those of the op differentiated by torch itself at tensors that were rounded by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

import autoprec
from tests.campaigns import report
from tests.campaigns.ops import OpModule, named_ops, outcome, same, samples_of
from tests.campaigns.planning import run_planned
from tests.campaigns.report import Tally, quietly

STORAGES = ("bf16", "fp8_e4m3")


class Behind(OpModule):
    """The op behind products with 1: what it reads are activations."""

    def forward(self) -> Any:
        return self.call([p * 1.0 for p in self.parameters_])

    def call(self, given: list[Tensor]) -> Any:
        values = iter(given)
        leaves = [next(values) if own else v for v, own in zip(self.leaves, self.own, strict=True)]
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **kwargs)


def rounded(x: Tensor, storage: str) -> Tensor:
    """What a view of a memory shows after the whole memory was rounded; by torch's own casts."""
    count = x.untyped_storage().nbytes() // x.element_size()
    flat = x.detach().as_strided((count,), (1,), 0)
    if storage == "bf16":
        narrow = flat.to(torch.bfloat16).float()
    else:
        amax = flat.abs().max()
        scale = 2.0 ** torch.floor(torch.log2(448.0 / amax)) if amax > 0 else torch.ones(())
        narrow = (flat * scale).to(torch.float8_e4m3fn).float() / scale
    return narrow.as_strided(x.shape, x.stride(), x.storage_offset())


#: Ours keep what they are given, where torch's keep other tensors: their gradients are those of rounded inputs.
GIVEN = ("nn.functional.cross_entropy",)


def by_hand(module: Behind, stored: dict[str, str], *, given_alone: bool = False) -> Any:
    """The op, differentiated at rounded tensors: `stored` names products with 1 by number, and the op's result."""
    given = [p * 1.0 for p in module.parameters_]
    if given_alone:
        narrow = [(x, stored.get(f":mul#{i}")) for i, x in enumerate(given)]
        return module.call([x if kept is None else x + (rounded(x, kept) - x).detach() for x, kept in narrow])
    of_memory = {
        x.untyped_storage().data_ptr(): stored[f":mul#{i}"] for i, x in enumerate(given) if f":mul#{i}" in stored
    }
    results = [storage for name, storage in stored.items() if name not in [f":mul#{i}" for i in range(len(given))]]
    waiting: list[list[Tensor]] = []

    def pack(x: Tensor) -> list[Tensor]:
        storage = of_memory.get(x.untyped_storage().data_ptr())
        kept = [x if storage is None else rounded(x, storage)]
        if storage is None:
            waiting.append(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0]):
        result = module.call(given)
    if results and isinstance(result, Tensor):
        for kept in waiting:
            if kept[0].untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
                kept[0] = rounded(kept[0], results[0])
    return result


def policy(storage: str) -> autoprec.Policy:
    """FP32, and as few bytes kept as can be."""
    return autoprec.Policy(
        name=storage,
        formats=["fp32"],
        objective="bytes",
        budget="1GiB",  # which no sample needs: bytes kept alone count, not the peak
        noise={"gradient": 1e3, "loss": 1e3},
        storage={"formats": [storage]},
        calibration={"steps": 2},
    )


@dataclass
class StorageTally(Tally):
    """Of samples that were planned."""

    samples: int = 0
    narrow: int = 0

    def summary(self) -> str:
        return f"{self.samples} planned samples, {self.narrow} keep something narrow"


def check(name: str, module: Behind, storage: str, tally: StorageTally) -> None:
    """Two observed steps, then a planned one against the op differentiated by hand."""
    ran = run_planned(name, module, policy(storage), 3, tally)
    if ran is None or len(ran.steps) < 3:
        return
    tally.samples += 1
    expected, found = ran.expected, ran.steps[-1]
    stored = {s.tensor: s.format for s in ran.plan.storages if s.format == storage} if ran.plan else {}
    if not stored:
        return
    outputs = len(found) - len(module.parameters_)
    if difference := same(expected[:outputs], found[:outputs]):
        tally.broken.append(f"{name}: {storage}: {difference}")
    ids = {f":mul#{i}" for i in range(len(module.parameters_))}
    if len(set(stored) - ids) > 1:
        tally.left_out["several ops in one sample"] += 1
        return
    tally.narrow += 1
    wanted = outcome(module, lambda: by_hand(module, stored, given_alone=name in GIVEN))
    for i, (a, b) in enumerate(zip(wanted[outputs:], found[outputs:], strict=True)):
        if (a is None) != (b is None) or (a is not None and b is not None and not close(a, b)):
            tally.broken.append(f"{name}: {storage}: gradient {i} is not that at the rounded tensors ({stored})")


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the order of sums."""
    size = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


def campaign(names: Sequence[str], samples: int = 1, *, every: int = 1) -> StorageTally:
    """The first samples of every so many ops, or of those with the given names."""
    tally = StorageTally()
    with quietly():
        for name, op in named_ops(names, every):
            for sample in samples_of(op, samples):
                module = Behind(op.op, sample)
                if any(p.requires_grad for p in module.parameters()):
                    for storage in STORAGES:
                        check(name, module, storage, tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    return report.main(__doc__, campaign, argv, samples=True)


if __name__ == "__main__":
    sys.exit(main())
