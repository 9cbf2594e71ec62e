"""One observed training step: histograms of values and gradients, without changing a bit of either.

Values are sampled when they are made (in-place ops change them later), gradients when autograd delivers them, through
tensor hooks. A tensor that is read by weighted GEMMs *and* by other ops gets its loss sensitivity through the GEMMs
alone, by one view per such edge: a cast is made for those readers, not for the skip connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from autoprec.calibration.frozen import frozen_weight
from autoprec.calibration.rows import row_weights
from autoprec.calibration.structure import StructureRecorder
from autoprec.execution.measuring import mark_gradient
from autoprec.graphs import OpClass
from autoprec.numerics.contractions import Layout
from autoprec.numerics.histograms import (
    SAMPLE_LIMIT,
    Reading,
    Sample,
    histogram,
    histograms,
    reading,
    sample,
    stride_for,
    thinned,
)
from autoprec.profiles import LossProfile, Profile, RangeHistogram, TensorProfile, WeightProfile
from autoprec.rewriting.calls import With
from autoprec.tracing.bindings import Binding, OpNode
from autoprec.tracing.checkpoints import Change, GraphInterpreter
from autoprec.tracing.gemms import gemm_arguments
from autoprec.tracing.kinds import returns_float32

__all__ = ["ObservingInterpreter", "StepObserver"]

#: Elements of a weight gradient whose moments over steps are kept.
WEIGHT_SAMPLE_LIMIT = 1 << 14

#: Elements of a tensor that are kept until its gradient arrives: all of them together must stay well below what a step
#: keeps anyway.
KEPT_LIMIT = 3 << 12

#: Elements of ranges that wait to be counted together: on a CPU what its caches hold, elsewhere what the host need not
#: wait for.
_WAITING_LIMIT_CPU, _WAITING_LIMIT = 1 << 15, 1 << 20

_FIELDS = ("values", "loss", "gradients", "input_weight_grad", "gradient_weight_grad")


class StepObserver:
    """Collects one training step: any number of forward and backward passes. `harvest()` gives its `Profile`.

    Mutable, owned by the session; hooks that outlive the step are removed by `harvest`.

    Args:
        limit: elements per tensor beyond which it is sampled.
        sensitivities: also collect what is weighted by gradients (calibration); a monitor needs ranges only.
        structure: records ops, shapes and saved tensors during the first observed step, else None.
        explicit_loss: the loss is given to `output` by the caller; scalar outputs of graphs are not taken for it.
        summed: FQNs of the parameters whose gradients a monitor looks at: those that are made in FP16. All others are
            made in FP32.
        masked: (tensor, field) of what is known to have elements that are not finite.
    """

    def __init__(
        self,
        *,
        limit: int = SAMPLE_LIMIT,
        sensitivities: bool = True,
        structure: StructureRecorder | None = None,
        explicit_loss: bool = False,
        summed: frozenset[str] = frozenset(),
        masked: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self.explicit_loss, self.summed, self.masked = explicit_loss, summed, masked
        self.limit, self.sensitivities, self.structure = limit, sensitivities, structure
        self._found: dict[tuple[str, str], RangeHistogram] = {}
        self._waiting: list[tuple[str, str, Reading]] = []
        self._waiting_numel = 0
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

    def value(self, tensor_id: str, x: Tensor, *, through_edges: bool = False) -> Sample | None:
        """Record a tensor; its gradient is recorded when it arrives. Returns the sample that is kept until then, None
        where ranges alone are wanted and nothing is kept."""
        taken, seen = None, _readable(x)
        if self.sensitivities:
            whole = sample(seen, self.limit)
            self.add(tensor_id, "values", histogram(whole))
            taken = thinned(whole, seen, min(self.limit, KEPT_LIMIT))
        else:
            self._read(tensor_id, "values", x)
        if x.requires_grad and torch.is_grad_enabled():
            self._on_gradient(x, lambda g: self._gradient(tensor_id, None if through_edges else taken, g))
        return taken

    def _read(self, tensor_id: str, field: str, x: Tensor) -> None:
        """Ranges alone: counted later, together with others."""
        found = reading(_readable(x), self.limit, masked=(tensor_id, field) in self.masked)
        self._waiting.append((tensor_id, field, found))
        self._waiting_numel += found.magnitudes.numel()
        if self._waiting_numel > (_WAITING_LIMIT_CPU if x.is_cpu else _WAITING_LIMIT):
            self._count()

    def _count(self) -> None:
        found = histograms([r for _, _, r in self._waiting])
        for (tensor_id, field, _), seen in zip(self._waiting, found, strict=True):
            self.add(tensor_id, field, seen)
        self._waiting, self._waiting_numel = [], 0

    def _gradient(self, tensor_id: str, taken: Sample | None, g: Tensor) -> None:
        mark_gradient()
        self._read(tensor_id, "gradients", g)
        if taken is not None:
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
        if not self.sensitivities:
            self._read(f"param:{fqn}", "values", p)
            if fqn in self.summed and p.requires_grad:
                self._on_gradient(p, lambda g: self._gradient(f"param:{fqn}", None, g))
            return
        self.value(f"param:{fqn}", p)
        if p.requires_grad and p.numel():
            stride = stride_for(p.shape, WEIGHT_SAMPLE_LIMIT)
            self._weight_fraction[fqn] = (-(-p.numel() // stride)) / max(p.numel(), 1)

            def record(g: Tensor) -> None:
                part = g.reshape(-1)[::stride].double()
                self._weights.setdefault(fqn, []).append((part, float(part.square().sum())))

            self._on_gradient(p, record)

    def gemm(self, how: Layout, weight: Tensor, taken: Sample, x: Tensor, y: Tensor, output_id: str) -> None:
        """Record what roundings of the input and of the output's gradient do to the weight gradient."""
        if not (self.sensitivities and y.requires_grad and torch.is_grad_enabled()):
            return
        rows = row_weights(how, weight, x.detach(), y.shape)

        def record(g: Tensor) -> None:
            weights = rows.for_input(g, taken)
            if weights is not None:
                self.add(output_id, "input_weight_grad", histogram(taken, weights))
            g_taken = sample(g, self.limit)
            weights = rows.for_gradient(g_taken)
            if weights is not None:
                self.add(output_id, "gradient_weight_grad", histogram(g_taken, weights))

        self._on_gradient(y, record)

    def frozen(self, fqn: str, how: Layout, weight: Tensor, x: Tensor, y: Tensor) -> None:
        """Record what the rounding of a frozen weight does to the loss."""
        found = frozen_weight(how, weight, x) if y.requires_grad and torch.is_grad_enabled() else None
        if found is not None:
            of = found
            self._on_gradient(y, lambda g: self.add(f"param:{fqn}", "loss", histogram(of.taken, of.squares(g))))

    def output(self, y: Tensor) -> None:
        """Record what enters at an output of the graph: a scalar output is taken to be the loss."""
        if y.requires_grad and y.numel() == 1 and torch.is_grad_enabled():
            value = float(y.detach())

            def record(g: Tensor) -> None:
                self._losses.append(value)
                self._entering.append(float(g))

            self._on_gradient(y, record)

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        for handle in self._handles:
            handle.remove()

    def harvest(self, graph_fingerprint: str = "") -> Profile:
        """The step as a `Profile`; the observer is closed. `steps` counts backward passes (loss values)."""
        self.close()
        self._count()
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


class ObservingInterpreter(GraphInterpreter):
    """Runs a graph node by node and shows every floating-point value to a `StepObserver`.

    `module` and `origin` are those of the captured graph or of its rewritten form. Under a provisional plan (rewritten,
    and with sensitivities) the structure, which is that of FP32, is foreseen elsewhere.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        origin: Mapping[fx.Node, fx.Node],
        binding: Binding,
        observer: StepObserver,
        *,
        rewritten: bool = False,
        changes: Mapping[fx.Node, Change] | None = None,
    ) -> None:
        super().__init__(module, origin, changes)
        self.binding, self.observer, self.rewritten = binding, observer, rewritten
        self.op_of = binding.op_of
        self.structure = None if rewritten and observer.sensitivities else observer.structure
        self.mixed = _mixed_readers(binding) if observer.sensitivities else set()
        #: What products read.
        self.factors = {n for op in binding.ops if op.op_class is OpClass.GEMM for n, _ in op.inputs}
        self._taken: dict[fx.Node, Sample] = {}
        self._parts: dict[str, Sample] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and show its result to the observer."""
        captured = self.origin.get(n)
        op = self.op_of.get(captured) if captured is not None else None
        structure = self.structure
        if op is None:
            result = self._run_plain(n, captured)
        elif structure is None:
            result = self._run_op(n, op)
        elif op.transformed:
            result = self._run_op(n, op)
            structure.unseen(op)
        else:
            with structure.saving():
                result = self._run_op(n, op)
            structure.op(op, self.fetch_args_kwargs_from_env(n), result)
        return result

    def _run_plain(self, n: fx.Node, captured: fx.Node | None) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and captured is not None:
            part = self._parts.get(self.binding.tensor_id.get(captured, ""))
            if part is not None:  # one result of an op with several
                self._taken[captured] = part
        if self.inside:  # what enters and leaves a body is seen outside of it
            return result
        if n.op == "placeholder" and isinstance(result, Tensor) and captured is not None:
            self._placeholder(captured, result)
        elif n.op == "output":
            for y in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(y, Tensor) and y.is_floating_point() and not self.observer.explicit_loss:
                    self.observer.output(y)
        return result

    def _placeholder(self, captured: fx.Node, x: Tensor) -> None:
        if self.structure is not None:
            self.structure.placeholder(self.binding, captured, x)
        if not x.is_floating_point():
            return
        if captured in self.binding.parameters:
            fqn = self.binding.parameters[captured]
            if self.observer.sensitivities or captured in self.factors or fqn in self.observer.summed:
                self.observer.parameter(fqn, x)  # norms and lookups have theirs in FP32, whatever they compute in
        elif captured in self.binding.tensor_id:
            tensor_id = self.binding.tensor_id[captured]
            taken = self.observer.value(tensor_id, x, through_edges=captured in self.mixed)
            if taken is not None:
                self._taken[captured] = taken

    def _run_op(self, n: fx.Node, op: OpNode) -> Any:
        if op.gemm is None or not self.observer.sensitivities:
            result = super().run_node(n)
            self._observe_results(op, result)
            return result
        x_node, ours = op.gemm.input, isinstance(n.target, With)
        here = n.args[0] if ours else n.all_input_nodes[op.node.all_input_nodes.index(x_node)]
        assert isinstance(here, fx.Node)
        with self._edge_view(here, x_node):
            result = super().run_node(n)
        self._observe_results(op, result)
        if x_node in self._taken:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if ours:  # (input, weight, …) of the rewritten call
                x, weight = args[:2]
            else:
                arguments = gemm_arguments(op.kind, args, kwargs)
                x, weight = arguments["input"], arguments["weight"]
            with self._unseen():
                self.observer.gemm(op.gemm.how, weight, self._taken[x_node], x, result, op.outputs[0])
                frozen = self.binding.parameters.get(op.gemm.weight)
                if frozen is not None and not weight.requires_grad:
                    self.observer.frozen(frozen, op.gemm.how, weight, x, result)
        return result

    def _unseen(self) -> AbstractContextManager[object]:
        """A selective checkpoint counts the ops that run inside it; those of the observer are not among them."""
        return _disable_current_modes() if self.inside else nullcontext()

    @contextmanager
    def _edge_view(self, here: fx.Node, x_node: fx.Node) -> Iterator[None]:
        """While the GEMM runs, its input is a view of its own, so that the gradient along this edge is seen."""
        x = self.env[here]
        if x_node not in self.mixed or not x.requires_grad or not torch.is_grad_enabled() or x_node not in self._taken:
            yield
            return
        view = x.view_as(x)
        record = self.observer.edge(self.binding.tensor_id[x_node], self._taken[x_node])
        self.observer._on_gradient(view, record)
        self.env[here] = view
        try:
            yield
        finally:
            self.env[here] = x

    def _observe_results(self, op: OpNode, result: Any) -> None:
        captured = op.node
        values = result if isinstance(result, (tuple, list)) else (result,)
        plain = not self.rewritten or self.observer.sensitivities
        shown = op.op_class is not OpClass.VIEW or op.inplace is not None or plain
        for tensor_id, y in zip(op.outputs, (v for v in values if isinstance(v, Tensor)), strict=False):
            if shown and y.is_floating_point() and not op.transformed:
                with self._unseen():
                    taken = self.observer.value(tensor_id, y, through_edges=captured in self.mixed)
                if taken is None:
                    continue
                if len(op.outputs) > 1:
                    self._parts[tensor_id] = taken
                if tensor_id == op.outputs[0]:
                    self._taken[captured] = taken
                    if op.inplace is not None:  # later readers see the changed values
                        self._taken[op.inplace] = taken


def _readable(x: Tensor) -> Tensor:
    """In FP32 where torch has no largest magnitude of a dtype's numbers: FP8, which the user's model makes."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _mixed_readers(binding: Binding) -> set[fx.Node]:
    """Values read by weighted GEMMs and by other ops: only the former would read a cast of it."""
    ops = binding.op_of
    mixed = set()
    for op in binding.ops:
        if op.gemm is not None:
            x = op.gemm.input
            others = [u for u in x.users if u not in ops or ops[u].gemm is None]
            whole = x.op == "placeholder" or x in ops  # of parts, all readers count
            if others and whole and returns_float32(x.meta.get("example_value")):
                mixed.add(x)
    return mixed
