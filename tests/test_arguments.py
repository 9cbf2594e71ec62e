"""Mistakes in what `compile` is given: one sentence, and the model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.errors import AutoprecError, InputError

BATCHES = [torch.randn(8, 16) for _ in range(3)]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def differentiated(model: nn.Module, batch: Tensor) -> Tensor:
    loss = loss_fn(model, batch)
    loss.backward()
    return loss


CALIBRATED = {"batches": BATCHES, "loss_fn": loss_fn}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"device": "cpu"}, "device= must be measured timings"),
        ({"device": torch.device("cpu"), **CALIBRATED}, "device= must be measured timings"),
        ({"policy": 3}, "a policy must be a name, a path or a Policy, not 3"),
        ({"plan": {}}, "plan= must be a plan file or a Plan, not a mapping"),
        ({"budget": True}, "budget= must be bytes"),
        ({"backend": None}, "unknown backend"),
        ({"backend": 0}, "unknown backend"),
        ({"total_steps": "1000"}, "total_steps= must be a whole number of optimizer steps, not text '1000'"),
        ({"total_steps": True}, "total_steps= must be a whole number of optimizer steps, not true"),
        ({"total_steps": 1000.5}, "total_steps= must be a whole number of optimizer steps, not 1000.5"),
        ({"events": True}, "events= must be a file"),
        ({"batches": 3, "loss_fn": loss_fn}, "batches must be an iterable of batches, not 3"),
        ({"batches": BATCHES, "loss_fn": 3}, "loss_fn must be a function"),
        ({"batches": BATCHES, "loss_fn": lambda m, b: loss_fn(m, b).detach()}, "depends on no parameter that is"),
        ({"batches": BATCHES, "loss_fn": differentiated}, "must return the loss and not differentiate it"),
    ],
)
def test_a_mistake_is_told_and_the_model_is_as_it_was(arguments: dict[str, Any], says: str) -> None:
    model = made()
    with pytest.raises(InputError) as caught:
        autoprec.compile(model, **{"events": None, **arguments})
    assert says in str(caught.value)
    assert_as_it_was(model)


def assert_as_it_was(model: nn.Module) -> None:
    with pytest.raises(InputError, match="was not compiled"):
        autoprec.unwrap(model)
    assert all(not p._post_accumulate_grad_hooks and p.grad is None for p in model.parameters())
    autoprec.compile(model, events=None)


class Rows:
    """As a Dataset of torch's: without `__iter__`."""

    def __getitem__(self, i: int) -> Tensor:
        return BATCHES[i]


def test_batches_may_be_a_dataset() -> None:
    model = made()
    autoprec.compile(model, batches=Rows(), loss_fn=loss_fn, events=None)
    assert autoprec.session(model).plan is not None


def test_calibrating_with_a_loader_draws_no_random_numbers() -> None:
    """Its iterator does, where it is made."""
    model, rows = made(), torch.randn(24, 16)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    autoprec.compile(model, batches=loader, loss_fn=loss_fn, events=None)
    assert torch.equal(torch.get_rng_state(), before)


def frozen_plan() -> autoprec.Plan:
    model = made()
    model[0].requires_grad_(False)
    policy = autoprec.Policy(name="frozen", storage={"frozen": ("bf16",)}, objective="peak")
    autoprec.compile(model, policy=policy, events=None, **CALIBRATED)
    plan = autoprec.session(model).plan
    assert plan is not None and plan.living
    return plan


@pytest.mark.parametrize("other", [made, lambda: nn.Sequential(nn.Linear(4, 4))])
def test_a_plan_of_another_model_changes_nothing(other: Callable[[], nn.Module]) -> None:
    model = other()
    with pytest.raises(AutoprecError):
        autoprec.compile(model, plan=frozen_plan(), events=None)
    assert_as_it_was(model)


def test_models_that_have_no_numbers_or_no_python_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(InputError, match="call it with a batch before compile"):
        autoprec.compile(lazy, events=None)
    lazy(torch.randn(2, 3))
    autoprec.compile(lazy, events=None)
    with pytest.raises(InputError, match="materialize it"):
        autoprec.compile(made().to("meta"), events=None)
    with pytest.raises(InputError, match="TorchScript"):
        autoprec.compile(torch.jit.script(made()), events=None)
    with pytest.raises(InputError, match="every parameter is frozen"):
        autoprec.compile(made().requires_grad_(False), events=None, **CALIBRATED)


def test_a_state_goes_to_a_file(tmp_path: Path) -> None:
    session = autoprec.session(autoprec.compile(made(), events=None))
    for call in (session.save, session.load):
        with pytest.raises(InputError, match="path must be a file, not 3"):
            call(3)
    session.save(tmp_path / "state.safetensors")
