"""Predicted against measured error of weight gradients when one tensor is kept for backward in a narrow format.

`python -m tests.storage_study` prints the table. One tensor at a time, everything computed in FP32: the difference
between the weight gradients of the model and of the same model under a plan with that one storage, over 16 batches.
Predicted is what the planner's evaluator says of the same choice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.planning.evaluator import evaluate
from autoprec.planning.planner import ask, propose
from autoprec.planning.problem import Problem
from autoprec.planning.solutions import Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import RECOMPUTED
from tests.noise_study import Study, digits_study, language_study, text

BATCHES = 16


class Gated(nn.Module):
    """Blocks of a gated MLP and a gated recurrence, written out in small ops: RMS norm, SiLU, softplus, exp, tanh."""

    def __init__(self, width: int = 48, depth: int = 3, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.steps = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for gate, down, step, out in zip(self.gates, self.downs, self.steps, self.outs, strict=True):
            a, b = gate(normed(h)).chunk(2, -1)
            h = h + down(F.silu(a) * b)
            delta, u = step(normed(h)).chunk(2, -1)
            decay = torch.exp(-F.softplus(delta))
            state = torch.zeros_like(u[:, 0])
            states = []
            for i in range(u.shape[1]):
                state = decay[:, i] * state + torch.tanh(u[:, i])
                states.append(state)
            h = h + out(torch.stack(states, 1))
        return self.head(normed(h))


def normed(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


def gated_study(*, steps: int = 150) -> Study:
    torch.manual_seed(0)
    data, model = text(), Gated()

    def batch() -> Tensor:
        at = torch.randint(0, len(data) - 17, (8,))
        return torch.stack([data[i : i + 17] for i in at.tolist()]).long()

    def loss(m: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch()).backward()
        optimizer.step()
    return Study("gated recurrence", model, [batch() for _ in range(BATCHES)], loss, lambda m: torch.zeros(()))


@dataclass(frozen=True)
class Kept:
    """One tensor in one storage: predicted and measured E‖δ∇W‖², summed over the weights that it reaches, each relative
    to its own gradient's energy."""

    study: str
    kinds: str
    tensor: str
    storage: str
    predicted: float
    measured: float


def gradients(study: Study, model: nn.Module) -> list[dict[str, Tensor]]:
    found = []
    for batch in study.batches:
        model.zero_grad()
        study.loss(model, batch).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def kept_pairs(
    study: Study, *, storages: tuple[str, ...] = ("bf16", "fp8_e4m3"), batches: int = BATCHES, every: int = 1
) -> Iterator[Kept]:
    """Every tensor (or every so many) that ops other than products with a parameter keep, in every storage."""
    study = replace(study, batches=study.batches[:batches])
    policy = autoprec.Policy(name="study", formats=("fp32",), storage={"formats": storages})
    model = copy.deepcopy(study.model)
    autoprec.compile(model, policy=policy.replaced(calibration={"steps": batches}), events=None)
    session = autoprec.session(model)
    session.calibrate(study.batches, study.loss)
    session.make_plan()
    graph, profile, device = session.graph, session.profile, session.device
    proposals = propose(ask(graph, profile, device, policy))
    problem = proposals.problem
    plain = uniform_choice(problem, "fp32")
    exact = gradients(study, copy.deepcopy(study.model))
    energy = {n: sum(float(g[n].square().sum()) for g in exact) / batches for n in exact[0]}
    others = [t for t in problem.storable if problem.tensors[t].others]
    for t in others[::every]:
        for storage in problem.tensors[t].storages:
            if storage == RECOMPUTED:
                continue  # of what is kept as it is: that is exact
            choice = plain.keeping(t, storage)
            solution = Solution(choice=choice, evaluation=evaluate(problem, choice), bound=0.0)
            rows = dict(zip([r.weight for r in problem.rows], solution.evaluation.rows, strict=True))
            plan = proposals.decisions(solution)
            narrow = copy.deepcopy(study.model)
            autoprec.compile(narrow, plan=plan, events=None)
            errors = {n: 0.0 for n in rows}
            for a, b in zip(gradients(study, narrow), exact, strict=True):
                for n in rows:
                    errors[n] += float((a[n] - b[n]).square().sum()) / batches
            reached = [n for n in rows if rows[n] > 0.0]
            if not reached:
                continue
            yield Kept(
                study=study.name,
                kinds=kinds_of(problem, t, graph),
                tensor=problem.tensors[t].id,
                storage=storage,
                predicted=sum(rows[n] / energy[n] for n in reached) / len(reached),
                measured=sum(errors[n] / energy[n] for n in reached) / len(reached),
            )


def kinds_of(problem: Problem, tensor: int, graph: autoprec.OpGraph) -> str:
    """Who keeps it."""
    ops = [graph.op_by_id[problem.ops[s.moment]] for s in problem.tensors[tensor].others]
    kinds = sorted({op.kind for op in ops}) + (["linear"] if problem.tensors[tensor].gemms else [])
    return "+".join(kinds)


def studies() -> list[Study]:
    digits = digits_study()
    digits.model.train()
    return [language_study(batches=BATCHES), gated_study(), digits]


def main() -> None:
    torch.set_num_threads(1)
    found = [pair for study in studies() for pair in kept_pairs(study)]
    print(
        "study             kept by                     storage    tensors  predicted/measured: median, lowest, highest"
    )
    for key in dict.fromkeys((p.study, p.kinds, p.storage) for p in found):
        ratios = np.array([p.predicted / p.measured for p in found if (p.study, p.kinds, p.storage) == key])
        print(
            f"{key[0]:17} {key[1]:27} {key[2]:9} {len(ratios):8}   {np.median(ratios):.2f}"
            f"  {ratios.min():.2f}  {ratios.max():.2f}"
        )


if __name__ == "__main__":
    main()
