"""What runs for one (template, owner): the one mutable slot, written by the session alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoprec.execution.checking import CheckingInterpreter
from autoprec.plans import Plan
from autoprec.rewriting.rewrite import Rewritten, rewrite
from autoprec.tracing.bindings import Binding

__all__ = ["Slot"]


@dataclass(eq=False)
class Slot:
    """A bound template and its executable.

    Attributes:
        binding: the captured graph and its owner's names.
        trains: whether a parameter of it is trainable.
        plan: what `rewritten` was made from; None runs the captured graph itself.
        executed: op id → format of its result, as seen at the first run of the rewritten graph.
        calls: how often it ran.
    """

    binding: Binding
    trains: bool
    plan: Plan | None = None
    rewritten: Rewritten | None = None
    executed: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    _checked: bool = False

    def adopt(self, plan: Plan | None, device_type: str) -> None:
        """Run `plan` from the next call on; the identity plan runs the captured graph itself."""
        self.plan, self.rewritten, self._checked = plan, None, False
        if plan is not None and not plan.is_identity:
            self.rewritten = rewrite(self.binding, plan, device_type)

    @property
    def module(self) -> fx.GraphModule:
        """The graph that runs."""
        return self.binding.template.module if self.rewritten is None else self.rewritten.module

    @property
    def origin(self) -> Mapping[fx.Node, fx.Node]:
        """The flat node that each node that runs stands for."""
        return self.binding.template.flat.origin if self.rewritten is None else self.rewritten.origin

    def run(self, arguments: Sequence[Any]) -> Any:
        """Run it; the first run of a rewritten graph is checked against the plan."""
        if self.rewritten is None or self._checked or self.plan is None:
            return self.module.forward(*arguments)
        checking = CheckingInterpreter(self.rewritten, self.binding, self.plan)
        result = checking.run(*arguments)
        self._checked, self.executed = True, checking.executed
        return result
