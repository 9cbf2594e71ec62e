"""Which formats each unit may have, and why not the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoprec.devices import Device
from autoprec.errors import InfeasibleError
from autoprec.formats import Format, format_named, is_operands_only, is_scaled, result_format
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind
from autoprec.planning.noise import saturates_by_design
from autoprec.planning.pricing import Prices
from autoprec.planning.roots import Roots
from autoprec.policies import Policy

__all__ = ["Options", "decides", "goes_without_saying", "in_place_pairs", "options_of", "reads_narrow", "unit_options"]


@dataclass(kw_only=True)
class Options:
    """The options of one unit while they are being found."""

    op: Op
    role: Role
    formats: list[str]
    dropped: dict[str, str] = field(default_factory=dict)
    rule: str = ""
    gives_way: bool = False
    needed: bool = True
    one_kernel: bool = False  # a gradient role that has the format of `output`, because one kernel makes both

    def drop(self, format_name: str, reason: str) -> None:
        """Take a format away; the first reason is kept. An optional rule gives way where nothing else is left."""
        if format_name in self.formats:
            self.formats.remove(format_name)
            self.dropped[format_name] = reason
        if self.gives_way and not self.formats and format_name != "fp32":
            self.formats = ["fp32"]
            del self.dropped["fp32"]
        if self.formats:
            return
        reasons = "; ".join(f"{f}: {why}" for f, why in self.dropped.items())
        who = f"rule ({self.rule})" if self.rule else "the policy's formats"
        raise InfeasibleError(
            f"op {self.op.id}, role {self.role}: {who} leaves no format that it can run in ({reasons})."
            " Relax the rule for this op, or allow fp32 there."
        )

    def keep(self, formats: list[str], reason: str) -> None:
        """Take away every format that is not in `formats`."""
        for name in [f for f in self.formats if f not in formats]:
            self.drop(name, reason)


def decides(op: Op, graph: OpGraph) -> bool:
    """Whether the op has units: its class has roles, and a float32 tensor is concerned."""
    return bool(op.roles) and any(graph.tensor_by_id[t].is_float32 for t in (*op.inputs, *op.outputs))


def reads_narrow(op: Op, tensor: str, graph: OpGraph) -> bool:
    """Whether an op with units reads this input in its own format (norms keep parameters and buffers in FP32, lookups
    all that they read)."""
    spec = graph.tensor_by_id[tensor]
    kept = op.op_class is OpClass.NORM and spec.kind in (TensorKind.PARAMETER, TensorKind.BUFFER)
    return spec.is_float32 and not kept and op.op_class is not OpClass.LOOKUP


def unit_options(
    graph: OpGraph,
    roots: Roots,
    prices: Prices,
    policy: Policy,
    device: Device,
    banned: frozenset[tuple[str, ...]],
) -> list[Options]:
    """Options of every unit in forward order, roles of an op together, before ties between ops."""
    found: list[Options] = []
    for op in graph.ops:
        if decides(op, graph):
            found.extend(options_of(op, graph, prices, policy, device, banned))
    _tie(graph, roots, policy, found)
    return found


def options_of(
    op: Op, graph: OpGraph, prices: Prices, policy: Policy, device: Device, banned: frozenset[tuple[str, ...]]
) -> list[Options]:
    """Options of the units of one op, as if it were tied to no other."""
    candidates = sorted(dict.fromkeys(policy.formats), key=_narrowness)
    unjudged = prices.unjudged(op)
    found = []
    for role in op.roles:
        rule = policy.rule_for(op, role)
        rule_text = f"{rule}" + (f": {rule.why}" if rule.why else "") if rule is not None else ""
        options = Options(op=op, role=role, formats=list(candidates), rule=rule_text)
        if op.pinned:
            options.formats = ["fp32"]
            options.dropped = dict.fromkeys((f for f in candidates if f != "fp32"), "the model itself casts to fp32")
        elif rule is not None:  # a rule speaks of what may be chosen; the user's own cast leaves no choice
            for name in list(options.formats):
                if not rule.allows(name):
                    options.drop(name, f"rule ({rule_text})")
            options.gives_way = rule.optional and "fp32" in options.dropped
        for name in [f for f in options.formats if is_operands_only(f)]:
            if reason := _not_computed(op, name, device, graph, pinned=rule is not None and rule.pin == name):
                options.drop(name, reason)
        for name in list(options.formats):
            if (why := device.no_kernel_by_key.get((op.timing_key, name))) is not None:
                options.drop(name, f"{device.name} cannot run it: {why}")
        for name in list(options.formats):
            if (op.id, name) in banned:
                options.drop(name, "it was unstable there while training")
            elif (op.id, name, str(role)) in banned:
                options.drop(name, "the schedule asks for more by now")
        _drop_overflows(options, graph, prices)
        if unjudged:
            options.keep(["fp32", "bf16"], unjudged)
        options.needed = _needed(op, role, graph)
        if not options.needed:
            # Nothing is computed: one option is enough, and it costs nothing.
            spare = "fp32" if "fp32" in options.formats else options.formats[0]
            options.formats = [spare]
        found.append(options)
    return found


def _narrowness(name: str) -> tuple[int, int, str]:
    """Sorts formats widest first, of equally wide ones that with the larger range."""
    fmt = format_named(name)
    return -fmt.bits, -fmt.exponent_bits, name


#: Why formats of operands alone are not for an op, whatever it computes: of its kind, and of the device.
_OF_ITS_KIND = "products alone are computed in it"
_OF_THE_DEVICE = "; a rule that pins it has it emulated"


def goes_without_saying(reason: str) -> bool:
    """Whether a reason against a format says nothing of the op itself, but of all of its kind on the device."""
    return reason.endswith((_OF_ITS_KIND, _OF_THE_DEVICE))


#: Products that devices compute in FP8: with one weight for all rows.
_FP8_KINDS = ("linear", "addmm", "matmul", "mm", "einsum")


def _not_computed(op: Op, format_name: str, device: Device, graph: OpGraph, *, pinned: bool) -> str:
    """Why an op cannot have a format of operands alone, or had better not, or ""."""
    if not op.is_plain_product:
        return _OF_ITS_KIND
    native = format_name in device.native
    if is_scaled(format_name):
        native = native and op.kind in _FP8_KINDS and bool(op.weights) and not _is_batched(op, graph)
    if native or pinned:
        return ""
    return f"{device.name} would emulate it, which takes longer than {result_format(format_name)}{_OF_THE_DEVICE}"


def _is_batched(op: Op, graph: OpGraph) -> bool:
    """Whether a product with a parameter has a weight for each of a batch of B matrices: input, weight and result have
    B·M·K, B·K·N and B·M·N elements, and B·M·K·N pairs are multiplied."""
    x, w, y = (graph.tensor_by_id[t].numel for t in (*op.inputs[:2], op.outputs[0]))
    return x * w * y > (op.flops // 2) ** 2


def _needed(op: Op, role: Role, graph: OpGraph) -> bool:
    if role is Role.GRAD_INPUT:
        return any(graph.tensor_by_id[t].requires_grad for t in (op.inputs[:1] if op.weights else op.inputs))
    if role is Role.GRAD_WEIGHT:
        spec = graph.tensor_by_id.get(f"param:{op.weights[0]}")
        return spec is None or spec.requires_grad
    return True


def _drop_overflows(options: Options, graph: OpGraph, prices: Prices) -> None:
    op = options.op
    for name in list(options.formats):
        fmt = format_named(name)
        if name == "fp32" or fmt.scaled:
            continue
        for t in _concerned(op, options.role):
            spec = graph.tensor_by_id[t]
            made = t in op.outputs
            if not spec.is_float32 or (not made and not reads_narrow(op, t, graph)):
                continue
            histogram = prices.values(t)
            if histogram is None or histogram.amax <= fmt.max_value:
                continue
            if saturates_by_design(histogram, fmt) and _takes_masks(op, t, fmt, graph, prices):
                continue
            options.drop(name, f"{name} overflows: amax {histogram.amax:.3g} of {t} > {fmt.max_value:.6g}")
            break
        reason = prices.gradient_overflow(op, options.role, fmt)
        if reason:
            options.drop(name, reason)


def _takes_masks(op: Op, tensor: str, fmt: Format, graph: OpGraph, prices: Prices) -> bool:
    """Whether the op reads or makes the tensor as a mask does, so that its huge values may become the largest one."""
    if tensor in op.outputs:
        if op.kind in ("masked_fill", "where"):
            return True  # the rewriter fits the number that these ops write into the format
        return op.kind in ("add", "sub") and _stays_finite(op, fmt, prices)
    if op.kind == "scaled_dot_product_attention" and tensor in op.inputs[3:]:
        return True
    if op.kind == "softmax":
        return True  # the probability is 0 at the largest magnitude of any format, and equal where a row is all masked
    if op.op_class is OpClass.GEMM and op.weights:
        return False
    if op.kind in ("add", "sub"):
        return _stays_finite(op, fmt, prices)
    return not graph.tensor_by_id[tensor].requires_grad


def _stays_finite(op: Op, fmt: Format, prices: Prices) -> bool:
    """Whether the largest value plus what else is added rounds to the largest value: it is less than half its ulp."""
    half_ulp = 2.0 ** (math.floor(math.log2(fmt.max_value)) - fmt.mantissa_bits - 1)
    found = [prices.values(t) for t in op.inputs]
    ordinary = [h.amax for h in found if h is not None and not saturates_by_design(h, fmt)]
    masks = sum(h is not None and saturates_by_design(h, fmt) for h in found)
    return masks == 1 and None not in found and sum(ordinary) < half_ulp


def _concerned(op: Op, role: Role) -> list[str]:
    """Tensors whose values a role reads or makes (gradients apart)."""
    if role is Role.OUTPUT:
        return list(dict.fromkeys((*op.inputs, *op.outputs)))
    if not op.weights:
        return list(dict.fromkeys(op.inputs))
    return list(op.inputs[1:]) if role is Role.GRAD_INPUT else [op.inputs[0]]


def _tie(graph: OpGraph, roots: Roots, policy: Policy, found: list[Options]) -> None:
    """In-place ops run in the format that the tensor which they change was born in, and gradients of kernels in that of
    the kernel, unless a rule of their own pins them: intersect their options."""
    by_op = {o.op.id: o for o in found if o.role is Role.OUTPUT}
    pairs = in_place_pairs(graph, roots)
    for o in found:
        rules = [policy.rule_for(o.op, role) for role in (Role.OUTPUT, Role.GRAD_INPUT)]
        apart = len(o.formats) == 1 and rules[0] is not rules[1]
        kernel = o.role is Role.GRAD_INPUT and not o.op.is_plain_product
        o.one_kernel = kernel and o.needed and not apart
    kernels = [o for o in found if o.one_kernel]
    while any([_tie_in_place(by_op, op, owner) for op, owner in pairs]) or any(
        [_tie_kernel(by_op[o.op.id], o) for o in kernels]
    ):
        pass


def _tie_kernel(output: Options, gradients: Options) -> bool:
    """Make the options of both roles of a kernel equal; whether anything changed."""
    before = output.formats, gradients.formats
    both = [f for f in output.formats if f in gradients.formats]
    if before == (both, both):
        return False
    reason = "{} cannot have it, and one kernel makes both; a rule that pins roles: [grad_input] makes two of it"
    output.keep(both, reason.format(Role.GRAD_INPUT))
    gradients.keep(both, reason.format(Role.OUTPUT))
    return True


def _tie_in_place(by_op: dict[str, Options], op: Op, owner: str | None) -> bool:
    """Make the options of two ops equal; whether anything changed."""
    mine, theirs = by_op.get(op.id), by_op.get(owner) if owner else None
    if theirs and any(map(is_operands_only, theirs.formats)):  # what changes in place must compute as the product does
        theirs.keep([f for f in theirs.formats if not is_operands_only(f)], f"{op.id} changes its result in place")
    a = mine.formats if mine else ["fp32"]
    b = theirs.formats if theirs else ["fp32"]
    if a == b:
        return False
    both = [f for f in a if f in b]
    if mine:
        mine.keep(both, f"it changes in place what {owner or 'no decided op'} makes without that format")
    if theirs:
        theirs.keep(both, f"{op.id} changes its result in place without that format")
    return True


def in_place_pairs(graph: OpGraph, roots: Roots) -> list[tuple[Op, str | None]]:
    """(op, op that gives birth to the tensor which it changes; None for inputs, parameters and buffers)."""
    pairs: list[tuple[Op, str | None]] = []
    for op in graph.ops:
        if roots.is_view(op):
            continue
        for t in op.outputs:
            root = roots.root_of[t]
            if root == t or not graph.tensor_by_id[t].is_float32:
                continue
            while root in roots.copied_from:
                root = roots.copied_from[root]
            pairs.append((op, graph.producer.get(root)))
    return pairs
