"""Every op that torch tests, under the identity plan and under all-BF16 and all-FP16 plans.

`python -m tests.campaigns.ops [--samples N] [NAME ...]` runs the first N FP32 samples of each op of torch's own `op_db`
(all of them with `--samples 0`) and ends with exit code 1 if a law is broken:

* the identity plan is bitwise the op, outputs and gradients, and raises nothing that the op does not raise (where
  Dynamo captures other arithmetic than the op's, bitwise what Dynamo captured, and listed);
* under a narrow plan outputs and gradients are bitwise those of `ManualCast`, which casts by hand and shares nothing
  with the rewriter (up to the order of sums where ours differs, which is counted); dtypes are those of the op; nothing
  becomes non-finite that is finite by hand.

A sample whose tensors can all be parameters becomes a module; what Dynamo does not capture is listed with its reason.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._pytree import tree_flatten, tree_unflatten

import autoprec
from autoprec.graphs import OpClass, Role
from autoprec.numerics.dtypes import format_of, native_formats
from autoprec.plans import Assignment, Plan
from autoprec.tracing.bindings import OpNode
from autoprec.tracing.kinds import CONVS
from tests.campaigns import report
from tests.campaigns.report import Tally, quietly

#: They return memory as they find it.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

#: Products inside kernels of torch run in the narrow dtype whether the device has products in it or not.
KERNELS = ("scaled_dot_product_attention", "einsum", "baddbmm", "addbmm")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OpModule(nn.Module):
    """One sample of an op; its float32 tensors are parameters."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.own = [_is_parameter(v) for v in leaves]
        self.leaves = [None if own else v for v, own in zip(leaves, self.own, strict=True)]
        self.parameters_ = nn.ParameterList(
            nn.Parameter(v.detach().clone(), requires_grad=v.requires_grad) for v in leaves if _is_parameter(v)
        )

    def forward(self) -> Any:
        parameters = iter(self.parameters_)
        leaves = [next(parameters) if own else v for v, own in zip(self.leaves, self.own, strict=True)]
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **kwargs)


def _is_parameter(v: Any) -> bool:
    return isinstance(v, Tensor) and v.dtype is torch.float32 and v.is_leaf and v.layout is torch.strided


class Straight(torch.autograd.Function):
    """Rounds forward; the gradient of a master weight is not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class BiasGradient(torch.autograd.Function):
    """Gives `y` as it is; the gradient of the bias in it is summed in FP32, and rounded to BF16 if `y` is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, channels: int) -> Tensor:
        ctx.channels = channels
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        if g.dim() == 1:
            return g, g.float(), None
        rounded = g.dtype if g.dtype is torch.bfloat16 else torch.float32
        dims = [d for d in range(g.dim()) if d != ctx.channels % g.dim()]
        return g, g.sum(dims, dtype=rounded).float(), None


class ManualCast(fx.Interpreter):
    """The captured graph with casts by hand: what an op reads is cast before it, once for all its readers (whose
    gradients meet in the narrow format), what it gives stays as it is until somebody wants FP32. Products are torch's
    own in that dtype where the device computes them, otherwise they are made of rounded operands in FP32 and rounded
    once."""

    def __init__(self, module: fx.GraphModule, ops: dict[fx.Node, OpNode], dtype: torch.dtype) -> None:
        super().__init__(module)
        self.ops, self.dtype = ops, dtype
        self.native = format_of(dtype) in native_formats("cpu")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.casts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        op = self.ops.get(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if op is not None and planned(op):
            return self._narrow(n, op, args, kwargs)
        if op is not None and op.op_class is OpClass.VIEW:
            return getattr(self, n.op)(n.target, args, kwargs)
        wide = fx.node.map_aggregate((args, kwargs), lambda v: v.float() if self._is_ours(v) else v)
        return getattr(self, n.op)(n.target, *wide)

    def _is_ours(self, v: Any) -> bool:
        return isinstance(v, Tensor) and v.dtype is self.dtype

    def _narrow(self, n: fx.Node, op: OpNode, args: Any, kwargs: Any) -> Any:
        def cast(v: Any) -> Any:
            if not isinstance(v, Tensor) or v.dtype is not torch.float32:
                return v
            return self.casts.setdefault((id(v), v._version), (v, v.to(self.dtype)))[1]

        if op.op_class is OpClass.LOOKUP:
            wide = fx.node.map_aggregate((args, kwargs), lambda v: v.float() if self._is_ours(v) else v)
            return getattr(self, n.op)(n.target, *wide).to(self.dtype)
        bias = None if op.gemm is None or op.gemm.bias is None else self.env[op.gemm.bias]
        if op.op_class is OpClass.GEMM and op.kind not in KERNELS and not self.native:
            weights = [] if op.gemm is None else [self.env[m] for m in op.gemm.tensors[1:]]

            def operand(v: Any) -> Any:
                if v is bias and bias is not None:
                    return v.detach().to(self.dtype).float()
                if any(v is w for w in weights):
                    return Straight.apply(v, self.dtype)
                return cast(v).float() if isinstance(v, Tensor) and v.is_floating_point() else v

            args, kwargs = fx.node.map_aggregate((args, kwargs), operand)
            result = getattr(self, n.op)(n.target, args, kwargs).to(self.dtype)
        else:
            args, kwargs = fx.node.map_aggregate(
                (args, kwargs), lambda v: cast(v.detach() if v is bias and bias is not None else v)
            )
            result = getattr(self, n.op)(n.target, args, kwargs)
        return result if bias is None else BiasGradient.apply(result, bias, 1 if op.kind in CONVS else -1)


def planned(op: OpNode) -> bool:
    """Ops that the narrow plans of this campaign name: norms are tested against formulas of their own elsewhere."""
    return (
        op.op_class in (OpClass.GEMM, OpClass.POINTWISE, OpClass.LOOKUP)
        and not op.pinned
        and op.inplace is None
        and not op.functional
    )


def reordered(op: OpNode, fmt: str) -> bool:
    """Whether we sum in another order than torch: `x @ W` is a linear with its weight transposed, a gradient that is
    summed over leading dimensions is one product, and a convolution whose input is kept narrower than it computes gets
    its input's gradient from the adjoint convolution."""
    if op.kind in CONVS and fmt not in native_formats("cpu"):
        return True
    if op.gemm is not None:
        return op.kind != "linear"
    shapes = [v.meta["example_value"].shape[:-2] for v in op.node.args if isinstance(v, fx.Node)]
    return op.kind == "matmul" and len(set(shapes)) > 1


def roles(op: OpNode) -> Sequence[Role]:
    return tuple(Role) if op.gemm is not None else (Role.OUTPUT,)


@dataclass
class SampleTally(Tally):
    """Of samples of ops or modules."""

    samples: int = 0
    captured: int = 0
    narrow: int = 0
    other_order: int = 0

    def summary(self) -> str:
        return (
            f"{self.samples} samples, {self.captured} captured, {self.narrow} narrow runs"
            f" ({self.other_order} up to the order of sums)"
        )


def floats(result: Any) -> list[Tensor]:
    return [v for v in tree_flatten(result)[0] if isinstance(v, Tensor)]


def outcome(module: nn.Module, call: Any) -> list[Tensor | None]:
    """Outputs and gradients, under a fixed gradient of the outputs."""
    torch.manual_seed(7)
    module.zero_grad()
    outputs = floats(call())
    live = [y for y in outputs if y.requires_grad and (y.is_floating_point() or y.is_complex())]
    if live:
        generator = torch.Generator().manual_seed(11)
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.dtype) for y in live]
        torch.autograd.backward(live, grads)
    return [*(y.detach() for y in outputs), *(p.grad for p in module.parameters())]


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> str:
    """ "" or what differs."""
    if len(a) != len(b):
        return f"{len(a)} results, not {len(b)}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x is None or y is None:
            if x is not y:
                return f"result {i} is {'missing' if y is None else 'there'}"
        elif x.dtype is not y.dtype or x.shape != y.shape:
            return f"result {i} is {y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}"
        elif not _equal(x, y):
            return f"result {i} differs"
    return ""


def _equal(x: Tensor, y: Tensor) -> bool:
    if x.layout is not torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if x.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    return bool(torch.equal(x, y) or torch.allclose(x, y, rtol=0, atol=0, equal_nan=True))


def close(a: Sequence[Tensor | None], b: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
    """Equal up to one rounding to `dtype`, relative to the largest element."""
    eps = torch.finfo(dtype).eps
    return all(
        (x is None and y is None)
        or (x is not None and y is not None and bool((x - y).abs().amax() <= eps * x.abs().amax()))
        for x, y in zip(a, b, strict=True)
    )


def samples_of(op: Any, count: int) -> Iterator[Any]:
    """The same at every run. Not by `op.sample_inputs`, which looks twice through the stack for the test that asks."""
    set_rng_seed()
    made = iter(op.sample_inputs_func(op, "cpu", torch.float32, op.supports_autograd))
    for _ in range(count) if count else itertools.count():
        set_rng_seed()
        if (sample := next(made, None)) is None:
            return
        yield sample


def check(name: str, op: Any, sample: Any, tally: SampleTally) -> None:
    """One sample under three plans."""
    tally.samples += 1
    module = OpModule(op, sample)
    if not list(module.parameters()):
        tally.left_out["no float32 tensor of its own"] += 1
        return
    try:
        expected, again = outcome(module, module), outcome(module, module)
    except Exception as error:
        tally.left_out[f"the op itself raises {type(error).__name__}"] += 1
        return
    if same(expected, again):
        tally.left_out["not reproducible in eager mode"] += 1
        return
    torch._dynamo.reset()
    autoprec.compile(module, plan=Plan(assignments=()), events=None)
    session = autoprec.session(module)
    try:
        found = outcome(module, module)
    except Exception as error:
        tally.broken.append(f"{name}: identity raises {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        autoprec.unwrap(module)
        return
    ops = [o for b in session.bindings for o in b.ops]
    if not ops:
        tally.left_out["not captured"] += 1
        tally.reasons.setdefault(name, "Dynamo leaves no graph with a float32 op in it")
        autoprec.unwrap(module)
        return
    tally.captured += 1
    if difference := same(expected, found):
        if same(found, of_dynamo_alone(module)):
            tally.broken.append(f"{name}: identity: {difference}")
        else:
            tally.captured -= 1
            tally.left_out["Dynamo captures other arithmetic"] += 1
            tally.reasons.setdefault(name, f"torch.compile(backend='eager') alone gives the same bits: {difference}")
    elif any(planned(o) for o in ops):
        for fmt in DTYPES:
            narrow(name, module, session, ops, fmt, expected, tally)
    autoprec.unwrap(module)


def of_dynamo_alone(module: nn.Module) -> list[Tensor | None]:
    """What torch's own `backend="eager"` makes of a compiled module, without us."""
    torch._dynamo.reset()
    autoprec.unwrap(module)
    try:
        return outcome(module, torch.compile(lambda: module(), backend="eager"))
    finally:
        autoprec.compile(module, plan=Plan(assignments=()), events=None)


def narrow(
    name: str,
    module: nn.Module,
    session: Any,
    ops: list[OpNode],
    fmt: str,
    wide: list[Tensor | None],
    tally: SampleTally,
) -> None:
    """All that can be planned in one format, against the casts by hand."""
    slots = list(session._slots.values())
    if any(slot.binding.template.flat.within for slot in slots):
        return
    plan = Plan(
        assignments=tuple(
            Assignment(op=o.id, role=r, format=fmt, reason="campaign") for o in ops if planned(o) for r in roles(o)
        )
    )
    session.adopt(plan)

    def by_hand(slot: Any, given: Sequence[Any]) -> Any:
        interpreter = ManualCast(slot.binding.template.module, slot.binding.op_of, DTYPES[fmt])
        return fx.node.map_aggregate(interpreter.run(*given), lambda v: v.float() if interpreter._is_ours(v) else v)

    try:
        with mock.patch.object(type(slots[0]), "run", by_hand):
            expected = outcome(module, module)
    except NotImplementedError as error:  # torch has no kernel for it in this dtype
        tally.left_out[f"no {fmt} kernel"] += 1
        tally.reasons.setdefault(f"{name} in {fmt}", str(error).splitlines()[0][:80])
        return
    tally.narrow += 1
    try:
        found = outcome(module, module)
    except Exception as error:
        tally.broken.append(f"{name}: {fmt} raises {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        return
    if difference := same(expected, found):
        if any(reordered(o, fmt) for o in ops) and close(expected, found, DTYPES[fmt]):
            tally.other_order += 1
        else:
            tally.broken.append(f"{name}: {fmt}: {difference}")
    if [getattr(x, "dtype", None) for x in wide] != [getattr(x, "dtype", None) for x in found]:
        tally.broken.append(f"{name}: {fmt}: a dtype changed at the boundary")


def named_ops(names: Sequence[str], every: int = 1) -> Iterator[tuple[str, Any]]:
    """Every so many ops with FP32 samples that mean something, or those with the given names."""
    for op in op_db[::every]:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if torch.float32 in op.dtypes and op.name not in UNINITIALISED and (not names or name in names):
            yield name, op


def campaign(names: Sequence[str], count: int, *, every: int = 1) -> SampleTally:
    """The first `count` samples (0 for all) of every so many ops, or of those with the given names."""
    tally = SampleTally()
    with quietly():
        for name, op in named_ops(names, every):
            for sample in samples_of(op, count):
                check(name, op.op, sample, tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    return report.main(__doc__, campaign, argv, samples=True)


if __name__ == "__main__":
    sys.exit(main())
