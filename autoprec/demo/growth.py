"""One layer's weights grow until its FP16 activations overflow. Only the training loop touches them."""

from __future__ import annotations

import copy
import math
import statistics

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

import autoprec
from autoprec.demo.results import Growth
from autoprec.demo.tasks import Batch, Task
from autoprec.devices import Device
from autoprec.errors import InfeasibleError
from autoprec.formats import format_named
from autoprec.graphs import Role
from autoprec.plans import Plan
from autoprec.policies import Policy, StorageOptions
from autoprec.testing import watching

__all__ = ["Watch", "grow_a_layer", "largest_result"]

FACTOR = 1.5
#: Steps before the growth begins (calibration is among them), the most that it takes, and those that follow.
STEPS_BEFORE, MOST_STEPS_GROWING, STEPS_AFTER = 12, 60, 20

FP16_WHERE_IT_FITS = Policy(
    name="fp16 where it fits",
    formats=("fp32", "fp16"),
    objective="bytes",
    storage=StorageOptions(formats=(), recompute=False),
)


def grow_a_layer(task: Task, device: Device | None = None) -> Growth:
    """Train the digits; multiply one convolution's weights each step until its results pass FP16's maximum.

    Batch norm behind it takes the scale out again, so the run itself stays healthy.
    """
    torch.manual_seed(0)
    model, generator = task.build(), Generator().manual_seed(0)
    optimizer = task.optimizer(model.parameters())
    autoprec.compile(model, policy=FP16_WHERE_IT_FITS, device=device, events=None)
    session = autoprec.session(model)
    watch = Watch(model, optimizer)
    for _ in range(STEPS_BEFORE):
        watch.step(task, task.batch(generator))
    assert session.plan is not None
    op = _grown_op(session.plan, model)
    name = op.partition(":")[0]
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Conv2d)
    limit, largest = format_named("fp16").max_value, 0.0
    for _ in range(MOST_STEPS_GROWING):
        with torch.no_grad():
            layer.weight.mul_(FACTOR)
        batch = task.batch(generator)
        largest = largest_result(model, name, batch[0])
        watch.step(task, batch)
        if largest > limit:
            break
    for _ in range(STEPS_AFTER):
        watch.step(task, task.batch(generator))
    finite = [x for x in watch.losses if math.isfinite(x)]
    return Growth(
        layer=name,
        op=op,
        was="fp16",
        now=session.plan.format_of.get((op, Role.OUTPUT), "fp32"),
        largest=largest,
        limit=limit,
        steps=len(watch.losses),
        bad_steps=watch.bad_steps,
        bad_updates=watch.bad_updates,
        good_steps_after=watch.good_steps_in_row,
        first_loss=statistics.mean(finite[:5]),
        last_loss=statistics.mean(finite[-5:]),
        caught=tuple(f"step {e.step}: {e.evidence}" for e in session.events if e.kind == "bad_step"),
        promoted=tuple(e.op for e in session.events if e.kind == "promoted"),
    )


def _grown_op(plan: Plan, model: nn.Module) -> str:
    """The last convolution whose result the plan has in FP16."""
    modules = dict(model.named_modules())
    found = [
        a.op
        for a in plan.assignments
        if a.role is Role.OUTPUT and a.format == "fp16" and isinstance(modules.get(a.op.partition(":")[0]), nn.Conv2d)
    ]
    if not found:
        raise InfeasibleError("the plan has no convolution in fp16, so there is nothing to overflow")
    return found[-1]


@torch.no_grad()
def largest_result(model: nn.Module, layer: str, images: Tensor) -> float:
    """The largest |x| that a layer makes in FP32, by a copy of the model that autoprec knows nothing of."""
    seen: list[float] = []
    plain = copy.deepcopy(model)
    plain.get_submodule(layer).register_forward_hook(lambda _m, _x, y: seen.append(float(y.abs().max())))
    plain(images)
    return seen[0]


class Watch:
    """Takes steps, and counts those whose gradients were not finite and what they changed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._watch = model, watching.Watch(model, optimizer)
        self.losses: list[float] = []
        self.bad_steps = self.bad_updates = self.good_steps_in_row = 0

    def step(self, task: Task, batch: Batch) -> None:
        """One step of a plain training loop, watched."""
        seen = self._watch.step(lambda: task.loss(self._model, batch))
        self.losses.append(seen.loss)
        self.bad_steps += seen.bad
        self.good_steps_in_row = 0 if seen.bad else self.good_steps_in_row + 1
        self.bad_updates += bool(seen.changed)
