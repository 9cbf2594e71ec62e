"""`autoprec chaos`: faults on purpose against a model of the user's, and what became of them."""

from __future__ import annotations

from itertools import islice
from typing import Any

from autoprec.cli.output import progress_console, show

__all__ = ["run_chaos"]

#: Of the faults that were told, those whose op must be named first.
RIGHT_FRAC = 0.95


def run_chaos(target: str, policy: str, faults: int, seed: int, optimizer: str, backend: str, *, as_json: bool) -> int:
    """Plan TARGET once, and give each fault a run of its own; 1 if a promise does not hold."""
    from autoprec.checks import check_choice
    from autoprec.errors import InputError
    from autoprec.execution.lowering import BACKENDS
    from autoprec.reporting.trials import trial_tables, trials_data
    from autoprec.serial import load_policy

    check_choice(backend, BACKENDS, "backend", InputError)
    check_choice(optimizer, tuple(_OPTIMIZERS), "optimizer", InputError)
    chosen = load_policy(policy)
    with progress_console().status("importing the target") as status:
        from autoprec.cli.targets import load_target
        from autoprec.testing.chaos import Start, chaos, monitored

        found = load_target(target)
        # Some steps of a run whose length nobody knows.
        chosen = monitored(chosen.replaced(schedule=tuple(e for e in chosen.schedule if e.after >= 1.0)))
        trials = []
        with found.running():
            batches = list(islice(found.batches, chosen.calibration.steps))
            status.update("calibrating and planning")
            make = _OPTIMIZERS[optimizer]
            start = Start.planned(found.model, chosen, batches, found.loss_fn, make, backend)
            for trial in chaos(start, count=faults, seed=seed, run_name=target):
                trials.append(trial)
                status.update(f"{len(trials)} of {faults} faults")
    data = trials_data(trials)
    right = data["right_frac"]
    holds = not data["changed"] and not data["missed"] and (right is None or right >= RIGHT_FRAC)
    show({"holds": holds, **data}, *trial_tables(trials), as_json=as_json)
    return 0 if holds else 1


def _adamw(parameters: object) -> object:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4)  # type: ignore[arg-type]


def _sgd(parameters: object) -> object:
    import torch

    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]


_OPTIMIZERS: dict[str, Any] = {"adamw": _adamw, "sgd": _sgd}
