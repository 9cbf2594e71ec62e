"""Predicted against measured peak bytes of a training step. `python -m tests.memory_study [NAME ...] [--compiled]
[--plans PLAN ...]` prints the table; names are those below, or those of `tests.hf.architectures`. Of compiled steps the
code tells what is predicted.

Measured at the allocator: the highest of a forward and backward pass above what was held before, with gradients that
are there already (as when they accumulate), so that it is the part of the step that precision can change. Predicted is
the plan's peak without parameters, gradients, optimizer state and inputs.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.execution.lowering import Backend
from autoprec.execution.measuring import peak_bytes
from autoprec.planning.evaluator import evaluate
from autoprec.planning.problem import fixed_bytes
from autoprec.planning.proposals import Proposals
from autoprec.planning.solutions import Choice, Solution
from autoprec.serial import load_policy
from tests.models import Transformer, language_loss

Loss = Callable[[nn.Module, Any], Tensor]


class Residual(nn.Module):
    """A convolutional network with batch norm and skip connections."""

    def __init__(self, channels: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        convs = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2 * depth)]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2 * depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(self.stem(x)))
        for i in range(0, len(self.convs), 2):
            y = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(x + self.norms[i + 1](self.convs[i + 1](y)))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 64), nn.LSTM(64, 128, batch_first=True)
        self.up, self.head = nn.Linear(128, 512), nn.Linear(512, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.up(self.lstm(self.embed(tokens))[0])))


class Attends(nn.Module):
    """Attention that drops out, with queries, keys and values of one product or of three."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.made = nn.ModuleList([nn.Linear(64, 192)] if fused else [nn.Linear(64, 64) for _ in range(3)])
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            made = torch.cat([m(x) for m in self.made], -1) if len(self.made) == 1 else [m(x) for m in self.made]
            parts = made.chunk(3, -1) if isinstance(made, Tensor) else made
            q, k, v = (p.unflatten(-1, (4, 16)).transpose(1, 2) for p in parts)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x.square().mean()


def labels_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def labelled(*shape: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(shape), torch.randint(0, 10, shape[:1])) for _ in range(3)]


def tokens(*shape: int, vocabulary: int = 256) -> list[Tensor]:
    return [torch.randint(0, vocabulary, shape) for _ in range(3)]


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


#: Name → model, batches, loss.
WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Sequence[Any], Loss]]] = {
    "transformer": lambda: (Transformer(width=128, depth=4, vocabulary=256), tokens(16, 65), language_loss),
    "convolutions": lambda: (Residual(), labelled(16, 3, 32, 32), labels_loss),
    "mlp": lambda: (mlp(), labelled(2048, 64), labels_loss),
    "recurrent": lambda: (Recurrent(), tokens(16, 65), next_token_loss),
    "dropout": lambda: (Attends(True), [torch.randn(16, 48, 64) for _ in range(3)], lambda m, x: m(x)),
    "vocabulary": lambda: (  # the logits are the largest tensor of a step, and the loss is inside
        Transformer(width=64, depth=1, vocabulary=8192, tied=False),
        tokens(16, 65, vocabulary=8192),
        language_loss,
    ),
}

#: Name → policy, budget.
PLANS: dict[str, tuple[str, str | None]] = {
    "fp32": ("safe", None), "bf16": ("bf16", None), "60 %": ("balanced", "60%"), "lowest": ("memory", None)
}  # fmt: skip


def architecture(name: str) -> tuple[nn.Module, Sequence[Any], Loss]:
    """A model from transformers."""
    from tests.hf.architectures import quietly
    from tests.hf.catalog import ARCHITECTURES

    quietly()
    found = next(a for a in ARCHITECTURES if a.name == name)
    return found.make().train(), [found.batch(seed) for seed in range(3)], found.loss


@dataclass(frozen=True)
class Peak:
    """Bytes beyond parameters, gradients, optimizer state and inputs; None where no plan fits the budget."""

    workload: str
    plan: str
    predicted: int | None
    measured: int | None
    budget: int | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted / self.measured if self.predicted and self.measured else None


def peak_of(name: str, plan: str, backend: Backend = "eager") -> Peak:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches, loss = WORKLOADS[name]() if name in WORKLOADS else architecture(name)
    chosen, budget = PLANS[plan]
    policy = load_policy(chosen).replaced(calibration={"steps": 3})
    if plan == "fp32":
        policy = policy.replaced(formats=("fp32",), rules=())
    model = copy.deepcopy(model)
    try:
        autoprec.compile(
            model, policy=policy, budget=budget, batches=batches, loss_fn=loss, backend=backend, events=None
        )
    except autoprec.InfeasibleError:
        return Peak(name, plan, None, None)
    session = autoprec.session(model)
    assert session.plan is not None and session.plan.predicted is not None and session.graph is not None

    def step() -> None:
        loss(model, batches[0]).backward()
        session.step()  # lets go of what is kept to replay the step: a later release would count as the next step's

    step()
    step()
    measured = peak_bytes(step, torch.device("cpu"))
    fixed, limit = fixed_bytes(session.graph), session.plan.budget_bytes
    return Peak(
        workload=name,
        plan=plan,
        predicted=session.plan.predicted.peak_bytes - fixed,
        measured=measured,
        budget=None if limit is None else limit - fixed,
    )


def predicted_and_measured(
    model: nn.Module, batches: list[Tensor], loss: Callable[[nn.Module, Tensor], Tensor], plan: str
) -> tuple[int, int]:
    """Of a step under a plan, beyond what is there anyway."""
    torch._dynamo.reset()
    policy = load_policy(PLANS[plan][0]).replaced(calibration={"steps": 3})
    if plan == "fp32":
        policy = policy.replaced(formats=("fp32",), rules=(), storage={"formats": ()})
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=loss, events=None)
    session = autoprec.session(model)
    assert session.plan is not None and session.plan.predicted is not None and session.graph is not None

    def step() -> None:
        loss(model, batches[0]).backward()
        session.step()

    step()
    step()
    return session.plan.predicted.peak_bytes - fixed_bytes(session.graph), peak_bytes(step, torch.device("cpu"))


def peaks_under(model: nn.Module, proposals: Proposals, choice: Choice, batch: Tensor) -> tuple[int, int]:
    """The peak of the second step under a choice, beyond what is there anyway."""
    evaluation = evaluate(proposals.problem, choice)
    plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
    autoprec.unwrap(model)
    autoprec.compile(model, plan=plan, events=None)

    def step() -> None:
        model(batch).backward()
        autoprec.session(model).step()  # as in `peak_of`

    step()
    step()
    measured = peak_bytes(step, torch.device("cpu"))
    return measured, evaluation.peak_bytes - proposals.problem.fixed_bytes


def peaks(names: Sequence[str], plans: Sequence[str] = tuple(PLANS), backend: Backend = "eager") -> Iterator[Peak]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for plan in plans:
                yield peak_of(name, plan, backend)
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.memory_study")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=tuple(PLANS))
    given = parser.parse_args()
    backend: Backend = "inductor" if given.compiled else "eager"
    print("workload      plan   predicted MB  measured MB  predicted/measured  measured/budget", flush=True)
    for p in peaks(given.names or list(WORKLOADS), given.plans, backend):
        if p.predicted is None or p.measured is None:
            print(f"{p.workload:13} {p.plan:6} no plan fits")
            continue
        kept = f"{p.measured / p.budget:16.3f}" if p.budget else ""
        found = f"{p.predicted / 1e6:12.3f} {p.measured / 1e6:12.3f} {p.ratio:19.3f} {kept}"
        print(f"{p.workload:13} {p.plan:6} {found}", flush=True)


if __name__ == "__main__":
    main()
