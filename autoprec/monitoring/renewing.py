"""Calibration's profile with the ranges of a window: how often numbers of a size occur is the window's, what each of
them is worth to the loss and to weight gradients is calibration's, because a window carries no such statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoprec.graphs import OpClass, OpGraph
from autoprec.profiles import BINS, Profile, RangeHistogram, TensorProfile

__all__ = ["renewed"]

_PER_OCTAVE = 4


def renewed(profile: Profile, window: Profile, graph: OpGraph, carried: Callable[[str], int]) -> Profile:
    """`profile` with the distributions of `window`, in which the gradient of a tensor carries 2^`carried(id)`.

    Every histogram keeps its energy: a tensor that became larger as a whole makes signal and noise larger alike.
    """
    read_by = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.op_class is OpClass.GEMM and op.weights}

    def of(found: Profile, tensor: str) -> RangeHistogram | None:
        """Its values, or those of what it is a view of."""
        seen = found.tensor_by_id.get(graph.seen_as(tensor, found.tensor_by_id))
        return None if seen is None else seen.values

    def tensor(t: TensorProfile) -> TensorProfile:
        if (seen := window.tensor_by_id.get(t.id)) is None:
            return t
        x, gradients = read_by.get(t.id), seen.gradients
        if gradients is not None:
            gradients = gradients.shifted(-carried(t.id))
        of_input = t.input_weight_grad if x is None else _weighted(t.input_weight_grad, of(profile, x), of(window, x))
        return TensorProfile(
            id=t.id,
            values=_with_energy(seen.values, t.values),
            loss=_weighted(t.loss, t.values, seen.values),
            gradients=t.gradients if gradients is None else _with_energy(gradients, t.gradients),
            input_weight_grad=of_input,
            gradient_weight_grad=_weighted(t.gradient_weight_grad, t.gradients, gradients),
        )

    return replace(profile, tensors=tuple(map(tensor, profile.tensors)))


def _with_energy(seen: RangeHistogram, usual: RangeHistogram | None) -> RangeHistogram:
    if usual is None or seen.energy <= 0.0 or usual.energy <= 0.0:
        return seen
    return seen.scaled(usual.energy / seen.energy)


def _weighted(
    weighted: RangeHistogram | None, usual: RangeHistogram | None, seen: RangeHistogram | None
) -> RangeHistogram | None:
    """Weights over numbers that are distributed as `seen`: the mean weight of a number of calibration, `usual`, of the
    same size in relation to all others."""
    if weighted is None or usual is None or seen is None:
        return weighted
    if min(weighted.energy, usual.energy, seen.energy, usual.total_weight, seen.total_weight) <= 0.0:
        return weighted
    grown = 0.5 * math.log2(seen.energy / seen.total_weight / (usual.energy / usual.total_weight))
    count = np.zeros(BINS)
    count[usual.bins] = usual.moments[:, 0]
    weight = np.zeros(BINS)
    weight[weighted.bins] = weighted.moments[:, 0]
    known = np.flatnonzero(count)
    at = seen.bins - round(grown * _PER_OCTAVE)
    each = np.interp(at, known, weight[known] / count[known])
    return _with_energy(replace(seen, moments=seen.moments * each[:, None]), weighted)
