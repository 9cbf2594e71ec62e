"""Gradients through derivatives that jump: noise in what is read turns whole elements on or off.

Noise of standard deviation σ in x moves elements near a kink across it, and there a gradient appears from nothing or is
lost. With as many elements just above the kink as below, that is, of the gradient's energy,

    2·Σ w·Q(|x|/σ) / Σ w,    w = g² of the elements above, Q the upper tail of the standard normal distribution,

which grows as σ, not as σ² where derivatives are smooth: BF16 is four times better than E4M3 here, not sixteen. A pool
hands its gradient to another element where the largest two of a window change places. The rounding of x itself keeps
signs and order; what was rounded before does not.

Rows are linear in the formats, so σ is that of everything in one format, and it counts where the product before is in
that format, or x is: right for uniform plans. Measured: docs/measurements/fp8.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from autoprec.formats import Format, format_named, result_format
from autoprec.graphs import Op, OpClass, OpGraph
from autoprec.planning.activations import Activations
from autoprec.planning.flow import Flow
from autoprec.planning.noise import relative_error
from autoprec.planning.pricing import Prices
from autoprec.planning.values import GradientNode
from autoprec.profiles import RangeHistogram

__all__ = ["KINK_FACTORS", "flipped", "kink_nodes", "switched"]

#: Kind → by what 2·Σw·Q/Σw is multiplied: of |x| both sides have a gradient, and a wrong one is off by twice of it.
#: Slopes of leaky ReLUs are taken for small, and that ReLU6 ends at 6 is not counted.
KINK_FACTORS = {"relu": 1.0, "relu6": 1.0, "leaky_relu": 1.0, "abs": 2.0}
_MAX_POOLS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})


def flipped(histogram: RangeHistogram, sigma: float) -> float:
    """2·Σw·Q(|x|/σ) / Σw. Exact zeros are not moved: they were written as such."""
    weight, weighed_x, _ = histogram.moments.T
    moved = (weighed_x > 0.0) & (weight > 0.0)
    if sigma <= 0.0 or not moved.any():
        return 0.0
    w, x = weight[moved], weighed_x[moved] / weight[moved]
    tails = np.array([math.erfc(a) for a in (x / (math.sqrt(2.0) * sigma)).tolist()])  # 2·Q(a·√2) = erfc(a)
    return float((w * tails).sum() / w.sum())


@lru_cache(maxsize=64)
def _gap_density(window: int) -> float:
    """Density at 0 of the gap between the largest two of so many standard normal values: n·(n−1)·∫φ²·Φⁿ⁻²."""
    at = np.linspace(-8.0, 8.0, 4001)
    density = np.exp(-at * at / 2.0) / math.sqrt(2.0 * math.pi)
    below = np.array([0.5 * math.erfc(-a / math.sqrt(2.0)) for a in at.tolist()])
    return float(window * (window - 1) * (density**2 * below ** (window - 2)).sum() * (at[1] - at[0]))


def switched(window: int, relative_sigma: float) -> float:
    """Energy of the error of a max pool's gradient over windows of so many elements, in units of the gradient's.

    For normal values with noise of `relative_sigma` times their root mean square: the difference of two noises exceeds
    a small gap with density p₀ in p₀·σ/√π of the windows, and each of them is wrong twice.
    """
    if window < 2:
        return 0.0
    return min(2.0, 2.0 * _gap_density(window) * relative_sigma / math.sqrt(math.pi))


def kink_nodes(
    flow: Flow,
    activations: Activations,
    forward: tuple[GradientNode, ...],
    passing: dict[int, tuple[tuple[int, float], ...]],
) -> tuple[GradientNode, ...]:
    """What jumps of derivatives add to gradients, the last op first.

    `forward`: the nodes of `activations`. `passing`: forward moment → `GradientNode.inputs` of the op whose derivative
    it is.
    """
    graph, prices = flow.graph, flow.prices
    uniform = {fmt.name: _uniform(forward, fmt) for fmt in prices.narrow}
    found = []
    for moment, op in reversed(list(enumerate(graph.ops))):
        if (
            moment not in passing
            or op.kind not in (*KINK_FACTORS, *_MAX_POOLS)
            or not activations.carries(op.inputs[0])
        ):
            continue
        number = activations.number(op.inputs[0])
        local = {f.name: _jumps(op, f, uniform[f.name].get(number, 0.0), graph, prices) for f in prices.narrow}
        units = _writers(op.inputs[0], flow, activations)
        if units and any(local.values()):
            node = GradientNode(
                moment=len(graph.ops) + moment, outputs=(), inputs=passing[moment], units=units,
                local=tuple((f.name, _beside_result(local, f)) for f in prices.narrow),
            )  # fmt: skip
            found.append(node)
    return tuple(found)


def _uniform(forward: tuple[GradientNode, ...], fmt: Format) -> dict[int, float]:
    """Forward variances with everything in one format; for FP8 every product, and the rest in that of its results."""
    formats = {fmt.name, result_format(fmt.name)}
    variance: dict[int, float] = {}
    for node in reversed(forward):
        arrived = sum(share * variance.get(k, 0.0) for k, share in node.outputs)
        rounded = sum(relative for name, relative in node.local if name in formats)
        variance |= {k: share * (arrived + rounded) for k, share in node.inputs}
    return variance


def _beside_result(local: dict[str, float], fmt: Format) -> float:
    """What operands in FP8 or TF32 add to what the format of their results counts anyway."""
    return max(0.0, local[fmt.name] - local.get(result_format(fmt.name), 0.0)) if fmt.operands_only else local[fmt.name]


def _jumps(op: Op, fmt: Format, variance: float, graph: OpGraph, prices: Prices) -> float:
    """Relative variance of the gradient that an op passes on."""
    read = op.inputs[0]
    values = prices.values(read)
    if values is None or values.nonfinite or values.total_weight <= 0.0:
        return 0.0
    before = max(0.0, variance - relative_error(values, format_named(result_format(fmt.name))))
    if op.kind in _MAX_POOLS:
        window = round(graph.tensor_by_id[read].numel / max(1, graph.tensor_by_id[op.outputs[0]].numel))
        return switched(window, math.sqrt(before))
    weighted = prices.loss(read)  # by the squares of the gradients; without them all count alike
    sigma = math.sqrt(before * values.energy / values.total_weight)
    return KINK_FACTORS[op.kind] * flipped(values if weighted is None else weighted, sigma)


def _writers(tensor: str, flow: Flow, activations: Activations) -> tuple[int, ...]:
    """The unit that a tensor is written in, and that of the product before it, where most of its energy comes from."""
    units: list[int] = []
    while tensor in flow.graph.producer:
        op = flow.graph.op_by_id[flow.graph.producer[tensor]]
        unit = flow.output_unit(op)
        if unit is not None and (not units or op.op_class is OpClass.GEMM):
            units.append(unit)
        reads = [t for t in op.inputs if activations.carries(t)]
        if op.op_class is OpClass.GEMM or not reads:
            break
        tensor = max(reads, key=flow.gains.energy)
    return tuple(units)
