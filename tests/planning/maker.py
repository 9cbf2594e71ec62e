"""Graphs made up op by op, with their profiles."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from autoprec.devices import CastTiming, Device, OpTiming
from autoprec.graphs import Op, OpClass, OpGraph, TensorKind, TensorSpec
from autoprec.profiles import BINS, LossProfile, Profile, RangeHistogram, TensorProfile, WeightProfile

FORMATS = ("fp32", "bf16", "fp16")
FP8 = ("fp8_e5m2", "fp8_e4m3")
STEPS = 4


def histogram(x: np.ndarray, weights: np.ndarray | float = 1.0) -> RangeHistogram:
    """The histogram of float32 values, as the calibration records it."""
    x = np.abs(np.asarray(x, np.float32)).ravel()
    w = np.broadcast_to(np.asarray(weights, np.float64), x.shape)
    bins = (x.view(np.uint32) >> 21).astype(np.int64)
    dense = np.zeros((BINS, 3))
    for k in range(3):
        dense[:, k] = np.bincount(bins, w * x.astype(np.float64) ** k, BINS)
    return RangeHistogram.from_dense(dense, amax=float(x.max(initial=0.0)), elements=float(x.size))


@dataclass
class Maker:
    """A graph, its profile and its device, op by op."""

    rng: np.random.Generator
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    frozen: float = 0.0  # the share of weights that are not trained
    breaks: list[int] = field(default_factory=list)  # numbers of the first ops of graphs but the first
    calm: bool = False  # statistics that go together as in a real network, instead of wildly different ones

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        kind: TensorKind = TensorKind.ACTIVATION,
        grad: bool = True,
        base: str | None = None,
        dtype: str = "float32",
    ) -> str:
        self.tensors[name] = TensorSpec(
            id=name, shape=shape, dtype=dtype, kind=kind, requires_grad=grad, base=base
        )  # fmt: skip
        return name

    def grad(self, *names: str) -> bool:
        return any(self.tensors[n].requires_grad for n in names)

    def op(
        self,
        kind: str,
        op_class: OpClass,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        *,
        saves: tuple[str, ...] = (),
        base: str | None = None,
        weights: tuple[str, ...] = (),
        private: int = 0,
        saves_output: bool = False,
        fqn: str = "",
        pinned: bool = False,
    ) -> str:
        name = f"{fqn or 'm'}:{kind}#{len(self.ops)}"
        out = self.tensor(name, shape, grad=self.grad(*inputs), base=base)
        saves = (*saves, out) if saves_output else saves
        flops = 2 * math.prod(shape) * self.tensors[inputs[0]].shape[-1] if op_class is OpClass.GEMM else 0
        self.ops.append(
            Op(id=name, kind=kind, op_class=op_class, fqn=fqn or "m", inputs=inputs, outputs=(out,), weights=weights,
               saves=saves if self.grad(out) else (), private_saved_bytes=private, pinned=pinned,
               timing_key=f"{kind}{shape}", flops=flops)
        )  # fmt: skip
        return out

    def linear(self, x: str, size: int, *, fqn: str = "", weight: str = "") -> str:
        rows, width = self.tensors[x].shape
        fqn = fqn or f"l{len(self.ops)}"
        weight = weight or f"{fqn}.weight"
        if f"param:{weight}" not in self.tensors:
            trained = bool(self.rng.random() >= self.frozen)
            self.tensor(f"param:{weight}", (size, width), kind=TensorKind.PARAMETER, grad=trained)
            self.weights.append(weight)
        inputs = (x, f"param:{weight}")
        return self.op("linear", OpClass.GEMM, inputs, (rows, size), saves=inputs, weights=(weight,), fqn=fqn)

    def lstm(self, x: str) -> str:
        """Of as many units as the input has; the weights' shapes are made up."""
        (rows, width), fqn = self.tensors[x].shape, f"r{len(self.ops)}"
        names = (f"{fqn}.weight_ih_l0", f"{fqn}.weight_hh_l0")
        own = tuple(self.tensor(f"param:{n}", (4 * width, width), kind=TensorKind.PARAMETER) for n in names)
        return self.op("lstm", OpClass.RECURRENT, (x, *own), (rows, width), saves=(x,), saves_output=True,
                       weights=names, private=16 * rows, fqn=fqn)  # fmt: skip

    def lookup(self, shape: tuple[int, int]) -> str:
        """Rows of a square table by indices."""
        indices = self.tensor("input:i", shape[:1], kind=TensorKind.INPUT, grad=False, dtype="int64")
        rows = self.tensor("param:embed.weight", (shape[1], shape[1]), kind=TensorKind.PARAMETER)
        self.weights.append("embed.weight")
        return self.op("embedding", OpClass.LOOKUP, (indices, rows), shape, saves=(indices,), weights=("embed.weight",),
                       fqn="embed")  # fmt: skip

    def split(self, x: str, rows: int) -> tuple[str, str]:
        """The first rows, and the others."""
        (whole, width), name = self.tensors[x].shape, f"m:split#{len(self.ops)}"
        parts = [self.tensor(f"{name}.{k}", (n, width), grad=self.grad(x), base=x)
                 for k, n in enumerate((rows, whole - rows))]  # fmt: skip
        self.ops.append(Op(id=name, kind="split", op_class=OpClass.VIEW, fqn="m", inputs=(x,), outputs=tuple(parts),
                           timing_key="split"))  # fmt: skip
        return parts[0], parts[1]

    def copying_product(self, x: str, y: str, shape: tuple[int, ...]) -> str:
        """A product of two activations, of which torch's own keeps copies of what it is given."""
        size = 4 * (self.tensors[x].numel + self.tensors[y].numel)
        return self.op("matmul", OpClass.GEMM, (x, y), shape, private=size)

    def norm(self, x: str) -> str:
        shape, fqn = self.tensors[x].shape, f"n{len(self.ops)}"
        scale = self.tensor(f"param:{fqn}.weight", shape[-1:], kind=TensorKind.PARAMETER)
        return self.op("layer_norm", OpClass.NORM, (x, scale), shape, saves=(x, scale), weights=(f"{fqn}.weight",),
                       private=8 * shape[0], fqn=fqn)  # fmt: skip

    def unfused_attention(self, queries: str, keys: str, values: str) -> str:
        """Op by op: it keeps copies of what it is given, and more."""
        rows, width = self.tensors[queries].shape
        given, private = (queries, keys, values), 4 * rows * (3 * width + 2 * rows)
        return self.op("scaled_dot_product_attention", OpClass.GEMM, given, (rows, width), private=private)

    def cross_entropy(self, x: str) -> str:
        """Of classes; as torch's, it keeps the logarithms of the probabilities and a sum."""
        rows, width = self.tensors[x].shape
        classes = self.tensor("input:y", (rows,), kind=TensorKind.INPUT, grad=False, dtype="int64")
        return self.op(
            "cross_entropy", OpClass.WIDE, (x, classes), (1,), saves=(classes,), private=4 * rows * width + 4
        )

    def crossing(self, x: str) -> str:
        """What the next graph is given of a tensor that this one returns."""
        self._return(x)
        shape, grad = self.tensors[x].shape, self.grad(x)
        return self.tensor(f"input:{len(self.breaks)}.{x}", shape, kind=TensorKind.INPUT, grad=grad, base=x)

    def _return(self, output: str) -> None:
        self.tensors[output] = dataclasses.replace(self.tensors[output], is_output=True)

    def graph(self, output: str) -> OpGraph:
        self._return(output)
        first = tuple(self.ops[k].id for k in (0, *self.breaks) if k < len(self.ops))
        size = sum(t.numel * 4 for t in self.tensors.values() if t.kind is TensorKind.PARAMETER)
        return OpGraph(model="Made", ops=tuple(self.ops), tensors=tuple(self.tensors.values()), parameter_bytes=size,
                       gradient_bytes=size, optimizer_bytes=2 * size, input_bytes=64,
                       first_ops=tuple(dict.fromkeys(first)))  # fmt: skip

    def _magnitudes(self, graph: OpGraph) -> tuple[dict[str, float], dict[str, float]]:
        """Root mean squares of values and of gradients: sums of what is added, and products that gain 0.25 to 1.25."""
        rng, spec = self.rng, graph.tensor_by_id
        sizes = {t.id: 10.0 ** rng.uniform(-0.3, 0.3) for t in graph.tensors}
        for op in graph.ops:
            y, x = op.outputs[0], sizes[op.inputs[0]]
            sizes |= dict.fromkeys(op.outputs, x)
            if op.op_class is OpClass.VIEW:
                sizes[y] = x
            elif op.kind == "add":
                sizes[y] = float(np.hypot(x, sizes[op.inputs[1]]))
            elif op.op_class is OpClass.GEMM and op.weights:
                sizes[op.inputs[1]] = sizes[y] / x * (rng.uniform(0.25, 1.25) / spec[op.inputs[0]].shape[-1]) ** 0.5
        squares = dict.fromkeys(sizes, 0.0)
        squares[graph.ops[-1].outputs[0]] = 1e-8
        for op in reversed(graph.ops):
            y = op.outputs[0]
            for t in op.inputs:
                share = 1.0 if op.op_class is OpClass.VIEW or op.kind == "add" else 10.0 ** rng.uniform(-0.3, 0.3)
                if op.op_class is OpClass.NORM:  # or gradients of hundreds of blocks overflow
                    share *= (sizes[y] / sizes[t]) ** 2
                if op.op_class is OpClass.GEMM and op.weights and t == op.inputs[0]:
                    share = spec[y].shape[-1] * sizes[op.inputs[1]] ** 2 / rng.uniform(0.25, 1.25)
                squares[t] += share * squares[y]
        return sizes, {t: (square or 1e-8) ** 0.5 for t, square in squares.items()}

    def profile(self, graph: OpGraph) -> Profile:
        rng = self.rng
        found = []
        sizes, slopes = self._magnitudes(graph) if self.calm else ({}, {})
        gemms = {op.outputs[0]: op for op in graph.ops if op.op_class is OpClass.GEMM and op.weights}
        for t in graph.tensors:
            x = rng.normal(size=64) * (sizes[t.id] if self.calm else 10.0 ** rng.uniform(-2, 1))
            g = rng.normal(size=64) * (slopes[t.id] if self.calm else 10.0 ** rng.uniform(-6, -2))
            if not t.requires_grad:
                found.append(TensorProfile(id=t.id, values=histogram(x)))
                continue
            gain = float((x @ x) / (g @ g)) if self.calm else 1e3
            found.append(
                TensorProfile(
                    id=t.id,
                    values=histogram(x),
                    loss=histogram(x, g**2),
                    gradients=histogram(g),
                    input_weight_grad=histogram(x, rng.gamma(1.0, size=64)) if t.id in gemms else None,
                    gradient_weight_grad=histogram(g, rng.gamma(1.0, size=64) * gain) if t.id in gemms else None,
                )
            )
        by_id = {t.id: t for t in found}
        weights = []
        inner = [(w, by_id[f"param:{w}"].gradients) for op in graph.ops
                 if op.op_class in (OpClass.RECURRENT, OpClass.LOOKUP) for w in op.weights]  # fmt: skip
        products = [(op.weights[0], by_id[op.outputs[0]].input_weight_grad) for op in gemms.values()]
        for weight, seen in (*products, *inner):
            if seen is None:
                continue
            energy = seen.energy / STEPS
            wide = rng.uniform(-0.3, 0.5) if self.calm else rng.uniform(-2, 1)
            mean, spread = rng.normal(size=8) * np.sqrt(energy / 8), energy * 10.0**wide
            squares = STEPS * float(mean @ mean) + (STEPS - 1) * spread
            if weight not in [w.fqn for w in weights]:
                weights.append(WeightProfile(fqn=weight, grad_sum=mean * STEPS, grad_square_sum=squares,
                                             fraction=1.0, steps=STEPS))  # fmt: skip
        loss = LossProfile(steps=STEPS, total=8.0, square_total=16.0 + 10.0 ** rng.uniform(-4, 0))
        return Profile(graph_fingerprint=graph.fingerprint, steps=STEPS, tensors=tuple(found),
                       weights=tuple(weights), loss=loss if rng.random() < 0.6 else None)  # fmt: skip

    def device(self, graph: OpGraph) -> Device:
        rng = self.rng
        roles = ("output", "grad_input", "grad_weight")
        keys = dict.fromkeys(op.timing_key for op in graph.ops)
        side = rng.spawn(1)[0]
        timings = tuple(
            OpTiming(
                timing_key=k,
                role=r,
                format=f,
                private_saved_bytes=int(side.integers(64)) if side.random() < 0.5 else None,
                seconds=1e-4 * float(rng.uniform(0.2, 1.5) if f != "fp32" else 1),
            )
            for k in keys
            for r in roles
            for f in FORMATS
        )
        timings += tuple(
            OpTiming(timing_key=k, role=r, format=f, seconds=1e-4 * float(side.uniform(0.1, 0.8)),
                     workspace_bytes=int(side.integers(64)))
            for k in keys for r in roles for f in FP8
        )  # fmt: skip
        tf32 = np.random.default_rng(len(keys))
        timings += tuple(
            OpTiming(timing_key=k, role=r, format="tf32", seconds=1e-4 * float(tf32.uniform(0.1, 1.2)),
                     workspace_bytes=int(tf32.integers(64)))
            for k in keys for r in roles
        )  # fmt: skip
        wide = np.random.default_rng(len(keys) + 1)  # torch's own products and ours, all in FP32
        sizes = {(k, r): wide.integers(400, size=2).tolist() for k in keys for r in roles[1:]}
        timings = tuple(
            dataclasses.replace(t, workspace_bytes=found[0], mixed_workspace_bytes=found[1])
            if t.format == "fp32" and (found := sizes.get((t.timing_key, t.role))) else t
            for t in timings
        )  # fmt: skip
        storages = (*FORMATS, *FP8)
        casts = tuple(
            CastTiming(
                source=a,
                target=b,
                seconds_per_element=float(rng.uniform(0.1, 2.0)) * (2e-8 if {a, b} & {*FP8} else 1e-7),
                seconds_per_call=float(rng.uniform(0.0, 1.0)) * 1e-6,
            )
            for a, b in itertools.permutations(storages, 2)
        )
        chance = np.random.default_rng([len(keys), len(graph.tensors), graph.parameter_bytes])
        native = [f for f in (*storages, "tf32") if f not in ("fp16", "bf16") or chance.random() < 0.5]
        timings = tuple(  # some were measured to take less than what is cast before them
            dataclasses.replace(t, workspace_bytes=int(chance.integers(64)))
            if t.format in ("fp16", "bf16") and chance.random() < 0.5 else t
            for t in timings
        )  # fmt: skip
        return Device(name="made up", type="cpu", native=tuple(native), timings=timings, casts=casts)
