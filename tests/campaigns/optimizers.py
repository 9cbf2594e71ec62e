"""Every optimizer that torch tests, over the identity plan, in good steps and in bad ones.

`python -m tests.campaigns.optimizers [NAME ...]` runs every configuration of torch's own `optim_db` (plain, foreach,
fused, differentiable) in every style of loop that torch allows it, and ends with exit code 1 if a law is broken:

* after each good step loss, parameters, buffers and optimizer state are bitwise those of the plain model;
* a bad step (a NaN in the batch, an infinite loss) changes none of them and says so;
* the steps after it go on bitwise as if it had never been.

What torch itself refuses is counted with its error.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs, optim_db
from torch.utils._pytree import tree_flatten

import autoprec
from autoprec.plans import Plan
from tests.campaigns import report
from tests.campaigns.ops import same
from tests.campaigns.report import Tally, quietly

STYLES = ("step", "closure", "GradScaler")

#: Optimizers that take matrices alone; what the db does not say.
MATRICES = {"Muon"}

#: Good batches by number, a NaN in the batch, an infinite loss.
Batch = int | str
GOOD: tuple[Batch, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
MIXED: tuple[Batch, ...] = (0, 1, 2, 3, "nan", 4, 5, "inf", 6, 7)


#: More than the model can learn by heart, which would end LBFGS in NaN without any bad batch.
ROWS = 64


class Net(nn.Module):
    """Two linears, a norm with buffers, a nonlinearity; words or vectors go in."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6, sparse=True) if sparse else None
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        result: Tensor = self.last(F.gelu(self.norm(self.first(x))))
        return result


@dataclass(frozen=True)
class Configuration:
    """An optimizer as the db makes it; `sparse`: it steps an embedding with sparse gradients."""

    info: Any
    name: str
    kwargs: dict[str, Any]
    sparse: bool

    def optimizer(self, model: Net) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.sparse and model.embedding is not None:
            parameters = list(model.embedding.parameters())
        if self.info.name in MATRICES:
            parameters = [p for p in parameters if p.dim() == 2]
        made: torch.optim.Optimizer = self.info.optim_cls(parameters, **copy.deepcopy(self.kwargs))
        return made


class Loop:
    """A training loop of one style."""

    def __init__(self, model: Net, configuration: Configuration, style: str) -> None:
        self.model, self.sparse, self.style = model, configuration.sparse, style
        self.optimizer = configuration.optimizer(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if style == "GradScaler" else None

    def loss(self, batch: Batch) -> Tensor:
        generator = torch.Generator().manual_seed(batch if isinstance(batch, int) else 99)
        words = torch.randint(0, 12, (ROWS,), generator=generator)
        x, y = torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)
        if batch == "nan":
            (y if self.sparse else x)[1, 2] = torch.nan
        loss = F.mse_loss(self.model(words if self.sparse else x), y)
        return loss * torch.inf if batch == "inf" else loss

    def backward(self, batch: Batch) -> Tensor:
        self.model.zero_grad()
        loss = self.loss(batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def step(self, batch: Batch) -> Tensor:
        if self.style == "closure":
            return torch.as_tensor(self.optimizer.step(lambda: self.backward(batch)))  # type: ignore[arg-type, return-value]
        loss = self.backward(batch)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def state(self) -> Any:
        """Everything that a bad step must leave alone."""
        model = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        return model, copy.deepcopy(self.optimizer.state_dict())


def differs(a: Any, b: Any) -> str:
    """ "" or what differs, also in tables of tables."""
    (x, x_spec), (y, y_spec) = tree_flatten(a), tree_flatten(b)
    if x_spec != y_spec:
        return "other keys"
    tensors = [i for i, v in enumerate(x) if isinstance(v, Tensor) and isinstance(y[i], Tensor)]
    rest = [i for i in range(len(x)) if i not in tensors and (type(x[i]) is not type(y[i]) or x[i] != y[i])]
    return f"{x[rest[0]]!r} became {y[rest[0]]!r}" if rest else same([x[i] for i in tensors], [y[i] for i in tensors])


@dataclass
class LoopTally(Tally):
    """Of training loops."""

    configurations: int = 0
    loops: int = 0
    good_steps: int = 0
    bad_steps: int = 0

    def summary(self) -> str:
        return (
            f"{self.configurations} configurations, {self.loops} loops, {self.good_steps} good steps,"
            f" {self.bad_steps} bad steps"
        )


def check(configuration: Configuration, style: str, tally: LoopTally) -> None:
    """One loop, plain over the good batches and compiled over all of them."""
    torch.manual_seed(0)
    model = Net(sparse=configuration.sparse)
    compiled = copy.deepcopy(model)
    plain = Loop(model, configuration, style)
    try:
        expected = [(plain.step(batch), plain.state()) for batch in GOOD]
    except Exception as error:
        tally.left_out[f"torch raises {type(error).__name__}: {str(error).splitlines()[0][:100]}"] += 1
        return
    if not all(bool(t.isfinite().all()) for t in expected[-1][1][0]):
        tally.left_out["the plain loop diverges"] += 1
        return
    torch._dynamo.reset()
    autoprec.compile(compiled, plan=Plan(assignments=()), events=None)
    tally.loops += 1
    try:
        for problem in problems(Loop(compiled, configuration, style), expected, tally):
            tally.broken.append(f"{configuration.name}, {style}: {problem}")
            break  # the steps after it differ too
    finally:
        autoprec.unwrap(compiled)


def problems(loop: Loop, expected: Sequence[Any], tally: LoopTally) -> Iterator[str]:
    """Broken laws, one after the other."""
    session = autoprec.session(loop.model)
    before = loop.state()
    for batch in MIXED:
        try:
            loss = loop.step(batch)
        except Exception as error:
            yield f"batch {batch} raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return
        bad, now = isinstance(batch, str), loop.state()
        if bad:
            tally.bad_steps += 1
            what = differs(before, now)
        else:
            tally.good_steps += 1
            what = differs(expected[int(batch)], (loss, now))
        if what:
            yield f"batch {batch}: {what}"
        if session.step_was_skipped is not bad:
            yield f"batch {batch}: step_was_skipped is {session.step_was_skipped}"
        before = now
    if (session.steps, session.skipped_steps) != (len(GOOD), len(MIXED) - len(GOOD)):
        yield f"{session.steps} steps and {session.skipped_steps} skipped ones were counted"
    if not session.bindings:
        yield "nothing was captured"


def configurations(info: Any) -> Iterator[Configuration]:
    """All that torch's tests run on a CPU, and the one for sparse gradients."""
    for made in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
        yield Configuration(info, f"{info.name} ({made.desc})", made.kwargs, info.only_supports_sparse_grads)
    if info.supports_sparse and not info.only_supports_sparse_grads:
        yield Configuration(info, f"{info.name} (sparse)", info.metadata_for_sparse[0], True)


def campaign(names: Sequence[str], count: int = 0) -> LoopTally:
    """The first `count` configurations of every optimizer (0 for all), or of those with the given names."""
    tally = LoopTally()
    with quietly():
        for info in optim_db:
            if not names or info.name in names:
                for configuration in islice(configurations(info), count or None):
                    tally.configurations += 1
                    for style in STYLES:
                        check(configuration, style, tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    return report.main(__doc__, campaign, argv)


if __name__ == "__main__":
    sys.exit(main())
