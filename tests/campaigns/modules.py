"""Every module that torch tests, under the identity plan and under all-BF16 and all-FP16 plans.

`python -m tests.campaigns.modules [--samples N] [NAME ...]` runs the first N FP32 samples of each module of torch's own
`module_db` (all of them with `--samples 0`), in train and in eval mode where they differ, and ends with exit code 1 if
a law is broken. The laws are those of `tests.campaigns.ops`; buffers after the call are results like the outputs.

The module itself is compiled and its inputs are inputs; one without parameters sits in a module that owns its inputs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import autoprec
from autoprec.plans import Plan
from tests.campaigns import report
from tests.campaigns.ops import DTYPES, OpModule, SampleTally, narrow, outcome, planned, same
from tests.campaigns.report import quietly


class Sample(nn.Module):
    """A module with the arguments of one call; `outcome` finds the gradients of both and the buffers."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.given, self.spec = tree_flatten((args, kwargs))
        self.fresh = [b.detach().clone() for b in module.buffers()]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from self.module.parameters()
        yield from (v for v in self.given if isinstance(v, Tensor) and v.requires_grad)

    def forward(self) -> Any:
        with torch.no_grad():
            for buffer, fresh in zip(self.module.buffers(), self.fresh, strict=True):
                buffer.copy_(fresh)
        args, kwargs = tree_unflatten(self.given, self.spec)
        return self.module(*args, **kwargs), [b.detach().clone() for b in self.module.buffers()]


def _leaf(v: Any) -> Any:
    return v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v


def sample_of(info: Any, made: Any, *, training: bool) -> Sample:
    """The module as torch's tests build it."""
    torch.manual_seed(3)
    module = info.module_cls(*made.constructor_input.args, **made.constructor_input.kwargs)
    module = module.to(torch.float32).train(training)
    args, kwargs = tree_map(_leaf, (made.forward_input.args, made.forward_input.kwargs))
    if info.is_lazy:  # the first call makes its parameters
        module(*args, **kwargs)
    if list(module.parameters()):
        return Sample(module, args, kwargs)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return Sample(
        OpModule(module, SimpleNamespace(input=bound.args[0], args=bound.args[1:], kwargs=bound.kwargs)), (), {}
    )


def check(name: str, sample: Sample, tally: SampleTally) -> None:
    """One sample under three plans."""
    tally.samples += 1
    if not list(sample.module.parameters()):
        tally.left_out["no float32 tensor of its own"] += 1
        return
    try:
        expected, again = outcome(sample, sample), outcome(sample, sample)
    except Exception as error:
        tally.left_out[f"the module itself raises {type(error).__name__}"] += 1
        tally.reasons.setdefault(name, str(error).splitlines()[0][:120])
        return
    if same(expected, again):
        tally.left_out["not reproducible in eager mode"] += 1
        tally.reasons.setdefault(name, "not reproducible in eager mode")
        return
    torch._dynamo.reset()
    counters.clear()
    autoprec.compile(sample.module, plan=Plan(assignments=()), events=None)
    try:
        _laws(name, sample, expected, tally)
    finally:
        autoprec.unwrap(sample.module)


def _laws(name: str, sample: Sample, expected: list[Tensor | None], tally: SampleTally) -> None:
    session, reason = autoprec.session(sample.module), ""
    for stepped in (False, True):
        try:
            found = outcome(sample, sample)
        except Exception as error:
            tally.broken.append(f"{name}: identity raises {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            return
        if difference := same(expected, found):
            tally.broken.append(f"{name}: identity{' after a step' if stepped else ''}: {difference}")
            return
        captured = [o for b in session.bindings for o in b.ops]
        if captured:
            break
        reason = reason or next((r.splitlines()[0] for r in counters["graph_break"]), "no float32 op left")
        try:
            session.step()  # modules that a graph break left eager are captured on their own from here on
        except autoprec.NotCapturedError:
            tally.left_out[f"the step says that it was not captured: {reason}"] += 1
            tally.reasons.setdefault(name.partition("[")[0], reason)
            return
    if not captured:
        tally.broken.append(f"{name}: not captured, and no step says so: {reason}")
        return
    tally.captured += 1
    if not any(planned(o) for o in captured):
        tally.left_out["captured, nothing to plan"] += 1
    else:
        for fmt in DTYPES:
            narrow(name, sample, session, captured, fmt, expected, tally)


def modes(info: Any) -> tuple[bool, ...]:
    return (True, False) if info.train_and_eval_differ else (True,)


def samples_of(info: Any, count: int) -> Iterator[tuple[str, Callable[[], Sample]]]:
    for training in modes(info):
        made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for i, m in enumerate(made[:count] if count else made):
            name = f"{info.name}[{i}]" + ("" if training else ".eval")
            yield name, lambda m=m, training=training: sample_of(info, m, training=training)  # type: ignore[misc]


def campaign(names: Sequence[str], count: int, *, every: int = 1) -> SampleTally:
    """The first `count` samples (0 for all) of every so many modules, or of those with the given names."""
    tally = SampleTally()
    with quietly():
        for info in module_db[::every]:
            if not names or info.name in names:
                for name, build in samples_of(info, count):
                    check(name, build(), tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    return report.main(__doc__, campaign, argv, samples=True)


if __name__ == "__main__":
    sys.exit(main())
