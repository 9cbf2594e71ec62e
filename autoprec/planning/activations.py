"""How the rounding of activations and weights reaches the gradients of other layers: nodes of the forward pass.

An activation's relative variance is the share of its energy that is rounding noise, E‖δx‖²/E‖x‖². It flows with the
values: through products and sums with their gains (`gains`), through norms and activations as it is. It comes into
gradients where a backward pass reads what was rounded: x in gᵀ·x, another factor of a product, the derivative of an
activation, and the loss, whose gradient was measured to change by about the share by which the results change. All of
it is linear in the roundings, so these nodes are `GradientNode`s with forward variances among what arrives, and weight
rows have it as `passing`. Derivatives that jump are not linear: `kinks`.

Measured on trained networks (docs/measurements/fp8.md, docs/measurements/variances.md).
"""

from __future__ import annotations

from autoprec.formats import BF16, format_named, other_operand
from autoprec.graphs import ATTENTION, Op, OpClass, TensorKind
from autoprec.planning.flow import Flow
from autoprec.planning.noise import relative_error
from autoprec.planning.saved import relative_variance
from autoprec.planning.values import GradientNode

__all__ = ["Activations"]


class Activations:
    """Forward variances of a graph."""

    def __init__(self, flow: Flow) -> None:
        self._flow, self._graph, self._prices, self._gains = flow, flow.graph, flow.prices, flow.gains

    def number(self, tensor: str) -> int:
        """The forward variance of a tensor; views share their base's."""
        return self._flow.gradients + self._flow.numbers[tensor]

    def nodes(self) -> tuple[GradientNode, ...]:
        """One per op, the last op first: nodes are gone through from the end."""
        found = []
        for moment, op in enumerate(self._graph.ops):
            if not op.outputs:  # it changes what it was given
                continue
            made = list(dict.fromkeys(self.number(t) for t in op.outputs if self.carries(t)))
            arriving = self._arriving(op)
            new = [k for k in made if k not in dict(arriving)]  # a view, or a change in place, goes on as it is
            unit = self._flow.output_unit(op)
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
        for t in op.outputs:
            if self._graph.tensor_by_id[t].gets_gradient and self.carries(t):
                found[self.number(t)] = 1.0
        if op.op_class is OpClass.GEMM and not op.weights:
            factors = [t for t in op.inputs[:3] if self.carries(t)]
            for t in factors:  # each gradient is made with all factors but its own
                found[self.number(t)] = found.get(self.number(t), 0.0) + (len(factors) - 1) / len(factors)
            return found
        for t in dict.fromkeys(op.saves):
            if self.carries(t) and (sensitivity := self._sensitivity(op, t)) > 0.0:
                found[self.number(t)] = found.get(self.number(t), 0.0) + sensitivity
        return found

    def into_weight(self, op: Op) -> tuple[int, float]:
        """(forward variance of what a product with a weight reads, what it is multiplied by in the weight's row).

        Weights before are rounded alike for every row of a batch, so the rows' errors may add up as the rows'
        gradients do: the energy of their sum, where it is the larger one.
        """
        x = self._prices.input_weight_grad(op)
        rows = 0.0 if x is None else x.energy / self._prices.steps
        return self.number(op.inputs[0]), max(rows, self._prices.weight_energy(op.weights[0]))

    # Shares

    def carries(self, tensor: str) -> bool:
        """Whether a tensor has a forward variance: activations in FP32 do."""
        spec = self._graph.tensor_by_id[tensor]
        return spec.is_float32 and spec.kind is TensorKind.ACTIVATION

    def _arriving(self, op: Op) -> tuple[tuple[int, float], ...]:
        reads = [t for t in op.inputs if self.carries(t)]
        if not reads:
            return ()
        if op.kind == ATTENTION:
            shares = self._of_attention(op)
        elif op.op_class is OpClass.GEMM and op.weights:
            shares = [(op.inputs[0], self._gains.forward(op))] if op.inputs[0] in reads else []
        elif op.op_class is OpClass.GEMM or op.kind == "mul":
            shares = [(t, self._gains.forward(op)) for t in reads]
        elif op.op_class in (OpClass.NORM, OpClass.RECURRENT) or len(reads) == 1:
            shares = [(reads[0], self._gains.forward(op))]
        else:
            made = self._gains.energy(op.outputs[0])
            energies = [self._gains.energy(t) for t in reads]
            shares = [(t, e / made if made > 0.0 else 1.0 / len(reads)) for t, e in zip(reads, energies, strict=True)]
        found: dict[int, float] = {}
        for t, share in shares:
            found[self.number(t)] = found.get(self.number(t), 0.0) + share
        return tuple(found.items())

    def _of_attention(self, op: Op) -> list[tuple[str, float]]:
        """Values as they are, queries and keys by what the scores move the values' weights."""
        query, key, value = op.inputs[:3]
        moves = min(1.0, self._gains.of_scores(op))
        shares = [(value, 1.0), (query, moves), (key, moves)]
        return [(t, share) for t, share in shares if self.carries(t)]

    # Roundings

    def _local(self, op: Op) -> tuple[tuple[str, float], ...]:
        """By format: the rounding of the result, and of a product's weight; of what it reads where the copy is its own
        (other copies are born so, or rounded when the op before is)."""
        product = op.op_class is OpClass.GEMM and op.kind != ATTENTION
        gain = self._gains.forward(op) if product else 1.0
        read = op.inputs[: 1 if op.weights else 2] if product else ()
        inputs = [t for t in read if self._graph.tensor_by_id[t].kind is TensorKind.INPUT]
        found = []
        for fmt in self._prices.narrow:
            variance = 0.0
            if not fmt.operands_only:
                variance += max((relative_error(self._prices.values(t), fmt) for t in op.outputs), default=0.0)
            variance += gain * sum(
                relative_error(self._prices.values(t), fmt) for t in (read if fmt.operands_only else inputs)
            )
            if product and op.weights:
                beside = format_named(other_operand(fmt.name))
                variance += gain * relative_error(self._prices.values(f"param:{op.weights[0]}"), beside)
            found.append((fmt.name, variance))
        return tuple(found)

    def _sensitivity(self, op: Op, tensor: str) -> float:
        """Relative variance of the derivative for a small relative variance of what it is made from: the quotient for
        BF16's rounding."""
        values = self._prices.values(tensor)
        if values is None or values.nonfinite:
            return 0.0
        own = relative_error(values, BF16)
        found = relative_variance(op.kind, tensor in op.outputs, values, BF16)
        return found / own if found is not None and own > 0.0 else 0.0
