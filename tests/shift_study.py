"""How well is the mean loss change predicted? `python -m tests.shift_study` prints the table.

Beside the zero-mean σ, rounding shifts the loss: by a second-order expansion with the Fisher information for the
Hessian (cross entropy: E[g gᵀ] over single loss terms), E(δL) = ½ · N · Σ g² · E(δ²), where g is the gradient of the
mean over N loss terms. Σ g² · E(δ²) is what the profile prices. Measured as in `tests.noise_study`, without our code:
every linear's input, or every linear's weight, rounded by torch's cast; the mean of the loss change over the batches,
with its standard error. At two batch sizes the same tokens are cut into more or fewer batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autoprec.formats import format_named
from autoprec.planning.noise import current_scale_log2, error_energy
from tests.noise_study import Study, language_study, profiled, rounding_input, rounding_weight

FORMATS = ("fp8_e5m2", "fp8_e4m3")

#: Sequences of 32 tokens in a batch.
SIZES = (4, 16)

#: Batches of the larger size: the bar asks for at least 40.
BATCHES = 48


@dataclass(frozen=True)
class Shift:
    """Mean loss change over the batches, its standard error, and what the profile predicts; σ the same way."""

    what: str
    format: str
    terms: int
    batches: int
    predicted: float
    measured: float
    error: float
    sigma_predicted: float
    sigma_measured: float


def regrouped(study: Study, size: int) -> Study:
    """The same sequences in batches of another size."""
    rows = torch.cat(study.batches)

    def losses(model: nn.Module) -> Tensor:
        return study.losses(model).reshape(-1, size // SIZES[0]).mean(1)

    return replace(study, batches=list(rows.split(size)), losses=losses)


def shifts(study: Study) -> Iterator[Shift]:
    for size in SIZES:
        grouped = regrouped(study, size)
        profile, graph = profiled(grouped)
        model = copy.deepcopy(study.model).double()
        ops = [op for op in graph.ops if op.kind == "linear"]
        modules = [model.get_submodule(op.fqn) for op in ops]
        terms = size * (study.batches[0].shape[1] - 1)
        with torch.no_grad():
            exact = grouped.losses(model)
        for what in ("input", "weight"):
            tensors = dict.fromkeys(op.inputs[0] if what == "input" else f"param:{op.weights[0]}" for op in ops)
            for name in FORMATS:
                fmt, energy = format_named(name), 0.0
                for t in tensors:
                    seen = profile.tensor_by_id[t]
                    assert seen.loss is not None
                    scale = current_scale_log2(fmt, seen.values.amax)
                    energy += error_energy(seen.loss, fmt, scale) / profile.steps
                with torch.no_grad(), ExitStack() as rounding:
                    if what == "input":
                        rounding.enter_context(rounding_input(modules, name))
                    else:
                        for m in modules:
                            rounding.enter_context(rounding_weight(m, name))
                    change = grouped.losses(model) - exact
                yield Shift(
                    what=what,
                    format=name,
                    terms=terms,
                    batches=len(change),
                    predicted=0.5 * terms * energy,
                    measured=float(change.mean()),
                    error=float(change.std() / len(change) ** 0.5),
                    sigma_predicted=energy**0.5,
                    sigma_measured=float(change.square().mean().sqrt()),
                )


def main() -> None:
    torch.set_num_threads(1)
    study = language_study(batches=BATCHES * SIZES[1] // SIZES[0])
    print(
        "rounded  format    terms  batches  mean change  (standard error)  ½·N·Σg²·err  ratio   σ measured  predicted"
    )
    for s in shifts(study):
        print(
            f"{s.what:8} {s.format:9} {s.terms:5} {s.batches:8} {s.measured:12.2e}  ({s.error:.1e})"
            f" {s.predicted:18.2e} {s.predicted / s.measured:8.2f} {s.sigma_measured:11.2e} {s.sigma_predicted:10.2e}"
        )


if __name__ == "__main__":
    main()
