"""How far FP32's own loss moves when its first weights are perturbed as BF16 rounds them.

`python -m tests.hf.perturbed` prints, for ResNet with 8 and with 32 images a batch, the loss after 20 steps relative to
the unperturbed run, twelve times: what no criterion on the loss can be finer than.
"""

from __future__ import annotations

import torch

from tests.hf.architectures import STEPS, fresh, quietly, trained
from tests.hf.catalog import ARCHITECTURES, Architecture, pixels


def ratios(architecture: Architecture, times: int) -> list[float]:
    plain = trained(architecture, fresh(architecture), STEPS)
    found = []
    for seed in range(times):
        model, generator = fresh(architecture), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + 2.0**-9 * (2.0 * torch.rand(p.shape, generator=generator) - 1.0))
        found.append(trained(architecture, model, STEPS) / plain)
    return sorted(found)


def main() -> None:
    quietly()
    resnet = next(a for a in ARCHITECTURES if a.name == "ResNet")
    for rows in (8, 32):
        changed = Architecture(resnet.name, resnet.make, lambda seed, rows=rows: pixels(seed, rows=rows), resnet.after)
        print(f"{rows} images: " + " ".join(f"{r:.3f}" for r in ratios(changed, 12)), flush=True)


if __name__ == "__main__":
    main()
