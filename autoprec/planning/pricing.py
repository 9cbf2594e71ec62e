"""Noise read off a profile: per-step energies of every rounding that a plan can choose."""

from __future__ import annotations

import math

from autoprec.formats import FP16, Format, format_named, other_operand
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind
from autoprec.planning.loss_scaling import largest_loss_scale_log2
from autoprec.planning.noise import current_scale_log2, error_energy, ordinary, saturates_by_design
from autoprec.planning.roots import Roots
from autoprec.planning.saved import relative_variance
from autoprec.policies import Policy
from autoprec.profiles import Profile, RangeHistogram, TensorProfile

__all__ = ["ROOM_LOG2", "Prices", "fp16_gradient_scale_log2", "told_scale"]

#: Least spread of a gradient, as a share of its energy: where all batches are the same there is no noise to hide
#: behind. Under `noise.gradient` 0.05 a relative error of 5e-5 is left, which FP32 alone keeps (BF16 rounds by up to
#: 2e-3); under 1000, which is to bind nothing, an error as large as the gradient.
_LEAST_SPREAD = 1e-6

#: FP16 gradients are scaled so that amax stays this many octaves below the largest value. What arrives between two
#: observed steps was up to five octaves larger than what was observed; up to sixteen cost no gradient its precision
#: (python -m tests.room_study, docs/measurements/room.md).
ROOM_LOG2 = 8

#: A tensor of the same region whose own amax would be below 2^this takes of that room, down to so many octaves: its
#: RMS, some octaves lower, comes near to FP16's last normal number, 2^-14 (docs/measurements/room.md).
_SMALLEST_LOG2, CLOSEST_LOG2 = -4, 3


def fp16_gradient_scale_log2(amax: float, smallest: float = math.inf) -> int:
    """Largest s with amax·2^s ≤ 65504/256; or more, up to 65504/8, as far as that brings the `smallest` amax of those
    under the same scale up to 2^-4. 0 if there is nothing to scale; within ±126."""
    if amax <= 0.0 or not math.isfinite(amax):
        return 0
    scale = math.frexp(FP16.max_value / 2**ROOM_LOG2 / amax)[1] - 1
    if 0.0 < smallest < amax:
        wanted = _SMALLEST_LOG2 + 1 - math.frexp(smallest)[1]
        scale = max(scale, min(wanted, scale + ROOM_LOG2 - CLOSEST_LOG2))
    return max(-126, min(126, scale))


def told_scale(amax: float, where: str, scale_log2: int) -> str:
    """Why gradients have a scale."""
    left = math.log2(FP16.max_value / amax) - scale_log2
    return f"largest gradient {amax:.3g} (at {where}) times 2^{scale_log2} is {left:.1f} octaves below 65504"


#: Roundings between the gradient that arrives at a layer of an LSTM and those that it passes on. The gradient of a gate
#: is a product of the one that arrives, the output gate, tanh of the cell and two more kept activations; it is rounded
#: itself, and multiplied by a weight or an input that is. Each rounds with about the same relative variance
#: (python -m tests.recurrent_study, docs/measurements/recurrent.md).
_LSTM_ROUNDINGS = 7


class Prices:
    """A profile seen through a graph: energies per step, by tensor and op. Missing histograms are None."""

    def __init__(self, graph: OpGraph, roots: Roots, profile: Profile, policy: Policy) -> None:
        self._graph = graph
        self._roots = roots
        self._profile = profile
        self._policy = policy
        self._global_log2: int | None = None if policy.loss_scaling.mode == "regional" else 0
        if policy.loss_scaling.mode == "global":  # a scale that overflows is backed off from
            init, largest = policy.loss_scaling.init, largest_loss_scale_log2(profile)
            self._global_log2 = largest if isinstance(init, str) else min(largest, math.frexp(init)[1] - 1)
        self.steps = profile.steps
        self.storages = tuple(format_named(name) for name in policy.storage.formats)
        computed = dict.fromkeys(("bf16", "fp16", *policy.formats))
        computed |= dict.fromkeys(other_operand(f) for f in tuple(computed))
        computed |= dict.fromkeys(policy.storage.frozen)
        #: Formats that a tensor may be rounded to where it is computed with, or for good.
        self.narrow = tuple(format_named(name) for name in computed if name != "fp32")
        self._members: dict[str, list[str]] = {}
        for t in graph.tensors:
            self._members.setdefault(roots.root_of[t.id], []).append(t.id)

    def _profiles(self, tensor: str) -> list[TensorProfile]:
        """Its own profile, then its root's, then those of other views of it."""
        root = self._roots.root_of[tensor]
        ids = dict.fromkeys((tensor, root, *self._members[root]))
        return [self._profile.tensor_by_id[t] for t in ids if t in self._profile.tensor_by_id]

    def values(self, tensor: str) -> RangeHistogram | None:
        """Histogram of its values."""
        return next((p.values for p in self._profiles(tensor)), None)

    def gradients(self, tensor: str) -> RangeHistogram | None:
        """Histogram of its gradient."""
        return next((p.gradients for p in self._profiles(tensor) if p.gradients is not None), None)

    def loss(self, tensor: str) -> RangeHistogram | None:
        """Histogram of its values weighted by the squares of its gradient."""
        return next((p.loss for p in self._profiles(tensor) if p.loss is not None), None)

    def versions(self, root: str) -> list[str]:
        """The root and its in-place results: each holds other values."""
        graph = self._graph
        made = [t for t in self._members[root] if t in graph.producer and t != root]
        return [root, *(t for t in made if graph.op_by_id[graph.producer[t]].op_class is not OpClass.VIEW)]

    def loss_noise(self, root: str, fmt: Format) -> float:
        """E(δL)² per step of rounding every version of a root tensor; 0.0 where it was not observed."""
        total = 0.0
        if self._graph.tensor_by_id[root].kind is TensorKind.PARAMETER:
            fmt = format_named(other_operand(fmt.name))
        for t in self.versions(root):
            histogram = next((p.loss for p in self._profiles(t) if p.loss is not None), None)
            values = self.values(t)
            if histogram is not None and values is not None and not fmt.scaled and saturates_by_design(values, fmt):
                histogram = ordinary(histogram, fmt)
            if histogram is not None:
                scale = current_scale_log2(fmt, values.amax if values is not None else histogram.amax)
                energy = error_energy(histogram, fmt, scale)
                total += energy if math.isfinite(energy) else 0.0  # an option that overflows is never chosen
        return total / self._profile.steps

    def _scale(self, fmt: Format, histogram: RangeHistogram) -> int:
        if fmt.scaled:
            return current_scale_log2(fmt, histogram.amax)
        if fmt is not FP16:
            return 0
        return fp16_gradient_scale_log2(histogram.amax) if self._global_log2 is None else self._global_log2

    def gradient_overflow(self, op: Op, role: Role, fmt: Format) -> str:
        """Why the gradients that arrive cannot be in this format, or ""."""
        if role is Role.OUTPUT and Role.GRAD_INPUT in op.roles:
            return ""
        for t in op.outputs:
            histogram = self.gradients(t)
            if histogram is None:
                continue
            if math.isinf(error_energy(histogram, fmt, self._scale(fmt, histogram))):
                return f"{fmt.name} overflows: gradient amax {histogram.amax:.3g} of {t} > {fmt.max_value:.6g}"
        return ""

    def relative_variance(self, op: Op, fmt: Format) -> float:
        """Relative variance of rounding the gradient that arrives at an op's outputs.

        Without a histogram: 2^(−2m)/12, the largest that in-range rounding can be. Recurrent layers round more than
        that on the way to their inputs and weights: see `_LSTM_ROUNDINGS`. In a format of operands alone the weight
        that the gradient is multiplied by is rounded as coarsely.
        """
        found = self._roundings(op) * self._arriving_variance(op, fmt)
        if fmt.operands_only and op.op_class is OpClass.GEMM:
            beside = format_named(other_operand(fmt.name))
            weights = [h for t in op.inputs[1:2] if (h := self.values(t)) is not None and h.energy > 0.0]
            found += sum(error_energy(h, beside, current_scale_log2(beside, h.amax)) / h.energy for h in weights)
        return found

    def _roundings(self, op: Op) -> int:
        if op.op_class is not OpClass.RECURRENT:
            return 1
        specs = [self._graph.tensor_by_id.get(f"param:{w}") for w in op.weights]
        matrices = sum(spec is not None and len(spec.shape) == 2 for spec in specs)
        return _LSTM_ROUNDINGS * max(1, matrices // 2)

    def _arriving_variance(self, op: Op, fmt: Format) -> float:
        error = energy = 0.0
        for t in op.outputs:
            histogram = self.gradients(t)
            if histogram is not None:
                error += error_energy(histogram, fmt, self._scale(fmt, histogram))
                energy += histogram.energy
        return error / energy if energy > 0.0 else math.ldexp(1.0, -2 * fmt.mantissa_bits) / 12.0

    def gradient_energy(self, op: Op, outputs: list[str]) -> float:
        """Σ g² over the given outputs, or 0.0 if one was not observed."""
        histograms = [self.gradients(t) for t in outputs]
        return sum(h.energy for h in histograms if h is not None) if None not in histograms else 0.0

    def input_weight_grad(self, op: Op) -> RangeHistogram | None:
        """Histogram that prices the rounding of a GEMM's input in its weight gradient."""
        found = (p.input_weight_grad for p in self._profiles(op.outputs[0]))
        return next((h for h in found if h is not None), None)

    def gradient_weight_grad(self, op: Op) -> RangeHistogram | None:
        """Histogram that prices the rounding of the gradient in a GEMM's weight gradient."""
        found = (p.gradient_weight_grad for p in self._profiles(op.outputs[0]))
        return next((h for h in found if h is not None), None)

    def reference(self, weight: str) -> float:
        """What the noise of a weight gradient is held against: its spread over batches; its energy where one batch
        alone gave a gradient."""
        found = self._profile.weight_by_fqn.get(weight)
        if found is None or found.steps == 0:
            return 0.0
        return found.energy if found.steps == 1 else max(found.spread, _LEAST_SPREAD * found.energy)

    def has_row(self, op: Op) -> bool:
        """Whether the op computes the gradient of a weight."""
        if not (op.op_class is OpClass.GEMM and op.weights):
            return False
        spec = self._graph.tensor_by_id.get(f"param:{op.weights[0]}")
        return spec is None or spec.requires_grad

    def inner_weights(self, op: Op) -> list[str]:
        """Weights whose gradients are judged by what arrives at the op: the matrices of recurrent layers, the tables of
        lookups, and parameters that are an operand like any other (of bmm, say, or in a kernel of torch's)."""
        if op.op_class in (OpClass.RECURRENT, OpClass.LOOKUP):
            found = [f"param:{w}" for w in op.weights]
        elif op.op_class is OpClass.GEMM and not op.weights:
            found = [root for t in op.inputs if (root := self._roots.root_of[t]).startswith("param:")]
        else:
            return []
        specs = [s for t in dict.fromkeys(found) if (s := self._graph.tensor_by_id.get(t)) is not None]
        names = [s.id.removeprefix("param:") for s in specs if s.requires_grad and len(s.shape) >= 2]
        return [w for w in names if self.reference(w) > 0.0]

    def weight_energy(self, weight: str) -> float:
        """E‖∇W‖² per step."""
        return self._profile.weight_by_fqn[weight].energy

    def unjudged(self, op: Op) -> str:
        """Why the noise of this GEMM's weight gradient cannot be judged, or ""."""
        if not self.has_row(op):
            return ""
        if self.reference(op.weights[0]) <= 0.0:
            return f"no gradient of weight {op.weights[0]} was observed, so its noise cannot be judged"
        if self.input_weight_grad(op) is None or self.gradient_weight_grad(op) is None:
            return f"the operands of weight {op.weights[0]}'s gradient were not observed, so its noise cannot be judged"
        return ""

    def saver_noise(self, op: Op, tensor: str) -> dict[str, float]:
        """By storage, what keeping this tensor in it adds to the relative variance of the gradient that the op passes
        on; without those that cannot be judged."""
        values = self.values(tensor)
        if values is None or values.nonfinite:
            return {}
        found = {f.name: relative_variance(op.kind, tensor in op.outputs, values, f) for f in self.storages}
        return {name: variance for name, variance in found.items() if variance is not None}

    def gemm_noise(self, op: Op) -> tuple[dict[str, float], dict[str, float], dict[str, float], float, float]:
        """(x by format, x by storage, arriving gradient by format, energy of x, upstream energy), per step; zeros if
        unjudged."""
        x, gradient = self.input_weight_grad(op), self.gradient_weight_grad(op)
        if not self.has_row(op) or self.unjudged(op) or x is None or gradient is None:
            return {}, {}, {}, 0.0, 0.0
        values = self.values(op.inputs[0])
        amax = values.amax if values is not None else x.amax
        steps = self._profile.steps
        x_noise = {f.name: error_energy(x, f, current_scale_log2(f, amax)) / steps for f in self.narrow}
        stored = {f.name: error_energy(x, f, current_scale_log2(f, amax)) / steps for f in self.storages}
        arrives = self.gradients(op.outputs[0])
        scaling = gradient if arrives is None else arrives
        arriving = {
            f.name: error_energy(gradient, f, self._scale(f, scaling if f.scaled else gradient)) / steps
            for f in self.narrow
        }
        return x_noise, stored, arriving, x.energy / steps, gradient.energy / steps
