"""Faults of many kinds, most of them not injected: `python -m tests.campaigns.faults [--count 640] [--seed 0]`.

Models × formats × optimizers are planned once each. Every fault then has a run of its own from that state. It is
injected at an op, or made as it happens to people: a batch that is not finite or far too large, a weight that is
overwritten, grows or shrinks, a learning rate that is a million times too high, a loss that is. Whether a step is bad,
whether it changed a bit, and which op is to blame is told without autoprec (`autoprec.testing.watching` looks at
gradients and bits, `tests.campaigns.oracle` at the model's own FP32 run). Exit code 1 if a bad step changed anything,
if one was not noticed in that step or a drift within a window, or if the op that was named first is not the right one
in 95 of 100.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from autoprec.formats import format_named
from autoprec.graphs import Role
from autoprec.reporting.trials import Trial, trial_tables, trials_data
from autoprec.testing.chaos import STEPS_BEFORE, WINDOW_STEPS, Run, Start, at_hand, chaos, outcome_of
from autoprec.testing.injection import KINDS, inject
from autoprec.testing.watching import Seen
from autoprec.tracing.bindings import OpNode
from tests.campaigns.fault_starts import loss_fn, starts
from tests.campaigns.oracle import Call, blamed, recorded

COUNT = 640

# Faults that nobody injects -----------------------------------------------------------------------------------------


class Outside:
    """A fault in steps of a run: what it changes before a step, and what the loss of the step is then."""

    kind, by = "", ""
    #: Steps that it may take until it shows.
    lasts = 1

    def __init__(self, run: Run, chance: random.Random) -> None:
        self.run, self.chance = run, chance
        self.op = ""

    def begin(self, k: int) -> None:
        """Before the k-th step."""

    def batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model, self.batch(batch))

    def factors(self, k: int) -> dict[str, float]:
        """By op, what its result is times in the k-th step."""
        return {}

    def look(self, calls: Sequence[Call]) -> None:
        """What the step is in FP32."""

    def wanted(self) -> bool:
        """Whether it must be noticed although no step was bad."""
        return False


class BadData(Outside):
    by = "data"

    def __init__(self, run: Run, chance: random.Random) -> None:
        super().__init__(run, chance)
        self.at = chance.randrange(64), chance.randrange(16)

    value = math.nan

    def batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = batch[0].clone()
        x[self.at] = self.value
        return x, batch[1]


class NanInData(BadData):
    kind = "nan in a batch"


class InfInData(BadData):
    kind, value = "inf in a batch", math.inf


class LargeData(Outside):
    kind, by = "a batch 1e7 times too large", "data"

    def batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] * 1e7, batch[1]


class OnWeights(Outside):
    """On the weight of one product."""

    by = "weights"

    def __init__(self, run: Run, chance: random.Random) -> None:
        super().__init__(run, chance)
        plan, ops = run.session.plan, self.candidates(run)
        assert plan is not None
        small = [op for op in ops if plan.format_of.get((op.id, Role.OUTPUT)) == "fp16"]
        self.node = chance.choice(small or ops)
        self.format = plan.format_of.get((self.node.id, Role.OUTPUT), "fp32")
        self.made: list[float] = []

    def candidates(self, run: Run) -> list[OpNode]:
        return [op for op in run.ops() if op.gemm is not None and op.weights]

    @property
    def weight(self) -> Tensor:
        return dict(self.run.model.named_parameters())[self.node.weights[0]].data

    def look(self, calls: Sequence[Call]) -> None:
        self.made += [call.made for call in calls if call.op == self.node.id]


class NanInWeight(OnWeights):
    kind = "a weight overwritten by nan"

    def begin(self, k: int) -> None:
        with torch.no_grad():
            self.weight.view(-1)[self.chance.randrange(self.weight.numel())] = math.nan


class LargeWeight(OnWeights):
    kind = "weights of a layer beyond the format"

    def begin(self, k: int) -> None:
        with torch.no_grad():
            self.weight.mul_(min(8.0 * format_named(self.format).max_value, 3e38) / float(self.weight.abs().max()))


class GrowingWeight(OnWeights):
    kind, lasts = "weights of a layer double from step to step", 3 * WINDOW_STEPS

    def begin(self, k: int) -> None:
        with torch.no_grad():
            self.weight.mul_(2.0)

    def wanted(self) -> bool:
        return self.format == "fp16"


class VanishingWeight(OnWeights):
    kind, lasts = "weights of a layer vanish", 2 * WINDOW_STEPS

    def begin(self, k: int) -> None:
        with torch.no_grad():
            bias = dict(self.run.model.named_parameters()).get(f"{self.node.fqn}.bias")
            for x in (self.weight, bias) if k == 0 else ():
                if x is not None:
                    x *= 2.0**-40

    def wanted(self) -> bool:
        """An optimizer may have made others of them at once."""
        return self.format == "fp16" and max(self.made) < 2.0**-26


class Injected(OnWeights):
    """A fault that lasts, put in by `inject` at any op; the oracle, which knows nothing of that, is told the factor."""

    by, lasts = "injected", 3 * WINDOW_STEPS
    each, at_once = 1.0, 1.0

    def __init__(self, run: Run, chance: random.Random) -> None:
        super().__init__(run, chance)
        self._fault = inject(run.model, self.node.id, self.kind, steps=self.lasts)

    def candidates(self, run: Run) -> list[OpNode]:
        return run.ops()

    def factors(self, k: int) -> dict[str, float]:
        return {self.node.id: self.at_once * self.each ** (k + 1)}


class InjectedGrowth(Injected):
    kind, each = "amax_growth", 2.0

    def wanted(self) -> bool:
        return self.format == "fp16"


class InjectedUnderflow(Injected):
    kind, at_once = "underflow", 2.0**-40

    def wanted(self) -> bool:
        return True


class InjectedZero(Injected):
    kind, at_once = "zero", 0.0

    def wanted(self) -> bool:
        return True


LASTING = (InjectedGrowth, InjectedUnderflow, InjectedZero)


class LearningRate(Outside):
    kind, by, lasts = "a learning rate 1e7 times too high for a step", "learning rate", 4

    def begin(self, k: int) -> None:
        for group in self.run.optimizer.param_groups:
            group["lr"] *= 1e7 if k == 0 else 1e-7 if k == 1 else 1.0


class LargeLoss(Outside):
    kind, by = "a loss 1e30 times too large", "loss"

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model, batch) * 1e30 * 1e8


class NanLoss(Outside):
    kind, by = "a loss that is nan", "loss"

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model, batch) * math.nan


OUTSIDE: Sequence[type[Outside]] = (
    NanInData,
    InfInData,
    LargeData,
    NanInWeight,
    LargeWeight,
    GrowingWeight,
    VanishingWeight,
    LearningRate,
    LargeLoss,
    NanLoss,
)


def outside(start: Start, kind: type[Outside], chance: random.Random, run_name: str) -> Trial:
    """One fault in a run of its own."""
    run = start.again()
    before = STEPS_BEFORE + chance.randrange(WINDOW_STEPS)
    for number in range(before):
        run.step(number)
    fault, session = kind(run, chance), run.session
    right = ""

    def steps() -> Iterator[Seen]:
        nonlocal right
        for k in range(kind.lasts):
            fault.begin(k)
            batch = start.batches[(before + k) % len(start.batches)]
            assert session.plan is not None
            calls = recorded(run.model, partial(fault.loss, batch=batch), session.plan, fault.factors(k))
            fault.look(calls)
            right = right or blamed(calls, session.plan)
            yield run.step(before + k, fault.loss)

    found = outcome_of(session, steps())
    expected = {right}
    if isinstance(fault, OnWeights) and not right:  # told by a window, before it went wrong
        right, expected = fault.node.id, at_hand(run, fault.node)
    named = "" if found.told is None else found.told.op
    plan = session.plan
    return Trial(
        kind=kind.kind,
        by=kind.by,
        run=run_name,
        op=right,
        format="" if plan is None else fault.format if isinstance(fault, OnWeights) else "",
        step=before,
        bad_steps=found.bad_steps,
        skipped_steps=found.skipped_steps,
        noticed=found.noticed,
        wanted=found.bad_steps > 0 or fault.wanted(),
        named=named,
        trigger="" if found.told is None else found.told.trigger,
        evidence="" if found.told is None else found.told.evidence,
        right=None if found.told is None else named in expected,
        changed=found.changed,
    )


def campaign(
    count: int, seed: int, tell: Callable[[str], object] = lambda _: None, planned: Sequence[tuple[str, Start]] = ()
) -> list[Trial]:
    """So many faults, three of five from outside."""
    chance, trials = random.Random(seed), list[Trial]()
    planned = planned or list(starts(seed))
    each = math.ceil(count / len(planned))
    for name, start in planned:
        tell(f"{name}: {each} faults")
        injected = each * 2 // 5
        sudden = [k for k in KINDS if k not in {lasting.kind for lasting in LASTING}]
        trials += chaos(start, count=injected // 2, seed=chance.randrange(1 << 30), run_name=name, kinds=sudden)
        trials += [outside(start, LASTING[i % len(LASTING)], chance, name) for i in range(injected - injected // 2)]
        kinds = [k for k in OUTSIDE for _ in range(-(-(each - injected) // len(OUTSIDE)))]
        chance.shuffle(kinds)
        trials += [outside(start, kind, chance, name) for kind in kinds[: each - injected]]
    return trials


def bars(trials: Sequence[Trial]) -> list[str]:
    """What does not hold."""
    data = trials_data(trials)
    wrong = []
    if data["changed"]:
        wrong.append(f"{data['changed']} parameters, buffers or optimizer states were changed by bad steps")
    if data["missed"]:
        wrong.append(f"{data['missed']} faults were missed")
    if data["right_frac"] is not None and data["right_frac"] < 0.95:
        wrong.append(f"the right op was named first in {data['right_frac']:.1%}, not 95 %")
    if 2 * data["not_injected"] < data["faults"]:
        wrong.append(f"{data['not_injected']} of {data['faults']} faults were not injected: less than half")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for every single trial")
    given = parser.parse_args()
    torch.set_num_threads(1)
    trials = campaign(given.count, given.seed, lambda text: print(text, file=sys.stderr))
    from rich.console import Console

    console = Console(width=200, markup=False, highlight=False)
    for table in trial_tables(trials):
        console.print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(trials_data(trials), indent=1))
    wrong = bars(trials)
    print("\n".join(wrong) or "every bar is met")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
