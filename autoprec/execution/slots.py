"""What runs for one (template, owner): the one mutable slot, written by the session alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoprec.execution.lowering import Lowering, RefusedError, Runner
from autoprec.plans import Plan
from autoprec.rewriting.rewrite import Rewritten, rewrite
from autoprec.tracing.bindings import Binding
from autoprec.tracing.checkpoints import Change, GraphInterpreter

__all__ = ["Slot"]


@dataclass(eq=False)
class Slot:
    """A bound template and what runs for it.

    Attributes:
        binding: the captured graph and its owner's names.
        trains: whether a parameter of it is trainable, and it was captured where gradients are recorded.
        lowering: how graphs are made to run.
        plan: what was adopted; None runs the captured graph itself. `rewritten` is made from what this graph can run of
            it.
        rewritten: the graph under the plan, None where that changes nothing.
        runner: what is called.
        calls: how often it ran.
        faults: what is done otherwise on purpose in the step in progress, by captured node; it then runs node by node.
        tell: is called with why the compiler refused sizes that came; the graph runs as it is from then on.
        tell_unmade: is called with why a graph that trains keeps a tensor that the plan has made again.
    """

    binding: Binding
    trains: bool
    lowering: Lowering
    plan: Plan | None = None
    rewritten: Rewritten | None = None
    runner: Runner = field(init=False)
    calls: int = 0
    faults: Mapping[fx.Node, Change] = field(default_factory=dict)
    tell: Callable[[str], object] = lambda _: None
    tell_unmade: Callable[[str], object] = lambda _: None
    _proven: Runner | None = field(default=None, init=False)  # what has run
    _fitting: Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.runner = self.lowering.runs(self.binding, None, None)

    def adopt(self, plan: Plan | None, device_type: str, *, compiled: bool = True) -> None:
        """Run `plan` from the next call on, compiled or as it is; the identity plan runs the captured graph itself."""
        self.plan, self.rewritten = plan, None
        self._fitting = plan = None if plan is None else _fitting(plan, self.binding)
        if plan is not None and not plan.is_identity:
            self.rewritten = rewrite(self.binding, plan, device_type)
            for why in self.rewritten.unmade.values() if self.trains else ():
                self.tell_unmade(why)
        self.runner = self.lowering.runs(self.binding, plan, self.rewritten, compiled=compiled)

    def lower(self) -> None:
        """Run the plan, which ran as it is until now, compiled from the next call on."""
        self.runner = self.lowering.runs(self.binding, self._fitting, self.rewritten)

    def prepare(self) -> str:
        """Compile the plan now, where that is to be; "" or why the compiler refused, and the graph runs as it is."""
        try:
            with torch.enable_grad():  # as it will run, wherever a step ends
                self.runner.prepare()
        except RefusedError as error:
            assert self._fitting is not None
            self.runner = self.lowering.uncompiled(self.binding, self._fitting, self.rewritten)
            return str(error)
        return ""

    @property
    def module(self) -> fx.GraphModule:
        """The graph that runs, before it is lowered."""
        return self.binding.template.module if self.rewritten is None else self.rewritten.module

    @property
    def origin(self) -> Mapping[fx.Node, fx.Node]:
        """The flat node that each node of the graph stands for."""
        return self.binding.template.flat.origin if self.rewritten is None else self.rewritten.origin

    @property
    def executed(self) -> Mapping[str, str]:
        """Op id → format of its result, as seen when the rewritten graph first ran."""
        return self.runner.executed

    def run(self, arguments: Sequence[Any]) -> Any:
        """Run it."""
        if self.faults:
            return GraphInterpreter(self.module, self.origin, self.faults).run(*arguments)
        rng = None if self._proven is self.runner else torch.get_rng_state()
        try:
            result = self.runner(*arguments)
        except Exception as error:
            # What the compiler refuses, or makes so that it fails at once. A graph that runs as it is may not.
            if not isinstance(error, RefusedError) and (rng is None or not self.runner.compiled):
                raise
            assert self._fitting is not None
            if rng is not None:
                torch.set_rng_state(rng)
            self.tell(" ".join(str(error).split())[:400])
            self.runner = self.lowering.uncompiled(self.binding, self._fitting, self.rewritten)
            return self.runner(*arguments)
        self._proven = self.runner
        return result


def _fitting(plan: Plan, binding: Binding) -> Plan:
    """What a graph can run of a plan. One that was calibrated speaks of ops as they were then: what is given another
    dtype here takes no format, and is as the user wrote it. One that somebody wrote means what it says."""
    without = {op.id for op in binding.ops if not op.roles}
    if not plan.graph_fingerprint or without.isdisjoint(a.op for a in plan.assignments):
        return plan
    made = {tensor for op in binding.ops if op.id in without for tensor in op.outputs}
    regions = ((r, tuple(op for op in r.ops if op not in without)) for r in plan.regions)
    return replace(
        plan,
        assignments=tuple(a for a in plan.assignments if a.op not in without),
        storages=tuple(s for s in plan.storages if s.tensor not in made),
        regions=tuple(replace(r, ops=ops) for r, ops in regions if ops),
    )
