"""LSTMs in BF16: predicted and measured. `python -m tests.bench.recurrent`

First torch's recurrent layers alone, in FP32, BF16 and FP16: seconds of a forward and backward pass, one thread, and
the relative error of outputs and of weight gradients. LSTMs compiled, taken apart as torch's compiler does it and by
one kernel as ours does, in turn with eager ones. Then the two recurrent workloads, each LSTM in BF16 by itself and
all else in FP32: root mean square of the loss change, and of the relative error of the LSTM's weight gradients, over 32
batches that calibration did not see, beside what the planner predicts.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.graphs import OpClass, Role
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.recurrent import _workspace_bytes, as_one_kernel
from autoprec.planning.evaluator import evaluate
from autoprec.planning.solutions import Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import Plan
from tests.bench.measure import Calibrated, calibrate, one_thread
from tests.bench.workloads import PLAIN_RECURRENT, WORKLOADS

BATCHES = 32

#: (batch, time, width) of the layers that are run alone.
SHAPES = ((8, 128, 192), (32, 64, 256))


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A layer in a format: seconds of a step, relative errors of the output and of the matrices' gradients."""

    kind: str
    format: str
    seconds: float
    output_error: float
    gradient_error: float


def alone(kind: str, batch: int, steps: int, width: int, rounds: int = 7) -> Iterator[Alone]:
    """One of torch's layers in every format, FP32 first; random weights as torch makes them, random data."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(width, width, batch_first=True)
    x, g = torch.randn(batch, steps, width), torch.randn(batch, steps, width)
    exact: list[Tensor] = []
    for name in ("fp32", "bf16", "fp16"):
        dtype = dtype_of(name)
        narrow = copy.deepcopy(layer).to(dtype)
        found = step(narrow, x.to(dtype), g.to(dtype))
        exact = exact or found
        taken = []
        for _ in range(rounds):
            begin = time.perf_counter()
            step(narrow, x.to(dtype), g.to(dtype))
            taken.append(time.perf_counter() - begin)
        errors = [relative(a, b) for a, b in zip(found, exact, strict=True)]
        yield Alone(kind=kind, format=name, seconds=statistics.median(taken), output_error=errors[0],
                    gradient_error=math.sqrt(statistics.fmean(e * e for e in errors[1:])))  # fmt: skip


def step(layer: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Output and gradients of the matrices, in FP32."""
    y = layer(x)[0]
    matrices = [p for p in layer.parameters() if p.dim() == 2]
    return [t.float() for t in (y.detach(), *torch.autograd.grad(y, matrices, g))]


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


#: (batch, time, width) of the layers that are compiled. Each step of time costs torch's compiler more than a second.
COMPILED = ((8, 16, 192), (32, 16, 256))


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an LSTM runs: seconds to compile it and of a step, and bytes of the step's peak."""

    name: str
    compile_seconds: float
    seconds: float
    peak_bytes: int


def compiled(batch: int, steps: int, width: int, dtype: torch.dtype, rounds: int = 40) -> list[Way]:
    """A layer in eager mode, compiled by one kernel, and compiled as torch does it; medians of rounds in turn."""
    torch.manual_seed(0)
    layer = nn.LSTM(width, width, batch_first=True).to(dtype)
    x, g = (torch.randn(batch, steps, width, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    state = [torch.zeros(1, batch, width, dtype=dtype)] * 2

    def forward(x: Tensor) -> Tensor:
        return torch.lstm(x, state, layer._flat_weights, True, 1, 0.0, True, False, True)[0]

    def by_one_kernel(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        as_one_kernel(graph)
        return compile_fx(graph, examples)

    def step(way: Callable[[Tensor], Tensor]) -> None:
        torch.autograd.grad(way(x), [x, *layer.parameters()], g)

    ways = {
        "eager": forward,
        "one kernel": torch.compile(forward, backend=by_one_kernel),
        "taken apart": torch.compile(forward),
    }
    first, taken = {}, {name: list[float]() for name in ways}
    with fresh_cache(), torch._dynamo.config.patch(allow_rnn=True):
        torch._dynamo.reset()
        for name, way in ways.items():
            begin = time.perf_counter()
            step(way)
            first[name] = time.perf_counter() - begin
        for _ in range(rounds):
            for name, way in ways.items():
                begin = time.perf_counter()
                step(way)
                taken[name].append(time.perf_counter() - begin)
        return [
            Way(name=name, compile_seconds=first[name], seconds=statistics.median(taken[name]),
                peak_bytes=peak_bytes(partial(step, way), x.device))
            for name, way in ways.items()
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InBF16:
    """One LSTM of a workload: root mean squares, predicted and measured."""

    op: str
    loss_predicted: float
    loss_measured: float
    gradient_predicted: float
    gradient_measured: float


def narrowed(found: Calibrated, batches: int = BATCHES) -> Iterator[InBF16]:
    """Each LSTM in BF16 by itself."""
    proposals = found.proposals(
        "balanced", formats=("fp32", "bf16"), storage={"formats": ()}, rules=(), noise={"gradient": 1e6, "loss": 1e6}
    )
    problem, graph = proposals.problem, found.session.graph
    generator = Generator().manual_seed(1)
    data = [found.workload.batch(generator) for _ in range(batches)]
    exact = runs(found, None, data)
    for op in graph.ops:
        if op.op_class is not OpClass.RECURRENT:
            continue
        options = list(uniform_choice(problem, "fp32").options)
        unit = problem.unit_index[op.id, Role.OUTPUT]
        options[unit] = problem.units[unit].options.index("bf16")
        choice = replace(uniform_choice(problem, "fp32"), options=tuple(options))
        said = evaluate(problem, choice)
        plan = proposals.decisions(Solution(choice=choice, evaluation=said, bound=0.0))
        seen = runs(found, plan, data)
        energy = {n: statistics.fmean(float(g[n].square().sum()) for _, g in exact) for n in exact[0][1]}
        own = [(r.weight, v) for r, v in zip(problem.rows, said.rows, strict=True) if r.weight in op.weights]
        errors = [
            statistics.fmean(float((a[n] - b[n]).square().sum()) for (_, a), (_, b) in zip(seen, exact, strict=True))
            / energy[n]
            for n, _ in own
        ]
        yield InBF16(
            op=op.id,
            loss_predicted=said.loss_sigma,
            loss_measured=math.sqrt(statistics.fmean((a - b) ** 2 for (a, _), (b, _) in zip(seen, exact, strict=True))),
            gradient_predicted=math.sqrt(statistics.fmean(v / energy[n] for n, v in own)),
            gradient_measured=math.sqrt(statistics.fmean(errors)),
        )


def runs(found: Calibrated, plan: Plan | None, batches: Sequence[object]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each batch under a plan; FP32 without one."""
    model = copy.deepcopy(found.model)
    if plan is not None:
        torch._dynamo.reset()
        autoprec.compile(model, plan=plan, events=None)
    seen = []
    for batch in batches:
        model.zero_grad()
        loss = found.workload.loss(model, batch)
        loss.backward()
        seen.append((loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    return seen


def main() -> None:
    with one_thread():
        print("layer  batch × time × width   format  step ms  / fp32   relative error: output  weight gradients")
        for shape in SHAPES:
            for kind in ("LSTM", "GRU", "RNN"):
                plain = 0.0
                for a in alone(kind, *shape):
                    plain = plain or a.seconds
                    print(f"{kind:5} {' × '.join(map(str, shape)):>16} {a.format:>12} {a.seconds * 1e3:9.1f}"
                          f" {a.seconds / plain:7.2f} {a.output_error:22.4f} {a.gradient_error:17.4f}",
                          flush=True)  # fmt: skip
        print("\nLSTM compiled       format  way           compiled in s  step ms  / eager   peak MB")
        for shape in COMPILED:
            for name in ("fp32", "bf16"):
                eager, *others = compiled(*shape, dtype_of(name))
                for way in (eager, *others):
                    print(f"{' × '.join(map(str, shape)):18} {name:>7}  {way.name:12} {way.compile_seconds:14.1f}"
                          f" {way.seconds * 1e3:8.2f} {way.seconds / eager.seconds:8.2f} {way.peak_bytes / 1e6:9.2f}",
                          flush=True)  # fmt: skip
                batch, steps, width = shape
                left = _workspace_bytes(steps, batch, width, width, dtype_of(name)) / (steps * batch * width)
                print(
                    f"{'':18} {name:>7}  the kernel leaves {left:.0f} bytes for each element of its output", flush=True
                )
        print("\nLSTM in BF16                             loss change: predicted  measured  ratio"
              "   weight gradients: predicted  measured  ratio")  # fmt: skip
        for workload in (WORKLOADS["recurrent"], PLAIN_RECURRENT):
            for r in narrowed(calibrate(workload)):
                print(f"{workload.name + ', ' + r.op:40} {r.loss_predicted:23.2e} {r.loss_measured:9.2e}"
                      f" {r.loss_predicted / r.loss_measured:6.2f} {r.gradient_predicted:29.4f}"
                      f" {r.gradient_measured:9.4f} {r.gradient_predicted / r.gradient_measured:6.2f}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
