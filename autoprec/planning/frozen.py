"""Frozen parameters that may live in a narrow format for good: each is decided by a unit without an op.

It is as if an op at the beginning of the step made the parameter in one of the formats, and kept it to the end of the
step. So every solver knows what it needs: the bytes are those that the unit keeps, whoever reads the parameter reads it
from there, and it is rounded as if somebody computed with it in that format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoprec.devices import Device
from autoprec.formats import format_named, is_scaled
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind, TensorSpec
from autoprec.planning.activations import Activations
from autoprec.planning.codes import bytes_of
from autoprec.planning.flow import Flow
from autoprec.planning.noise import relative_error
from autoprec.planning.options import decides
from autoprec.planning.pricing import Prices
from autoprec.planning.values import GradientNode, Unit
from autoprec.policies import Policy

__all__ = ["frozen_nodes", "frozen_units", "living_bytes", "reading_wide"]


def living_bytes(numel: int, fmt: str) -> int:
    """Bytes of a parameter that lives in a format, with its scale."""
    return numel * bytes_of(fmt) + (4 if is_scaled(fmt) else 0)


def frozen_units(
    graph: OpGraph,
    prices: Prices,
    policy: Policy,
    device: Device,
    banned: frozenset[tuple[str, ...]],
    living: Mapping[str, str],
) -> tuple[Unit, ...]:
    """One for each frozen parameter of which the policy leaves more than FP32. `living`: parameter → the format in
    which it lives already, which is the one option that it has."""
    found = []
    for spec in graph.tensors:
        readers = _readers(spec, graph)
        if not readers or not (policy.storage.frozen or spec.id in living):
            continue
        dropped = _dropped(spec, readers, prices, policy, banned)
        wanted = sorted(policy.storage.frozen, key=lambda f: -format_named(f).bits)
        options = ["fp32", *(f for f in wanted if f not in dropped)]
        if spec.id in living:
            options = [living[spec.id]]
        found.append(
            Unit(
                op=spec.id,
                role=Role.OUTPUT,
                options=tuple(options),
                seconds=tuple(_reading_seconds(f, spec, readers, graph, device) for f in options),
                workspace=(0,) * len(options),
                moment=0,
                kept=tuple(living_bytes(spec.numel, f) for f in options),
                dropped=tuple(dropped.items()),
            )
        )
    return tuple(found)


def reading_wide(units: Sequence[Unit], frozen: Sequence[Unit], graph: OpGraph, device: Device) -> Iterator[Unit]:
    """Units of products, with what it takes to decode a frozen weight where FP32 reads it, as if the weight lived in a
    narrow format: too much where it stays in FP32."""
    narrow = {u.op for u in frozen if u.options != ("fp32",)}
    for unit in units:
        op = graph.op_by_id[unit.op]
        weight = f"param:{op.weights[0]}" if op.op_class is OpClass.GEMM and op.weights else ""
        reads = unit.needed and unit.role in (Role.OUTPUT, Role.GRAD_INPUT) and "fp32" in unit.options
        if weight not in narrow or not reads:
            yield unit
            continue
        k, numel = unit.options.index("fp32"), graph.tensor_by_id[weight].numel
        runs = op.calls * (1 + (len(op.checkpoints) if unit.role is Role.OUTPUT else 0))
        seconds, workspace = list(unit.seconds), list(unit.workspace)
        seconds[k] += runs * device.cast_seconds("bf16", "fp32", numel)
        workspace[k] += 4 * numel
        yield replace(unit, seconds=tuple(seconds), workspace=tuple(workspace))


def _readers(spec: TensorSpec, graph: OpGraph) -> list[Op]:
    """The ops that read a frozen matrix, if all of them take it from a narrow format: products with it as their weight,
    and lookups of its rows."""
    if spec.kind is not TensorKind.PARAMETER or spec.requires_grad or not spec.is_float32 or len(spec.shape) < 2:
        return []
    readers = [graph.op_by_id[op] for op in graph.readers.get(spec.id, ())]
    return readers if all(_takes_it(op, spec.id, graph) for op in readers) else []


def _takes_it(op: Op, tensor: str, graph: OpGraph) -> bool:
    if not op.weights or f"param:{op.weights[0]}" != tensor or not decides(op, graph):
        return False
    return op.kind == "embedding" or (op.op_class is OpClass.GEMM and Role.GRAD_INPUT in op.roles)


def _dropped(
    spec: TensorSpec, readers: list[Op], prices: Prices, policy: Policy, banned: frozenset[tuple[str, ...]]
) -> dict[str, str]:
    """Formats that the parameter cannot have, each with the reason."""
    found: dict[str, str] = {}
    values = prices.values(spec.id)
    for name in policy.storage.frozen:
        rules = [(op, rule) for op in readers if (rule := policy.rule_for(op, Role.OUTPUT)) is not None]
        refusing = next(((op, rule) for op, rule in rules if not rule.allows(name)), None)
        if refusing is not None:
            found[name] = f"rule ({refusing[1]}), of {refusing[0].id}, which reads it"
        elif any(op.pinned for op in readers):
            found[name] = "the model itself computes with it in fp32"
        elif any((op.id, name) in banned for op in readers):
            found[name] = "it was unstable there while training"
        elif values is None or values.nonfinite:
            found[name] = "its values were not observed, or not all of them are finite: its noise cannot be judged"
        elif is_scaled(name) and prices.loss(spec.id) is None:
            found[name] = "no gradient arrives where it is read, so what it is worth to the loss was not observed"
    return found


def _reading_seconds(fmt: str, spec: TensorSpec, readers: list[Op], graph: OpGraph, device: Device) -> float:
    """Decoding what carries a scale. BF16 is read as it is, which saves the cast that a product's seconds contain: that
    is not counted, because FP32 may be what reads it."""
    if not is_scaled(fmt):
        return 0.0
    products = [op for op in readers if op.op_class is OpClass.GEMM]
    reads = sum((1 + len(op.checkpoints) + _passes_back(op, graph)) * op.calls for op in products)
    return reads * device.cast_seconds(fmt, "bf16", spec.numel)


def _passes_back(op: Op, graph: OpGraph) -> bool:
    return graph.tensor_by_id[op.inputs[0]].requires_grad


def frozen_nodes(
    flow: Flow, activations: Activations, units: Mapping[str, int], passing: Mapping[int, tuple[tuple[int, float], ...]]
) -> Iterator[GradientNode]:
    """What the rounding of frozen weights adds to relative variances: of what products and lookups make of them, and of
    the gradients that products pass on, which are multiplied by them (`passing`: forward moment → those gradients)."""
    graph = flow.graph
    for moment, op in enumerate(graph.ops):
        weight = f"param:{op.weights[0]}" if op.weights else ""
        if weight not in units:
            continue
        values = flow.prices.values(weight)
        errors = [(f.name, relative_error(values, f)) for f in flow.prices.narrow]
        gain = flow.gains.forward(op) if op.op_class is OpClass.GEMM else 1.0
        made = tuple((activations.number(t), gain) for t in op.outputs if activations.carries(t))
        for inputs in (made, passing.get(moment, ())):
            if inputs:  # constants, whatever arrives: they go with the nodes of the forward pass
                yield GradientNode(
                    moment=len(graph.ops) + moment,
                    outputs=(),
                    inputs=inputs,
                    units=(units[weight],),
                    local=tuple(errors),
                )
