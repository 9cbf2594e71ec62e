"""What ops do to relative noise: errors of elements add up as squares, what they are errors of as numbers.

A sum y over n products w·x of elements with independent errors of relative variance v has an error of energy
v·n·ms(w)·ms(x) (ms: mean square). Trained weights give more than n·ms(w)·ms(x) where the signal is, so noise fades: the
*gain* of a product, n·ms(w)·ms(x) / ms(y), is mostly below 1, forward and backward (docs/measurements/variances.md).
Above 1 it is taken for 1: outliers meet small weights, and their errors, as large as they, do too.
"""

from __future__ import annotations

from autoprec.graphs import Op, OpGraph
from autoprec.planning.pricing import Prices

__all__ = ["Gains"]

_AVERAGES = frozenset({"sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d"})


class Gains:
    """Gains of a graph's ops, read off histograms; 1.0 where something was not observed."""

    def __init__(self, graph: OpGraph, prices: Prices) -> None:
        self._graph, self._prices = graph, prices

    def mean_square(self, tensor: str) -> float:
        """Of a tensor's values; 0.0 where it was not observed."""
        found = self._prices.values(tensor)
        return found.energy / found.total_weight if found is not None and found.total_weight > 0.0 else 0.0

    def energy(self, tensor: str) -> float:
        """Σ x² of one step."""
        return self.mean_square(tensor) * self._graph.tensor_by_id[tensor].numel

    def forward(self, op: Op) -> float:
        """What a relative variance in what an op reads is multiplied by in its result."""
        specs = self._graph.tensor_by_id
        read, made = op.inputs[0], op.outputs[0]
        x, y = self.mean_square(read), self.mean_square(made)
        if x <= 0.0 or y <= 0.0:
            return 1.0
        if op.is_plain_product and len(op.inputs) > 1 and op.flops:
            other = self.mean_square(op.inputs[1])
            return min(1.0, self._terms(op) * x * other / y) if other > 0.0 else 1.0
        if op.kind == "relu":  # what is 0 has no error
            values = self._prices.values(made)
            assert values is not None
            zeros = float(values.moments[values.moments[:, 1] == 0.0, 0].sum())
            return (1.0 - zeros / values.total_weight) * x / y
        if op.kind in _AVERAGES and specs[made].numel:  # of n elements with errors of their own
            n = specs[read].numel / specs[made].numel
            return (n if op.kind == "sum" else 1.0 / n) * x / y
        return 1.0

    def backward(self, op: Op, tensor: str) -> float | None:
        """What a relative variance of the gradient that arrives at an op is multiplied by in the whole gradient of one
        of its inputs, whoever else reads it; None where only shares of the gradient's energy can be told."""
        arriving = self._prices.gradient_energy(op, [op.outputs[0]])
        passed = self._prices.gradients(tensor)
        if arriving <= 0.0 or passed is None or passed.energy <= 0.0:
            return None
        specs = self._graph.tensor_by_id
        read, made = specs[tensor], specs[op.outputs[0]]
        if op.kind in ("add", "sub") and read.numel == made.numel:
            return op.inputs.count(tensor) ** 2 * arriving / passed.energy
        if op.is_plain_product and op.weights and op.flops and tensor == op.inputs[0]:
            weight = self.mean_square(op.inputs[1])
            return min(1.0, self._terms(op) * weight * arriving / passed.energy) if weight > 0.0 else None
        return None

    def of_scores(self, op: Op) -> float:
        """What a relative variance in the queries, or keys, of attention is multiplied by in its weights: a score
        q·k/√d has the variance ms(q)·ms(k) where the two are independent, and its error moves the weights by as much as
        it is large. (For any other scale than 1/√d, which graphs do not tell, it is off by d·scale².)"""
        query, key = op.inputs[:2]
        return self.mean_square(query) * self.mean_square(key)

    def _terms(self, op: Op) -> float:
        """How many products are summed up in one element of the result."""
        return op.flops / (2 * max(1, self._graph.tensor_by_id[op.outputs[0]].numel))
