"""Architectures that no one here wrote, under one added line. `python -m tests.hf.architectures [NAME ...]` prints the
table; it ends with exit code 1 if a row breaks a bar.

captured: the share of the forward pass's FLOPs that ran inside our graphs (torch's own counter). known: the share of
the captured graph's seconds in ops that the table of kinds knows. identity: loss and every gradient bitwise under the
all-FP32 plan. one line, bf16 and 60 %: the loss of the last steps relative to FP32's, after `autoprec.compile(model)`
with no arguments in a plain loop, under uniform BF16, and under a plan for 60 % of the bytes. peak: measured bytes of a
step beyond parameters, gradients and inputs under that plan, relative to FP32's. after: what must hold after training.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.execution.slots import Slot
from autoprec.graphs import OpClass
from autoprec.plans import Plan
from autoprec.serial import load_policy
from autoprec.tracing.checkpoints import GraphInterpreter
from tests.hf.catalog import ARCHITECTURES, Architecture

STEPS = 20


@dataclass(frozen=True)
class Row:
    """What one architecture measured; losses are medians of the last steps."""

    name: str
    ops: int
    captured: float
    known: float
    identity: bool
    one_line: float
    bf16: float
    budget: float | None
    peak: float | None
    after: str
    seconds: float

    def broken(self) -> list[str]:
        """The bars that it breaks."""
        found = []
        if self.captured < 0.95:
            found.append(f"captured {self.captured:.1%} < 95 %")
        if self.known < 0.98:
            found.append(f"known {self.known:.1%} < 98 %")
        if not self.identity:
            found.append("identity is not bitwise")
        for name in ("one_line", "bf16", "budget"):
            ratio = getattr(self, name)
            if ratio is None:
                found.append("no plan fits 60 %")
            elif not abs(ratio - 1.0) <= 0.02:
                found.append(f"{name} loss ratio {ratio:.3f}")
        if self.after != "ok":
            found.append(self.after)
        return found


def quietly() -> None:
    """No advice from transformers, one thread: small ops on two busy threads take a hundred times as long."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def fresh(architecture: Architecture) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return architecture.make().train()


def one_step(architecture: Architecture, model: nn.Module) -> list[Tensor | None]:
    """Loss and every gradient."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = architecture.loss(model, architecture.batch(0))
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


class Timed(GraphInterpreter):
    """Seconds by op class of one run of a captured graph."""

    def __init__(self, slot: Slot) -> None:
        template = slot.binding.template
        super().__init__(template.module, template.flat.origin)
        self.classes = {op.node: op.op_class for op in slot.binding.ops}
        self.seconds: dict[OpClass, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = time.perf_counter()
        result = super().run_node(n)
        taken = time.perf_counter() - begin
        op_class = self.classes.get(self.origin.get(n))  # type: ignore[arg-type]
        if op_class is not None:
            self.seconds[op_class] = self.seconds.get(op_class, 0.0) + taken
        return result


def captured_and_known(architecture: Architecture, model: nn.Module, plain: nn.Module) -> tuple[float, float]:
    """Shares of FLOPs and of seconds, from one forward pass of a compiled model."""
    calls: list[tuple[Slot, Sequence[Any]]] = []
    run = Slot.run
    inside, total = FlopCounterMode(display=False), FlopCounterMode(display=False)

    def counted(slot: Slot, arguments: Sequence[Any]) -> Any:
        calls.append((slot, [a.detach() if isinstance(a, Tensor) else a for a in arguments]))
        with inside:  # Dynamo captures nothing while a counter is active, so it is switched on in here only
            return run(slot, arguments)

    with mock.patch.object(Slot, "run", counted):
        architecture.loss(model, architecture.batch(0))
    with total:
        architecture.loss(plain, architecture.batch(0))
    seconds: dict[OpClass, float] = {}
    with torch.no_grad():
        for slot, arguments in calls:
            runs = [Timed(slot) for _ in range(5)]
            for timed in runs:
                timed.run(*arguments)
            for op_class in runs[0].seconds:
                least = min(timed.seconds[op_class] for timed in runs)
                seconds[op_class] = seconds.get(op_class, 0.0) + least
    captured = inside.get_total_flops() / total.get_total_flops()
    return captured, 1.0 - seconds.get(OpClass.UNKNOWN, 0.0) / sum(seconds.values())


def trained(architecture: Architecture, model: nn.Module, steps: int) -> float:
    """The mean loss of the last quarter of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        loss = architecture.loss(model, architecture.batch(10 + step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 4) :]
    return sum(last) / len(last)


def planned(architecture: Architecture, model: nn.Module, policy: str, budget: str | None) -> nn.Module:
    """Compiled and calibrated up front."""
    chosen = load_policy(policy).replaced(calibration={"steps": 3})
    batches = [architecture.batch(seed) for seed in range(3)]
    return autoprec.compile(
        model, policy=chosen, budget=budget, batches=batches, loss_fn=architecture.loss, events=None
    )


def step_bytes(architecture: Architecture, model: nn.Module) -> int:
    """Peak of one forward and backward pass above what was held before; gradients are there already."""
    batch = architecture.batch(0)
    architecture.loss(model, batch).backward()
    return peak_bytes(lambda: architecture.loss(model, batch).backward(), torch.device("cpu"))


def shared(model: nn.Module) -> list[list[str]]:
    """Names of each parameter, the tied ones together."""
    groups: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), []).append(name)
    return sorted(groups.values())


def after(architecture: Architecture, model: nn.Module, plain: nn.Module) -> str:
    """What must hold after training: "ok", or what does not."""
    fired = []
    handle = model.register_forward_hook(lambda *_: fired.append(1))
    model.eval()
    architecture.after(model, architecture.batch(0))
    handle.remove()
    if not fired:
        return "a forward hook did not fire"
    if list(model.state_dict()) != list(plain.state_dict()):
        return "state_dict keys changed"
    tied = [shared(m) for m in (model, plain)]
    if tied[0] != tied[1]:
        return "tied weights came apart"
    expected = one_step(architecture, _loaded(architecture, model))
    autoprec.unwrap(model).train()
    if not same(expected, one_step(architecture, model)):
        return "unwrap does not give the plain model back"
    return "ok"


def _loaded(architecture: Architecture, model: nn.Module) -> nn.Module:
    plain = architecture.make().train()
    plain.load_state_dict(model.state_dict())
    return plain


def with_one_line(architecture: Architecture, steps: int) -> float:
    """The loss after a plain loop around a model that was compiled with no arguments; it must have been planned."""
    model = autoprec.compile(fresh(architecture), events=None)
    loss = trained(architecture, model, steps)
    session = autoprec.session(model)
    unusual = [e for e in session.events if e.kind != "planned"]
    if session.plan is None or unusual:
        raise autoprec.AutoprecError(f"in a plain loop: {unusual or 'no plan was made'}")
    return loss


def under_budget(architecture: Architecture, plain: nn.Module, steps: int) -> tuple[float | None, float | None]:
    """Loss, and measured peak relative to FP32's, under a 60 % plan; None where no plan fits."""
    try:
        model = planned(architecture, fresh(architecture), "balanced", "60%")
    except autoprec.InfeasibleError:
        return None, None
    loss = trained(architecture, model, steps)
    return loss, step_bytes(architecture, model) / step_bytes(architecture, plain)


def measure(architecture: Architecture, *, steps: int = STEPS, one_line: bool = True, whole: bool = True) -> Row:
    """One row. Without `whole` the BF16 and the 60 % plan are left out, without `one_line` the plain loop as well
    (their columns are 1)."""
    begin = time.perf_counter()
    plain, model = fresh(architecture), fresh(architecture)
    expected = one_step(architecture, copy.deepcopy(plain))
    autoprec.compile(model, plan=Plan(assignments=()), events=None)
    found = one_step(architecture, model)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    graph_ops = sum(len(binding.ops) for binding in autoprec.session(model).bindings)
    captured, known = captured_and_known(architecture, model, plain)
    last = after(architecture, model, plain)
    plain_loss = trained(architecture, copy.deepcopy(plain), steps) if one_line or whole else 1.0
    one_line_loss = with_one_line(architecture, steps) if one_line else plain_loss
    bf16_loss, budget_loss, peak = plain_loss, plain_loss, None
    if whole:
        model = planned(architecture, fresh(architecture), "bf16", None)
        bf16_loss = trained(architecture, model, steps)
        last = after(architecture, model, plain) if last == "ok" else last
        budget_loss, peak = under_budget(architecture, plain, steps)
    return Row(
        name=architecture.name,
        ops=graph_ops,
        captured=captured,
        known=known,
        identity=same(expected, found),
        one_line=one_line_loss / plain_loss,
        bf16=bf16_loss / plain_loss,
        budget=None if budget_loss is None else budget_loss / plain_loss,
        peak=peak,
        after=last,
        seconds=time.perf_counter() - begin,
    )


def line(row: Row) -> str:
    """A row of the table."""

    def ratio(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row.name:11} {row.ops:5} {row.captured:8.1%} {row.known:7.1%} {'bitwise' if row.identity else 'NO':8}"
        f" {row.one_line:8.3f} {row.bf16:6.3f} {ratio(row.budget, 3):>6} {ratio(row.peak, 2):>5} {row.seconds:6.1f}"
        f"  {row.after}"
    )


HEADING = "arch          ops captured   known identity one line   bf16    60%  peak      s  after"


def main(names: Sequence[str]) -> int:
    quietly()
    chosen = [a for a in ARCHITECTURES if not names or a.name in names]
    print(HEADING)
    broken = {}
    for architecture in chosen:
        try:
            row = measure(architecture)
        except autoprec.AutoprecError as error:
            broken[architecture.name] = [f"{type(error).__name__}: {error}"]
            print(f"{architecture.name:11} {type(error).__name__}: {error}", flush=True)
            continue
        print(line(row), flush=True)
        if row.broken():
            broken[row.name] = row.broken()
    for name, reasons in broken.items():
        print(f"RED {name}: {'; '.join(reasons)}")
    print(f"{len(chosen)} architectures, {len(broken)} red")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
