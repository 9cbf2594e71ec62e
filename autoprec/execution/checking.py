"""What runs is what the plan claims: the first run of a rewritten graph compares every op's result with its format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoprec.errors import PlanError
from autoprec.formats import result_format
from autoprec.graphs import Role
from autoprec.numerics.dtypes import dtype_of, format_of
from autoprec.plans import Plan
from autoprec.rewriting.rewrite import Rewritten
from autoprec.tracing.bindings import Binding
from autoprec.tracing.checkpoints import GraphInterpreter

__all__ = ["CheckingInterpreter"]


class CheckingInterpreter(GraphInterpreter):
    """Runs a rewritten graph once and notes the format of every op's result in `executed`.

    Raises `PlanError` where a planned op gives another dtype than the plan says.
    """

    def __init__(self, rewritten: Rewritten, binding: Binding, plan: Plan) -> None:
        super().__init__(rewritten.module, rewritten.origin)
        self._op_of, self._plan = binding.op_of, plan
        self.executed: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and look at the dtype of its result."""
        result = super().run_node(n)
        captured = self.origin.get(n)
        op = self._op_of.get(captured) if captured is not None else None
        if op is None:
            return result
        claimed = self._plan.format_of.get((op.id, Role.OUTPUT))
        for y in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(y, Tensor) or not y.is_floating_point():
                continue
            if claimed is not None and y.dtype is not dtype_of(result_format(claimed)):
                raise PlanError(f"{op.id} is planned in {claimed} but gives {y.dtype}; please report this model")
            if y.dtype in (torch.float32, torch.bfloat16, torch.float16):
                self.executed[op.id] = format_of(y.dtype)
        return result
