"""One observed training step: histograms of values and gradients, without changing a bit of either.

Values are sampled when they are made (in-place ops change them later), gradients when autograd delivers them, through
tensor hooks. A tensor that is read by weighted GEMMs *and* by other ops gets its loss sensitivity through the GEMMs
alone, by one view per such edge: a cast is made for those readers, not for the skip connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from autoprec.calibration.rows import row_weights
from autoprec.calibration.structure import StructureRecorder
from autoprec.graphs import OpClass
from autoprec.numerics.histograms import SAMPLE_LIMIT, Sample, histogram, sample, stride_for
from autoprec.profiles import LossProfile, Profile, RangeHistogram, TensorProfile, WeightProfile
from autoprec.tracing.bindings import Binding, OpNode
from autoprec.tracing.kinds import returns_float32

__all__ = ["ObservingInterpreter", "StepObserver"]

#: Elements of a weight gradient whose moments over steps are kept.
WEIGHT_SAMPLE_LIMIT = 1 << 14

_FIELDS = ("values", "loss", "gradients", "input_weight_grad", "gradient_weight_grad")


class StepObserver:
    """Collects one training step: any number of forward and backward passes. `harvest()` gives its `Profile`.

    Mutable, owned by the session; hooks that outlive the step are removed by `harvest`.

    Args:
        limit: elements per tensor beyond which it is sampled.
        sensitivities: also collect what is weighted by gradients (calibration); a monitor needs ranges only.
        structure: records ops, shapes and saved tensors during the first observed step, else None.
        explicit_loss: the loss is given to `output` by the caller; scalar outputs of graphs are not taken for it.
    """

    def __init__(
        self,
        *,
        limit: int = SAMPLE_LIMIT,
        sensitivities: bool = True,
        structure: StructureRecorder | None = None,
        explicit_loss: bool = False,
    ) -> None:
        self.explicit_loss = explicit_loss
        self.limit, self.sensitivities, self.structure = limit, sensitivities, structure
        self._found: dict[tuple[str, str], RangeHistogram] = {}
        self._edges: list[tuple[str, Sample, list[Tensor]]] = []
        self._weights: dict[str, list[tuple[Tensor, float]]] = {}
        self._weight_fraction: dict[str, float] = {}
        self._handles: list[RemovableHandle] = []
        self._seen_parameters: set[str] = set()
        self._losses: list[float] = []
        self._entering: list[float] = []
        self._closed = False

    def add(self, tensor_id: str, field: str, found: RangeHistogram) -> None:
        """Add a histogram to a tensor's field."""
        key = (tensor_id, field)
        before = self._found.get(key)
        self._found[key] = found if before is None else before.merge(found)

    def value(self, tensor_id: str, x: Tensor, *, through_edges: bool = False) -> Sample:
        """Record a tensor; its gradient is recorded when it arrives. Returns the sample taken."""
        taken = sample(x, self.limit)
        self.add(tensor_id, "values", histogram(taken))
        if x.requires_grad and torch.is_grad_enabled():
            self._on_gradient(x, lambda g: self._gradient(tensor_id, taken, g, loss=not through_edges))
        return taken

    def _gradient(self, tensor_id: str, taken: Sample, g: Tensor, *, loss: bool) -> None:
        self.add(tensor_id, "gradients", histogram(sample(g, self.limit)))
        if loss and self.sensitivities:
            self.add(tensor_id, "loss", histogram(taken, taken.pick(g).double().square()))

    def _on_gradient(self, x: Tensor, record: Callable[[Tensor], None]) -> None:
        def hook(g: Tensor | None) -> None:
            if g is not None and not self._closed:
                with torch.no_grad():
                    record(g.to_dense() if g.is_sparse else g.detach())

        # A leaf keeps its hooks for ever, so those are removed at the end of the step; others die with the graph.
        handle = x.register_hook(hook)
        if x.is_leaf:
            self._handles.append(handle)

    def edge(self, tensor_id: str, taken: Sample) -> Callable[[Tensor], None]:
        """A recorder for the gradient along one edge; the edges of one call add up before they are squared."""
        parts: list[Tensor] = []
        self._edges.append((tensor_id, taken, parts))

        def record(g: Tensor) -> None:
            part = taken.pick(g).double()
            if parts:
                parts[0] += part
            else:
                parts.append(part.clone())

        return record

    def parameter(self, fqn: str, p: Tensor) -> None:
        """Record a parameter and its gradients, once per step however often it is used."""
        if fqn in self._seen_parameters:
            return
        self._seen_parameters.add(fqn)
        taken = self.value(f"param:{fqn}", p)
        del taken
        if p.requires_grad and self.sensitivities:
            stride = stride_for(p.shape, WEIGHT_SAMPLE_LIMIT)
            self._weight_fraction[fqn] = (-(-p.numel() // stride)) / max(p.numel(), 1)

            def record(g: Tensor) -> None:
                part = g.reshape(-1)[::stride].double()
                self._weights.setdefault(fqn, []).append((part, float(part.square().sum())))

            self._on_gradient(p, record)

    def gemm(self, kind: str, arguments: dict[str, Any], taken: Sample, x: Tensor, y: Tensor, output_id: str) -> None:
        """Record what roundings of the input and of the output's gradient do to the weight gradient."""
        if not (self.sensitivities and y.requires_grad and torch.is_grad_enabled()):
            return
        rows = row_weights(kind, arguments, x.detach(), y.shape)

        def record(g: Tensor) -> None:
            weights = rows.for_input(g, taken)
            if weights is not None:
                self.add(output_id, "input_weight_grad", histogram(taken, weights))
            g_taken = sample(g, self.limit)
            weights = rows.for_gradient(g_taken)
            if weights is not None:
                self.add(output_id, "gradient_weight_grad", histogram(g_taken, weights))

        self._on_gradient(y, record)

    def output(self, y: Tensor) -> None:
        """Record what enters at an output of the graph: a scalar output is taken to be the loss."""
        if y.requires_grad and y.numel() == 1 and torch.is_grad_enabled():
            value = float(y.detach())

            def record(g: Tensor) -> None:
                self._losses.append(value)
                self._entering.append(float(g))

            self._on_gradient(y, record)

    def harvest(self, graph_fingerprint: str = "") -> Profile:
        """The step as a `Profile`; the observer is closed. `steps` counts backward passes (loss values)."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for tensor_id, taken, parts in self._edges:
            if parts:
                self.add(tensor_id, "loss", histogram(taken, parts[0].square()))
        batches = max((len(v) for v in self._weights.values()), default=1)
        # Gradients are relative to the one that enters at the loss, so that loss scaling and accumulation cancel.
        entering = np.mean(np.square(self._entering)) if self._entering else 1.0
        factor = 1.0 / float(entering) if entering > 0 and np.isfinite(entering) else 1.0
        ids = sorted({tensor_id for tensor_id, _ in self._found})
        tensors = []
        for tensor_id in ids:
            fields = {f: self._found[(tensor_id, f)] for f in _FIELDS if (tensor_id, f) in self._found}
            if "loss" in fields:
                fields["loss"] = fields["loss"].scaled(factor)
            if "values" in fields:
                tensors.append(TensorProfile(id=tensor_id, **fields))
        return Profile(
            graph_fingerprint=graph_fingerprint,
            steps=batches,
            tensors=tuple(tensors),
            weights=tuple(self._weight_profile(fqn) for fqn in sorted(self._weights)),
            loss=self._loss_profile(),
        )

    def _weight_profile(self, fqn: str) -> WeightProfile:
        parts = self._weights[fqn]
        total = torch.stack([p for p, _ in parts]).sum(0)
        return WeightProfile(
            fqn=fqn,
            grad_sum=total.cpu().numpy().copy(),
            grad_square_sum=sum(s for _, s in parts),
            fraction=self._weight_fraction[fqn],
            steps=len(parts),
        )

    def _loss_profile(self) -> LossProfile | None:
        if not self._losses:
            return None
        losses = np.asarray(self._losses)
        return LossProfile(
            steps=len(self._losses), total=float(losses.sum()), square_total=float(np.square(losses).sum())
        )


class ObservingInterpreter(fx.Interpreter):
    """Runs a graph node by node and shows every floating-point value to a `StepObserver`.

    `origin` maps the nodes of a rewritten graph to the captured ones that they stand for; None for the captured graph
    itself.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        binding: Binding,
        observer: StepObserver,
        origin: Mapping[fx.Node, fx.Node] | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.binding, self.observer, self.origin = binding, observer, origin
        self.op_of = binding.op_of
        self.mixed = _mixed_readers(binding) if origin is None else set()
        self._taken: dict[fx.Node, Sample] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and show its result to the observer."""
        captured = n if self.origin is None else self.origin.get(n)
        op = self.op_of.get(captured) if captured is not None else None
        structure = self.observer.structure
        if op is None:
            result = self._run_plain(n)
        elif structure is None:
            result = self._run_op(n, op)
        else:
            with structure.saving(op):
                result = self._run_op(n, op)
            structure.op(op, self._arguments(n), result)
        return result

    def _arguments(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return args, kwargs

    def _run_plain(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "placeholder" and isinstance(result, Tensor):
            captured = n if self.origin is None else self.origin.get(n, n)
            self._placeholder(captured, result)
        elif n.op == "output":
            for y in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(y, Tensor) and y.is_floating_point() and not self.observer.explicit_loss:
                    self.observer.output(y)
        return result

    def _placeholder(self, n: fx.Node, x: Tensor) -> None:
        if self.observer.structure is not None:
            self.observer.structure.placeholder(self.binding, n, x)
        if not x.is_floating_point():
            return
        if n in self.binding.parameters:
            self.observer.parameter(self.binding.parameters[n], x)
        elif n in self.binding.tensor_id:
            self._taken[n] = self.observer.value(self.binding.tensor_id[n], x, through_edges=n in self.mixed)

    def _run_op(self, n: fx.Node, op: OpNode) -> Any:
        gemm = self.origin is None and op.op_class is OpClass.GEMM and bool(op.weights)
        x_node = op.inputs[0][0] if gemm else None
        if x_node is None:
            result = super().run_node(n)
        else:
            with self._edge_view(x_node):
                result = super().run_node(n)
        self._observe_results(n, op, result)
        if x_node is not None and x_node in self._taken:
            arguments = _named_arguments(n, *self._arguments(n))
            self.observer.gemm(op.kind, arguments, self._taken[x_node], arguments["input"], result, op.outputs[0])
        return result

    @contextmanager
    def _edge_view(self, x_node: fx.Node) -> Iterator[None]:
        """While the GEMM runs, its input is a view of its own, so that the gradient along this edge is seen."""
        x = self.env[x_node]
        if x_node not in self.mixed or not x.requires_grad or not torch.is_grad_enabled() or x_node not in self._taken:
            yield
            return
        view = x.view_as(x)
        record = self.observer.edge(self.binding.tensor_id[x_node], self._taken[x_node])
        self.observer._on_gradient(view, record)
        self.env[x_node] = view
        try:
            yield
        finally:
            self.env[x_node] = x

    def _observe_results(self, n: fx.Node, op: OpNode, result: Any) -> None:
        captured = op.node
        values = result if isinstance(result, (tuple, list)) else (result,)
        for tensor_id, y in zip(op.outputs, (v for v in values if isinstance(v, Tensor)), strict=False):
            if y.is_floating_point() and (
                op.op_class is not OpClass.VIEW or op.inplace is not None or self.origin is None
            ):
                taken = self.observer.value(tensor_id, y, through_edges=captured in self.mixed)
                if tensor_id == op.outputs[0]:
                    self._taken[captured] = taken
                    if op.inplace is not None:  # later readers see the changed values
                        self._taken[op.inplace] = taken


def _named_arguments(n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return dict(zip(names, args, strict=False)) | kwargs


def _mixed_readers(binding: Binding) -> set[fx.Node]:
    """Values read by weighted GEMMs and by other ops: only the former would read a cast of it."""
    ops = binding.op_of
    mixed = set()
    for op in binding.ops:
        if op.op_class is OpClass.GEMM and op.weights:
            x = op.inputs[0][0]
            others = [u for u in x.users if not (u in ops and ops[u].op_class is OpClass.GEMM and ops[u].weights)]
            if others and returns_float32(x.meta.get("example_value")):
                mixed.add(x)
    return mixed
