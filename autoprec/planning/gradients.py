"""How relative gradient variance propagates: `GradientNode`s in forward order."""

from __future__ import annotations

from autoprec.graphs import Op, OpClass, Role, TensorKind
from autoprec.planning.activations import Activations
from autoprec.planning.flow import Flow
from autoprec.planning.options import decides
from autoprec.planning.values import GradientNode

__all__ = ["gradient_nodes"]


def gradient_nodes(flow: Flow, activations: Activations) -> tuple[GradientNode, ...]:
    """One node per op that passes gradients on (views that share memory pass them on as they are)."""
    graph, roots, prices, numbers = flow.graph, flow.roots, flow.prices, flow.numbers
    specs = graph.tensor_by_id
    passing: list[tuple[int, Op, list[str], list[str]]] = []
    for moment, op in enumerate(graph.ops):
        if roots.is_view(op) and not any(t in roots.copied_from for t in op.outputs):
            continue
        outputs = [t for t in op.outputs if specs[t].requires_grad and specs[t].is_float32]
        inner = prices.inner_weights(op)
        inputs = [
            t
            for t in dict.fromkeys(op.inputs)
            if specs[t].requires_grad
            and specs[t].is_float32
            and (specs[t].kind is not TensorKind.PARAMETER or t.removeprefix("param:") in inner)
        ]
        if outputs and (inputs or op.weights):
            passing.append((moment, op, inputs, outputs))
    share = _passed(passing, flow)
    nodes = []
    for moment, op, inputs, outputs in passing:
        units: tuple[int, ...] = ()
        local: tuple[tuple[str, float], ...] = ()
        if decides(op, graph):
            roles = [r for r in (Role.OUTPUT, Role.GRAD_INPUT) if r in op.roles]
            units = tuple(flow.unit_of[op.id, r] for r in roles)
            local = tuple((f.name, prices.relative_variance(op, f)) for f in prices.narrow)
        energies = [(numbers[t], prices.gradient_energy(op, [t])) for t in outputs]
        nodes.append(
            GradientNode(
                moment=moment,
                outputs=(*sorted(_shares(energies).items()), *sorted(activations.into_gradient(op).items())),
                inputs=tuple((k, share[k][moment]) for k in dict.fromkeys(numbers[t] for t in inputs)),
                units=units,
                local=local,
            )
        )
    return tuple(nodes)


def _passed(passing: list[tuple[int, Op, list[str], list[str]]], flow: Flow) -> dict[int, dict[int, float]]:
    """Variance → forward moment of each op that reads → what the variance of the gradient that arrives there counts.

    Products with weights and sums have gains of their own; the others share the energy that sums leave.
    """
    numbers, gains = flow.numbers, flow.gains
    energies: dict[int, list[tuple[int, float]]] = {}
    own: dict[int, dict[int, float]] = {}
    left: dict[int, float] = {}
    for moment, op, inputs, outputs in passing:
        energy = flow.prices.gradient_energy(op, outputs)
        for number in dict.fromkeys(numbers[t] for t in inputs):
            found = [gain for t in inputs if numbers[t] == number and (gain := gains.backward(op, t)) is not None]
            if found:
                own.setdefault(number, {})[moment] = sum(found)
            if found and op.op_class is not OpClass.GEMM:
                left[number] = left.get(number, 1.0) - sum(found)
            else:
                energies.setdefault(number, []).append((moment, energy))
    shares = {number: _shares(found) for number, found in energies.items()}
    return {
        number: {m: max(0.0, left.get(number, 1.0)) * part for m, part in shares.get(number, {}).items()}
        | own.get(number, {})
        for number in dict.fromkeys((*energies, *own))
    }


def _shares(energies: list[tuple[int, float]]) -> dict[int, float]:
    """Shares in proportion to energy; equal ones where an energy is not known."""
    total = sum(e for _, e in energies)
    known = total > 0.0 and all(e > 0.0 for _, e in energies)
    shares: dict[int, float] = {}
    for key, energy in energies:
        shares[key] = shares.get(key, 0.0) + (energy / total if known else 1.0 / len(energies))
    return shares
