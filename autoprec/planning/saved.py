"""What an op's backward pass makes of the tensor that it kept, and so what keeping it in a narrow format costs.

The gradient that a pointwise op passes on is g·d(s), with s the kept value and d the derivative written in it: s for a
product's other factor and for an exponential's result, 1 − s² for tanh's result, and so on. If g and s are independent,
rounding s adds the relative variance Σ(d(Q(s)) − d(s))² / Σ d(s)² to the gradient; both sums are over the tensor's
elements, read off its histogram of values. Norms take means over what they kept, in which most of its rounding
cancels: they count a fifth (measured: docs/measurements/storage.md). What an op that is not in the table keeps stays as
it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from autoprec.formats import Format
from autoprec.planning.noise import current_scale_log2, error_energy
from autoprec.profiles import RangeHistogram, bin_lower_edges

__all__ = ["PRODUCTS", "logits_variance", "relative_change", "relative_variance"]

_Array = npt.NDArray[np.float64]
_Derivative = Callable[[_Array], _Array]

#: Products of two tensors: the gradient of each is made with the other.
PRODUCTS = frozenset({"mul", "matmul", "bmm", "mm"})

_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")

#: Measured: 1/257 to 1/6 on 12 norms of two trained networks (python -m tests.storage_study).
_NORM_FRAC = 0.2

#: Points within each quarter-octave bin at which derivatives are compared. Odd, because a format has a power of two of
#: numbers there: so the points fall everywhere between two of them.
_POINTS = 61


def _sigmoid(s: _Array) -> _Array:
    return 1.0 / (1.0 + np.exp(-s))


def _silu(s: _Array) -> _Array:
    p = _sigmoid(s)
    return p * (1.0 + s * (1.0 - p))


def _gelu(s: _Array) -> _Array:
    """By tanh's formula; the exact one differs by less than 1e-3."""
    inner = math.sqrt(2.0 / math.pi) * (s + 0.044715 * s**3)
    slope = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * s**2)
    return 0.5 * (1.0 + np.tanh(inner)) + 0.5 * s * (1.0 - np.tanh(inner) ** 2) * slope


def _mish(s: _Array) -> _Array:
    t = np.tanh(np.logaddexp(0.0, s))
    return t + s * _sigmoid(s) * (1.0 - t**2)


def _itself(s: _Array) -> _Array:
    return s


def _nothing(s: _Array) -> _Array:
    return np.zeros_like(s)


#: d(s) where the op keeps its own result.
_OF_RESULT: dict[str, _Derivative] = {
    "exp": _itself,
    "exp2": _itself,
    "tanh": lambda s: 1.0 - s**2,
    "sigmoid": lambda s: s * (1.0 - s),
    "softmax": _itself,
}

#: d(s) where it keeps what it read.
_OF_INPUT: dict[str, _Derivative] = {
    "mul": _itself,
    "square": _itself,
    "matmul": _itself,
    "bmm": _itself,
    "mm": _itself,
    "silu": _silu,
    "gelu": _gelu,
    "mish": _mish,
    "softplus": _sigmoid,
    "log": lambda s: 1.0 / s,
    "log1p": lambda s: 1.0 / (1.0 + s),
    "sin": np.cos,
    "cos": np.sin,
}
_OF_INPUT |= dict.fromkeys(_NORMS, _itself)
# Pooling keeps its input for the sake of its shape.
_OF_INPUT |= {f"{p}_pool{n}d": _nothing for p in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)}

#: Results that are never negative; a histogram of magnitudes does not tell.
_POSITIVE = frozenset({"exp", "exp2", "sigmoid", "softmax", "log", "log1p"})


#: Values where an op is a function of one number.
_VALUE: dict[str, _Derivative] = {
    "gelu": lambda s: 0.5 * s * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (s + 0.044715 * s**3))),
    "silu": lambda s: s * _sigmoid(s),
    "mish": lambda s: s * np.tanh(np.logaddexp(0.0, s)),
    "relu": lambda s: np.maximum(s, 0.0),
}


def relative_change(kind: str, values: RangeHistogram, fmt: Format, scale_log2: int) -> float:
    """Relative variance of an op's result where it is given these values rounded to `fmt`; inf for unknown kinds."""
    if kind not in _VALUE:
        return math.inf
    weight, points = _points(values)
    error, energy = _compared(_VALUE[kind], weight, points, fmt, scale_log2, (1.0, -1.0))
    return error / energy if energy > 0.0 else 0.0


def relative_variance(kind: str, is_result: bool, values: RangeHistogram, fmt: Format) -> float | None:
    """Relative variance of the gradient through an op that keeps a tensor with these values in `fmt`, under current
    scaling; None where the table does not know the op, or the tensor does not fit into the format.
    """
    derivative = (_OF_RESULT if is_result else _OF_INPUT).get(kind)
    if derivative is None or (not fmt.scaled and values.amax > fmt.max_value):
        return None
    scale_log2 = current_scale_log2(fmt, values.amax)
    weight, points = _points(values)
    signs = (1.0,) if kind in _POSITIVE else (1.0, -1.0)
    error, energy = _compared(derivative, weight, points, fmt, scale_log2, signs)
    return (_NORM_FRAC if kind in _NORMS else 1.0) * error / energy if energy > 0.0 else 0.0


def logits_variance(
    values: RangeHistogram, loss: RangeHistogram, gradients: RangeHistogram, fmt: Format
) -> float | None:
    """Relative variance of the gradient of logits that a cross entropy keeps in `fmt`, under current scaling; None
    where they do not fit into the format. `loss`: of their values, weighted by the squares of that gradient.

    Of a row it is g = s·(p − e), with p the softmax, e the target's unit vector and s what arrives. Errors of the
    logits with variances v, independent of each other, change it by s·(diag p − p·pᵀ) of them: by an energy of
    s²·Σ v_j·p_j²·((1 − p_j)² + Σ_{k≠j} p_k²), at most 2·Σ v_j·g_j²·(1 − |g_j|/s)². Here s is taken to be the largest
    |g|, which some row that is wrong comes near, and the last factor at its mean over Σ g². That is 0.3 to 5 times what
    is measured, and more where all probabilities are small (`tests/test_losses.py`).
    """
    if (not fmt.scaled and values.amax > fmt.max_value) or loss.total_weight <= 0.0 or gradients.energy <= 0.0:
        return None
    _, wx, wxx = gradients.moments.T
    share = np.minimum(1.0, wxx / np.where(wx > 0.0, wx, 1.0) / gradients.amax)
    unsure = float((wxx * (1.0 - share) ** 2).sum()) / gradients.energy
    error = error_energy(loss, fmt, current_scale_log2(fmt, values.amax))
    return 2.0 * unsure * error / loss.total_weight


def _points(values: RangeHistogram) -> tuple[_Array, _Array]:
    """(weight of each occupied bin, points in it)."""
    lower, upper = bin_lower_edges(values.bins), bin_lower_edges(values.bins + 1)
    weight = values.moments[:, 0]
    inside = np.isfinite(upper) & (weight > 0.0) & (values.moments[:, 1] > 0.0)
    at = (np.arange(_POINTS) + 0.5) / _POINTS
    return weight[inside], lower[inside, None] + (upper - lower)[inside, None] * at


def _compared(
    function: _Derivative, weight: _Array, points: _Array, fmt: Format, scale_log2: int, signs: tuple[float, ...]
) -> tuple[float, float]:
    """Σ (f(Q(s)) − f(s))² and Σ f(s)², over the points with each of the signs."""
    error = energy = 0.0
    for sign in signs:
        with np.errstate(all="ignore"):
            exact, rounded = function(sign * points), function(sign * _rounded(points, fmt, scale_log2))
        exact, rounded = (np.nan_to_num(d, nan=0.0, posinf=1e150, neginf=-1e150) for d in (exact, rounded))
        error += float((weight * ((rounded - exact) ** 2).mean(1)).sum())
        energy += float((weight * (exact**2).mean(1)).sum())
    return error, energy


def _rounded(x: _Array, fmt: Format, scale_log2: int) -> _Array:
    """Positive x, times 2^scale, rounded to nearest even, and back; magnitudes beyond the largest value become it."""
    _, exponent = np.frexp(x)
    step_log2 = np.maximum(exponent - 1 + scale_log2, fmt.min_normal_log2) - fmt.mantissa_bits - scale_log2
    step = np.exp2(step_log2.astype(np.float64))
    return np.asarray(np.minimum(np.round(x / step) * step, np.ldexp(fmt.max_value, -scale_log2)))
