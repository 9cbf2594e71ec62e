"""The same plan, compiled? `python -m tests.bench.lowering [NAME ...] [--rivals]`

Under `memory`, as the planner makes it for a compiled step: loss and gradients of the plan run as it is and through
inductor, on four batches, in what the plan's own rounding changes of FP32's; what the compiled graph keeps for its
backward pass beside the storages that the plan names; peaks of both, as predicted (of the compiled step by the planner,
and from the generated code) and measured; compile seconds. With --rivals the plan, compiled, against torch.compile with
autocast and torch's own means to save memory: FP8 for kept tensors by size (inductor's activation quantization) and
recomputation under `activation_memory_budget`; and the same plan as torch fuses it, without regard to what that holds
("not lean"). Time in turn, one thread. Exit code 1 where the two lowerings are
further apart than what rounding changes, where a tensor is kept beside its storage, where the peak of either lowering
is more than 5 % off what is predicted (of the compiled one, by the planner or from its code), and, with --rivals on the
transformer and the convolutional network, where torch's FP8 has the smaller gradient error at no higher peak, or its
recomputation the smaller step time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import autoprec
from autoprec.execution import inductor
from autoprec.execution.measuring import peak_bytes, saved_bytes
from autoprec.planning.evaluator import evaluate
from autoprec.plans import Plan
from tests.bench.measure import Calibrated, calibrate, in_turn, one_thread
from tests.bench.workloads import Workload, chosen, conclude

BATCHES = 4
#: Of what the plan's rounding changes of FP32's gradients: two ways to round to the same formats.
APART = 1.0
#: Of a peak.
OFF = 0.05
BARRED = ("transformer", "cnn")
BUDGETS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.0)


@dataclass(kw_only=True)
class Contestant:
    """Something that steps, and what was measured of it.

    `around` is in force while it is compiled: at its first step.
    """

    model: nn.Module
    autocast: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    peak_bytes: int = 0
    kept_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def loss(self, workload: Workload, batch: Any) -> Tensor:
        """Forward."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            return workload.loss(self.model, batch)

    def step(self, workload: Workload, batch: Any) -> float:
        """Forward and backward; the loss."""
        loss = self.loss(workload, batch)
        loss.backward()
        return float(loss)

    def measure(self, workload: Workload, batches: Any) -> None:
        """All but the seconds of a step."""
        begin = time.perf_counter()
        with self.around():
            self.step(workload, batches[0])
        self.first_seconds = time.perf_counter() - begin
        for batch in batches[:BATCHES]:
            self.model.zero_grad(set_to_none=False)
            torch.manual_seed(0)
            self.losses.append(self.step(workload, batch))
            grads = [p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]
            self.gradients.append(torch.cat(grads).double())
        held = [*self.model.parameters(), *self.model.buffers(), *_tensors(batches[0])]
        self.kept_bytes = saved_bytes(lambda: self.loss(workload, batches[0]), held)
        self.peak_bytes = peak_bytes(lambda: self.step(workload, batches[0]), torch.device("cpu"))

    def error(self, exact: Contestant) -> float:
        """‖g − g*‖ / ‖g*‖ over all weights, median over the batches."""
        pairs = zip(self.gradients, exact.gradients, strict=True)
        return statistics.median(float((a - b).norm() / b.norm()) for a, b in pairs)


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch
    return [x for x in values if isinstance(x, Tensor)]


def planned(
    found: Calibrated, plan: Plan, backend: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Contestant:
    """A plan's."""
    model = copy.deepcopy(found.model)
    autoprec.compile(model, plan=plan, events=None, backend=backend)
    return Contestant(model=model, around=around)


def compiled(found: Calibrated, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Contestant:
    """torch.compile under autocast."""
    return Contestant(model=torch.compile(copy.deepcopy(found.model)), autocast=True, around=around)  # type: ignore[arg-type]


@contextmanager
def fp8_by_size(dtype: str) -> Iterator[None]:
    """Every kept tensor of torch's own compiled graphs in FP8 with a scale."""
    options = {
        "size_in_mb": 0.0,
        "quant_type": dtype,
        "use_scaling": True,
        "exclude_primals": True,
        "allowed_dtypes": "torch.bfloat16;torch.float32",
    }
    with (
        inductor_config.patch(post_grad_fusion_options={"activation_quantization_aten_pass": options}),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextmanager
def not_lean() -> Iterator[None]:
    """Plans that keep little are compiled as torch compiles anything."""
    lean, inductor.lean_code = inductor.lean_code, nullcontext  # type: ignore[assignment]
    try:
        yield
    finally:
        inductor.lean_code = lean


def for_compiled(found: Calibrated) -> tuple[Plan, int]:
    """The planner's plan for a compiled step, and the peak that it predicts of it in eager mode."""
    compiled, eager = (found.proposals("memory", compiled=c) for c in (True, False))
    solution = compiled.best.solution
    return compiled.plan(solution), evaluate(eager.problem, solution.choice).peak_bytes


def agreement(found: Calibrated, plan: Plan, eager_peak: int) -> list[str]:
    """Three lines, and what is missed."""
    workload = found.workload
    exact = Contestant(model=copy.deepcopy(found.model))
    runs = {"fp32": exact}
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        runs[backend] = planned(found, plan, backend)
    for run in runs.values():
        run.measure(workload, found.batches)
    eager, own = runs["eager"], runs["inductor"]
    apart, rounding = own.error(eager), eager.error(exact)
    loss = max(abs(a - b) / abs(b) for a, b in zip(own.losses, eager.losses, strict=True))
    made = autoprec.session(own.model).lowering.compiled
    again = [t for m in made for t in m.kept if t.again]
    named = sum(t.bytes for m in made for t in m.kept if t.planned)
    assert plan.predicted is not None
    planned_peak, eager_peak = (n - found.fixed_bytes for n in (plan.predicted.peak_bytes, eager_peak))
    loss_bytes = found.session.graph.loss_bytes
    coded = max(max(m.peak_bytes or 0, m.passes.held + loss_bytes if m.passes else 0) for m in made)
    print(
        f"{workload.name:12} loss {loss:.1e} apart, gradients {apart:.1e}; rounding changes them by {rounding:.1e}"
        f" ({apart / rounding:.2f})\n"
        f"{'':12} kept {sum(m.kept_bytes for m in made) / 1e6:.2f} MB, {named / 1e6:.2f} of them storages of the plan,"
        f" {len(again)} beside them; eager keeps {eager.kept_bytes / 1e6:.2f}\n"
        f"{'':12} peak {own.peak_bytes / 1e6:.2f} MB, planned {planned_peak / 1e6:.2f}, by its code {coded / 1e6:.2f};"
        f" eager {eager.peak_bytes / 1e6:.2f}, planned {eager_peak / 1e6:.2f};"
        f" compiled {len(made)} graphs in {sum(m.seconds for m in made):.1f} s",
        flush=True,
    )
    missed = []
    if apart > APART * rounding:
        missed.append(f"{workload.name}: the lowerings are {apart / rounding:.2f} of the rounding apart")
    if again:
        missed.append(f"{workload.name}: {again[0].tensor} is kept beside its storage")
    for what, peak, by, predicted in (
        ("compiled", own.peak_bytes, "the planner", planned_peak),
        ("compiled", own.peak_bytes, "its code", coded),
        ("eager", eager.peak_bytes, "the planner", eager_peak),
    ):
        if abs(predicted / peak - 1.0) > OFF:
            missed.append(f"{workload.name}: {by} predicts {predicted / peak:.3f} of the {what} peak")
    return missed


OWN, NOT_LEAN, BY_SIZE = "autoprec memory", "  not lean", "fp8_e4m3 by size"


def contestants(found: Calibrated, plan: Plan, *names: str) -> tuple[Contestant, dict[str, Contestant]]:
    """FP32, and the others by name (all, unless some are named): measured, but for the seconds."""
    workload = found.workload
    exact = Contestant(model=copy.deepcopy(found.model))
    exact.measure(workload, found.batches)
    makers: dict[str, Callable[[], Contestant]] = {
        "autocast": lambda: compiled(found),
        BY_SIZE: lambda: compiled(found, lambda: fp8_by_size("torch.float8_e4m3fn")),
        "fp8_e5m2 by size": lambda: compiled(found, lambda: fp8_by_size("torch.float8_e5m2")),
    }
    for budget in BUDGETS:
        makers[f"recompute {budget}"] = lambda b=budget: compiled(
            found, lambda: functorch_config.patch(activation_memory_budget=b, enable_autograd_cache=False)
        )
    makers[OWN] = lambda: planned(found, plan, "inductor")
    makers[NOT_LEAN] = lambda: planned(found, plan, "inductor", not_lean)
    runs: dict[str, Contestant] = {}
    for name in names or makers:
        torch._dynamo.reset()
        runs[name] = makers[name]()
        runs[name].measure(workload, found.batches)
    return exact, runs


def beaten_by_size(exact: Contestant, runs: dict[str, Contestant]) -> list[str]:
    """Torch's FP8 where it has the smaller gradient error at no higher a peak."""
    own = runs[OWN]
    return [
        f"{name} has an error of {run.error(exact):.2e} at a lower peak"
        for name, run in runs.items()
        if "by size" in name and run.peak_bytes <= own.peak_bytes and run.error(exact) <= own.error(exact)
    ]


def rivals(found: Calibrated, plan: Plan) -> list[str]:
    """A table, and what is missed."""
    workload = found.workload
    exact, runs = contestants(found, plan)
    seconds = in_turn(list(runs), lambda name, batch: runs[name].step(workload, batch), found.batches)
    for name, run in runs.items():
        run.seconds = seconds[name]
    base, own = runs["autocast"], runs[OWN]

    def ratio(run: Contestant) -> float:
        return statistics.median(a / b for a, b in zip(run.seconds, base.seconds, strict=True))

    for name, run in runs.items():
        print(
            f"{workload.name:12} {name:18} {statistics.median(run.seconds) * 1e3:7.1f} ms {ratio(run):.3f}"
            f"  keeps {run.kept_bytes / 1e6:6.2f} MB  peak {run.peak_bytes / 1e6:6.2f} MB"
            f"  gradient error {run.error(exact):.2e}  first step {run.first_seconds:.0f} s",
            flush=True,
        )
    if workload.name not in BARRED:
        return []
    missed = [f"{workload.name}: {what}" for what in beaten_by_size(exact, runs)]
    for name, run in runs.items():
        if "recompute" in name and run.peak_bytes <= own.peak_bytes and ratio(run) <= ratio(own):
            missed.append(f"{workload.name}: {name} takes {ratio(run) / ratio(own):.2f} of the time at a lower peak")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lowering")
    parser.add_argument("--rivals", action="store_true")
    workloads, given = chosen(parser)
    missed: list[str] = []
    with one_thread():
        for workload in workloads:
            found = calibrate(workload)
            plan, eager_peak = for_compiled(found)
            missed += agreement(found, plan, eager_peak)
            if given.rivals:
                missed += rivals(found, plan)
    conclude(missed, "every bar is met")


if __name__ == "__main__":
    main()
