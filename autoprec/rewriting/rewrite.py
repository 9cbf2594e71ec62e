"""Rewrite a bound template so that each op runs as the plan says.

What holds afterwards:

* one cast per (tensor, format), made at its first reader, shared by all of them until the memory is changed in place
  or gradient recording is switched;
* a view carries its base's format; a cast of a view is the same view of the cast base where that costs no more;
* in-place ops compute in the format of the memory that they change;
* ops without an assignment, unknown ops and graph outputs get the dtypes that the user wrote;
* parameters of linears and convolutions go in as masters; parameters of norms stay FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoprec.errors import PlanError
from autoprec.graphs import OpClass, Role
from autoprec.numerics.casts import cast, enter_region, leave_region, saturating_cast
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.gemm import conv, keep, linear, matmul, relu_keeping_bits
from autoprec.numerics.norms import norm
from autoprec.numerics.specs import NORM_SIGNATURE, conv_options, fit_scalars, gemm_spec, norm_call
from autoprec.plans import AS_IS, Plan
from autoprec.tracing.bindings import Binding, OpNode
from autoprec.tracing.kinds import CONVS, changes_mode, out_of_place, returns_float32

__all__ = ["Rewritten", "rewrite"]

_FP32 = "fp32"


class _With:
    """A function with its last arguments fixed: fx writes only plain values into the code that it generates."""

    def __init__(self, function: Callable[..., Any], *fixed: Any) -> None:
        self._function, self.fixed = function, fixed
        self.__name__, self.__module__ = function.__name__, function.__module__

    def __call__(self, *args: Any) -> Any:
        return self._function(*args, *self.fixed)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten graph and, for observation, which captured node each value comes from."""

    module: fx.GraphModule
    origin: dict[fx.Node, fx.Node]


def rewrite(binding: Binding, plan: Plan, device_type: str) -> Rewritten:
    """The bound template under a plan. Ops that the plan does not name run as the user wrote them."""
    return _Rewriter(binding, plan, device_type).run()


_GEMM_SIGNATURE = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(CONVS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
}


class _Rewriter:
    def __init__(self, binding: Binding, plan: Plan, device_type: str) -> None:
        self.binding, self.plan, self.device_type = binding, plan, device_type
        self.graph = fx.Graph()
        self.origin: dict[fx.Node, fx.Node] = {}
        self.ops = binding.op_of
        self.made: dict[fx.Node, dict[str, fx.Node]] = {}
        self.born: dict[fx.Node, str] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        self.packed: dict[fx.Node, fx.Node] = {}
        self.region = {op: r.scale_log2 for r in plan.regions for op in r.ops}
        self.region_of_value: dict[fx.Node, int] = {}
        self.saturating = set(plan.saturating)
        self.base_of = _bases(binding)
        self.touched = _changed_in_place(binding)

    def run(self) -> Rewritten:
        for node in self.binding.template.module.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], lambda n: self.as_written(n)))
            elif node in self.ops:
                self.visit_op(self.ops[node])
            else:
                if changes_mode(node):
                    self.forget_casts(lambda _: True)
                self.visit_plain(node)
        module = fx.GraphModule(self.binding.template.module, self.graph)
        self.graph.lint()
        return Rewritten(module=module, origin=self.origin)

    def visit_plain(self, node: fx.Node) -> None:
        """A node that is no op. One result of an op with several is born as they are."""
        source = node.args[0] if node.op == "call_function" and node.args else None
        part = isinstance(source, fx.Node) and source in self.ops and returns_float32(node.meta.get("example_value"))
        new = self.graph.node_copy(node, lambda n: self.as_born(n) if part and n is source else self.as_written(n))
        if part and isinstance(source, fx.Node):
            self.put(node, new, self.born[source], source)
        else:
            self.put(node, new, _FP32)

    # Values ---------------------------------------------------------------------------------------------------

    def put(self, node: fx.Node, new: fx.Node, fmt: str, base: fx.Node | None = None) -> None:
        """Record the new node that stands for a captured one, and the format in which it is born."""
        new.meta = dict(node.meta)
        self.made[node] = {fmt: new}
        self.born[node] = fmt
        self.root[node] = node if base is None else self.root.get(base, base)
        self.origin[new] = node

    def as_born(self, node: fx.Node) -> fx.Node:
        return self.made[node][self.born[node]]

    def as_written(self, node: fx.Node) -> fx.Node:
        """The value in the dtype that the user's program gave it."""
        return self.in_format(node, _FP32) if self.born[node] != _FP32 else self.as_born(node)

    def in_format(self, node: fx.Node, fmt: str, region: int | None = None) -> fx.Node:
        """The value in `fmt`; only float32 tensors ever change."""
        if not returns_float32(node.meta.get("example_value")):
            return self.as_born(node)
        if fmt == self.born[node]:
            return self.as_born(node)
        # Casts into FP16 regions of different gradient scales are different casts.
        key = f"{fmt}@{region}" if region and fmt == "fp16" else fmt
        found = self.made[node].get(key)
        if found is None:
            found = self.made[node][key] = self._view_of_cast(node, fmt, region) or self._cast(node, fmt, region)
        return found

    def _view_of_cast(self, node: fx.Node, fmt: str, region: int | None) -> fx.Node | None:
        """The same view of the cast base, where the base is no larger or is cast already."""
        op = self.ops.get(node)
        if op is None or op.op_class is not OpClass.VIEW or op.inplace is not None or not op.inputs:
            return None
        base = op.inputs[0][0]
        if not returns_float32(base.meta.get("example_value")) or base not in self.made:
            return None
        if self.root[node] in self.touched:  # a copying view made again would miss, or repeat, a change in place
            return None
        if fmt not in self.made[base] and not _no_larger(base, node):  # pay for the view's elements only
            return None
        new = self.graph.node_copy(node, lambda n: self.in_format(n, fmt, region) if n is base else self.as_written(n))
        return new

    def _cast(self, node: fx.Node, fmt: str, region: int | None) -> fx.Node:
        source, dtype = self.born[node], dtype_of(fmt)
        value = self.as_born(node)
        if self.binding.tensor_id.get(node) in self.saturating and fmt != _FP32:
            return self.graph.call_function(saturating_cast, (value, dtype))
        if fmt == "fp16" and region:
            return self.graph.call_function(enter_region, (value, dtype, region))
        leaving = self.region_of_value.get(self.root[node], 0)
        if source == "fp16" and leaving:
            return self.graph.call_function(leave_region, (value, dtype, leaving))
        return self.graph.call_function(cast, (value, dtype))

    def forget_casts(self, which: Callable[[fx.Node], bool]) -> None:
        """Keep only the born value of the nodes for which `which` holds."""
        for node, made in self.made.items():
            if len(made) > 1 and which(node):
                self.made[node] = {self.born[node]: made[self.born[node]]}
        for node in [n for n in self.packed if which(n)]:
            del self.packed[node]

    # Ops ------------------------------------------------------------------------------------------------------

    def visit_op(self, op: OpNode) -> None:
        if op.inplace is not None:
            self.visit_inplace(op, op.inplace)
        elif op.op_class is OpClass.VIEW and (op.id, Role.OUTPUT) not in self.plan.format_of:
            base = op.inputs[0][0] if op.inputs else None
            fmt = self.born[base] if base is not None and returns_float32(base.meta["example_value"]) else _FP32
            new = self.graph.node_copy(op.node, lambda n: self.as_born(n) if n is base else self.as_written(n))
            self.put(op.node, new, fmt, base)
        elif (op.id, Role.OUTPUT) in self.plan.format_of:
            self.visit_planned(op)
        else:
            self.put(op.node, self.graph.node_copy(op.node, lambda n: self.as_written(n)), _FP32)

    def visit_inplace(self, op: OpNode, changed: fx.Node) -> None:
        """Everything in the format of the memory that changes; casts of that memory are stale afterwards."""
        fmt = self.born.get(changed, _FP32)
        root = self.root.get(changed, changed)
        region = self.region_of_value.get(root)
        new = self.graph.node_copy(
            op.node, lambda n: self.as_born(n) if n is changed else self.in_format(n, fmt, region)
        )
        new.args = fit_scalars(op.kind, new.args, fmt)
        self.forget_casts(lambda n: self.root.get(n, n) is root)
        self.put(op.node, new, fmt, changed)

    def visit_planned(self, op: OpNode) -> None:
        if op.op_class not in (OpClass.GEMM, OpClass.POINTWISE, OpClass.NORM):
            raise PlanError(f"the plan gives {op.id} a format, but {op.kind} is {op.op_class.value}: it takes none")
        formats = {role: f for role in Role if (f := self.plan.format_of.get((op.id, role))) is not None}
        fmt = formats[Role.OUTPUT]
        region = self.region.get(op.id) if fmt == "fp16" else None
        if op.kind in _GEMM_SIGNATURE:
            new = self._weighted_gemm(op, formats, region)
        elif fmt == _FP32:
            if op.kind == "relu" and self._is_narrow(op.outputs[0]):
                new = self.graph.call_function(relu_keeping_bits, (self.in_format(op.inputs[0][0], _FP32),))
            else:
                new = self.graph.node_copy(op.node, lambda n: self.as_written(n))
        elif op.op_class is OpClass.NORM:
            new = self._norm(op, fmt, region)
        elif op.op_class is OpClass.GEMM and op.kind != "scaled_dot_product_attention":
            spec = gemm_spec(formats, self.device_type, region or 0)
            a, b = (self.in_format(n, fmt, region) for n in _operands(op.node))
            new = self.graph.call_function(_With(matmul, spec), (a, b))
        elif op.kind == "relu" and self._is_narrow(op.outputs[0]):
            new = self.graph.call_function(relu_keeping_bits, (self.in_format(op.inputs[0][0], fmt, region),))
        else:
            new = self.graph.node_copy(op.node, lambda n: self.in_format(n, fmt, region))
            if op.functional:
                new.target, new.args, new.kwargs = out_of_place(op.kind, new.target, new.args, new.kwargs)
            new.args, new.kwargs = fit_scalars(op.kind, new.args, fmt), fit_scalars(op.kind, new.kwargs, fmt)
        self.put(op.node, new, fmt)
        if region:
            self.region_of_value[op.node] = region

    def _norm(self, op: OpNode, fmt: str, region: int | None) -> fx.Node:
        x = op.inputs[0][0]
        if fmt == "fp16":
            return self._norm_in_fp16(op, region)
        whole = self.device_type != "cpu" and op.kind in ("layer_norm", "group_norm", "rms_norm")
        new = self.graph.node_copy(
            op.node, lambda n: self.in_format(n, fmt, region) if n is x or whole else self.as_written(n)
        )
        if op.kind in ("rms_norm", "instance_norm"):
            new = self.graph.call_function(cast, (new, dtype_of(fmt)))
        return new

    def _norm_in_fp16(self, op: OpNode, region: int | None) -> fx.Node:
        """FP32 inside; torch's kernels would add up the weight's gradient in FP16."""
        arguments = dict(zip(NORM_SIGNATURE.get(op.kind, ()), op.node.args, strict=False)) | op.node.kwargs
        call = norm_call(op.kind, arguments, region or 0)
        if call is None:
            new = self.graph.node_copy(op.node, lambda n: self.as_written(n))
            if region:
                return self.graph.call_function(enter_region, (new, torch.float16, region))
            return self.graph.call_function(cast, (new, torch.float16))
        x = self.in_format(arguments["input"], "fp16", region)
        names = ("weight", "bias", "running_mean", "running_var")
        others = [arguments.get(n) for n in names]
        tensors = [self.as_written(t) if isinstance(t, fx.Node) else None for t in others]
        return self.graph.call_function(_With(norm, call), (x, *tensors))

    def _weighted_gemm(self, op: OpNode, formats: dict[Role, str], region: int | None) -> fx.Node:
        arguments = dict(zip(_GEMM_SIGNATURE[op.kind], op.node.args, strict=False)) | op.node.kwargs
        x = arguments["input"]
        narrow = self._is_narrow(self.binding.tensor_id[x])
        if not narrow and set(formats.values()) == {_FP32}:
            return self.graph.node_copy(op.node, lambda n: self.as_written(n))
        x_new = self.in_format(x, formats[Role.OUTPUT], region)
        weight = self.as_written(arguments["weight"])
        bias = arguments.get("bias")
        bias_new = self.as_written(bias) if isinstance(bias, fx.Node) else None
        packed = None
        if narrow:
            if x not in self.packed:
                self.packed[x] = self.graph.call_function(keep, (x_new,))
            packed = self.packed[x]
        # FP16 in gradient roles alone: what arrives carries no scale yet.
        local = 0 if region else self.region.get(op.id, 0)
        spec = gemm_spec(formats, self.device_type, region or 0, local)
        if op.kind == "linear":
            return self.graph.call_function(_With(linear, spec), (x_new, weight, bias_new, packed))
        options = conv_options(op.kind, arguments)
        return self.graph.call_function(_With(conv, spec, options), (x_new, weight, bias_new, packed))

    def _is_narrow(self, tensor_id: str) -> bool:
        """Whether the plan keeps the tensor, or the nearest tensor that it is a view of, in a narrow format."""
        current: str | None = tensor_id
        while current is not None:
            if current in self.plan.storage_of:
                storage = self.plan.storage_of[current]
                if storage not in (AS_IS, "fp8_e4m3"):
                    raise PlanError(f"the plan keeps {current} in {storage}; storages are {AS_IS} and fp8_e4m3")
                return storage != AS_IS
            current = self.base_of.get(current)
        return False


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Both factors of a matrix product, however they are passed."""
    values = [*node.args, *(node.kwargs[k] for k in ("input", "mat2", "other") if k in node.kwargs)]
    a, b = values[0], values[1]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def _bases(binding: Binding) -> dict[str, str]:
    """Tensor id → id of the tensor whose values it shows through one view or in-place change."""
    return {
        out: op.inputs[0][1]
        for op in binding.ops
        if op.op_class is OpClass.VIEW and op.inputs
        for out in op.outputs
        if out != op.inputs[0][1]
    }


def _changed_in_place(binding: Binding) -> set[fx.Node]:
    """Roots (views and their copies joined) of every value that an op changes in place."""
    root: dict[fx.Node, fx.Node] = {}
    for node in binding.template.module.graph.nodes:
        op = binding.op_of.get(node)
        source = op.inputs[0][0] if op is not None and op.inputs and op.op_class is OpClass.VIEW else None
        root[node] = node if source is None else root.get(source, source)
    return {root.get(op.inplace, op.inplace) for op in binding.ops if op.inplace is not None}


def _no_larger(base: fx.Node, view: fx.Node) -> bool:
    a, b = base.meta["example_value"], view.meta["example_value"]
    sizes = [*a.shape, *b.shape]
    # Symbolic sizes are not compared: that would add a guard. A cast of the view itself is always right.
    return all(isinstance(s, int) for s in sizes) and a.numel() <= b.numel()
