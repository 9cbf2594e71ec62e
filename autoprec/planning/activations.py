"""How the rounding of activations and weights reaches the gradients of other layers: nodes of the forward pass.

An activation's relative variance is the share of its energy that is rounding noise, E‖δx‖²/E‖x‖². It flows with the
values: through a product as it is (rounded operands add theirs), through a sum by the energies of the terms, through
norms and activations as it is. It comes into gradients where a backward pass reads what was rounded: x in gᵀ·x, another
factor of a product, the derivative of an activation. All of it is linear in the roundings, so these nodes are
`GradientNode`s with forward variances among what arrives, and weight rows have it as `passing`.

Measured on trained networks with every product in FP8 (python -m tests.bench.fp8, docs/measurements/fp8.md).
"""

from __future__ import annotations

from autoprec.formats import BF16, Format, format_named, other_operand
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.planning.pricing import Prices
from autoprec.planning.saved import relative_variance
from autoprec.planning.values import GradientNode
from autoprec.profiles import RangeHistogram

__all__ = ["Activations"]

_ATTENTION = "scaled_dot_product_attention"


class Activations:
    """Forward variances of a graph, numbered from `first` on in the order of `numbers`."""

    def __init__(
        self,
        graph: OpGraph,
        prices: Prices,
        unit_of: dict[tuple[str, Role], int],
        numbers: dict[str, int],
        first: int,
    ) -> None:
        self._graph, self._prices, self._unit_of = graph, prices, unit_of
        self._numbers, self._first = numbers, first

    def number(self, tensor: str) -> int:
        """The forward variance of a tensor; views share their base's."""
        return self._first + self._numbers[tensor]

    def nodes(self) -> tuple[GradientNode, ...]:
        """One per op, the last op first: nodes are gone through from the end."""
        found = []
        for moment, op in enumerate(self._graph.ops):
            made = list(dict.fromkeys(self.number(t) for t in op.outputs if self._carries(t)))
            arriving = self._arriving(op)
            new = [k for k in made if k not in dict(arriving)]  # a view, or a change in place, goes on as it is
            unit = self._unit_of.get((op.id, Role.OUTPUT))
            local = () if unit is None else self._local(op)
            if new and (arriving or local):
                node = GradientNode(
                    moment=len(self._graph.ops) + moment,
                    outputs=arriving,
                    inputs=tuple((k, 1.0) for k in new),
                    units=() if unit is None else (unit,),
                    local=local,
                )
                found.append(node)
        return tuple(reversed(found))

    def into_gradient(self, op: Op) -> dict[int, float]:
        """Forward variance → how much of it an op adds to the relative variance of the gradients that it passes on."""
        found: dict[int, float] = {}
        if op.op_class is OpClass.GEMM and not op.weights:
            factors = [t for t in op.inputs[:3] if self._carries(t)]
            for t in factors:  # each gradient is made with all factors but its own
                found[self.number(t)] = found.get(self.number(t), 0.0) + (len(factors) - 1) / max(1, len(factors))
            return found
        for t in dict.fromkeys(op.saves):
            if self._carries(t) and (sensitivity := self._sensitivity(op, t)) > 0.0:
                found[self.number(t)] = found.get(self.number(t), 0.0) + sensitivity
        return found

    def into_weight(self, op: Op) -> tuple[int, float]:
        """(forward variance of what a product with a weight reads, what it is multiplied by in the weight's row)."""
        x = self._prices.input_weight_grad(op)
        return self.number(op.inputs[0]), 0.0 if x is None else x.energy / self._prices.steps

    # Shares

    def _carries(self, tensor: str) -> bool:
        spec = self._graph.tensor_by_id[tensor]
        return spec.is_float32 and spec.kind is TensorKind.ACTIVATION

    def _arriving(self, op: Op) -> tuple[tuple[int, float], ...]:
        reads = [t for t in op.inputs if self._carries(t)]
        if not reads:
            return ()
        if op.kind == _ATTENTION:
            shares = self._of_attention(op)
        elif op.op_class is OpClass.GEMM and op.weights:
            shares = [(op.inputs[0], 1.0)] if op.inputs[0] in reads else []
        elif op.op_class is OpClass.GEMM or op.kind == "mul":
            shares = [(t, 1.0) for t in reads]
        elif op.op_class in (OpClass.NORM, OpClass.RECURRENT) or len(reads) == 1:
            shares = [(reads[0], 1.0)]
        else:
            energies = [self._energy(t) for t in op.inputs if self._graph.tensor_by_id[t].is_float32]
            total = sum(energies)
            shares = [(t, self._energy(t) / total if total > 0.0 else 1.0 / len(reads)) for t in reads]
        found: dict[int, float] = {}
        for t, share in shares:
            found[self.number(t)] = found.get(self.number(t), 0.0) + share
        return tuple(found.items())

    def _of_attention(self, op: Op) -> list[tuple[str, float]]:
        """Values as they are. A score q·k/√d has the variance ms(q)·ms(k) (ms: mean square) where the two are
        independent, and its error moves the weights of the values by as much as it is large."""
        query, key, value = op.inputs[:3]
        moves = min(1.0, self._mean_square(query) * self._mean_square(key))
        shares = [(value, 1.0), (query, moves), (key, moves)]
        return [(t, share) for t, share in shares if self._carries(t)]

    def _mean_square(self, tensor: str) -> float:
        found = self._prices.values(tensor)
        return found.energy / found.total_weight if found is not None and found.total_weight > 0.0 else 0.0

    def _energy(self, tensor: str) -> float:
        return self._mean_square(tensor) * self._graph.tensor_by_id[tensor].numel

    # Roundings

    def _local(self, op: Op) -> tuple[tuple[str, float], ...]:
        """By format: the rounding of the result, and of a product's weight; of what it reads where the copy is its own
        (other copies are born so, or rounded when the op before is)."""
        product = op.op_class is OpClass.GEMM and op.kind != _ATTENTION
        found = []
        for fmt in self._prices.narrow:
            variance = 0.0
            if not fmt.scaled:
                variance += max((_relative(self._prices.values(t), fmt) for t in op.outputs), default=0.0)
            elif product:
                variance += sum(_relative(self._prices.values(t), fmt) for t in op.inputs[: 1 if op.weights else 2])
            if product and op.weights:
                beside = format_named(other_operand(fmt.name))
                variance += _relative(self._prices.values(f"param:{op.weights[0]}"), beside)
            found.append((fmt.name, variance))
        return tuple(found)

    def _sensitivity(self, op: Op, tensor: str) -> float:
        """Relative variance of the derivative for a small relative variance of what it is made from: the quotient for
        BF16's rounding."""
        values = self._prices.values(tensor)
        if values is None or values.nonfinite:
            return 0.0
        own = _relative(values, BF16)
        found = relative_variance(op.kind, tensor in op.outputs, values, BF16)
        return found / own if found is not None and own > 0.0 else 0.0


def _relative(values: RangeHistogram | None, fmt: Format) -> float:
    """Relative rounding error of a tensor; 0 where it was not observed, or leaves the format (then it is no option)."""
    if values is None or values.energy <= 0.0:
        return 0.0
    error = error_energy(values, fmt, current_scale_log2(fmt, values.amax)) / values.energy
    return error if error < 1.0 else 1.0
