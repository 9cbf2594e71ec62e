"""Rewrite a bound template so that each op runs as the plan says.

What holds afterwards:

* one cast per (tensor, format), made at its first reader, shared by all of them until the memory is changed in place
  or gradient recording is switched;
* a view carries its base's format; a cast of a view is the same view of the cast base where that costs no more;
* in-place ops compute in the format of the memory that they change;
* ops without an assignment, unknown ops and graph outputs get the dtypes that the user wrote;
* parameters of linears and convolutions go in as masters; parameters of norms stay FP32;
* a product in FP8 is given BF16 and gives BF16; the FP8 copy of what it reads is made once for all that read it so;
* what an activation checkpoint reads in another format is cast before it, once, so that the checkpoint keeps the cast
  and not the original; casts of what it makes itself are made, and made again, inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from autoprec.errors import PlanError
from autoprec.formats import is_operands_only, is_scaled, result_format
from autoprec.graphs import ATTENTION, OpClass, Role, shared_path
from autoprec.numerics.casts import cast, enter_region, leave_region, within
from autoprec.numerics.contractions import Contraction, weighted_product
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.gemm import matmul
from autoprec.numerics.keeping import cast_of_kept
from autoprec.numerics.kernels import kernel
from autoprec.numerics.lean import lean, relu_keeping_bits
from autoprec.numerics.losses import cross_entropy
from autoprec.numerics.norms import layer_norm, norm, takes_one_dtype
from autoprec.numerics.packing import encode
from autoprec.numerics.products import GemmSpec
from autoprec.numerics.remaking import made_again
from autoprec.numerics.specs import NORM_SIGNATURE, fit_scalars, gemm_spec, loss_call, norm_call
from autoprec.plans import RECOMPUTED, Plan
from autoprec.rewriting.calls import Method, With, is_copy, is_image, operands
from autoprec.rewriting.memory import bases, changed_in_place, no_larger, shared
from autoprec.rewriting.recipes import Shown, Written
from autoprec.rewriting.storing import Storing
from autoprec.tracing.bindings import Binding, OpNode
from autoprec.tracing.checkpoints import CheckpointPath, fold
from autoprec.tracing.gemms import GemmCall
from autoprec.tracing.kinds import casts_nothing, changes_mode, enters_transform, out_of_place, returns_float32

__all__ = ["Rewritten", "rewrite"]

_FP32 = "fp32"


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten graph and, for observation, which captured node each value comes from. `unmade`: by tensor that the
    plan has made again, and that this graph keeps as it is, why."""

    module: fx.GraphModule
    origin: dict[fx.Node, fx.Node]
    unmade: Mapping[str, str]


def rewrite(binding: Binding, plan: Plan, device_type: str) -> Rewritten:
    """The bound template under a plan. Ops that the plan does not name run as the user wrote them."""
    return _Rewriter(binding, plan, device_type).run()


class _Rewriter(Storing):
    def __init__(self, binding: Binding, plan: Plan, device_type: str) -> None:
        super().__init__({t for op in binding.ops for t in op.outputs})
        self.binding, self.plan, self.device_type = binding, plan, device_type
        self.graph = fx.Graph()
        self.origin: dict[fx.Node, fx.Node] = {}
        self.ops = binding.op_of
        self.value: dict[fx.Node, fx.Node] = {}
        self.casts: dict[fx.Node, dict[tuple[str, CheckpointPath], fx.Node]] = {}
        self.born: dict[fx.Node, str] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        #: By cast that casts nothing, what it is given.
        self.same: dict[fx.Node, fx.Node] = {}
        self.main: fx.Node | None = None
        self.path: CheckpointPath = ()
        self.within: dict[fx.Node, CheckpointPath] = {}
        self.entry: dict[CheckpointPath, fx.Node] = {}
        self.transforms = 0
        self.transform_entry: fx.Node | None = None
        self.region = {op: r.scale_log2 for r in plan.regions for op in r.ops}
        self.region_of_value: dict[fx.Node, int] = {}
        self.saturating = set(plan.saturating)
        self.base_of, self.memory_of = bases(binding), shared(binding)
        self.touched = changed_in_place(binding)

    def run(self) -> Rewritten:
        flat, root = self.binding.template.flat, self.binding.template.module
        for node in flat.graph.nodes:
            self.path = flat.within.get(node, ())
            if node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], lambda n: self.as_written(n)))
            elif node in self.ops:
                self.visit_op(self.ops[node])
            else:
                if changes_mode(node):
                    self.forget_casts(lambda _: True)
                self.visit_plain(node)
        self.graph.lint()
        module, went = fold(self.graph, self.within, root)
        origin = {went[new]: node for new, node in self.origin.items()}
        return Rewritten(module=module, origin=origin, unmade=self.unmade)

    def visit_plain(self, node: fx.Node) -> None:
        """A node that is no op. One result of an op with several is born as they are."""
        source = node.args[0] if node.op == "call_function" and node.args else None
        part = isinstance(source, fx.Node) and source in self.ops and returns_float32(node.meta.get("example_value"))
        new = self.copy(node, lambda n: self.as_born(n) if part and n is source else self.as_written(n))
        if part and isinstance(source, fx.Node):
            self.put(node, new, self.born[source], source)
        else:
            self.put(node, new, _FP32)
        self.transforms += enters_transform(node)
        if not self.transforms:
            self.transform_entry = None
        elif self.transform_entry is None:
            self.transform_entry = new

    # New nodes ------------------------------------------------------------------------------------------------

    def copy(self, node: fx.Node, transform: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """A copy of a captured node, where the pass stands."""
        return self._placed(lambda: self.graph.node_copy(node, transform))

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """A new call, where the pass stands."""
        return self._placed(lambda: self.graph.call_function(function, arguments, kwargs))

    def _placed(self, make: Callable[[], fx.Node]) -> fx.Node:
        new = make()
        if self.path:
            self.within[new] = self.path
        for depth in range(1, len(self.path) + 1):
            first = self.entry.setdefault(self.path[:depth], new)
            if new < first:
                self.entry[self.path[:depth]] = new
        return new

    @contextmanager
    def outside(self, path: CheckpointPath, value: fx.Node) -> Iterator[None]:
        """Stand before the checkpoints that are around the current node but are not among `path`, and before the
        torch.func transform that `value` does not belong to."""
        here = self.path
        first = self.entry.get(here[: len(path) + 1]) if len(here) > len(path) else None
        if self.transform_entry is not None and value < self.transform_entry:
            first = self.transform_entry if first is None or self.transform_entry < first else first
        self.path = path
        try:
            if first is None:
                yield
            else:
                with self.graph.inserting_before(first):
                    yield
        finally:
            self.path = here

    # Values ---------------------------------------------------------------------------------------------------

    def put(self, node: fx.Node, new: fx.Node, fmt: str, base: fx.Node | None = None) -> None:
        """Record the new node that stands for a captured one, and the format in which it is born."""
        new.meta = dict(node.meta)
        self.value[node] = new
        self.casts[node] = {}
        self.born[node] = fmt
        self.root[node] = node if base is None else self.root.get(base, base)
        self.origin[new] = node
        self._shows(new, node, fmt)

    def same_as(self, node: fx.Node, other: fx.Node) -> None:
        """A captured node is another one: all that stands for that stands for it."""
        self.same[node] = other = self.same.get(other, other)
        self.value[node], self.casts[node], self.born[node] = self.value[other], self.casts[other], self.born[other]
        self.root[node] = self.root.get(other, other)
        self._shows(self.value[node], node, self.born[node])

    def as_born(self, node: fx.Node) -> fx.Node:
        return self.value[node]

    def as_written(self, node: fx.Node) -> fx.Node:
        """The value in the dtype that the user's program gave it."""
        return self.in_format(node, _FP32)

    def in_format(self, node: fx.Node, fmt: str, region: int | None = None) -> fx.Node:
        """The value in `fmt`; only float32 tensors ever change."""
        node = self.same.get(node, node)
        if fmt == self.born[node] or not returns_float32(node.meta.get("example_value")):
            return self.as_born(node)
        # Casts into FP16 regions of different gradient scales are different casts.
        key = f"{fmt}@{region}" if region and fmt == "fp16" else fmt
        path = self._cast_path(node)
        found = self.casts[node].get((key, path))
        if found is None:
            with self.outside(path, self.value[node]):
                found = self._view_of_cast(node, fmt, key, region) or self._cast(node, fmt, region)
            self.casts[node][(key, path)] = found
            self._shows(found, node, fmt)
        return found

    def _shows(self, new: fx.Node, node: fx.Node, fmt: str) -> None:
        if node in self.binding.tensor_id:
            self.shown.setdefault(new, Shown(self.binding.tensor_id[node], fmt))
            self.node_of.setdefault(self.binding.tensor_id[node], node)

    def _cast_path(self, node: fx.Node) -> CheckpointPath:
        """Where a cast for a reader at the current node goes. What changes in place is cast at the reader."""
        if self.root[node] in self.touched:
            return self.path
        return shared_path(self.within.get(self.value[node], ()), self.path)

    def _view_of_cast(self, node: fx.Node, fmt: str, key: str, region: int | None) -> fx.Node | None:
        """The same view of the cast base, where the base is no larger or is cast already."""
        op = self.ops.get(node)
        if op is None or op.op_class is not OpClass.VIEW or op.inplace is not None or not op.inputs:
            return None
        base = op.inputs[0][0]
        if not returns_float32(base.meta.get("example_value")) or base not in self.value or is_copy(node, base):
            return None
        if self.root[node] in self.touched:  # a copying view made again would miss, or repeat, a change in place
            return None
        if self.within.get(self.value[node], ()) != self.path:  # a checkpoint would give out, and keep, the base
            return None
        cast_already = fmt == self.born[base] or (key, self._cast_path(base)) in self.casts[base]
        if not cast_already and not no_larger(base, node):  # pay for the view's elements only
            return None
        return self.copy(node, lambda n: self.in_format(n, fmt, region) if n is base else self.as_written(n))

    def _cast(self, node: fx.Node, fmt: str, region: int | None) -> fx.Node:
        source, dtype = self.born[node], dtype_of(fmt)
        value = self.as_born(node)
        make: tuple[Any, ...] = (cast, dtype)
        if fmt == "fp16" and region:
            make = (enter_region, dtype, region)
        elif source == "fp16" and (leaving := self.region_of_value.get(self.root[node], 0)):
            make = (leave_region, dtype, leaving)
        if fmt != _FP32 and self._saturates(node):
            return self.call(make[0], (self.call(within, (value, dtype)), *make[1:]))
        stored = self._stored(self.binding.tensor_id[node]) if node in self.binding.tensor_id else None
        if stored is None or stored in self.plan.made_from_of or self.path:
            return self.call(make[0], (value, *make[1:]))
        return self.call(With(cast_of_kept, *make), (value, self.cell_of(stored, node)))

    def _saturates(self, node: fx.Node) -> bool:
        """Whether the plan lets the tensor, or one that it is a view of, saturate."""
        current = self.binding.tensor_id.get(node)
        while current is not None and current not in self.saturating:
            current = self.base_of.get(current)
        return current is not None

    def forget_casts(self, which: Callable[[fx.Node], bool]) -> None:
        """Keep only the born value of the nodes for which `which` holds."""
        for node, casts in self.casts.items():
            if casts and which(node):
                casts.clear()
        for key in [k for k in self.packed if which(k[0])]:
            del self.packed[key]

    # Ops ------------------------------------------------------------------------------------------------------

    def visit_op(self, op: OpNode) -> None:
        """Write the op as the plan says, and open the cell of what it makes if that is kept narrow."""
        self.main = None
        self.write_op(op)
        own = op.outputs[0] if len(op.outputs) == 1 else ""
        if op.kind == "relu" and op.inplace is None:
            self.written[own] = Written("relu", torch.relu, (self.value[op.node].all_input_nodes[0],), {})
        elif self.main is not None:
            self.written[own] = Written(op.kind, self.main.target, self.main.args, self.main.kwargs)
        read = [] if self.main is None else list(self.main.all_input_nodes)
        made = own if own and self._stored(own) == own and own not in self.plan.made_from_of else None
        if self.main is not None:
            self.keep_narrow(op, self.main, made)
        elif made is not None:
            self.cells[made, self.path] = self._open(made, self.value[op.node])
        self.hold_for_recipes(op, read)
        if own in self.plan.made_from_of and self._stored(own) == own:
            # Now, not at the first reader: until it is opened, a recipe's values live.
            self.open_recipe(own, op.node)

    def write_op(self, op: OpNode) -> None:
        if op.inplace is not None:
            self.visit_inplace(op, op.inplace)
        elif casts_nothing(op.node):
            self.same_as(op.node, op.inputs[0][0])
        elif op.op_class is OpClass.VIEW and (op.id, Role.OUTPUT) not in self.plan.format_of:
            base = op.inputs[0][0] if op.inputs else None
            fmt = self.born[base] if base is not None and returns_float32(base.meta["example_value"]) else _FP32
            new = self.copy(op.node, lambda n: self.as_born(n) if n is base else self.as_written(n))
            self.put(op.node, new, fmt, base)
        elif (op.id, Role.OUTPUT) in self.plan.format_of:
            self.visit_planned(op)
        elif op.gemm is not None and self._stored(self.binding.tensor_id[op.gemm.input]):
            self.put(op.node, self._weighted_gemm(op, op.gemm, dict.fromkeys(op.roles, _FP32), None), _FP32)
        else:
            loss = self._loss(op) if op.kind == "cross_entropy" else None
            self.put(op.node, loss or self.copy_main(op, lambda n: self.as_written(n)), _FP32)

    def copy_main(self, op: OpNode, transform: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """A copy of the op itself, which may keep tensors for its backward pass. torch's own may keep copies, and not
        what it is given."""
        if op.is_plain_product and op.gemm is None and any(self._stored(tensor) for _, tensor in op.inputs):
            spec = self._spec(op, dict.fromkeys(op.roles, _FP32), None)
            self.main = self.call(With(matmul, spec), tuple(map(transform, operands(op.node))))
            return self.main
        self.main = self.copy(op.node, transform)
        if op.functional and any(self._stored(tensor) for _, tensor in op.inputs):  # in place it would keep a copy
            self._run_out_of_place(op, self.main)
        if op.kind == ATTENTION and any(self._stored(tensor) for _, tensor in op.inputs[:3]):
            self.main.target = lean(self.main.target)
        return self.main

    def _run_out_of_place(self, op: OpNode, node: fx.Node) -> None:
        node.target, node.args, node.kwargs = out_of_place(op.kind, node.target, node.args, node.kwargs)

    def visit_inplace(self, op: OpNode, changed: fx.Node) -> None:
        """Everything in the format of the memory that changes; casts of that memory are stale afterwards."""
        fmt = self.born.get(changed, _FP32)
        root = self.root.get(changed, changed)
        region = self.region_of_value.get(root)
        new = self.copy(op.node, lambda n: self.as_born(n) if n is changed else self.in_format(n, fmt, region))
        new.args = fit_scalars(op.kind, new.args, fmt)
        self.forget_casts(lambda n: self.root.get(n, n) is root)
        self.put(op.node, new, fmt, changed)

    def visit_planned(self, op: OpNode) -> None:
        if not op.roles:
            raise PlanError(f"the plan gives {op.id} a format, but {op.kind} is {op.op_class.value}: it takes none")
        formats = {role: f for role in Role if (f := self.plan.format_of.get((op.id, role))) is not None}
        fmt = formats[Role.OUTPUT]
        if foreign := [role for role, f in formats.items() if role not in op.roles and f != fmt]:
            known = " and ".join(op.roles)
            raise PlanError(f"the plan gives {op.id} a format for {foreign[0]}, but {op.kind} has {known} alone")
        if not op.is_plain_product and any(map(is_operands_only, formats.values())):
            raise PlanError(f"the plan gives {op.id} {fmt}, in which products alone are computed; {op.kind} is none")
        region = self.region.get(op.id) if fmt == "fp16" else None
        if op.gemm is not None:
            new = self._weighted_gemm(op, op.gemm, formats, region)
        elif op.is_plain_product and set(formats.values()) != {_FP32}:
            spec = self._spec(op, formats, region)
            a, b = (self.in_format(n, result_format(fmt), region) for n in operands(op.node))
            new = self.main = self.call(With(matmul, spec), (a, b))
        elif formats.get(Role.GRAD_INPUT, fmt) != fmt:
            new = self._kernel_of_two_formats(op, formats, region)
        elif op.kind == "relu" and self._stored(op.outputs[0]):
            relu = With(relu_keeping_bits, is_image(op.node))
            new = self.call(relu, (self.in_format(op.inputs[0][0], fmt, region),))
        elif fmt == _FP32:
            new = self.copy_main(op, lambda n: self.as_written(n))
        elif op.op_class is OpClass.NORM:
            new = self._norm(op, fmt, region)
        elif op.op_class is OpClass.LOOKUP:
            new = self._cast_result(op, fmt, region)
        else:
            new = self.copy_main(op, lambda n: self.in_format(n, fmt, region))
            if op.functional:
                self._run_out_of_place(op, new)
            new.target = lean(new.target)
            new.args, new.kwargs = fit_scalars(op.kind, new.args, fmt), fit_scalars(op.kind, new.kwargs, fmt)
        self.put(op.node, new, result_format(fmt))
        if region:
            self.region_of_value[op.node] = region

    def _spec(self, op: OpNode, formats: dict[Role, str], region: int | None, *, rowwise: bool = False) -> GemmSpec:
        # FP16 in gradient roles alone: what arrives carries no scale yet.
        local = 0 if region else self.region.get(op.id, 0)
        return gemm_spec(formats, self.device_type, region or 0, local, rowwise=rowwise)

    def _kernel_of_two_formats(self, op: OpNode, formats: dict[Role, str], region: int | None) -> fx.Node:
        dropout = op.node.kwargs.get("dropout_p", op.node.args[4] if len(op.node.args) > 4 else 0.0)
        if op.kind == ATTENTION and dropout != 0.0:
            raise PlanError(
                f"the plan gives the gradients of {op.id} a format of their own, but it drops out ({dropout}): when it"
                " runs again for them it would drop others; give both roles one format"
            )
        spec = self._spec(op, formats, region)
        new = self.copy_main(op, lambda n: self.in_format(n, formats[Role.OUTPUT], region))
        function = new.target if callable(new.target) else Method(str(new.target))
        new.op, new.target = "call_function", With(kernel, function=function, spec=spec)
        return new

    def _norm(self, op: OpNode, fmt: str, region: int | None) -> fx.Node:
        x = op.inputs[0][0]
        if fmt == "fp16":
            return self._norm_in_fp16(op, region)
        whole = takes_one_dtype(op.kind, self.device_type)
        new = self.copy_main(op, lambda n: self.in_format(n, fmt, region) if n is x or whole else self.as_written(n))
        if op.kind == "layer_norm" and new.target is F.layer_norm:
            new.target = layer_norm
        if op.kind in ("rms_norm", "instance_norm"):
            new = self.call(cast, (new, dtype_of(fmt)))
        return new

    def _norm_in_fp16(self, op: OpNode, region: int | None) -> fx.Node:
        """FP32 inside; torch's kernels would add up the weight's gradient in FP16."""
        arguments = dict(zip(NORM_SIGNATURE.get(op.kind, ()), op.node.args, strict=False)) | op.node.kwargs
        call = norm_call(op.kind, arguments, region or 0)
        if call is None:
            return self._cast_result(op, "fp16", region)
        x = self.in_format(arguments["input"], "fp16", region)
        names = ("weight", "bias", "running_mean", "running_var")
        others = [arguments.get(n) for n in names]
        tensors = [self.as_written(t) if isinstance(t, fx.Node) else None for t in others]
        self.main = self.call(With(norm, call), (x, *tensors))
        return self.main

    def _cast_result(self, op: OpNode, fmt: str, region: int | None) -> fx.Node:
        """The op in FP32 as it was written, and its result in the format."""
        new = self.copy_main(op, lambda n: self.as_written(n))
        if region:
            return self.call(enter_region, (new, dtype_of(fmt), region))
        return self.call(cast, (new, dtype_of(fmt)))

    def _weighted_gemm(self, op: OpNode, gemm: GemmCall, formats: dict[Role, str], region: int | None) -> fx.Node:
        x = gemm.input
        narrow = self._stored(self.binding.tensor_id[x])
        if narrow is None and set(formats.values()) == {_FP32}:
            return self.copy(op.node, lambda n: self.as_written(n))
        if not gemm.weight.meta["example_value"].requires_grad:
            narrow = None  # it keeps nothing of its input, which torch's convolutions do all the same
        x_new = self.in_format(x, result_format(fmt := formats[Role.OUTPUT]), region)
        weight = self.as_written(gemm.weight)
        bias, offs = (None if n is None else self.as_written(n) for n in (gemm.bias, gemm.offs))
        storage = None if narrow is None else self.plan.storage_of[narrow]
        kept = None
        if narrow is not None and storage == RECOMPUTED:
            kept = self.call(made_again, (self.cell_of(narrow, x), x_new))
        elif narrow is not None:
            kept = self._kept(narrow, x, x_new)
        operand = None
        rowwise = self.plan.scales == "rowwise" and isinstance(gemm.how, Contraction) and gemm.how.is_by_rows
        if is_scaled(fmt):
            shared = storage == fmt and not rowwise
            what = f"{fmt} by row" if rowwise else fmt
            operand = kept if shared else self._shared(x, what, With(encode, fmt, rowwise=rowwise), (x_new,))
        spec = self._spec(op, formats, region, rowwise=rowwise)
        how = With(weighted_product, spec, gemm.how)
        return self.call(how, (x_new, weight, bias, kept, offs), operand=operand)

    def _loss(self, op: OpNode) -> fx.Node | None:
        """A cross entropy whose logits the plan keeps narrow; None where it is torch's own."""
        call = loss_call(op.node)
        x = None if call is None else call[0]["input"]
        narrow = None if x is None else self._stored(self.binding.tensor_id[x])
        if call is None or x is None or narrow is None or narrow in self.plan.made_from_of:
            return None
        logits, target, weight = (None if n is None else self.as_written(n) for n in call[0].values())
        assert logits is not None
        return self.call(With(cross_entropy, call[1]), (logits, target, weight, self._kept(narrow, x, logits)))
