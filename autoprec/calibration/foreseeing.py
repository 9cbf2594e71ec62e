"""The structure of a training graph without running it: shapes, what ops keep, FLOPs, from fake tensors.

For a model that does not fit in FP32: what an FP32 step would hold must be known before there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoprec.calibration.structure import StructureRecorder
from autoprec.devices import Device
from autoprec.graphs import OpGraph
from autoprec.tracing.bindings import Binding
from autoprec.tracing.checkpoints import GraphInterpreter

__all__ = ["foresee", "with_private_bytes", "without_hooks"]


def foresee(binding: Binding, arguments: Sequence[Any], structure: StructureRecorder) -> None:
    """Record what a call of a captured graph with these arguments would be in FP32; nothing is computed.

    Raises whatever torch says where a graph looks at values (`.item()`, sizes that depend on data).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, Tensor) else a for a in arguments]
    structure.alive += fakes
    with without_hooks(), mode, torch.enable_grad():
        _Foreseeing(binding, structure).run(*fakes)


def without_hooks() -> AbstractContextManager[None]:
    """Hooks for saved tensors that may be in force (an eager checkpoint's, the user's own) do not see what is saved
    here: a checkpoint counts what it is given."""
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x)


class _Foreseeing(GraphInterpreter):
    """Runs the captured graph on fake tensors and shows every op to the recorder."""

    def __init__(self, binding: Binding, structure: StructureRecorder) -> None:
        super().__init__(binding.template.module, binding.template.flat.origin)
        self._binding, self._op_of, self._structure = binding, binding.op_of, structure

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record it."""
        captured = self.origin.get(n)
        op = self._op_of.get(captured) if captured is not None else None
        if op is None:
            result = super().run_node(n)
            if n.op == "placeholder" and isinstance(result, Tensor) and captured is not None and not self.inside:
                self._structure.placeholder(self._binding, captured, result)
            return result
        if op.transformed:
            self._structure.unseen(op)
            return super().run_node(n)
        with self._structure.saving():
            result = super().run_node(n)
        self._structure.op(op, self.fetch_args_kwargs_from_env(n), result)
        return result


def with_private_bytes(graph: OpGraph, device: Device) -> OpGraph:
    """The graph with what ops keep privately in FP32 as the device has it: kernels' own buffers are no fake tensors."""
    known = device.private_bytes_by_key
    private = ((op, known.get((op.timing_key, "fp32"), op.private_saved_bytes)) for op in graph.ops)
    return replace(graph, ops=tuple(replace(op, private_saved_bytes=size) for op, size in private))
