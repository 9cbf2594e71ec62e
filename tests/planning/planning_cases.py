"""Graphs, profiles and devices made up for the planner's tests."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoprec.devices import CastTiming, Device, OpTiming
from autoprec.graphs import OpClass, OpGraph, TensorKind
from autoprec.planning.brute_force import choices_count
from autoprec.planning.planner import make_plan
from autoprec.planning.problem import build_problem
from autoprec.planning.values import Gemm, Problem
from autoprec.plans import Plan
from autoprec.policies import Policy
from autoprec.profiles import Profile
from tests.planning.maker import FORMATS, FP8, Maker

#: What a policy may allow: nothing, one narrow storage, or both.
STORAGES = ((), ("fp8_e4m3",), ("bf16",), ("bf16", "fp8_e4m3"))


@dataclass(frozen=True)
class Case:
    graph: OpGraph
    profile: Profile
    device: Device
    policy: Policy
    banned: frozenset[tuple[str, str]] = frozenset()
    strided: bool = False  # products with a weight make its gradient of a third of what they read
    pieces: int = 0  # number of what chance says of the pieces of products with a weight; 0: they have none

    def problem(self, budget_bytes: int | None = None) -> Problem:
        made = build_problem(self.graph, self.profile, self.device, self.policy, budget_bytes=budget_bytes,
                             banned=self.banned)  # fmt: skip
        gemms = made.gemms
        if self.strided:
            gemms = tuple(dataclasses.replace(g, seen_numel=g.x_numel // 3) for g in gemms)
        if self.pieces:
            rng = np.random.default_rng([self.pieces, 39])
            gemms = tuple(in_pieces(g, rng) if g.grad_weight != g.grad_input else g for g in gemms)
        return dataclasses.replace(made, gemms=gemms)


def in_pieces(gemm: Gemm, rng: np.random.Generator) -> Gemm:
    """A product that goes a few rows at a time, as convolutions do, in most formats."""
    formats = [f for f in ("fp32", "bf16", "fp16") if rng.random() < 0.8]
    of_input, of_weight = (tuple((f, float(rng.choice([0.5, 0.3, 0.1]))) for f in formats) for _ in range(2))
    spared = tuple((f, int(rng.integers(-40, 100))) for f in formats)
    return dataclasses.replace(gemm, input_pieces=of_input, weight_pieces=of_weight, spared=spared)


def random_graph(rng: np.random.Generator) -> tuple[Maker, OpGraph]:
    """Three to eight ops, and a sum: linears, residual edges, views, copies, norms, in-place ops, many readers; some in
    two graphs or three."""
    make = Maker(rng, frozen=0.1)
    width, rows = int(rng.integers(2, 6)), int(rng.integers(2, 6))
    shape = (rows, width)
    live = [make.tensor("input:x", shape, kind=TensorKind.INPUT, grad=bool(rng.random() < 0.2))]
    if rng.spawn(1)[0].random() < 0.3:
        live.append(make.lookup(shape))
    linears = 0
    parting = np.random.default_rng([rng.bit_generator.seed_seq.entropy, 36])  # type: ignore[attr-defined]
    count = int(rng.integers(3, 9))
    breaking = np.random.default_rng([rng.bit_generator.seed_seq.entropy, 38])  # type: ignore[attr-defined]
    break_after = set(breaking.integers(count, size=int(breaking.integers(1, 3)))) if breaking.random() < 0.2 else ()
    split_after = int(parting.integers(count)) if parting.random() < 0.2 else -1
    for k in range(count):
        x = live[-1] if rng.random() < 0.6 else live[int(rng.integers(len(live)))]
        y = live[int(rng.integers(len(live)))]
        kind = str(rng.choice(["linear", "linear", "add", "relu", "gelu", "norm", "view", "copy", "softmax", "matmul",
                               "relu_", "iadd", "lstm"]))  # fmt: skip
        if kind == "linear" and linears < 3:
            linears += 1
            tied = make.weights[0] if make.weights and rng.random() < 0.2 else ""
            out = make.linear(x, width, weight=tied)
        elif kind == "add":
            out = make.op("add", OpClass.POINTWISE, (x, y), shape)
        elif kind == "relu":
            out = make.op("relu", OpClass.POINTWISE, (x,), shape, saves_output=True)
        elif kind == "norm":
            out = make.norm(x)
        elif kind == "lstm":
            out = make.lstm(x)
        elif kind == "view":
            out = make.op("view", OpClass.VIEW, (x,), shape, base=x)
        elif kind == "copy":
            out = make.op("contiguous", OpClass.VIEW, (x,), shape)
        elif kind == "softmax":
            out = make.op("softmax", OpClass.WIDE, (x,), shape, saves_output=True)
        elif kind == "matmul":
            out = make.op("matmul", OpClass.GEMM, (x, y), shape, saves=(x, y) if x != y else (x,))
        elif kind == "relu_" and x != "input:x":
            out = make.op("relu", OpClass.POINTWISE, (x,), shape, base=x, saves_output=True)
        elif kind == "iadd" and x != "input:x" and x != y:
            out = make.op("add", OpClass.POINTWISE, (x, y), shape, base=x)
        else:
            out = make.op("gelu", OpClass.POINTWISE, (x,), shape, saves=(x,))
        live.append(out)
        if k in break_after:
            make.breaks.append(len(make.ops))
            live = [make.crossing(t) if make.tensors[t].kind is TensorKind.ACTIVATION else t for t in live[-3:]]
        if k == split_after:
            live.append(through_parts(make, live[int(parting.integers(len(live)))], shape, parting))
    sums = np.random.default_rng([rng.bit_generator.seed_seq.entropy, 37])  # type: ignore[attr-defined]
    if sums.random() < 0.25:  # what it sends back is a view
        x = live[int(sums.integers(len(live)))]
        total = make.op("sum", OpClass.WIDE, (x,), (rows, 1))
        live.append(make.op("mul", OpClass.POINTWISE, (live[-1], total), shape, saves=(live[-1], total)))
    gates = np.random.default_rng([rng.bit_generator.seed_seq.entropy, 39])  # type: ignore[attr-defined]
    if gates.random() < 0.25:
        live.append(gated(make, live, shape, gates))
    ends = np.random.default_rng([rng.bit_generator.seed_seq.entropy, 35])  # type: ignore[attr-defined]
    if ends.random() < 0.3:
        queries, keys, values = (live[int(ends.integers(len(live)))] for _ in range(3))
        live.append(make.unfused_attention(queries, keys, values))
    if ends.random() < 0.3:
        live.append(make.cross_entropy(live[-1]))
    checkpoint_some(make, rng.spawn(1)[0])
    return make, make.graph(live[-1])


def gated(make: Maker, live: list[str], shape: tuple[int, int], rng: np.random.Generator) -> str:
    """A factor that may be made again, and a product that may, if a linear layer reads it."""
    g, u = (live[int(rng.integers(len(live)))] for _ in range(2))
    h = make.op("gelu", OpClass.POINTWISE, (g,), shape, saves=(g,))
    product = make.op("mul", OpClass.POINTWISE, (h, u), shape, saves=(h, u))
    return make.linear(product, shape[1]) if rng.random() < 0.6 else product


def through_parts(make: Maker, x: str, shape: tuple[int, int], rng: np.random.Generator) -> str:
    """Two parts of a tensor, that go through ops of their own (or the second through none), and a whole again."""
    one, other = make.split(x, int(rng.integers(1, shape[0])))
    kinds = rng.choice(["gelu", "linear", "matmul", "part"], size=2)
    found = []
    for t, kind in ((one, str(kinds[0])), (other, str(kinds[1]))):
        own = make.tensors[t].shape
        if kind == "linear":
            found.append(make.linear(t, shape[1]))
        elif kind == "matmul":
            found.append(make.copying_product(t, str(rng.choice([one, other])), own))
        elif kind == "part" and own[0] > 1:
            found.append(make.op("gelu", OpClass.POINTWISE, (make.split(t, 1)[0],), own, saves=(t,)))
        else:
            found.append(make.op("gelu", OpClass.POINTWISE, (t,), own, saves=(t,)))
    if rng.random() < 0.3:
        return make.op("cat", OpClass.POINTWISE, (found[0], one), shape)
    return make.op("cat", OpClass.POINTWISE, tuple(found), shape)


def checkpoint_some(make: Maker, rng: np.random.Generator) -> None:
    """Half of the graphs get activation checkpoints, some of them one inside another."""
    if rng.random() < 0.5:
        return
    bounds = sorted(int(k) for k in rng.integers(len(make.ops) + 1, size=4))
    path: tuple[str, ...] = ()
    for name, (first, last) in {"c0": (bounds[0], bounds[3]), "c1": (bounds[1], bounds[2])}.items():
        path = (*path, name)
        for i in range(first, last):
            make.ops[i] = dataclasses.replace(make.ops[i], checkpoints=path)


@lru_cache(maxsize=1000)
def random_case(seed: int, *, most: int = 256) -> Case:
    """A problem with at most `most` choices."""
    rng = np.random.default_rng(seed)
    make, graph = random_graph(rng)
    formats = FORMATS if rng.random() < 0.5 else ("fp32", "bf16")
    side, rules = rng.spawn(1)[0], []
    if side.random() < 0.5:  # products of activations have FP8 where a rule says so
        formats = (*formats, *FP8) if side.random() < 0.5 else ("fp32", str(side.choice(FP8)))
        rules = [{"kinds": ["matmul"], "pin": formats[-1], "optional": True}] if side.random() < 0.5 else []
    if np.random.default_rng([seed, 32]).random() < 0.3:
        formats = ("tf32", *formats)
    policy = Policy.model_validate({
        "name": "made up",
        "formats": formats,
        "rules": rules,
        "objective": "time" if rng.random() < 0.5 else "bytes",
        "noise": {"gradient": 10.0 ** float(rng.uniform(-3.0, 0.5)), "loss": 10.0 ** float(rng.uniform(-6.0, -1.0))},
        "storage": {"formats": STORAGES[int(np.searchsorted((0.2, 0.5, 0.6), rng.random()))]},
    })  # fmt: skip
    last = np.random.default_rng([seed, 33])
    if last.random() < 0.3:
        graph = with_frozen_weights(graph, last)
        frozen = STORAGES[int(last.integers(2, 4))]
        policy = policy.replaced(storage={"formats": policy.storage.formats, "frozen": frozen})
    if (parts := np.random.default_rng([seed, 34])).random() < 0.3:
        firsts = tuple(op.id for op in graph.ops if parts.random() < 0.3)
        graph = dataclasses.replace(graph, compiled=True, first_ops=firsts, loss_bytes=int(parts.integers(200)))
    strided, piecing = bool(last.random() < 0.3), np.random.default_rng([seed, 39])
    pieces = seed + 1 if piecing.random() < 0.3 else 0
    case = Case(graph, make.profile(graph), make.device(graph), policy, strided=strided, pieces=pieces)
    banned: set[tuple[str, str]] = set()
    while choices_count(problem := case.problem()) > most:
        units = [u for u in problem.units if len(u.options) > 1 and not u.is_parameter]
        if not units:
            policy = policy.replaced(storage={"formats": policy.storage.formats[1:]})
            case = dataclasses.replace(case, policy=policy)
            continue
        unit = units[int(rng.integers(len(units)))]
        banned.add((unit.op, str(rng.choice([f for f in unit.options if f != "fp32"]))))
        case = dataclasses.replace(case, banned=frozenset(banned))
    return case


def with_frozen_weights(graph: OpGraph, rng: np.random.Generator) -> OpGraph:
    """The same graph, in which more of the weights of linears and lookups are not trained."""
    weights = {f"param:{w}" for op in graph.ops if op.kind in ("linear", "embedding") for w in op.weights}
    frozen = {t for t in sorted(weights) if rng.random() < 0.6}
    specs = (dataclasses.replace(t, requires_grad=False) if t.id in frozen else t for t in graph.tensors)
    return dataclasses.replace(graph, tensors=tuple(specs))


def transformer(layers: int = 12, *, width: int = 64, rows: int = 128, seed: int = 0) -> tuple[Maker, OpGraph]:
    """A lookup, and blocks: norm, q/k/v, attention, projection, residual, norm, two linears with GELU, residual."""
    make = Maker(np.random.default_rng(seed), calm=True)
    x = make.lookup((rows, width))
    for i in range(layers):
        h = make.norm(x)
        q, k, v = (make.linear(h, width, fqn=f"b{i}.{n}") for n in "qkv")
        views = [make.op("view", OpClass.VIEW, (t,), (rows, width), base=t) for t in (q, k, v)]
        a = make.op("scaled_dot_product_attention", OpClass.GEMM, tuple(views), (rows, width), saves=tuple(views),
                    saves_output=True, private=4 * rows)  # fmt: skip
        a = make.op("contiguous", OpClass.VIEW, (a,), (rows, width))
        a = make.linear(a, width, fqn=f"b{i}.o")
        x = make.op("add", OpClass.POINTWISE, (x, a), (rows, width))
        h = make.norm(x)
        h = make.linear(h, 4 * width, fqn=f"b{i}.up")
        h = make.op("gelu", OpClass.POINTWISE, (h,), (rows, 4 * width), saves=(h,))
        h = make.linear(h, width, fqn=f"b{i}.down")
        x = make.op("add", OpClass.POINTWISE, (x, h), (rows, width))
    x = make.norm(x)
    x = make.linear(x, 2 * width, fqn="head")
    return make, make.graph(make.op("cross_entropy", OpClass.WIDE, (x,), (1,), saves=(x,)))


def modelled_device(graph: OpGraph) -> Device:
    """A device whose narrow GEMMs are four times as fast, and whose other ops and casts are bound by bandwidth."""
    specs = graph.tensor_by_id
    timings: dict[tuple[str, str, str], float] = {}
    for op in graph.ops:
        moved = sum(specs[t].numel for t in (*op.inputs, *op.outputs))
        for f in FORMATS:
            speed = 1.0 if f == "fp32" else 4.0
            size = 4 if f == "fp32" else 2
            for role in op.roles:
                seconds = 2e-6 + moved * size / 1e12
                if op.op_class is OpClass.GEMM and op.weights:
                    seconds += 2.0 * specs[op.outputs[0]].numel * specs[op.inputs[0]].shape[-1] / 2e13 / speed
                elif op.op_class is OpClass.GEMM:
                    seconds += 6.0 * specs[op.outputs[0]].numel * specs[op.inputs[0]].shape[0] / 2e13 / speed
                timings[op.timing_key, role, f] = seconds
    found = tuple(OpTiming(timing_key=k, role=r, format=f, seconds=s) for (k, r, f), s in timings.items())
    size_of = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1}
    casts = tuple(
        CastTiming(source=a, target=b, seconds_per_element=(size_of[a] + size_of[b]) / 1e12, seconds_per_call=2e-6)
        for a, b in itertools.permutations(size_of, 2)
    )
    return Device(name="modelled", type="cuda", native=FORMATS, timings=found, casts=casts, source="modelled")


#: Noise limits that bind little.
LOOSE = {"gradient": 0.5, "loss": 10.0}


def policy(formats=("fp32", "bf16"), **more) -> Policy:
    return Policy.model_validate({"name": "test", "formats": formats, "noise": LOOSE, **more})


def chain(*, rows: int = 4096, width: int = 512) -> tuple[Maker, OpGraph]:
    """linear, relu, linear, gelu, linear, cross entropy."""
    make = Maker(np.random.default_rng(0), calm=True)
    x = make.tensor("input:x", (rows, width), kind=TensorKind.INPUT, grad=False)
    h = make.linear(x, width, fqn="a")
    h = make.op("relu", OpClass.POINTWISE, (h,), (rows, width), saves_output=True)
    h = make.linear(h, width, fqn="b")
    h = make.op("gelu", OpClass.POINTWISE, (h,), (rows, width), saves=(h,))
    h = make.linear(h, width, fqn="c")
    return make, make.graph(make.op("cross_entropy", OpClass.WIDE, (h,), (1,), saves=(h,)))


def chain_case(**more) -> Case:
    make, graph = chain()
    return Case(graph, make.profile(graph), modelled_device(graph), policy(**more))


def with_tensor(profile: Profile, tensor: str, **changes) -> Profile:
    tensors = tuple(dataclasses.replace(t, **changes) if t.id == tensor else t for t in profile.tensors)
    return dataclasses.replace(profile, tensors=tensors)


def plan_of(case: Case, **more) -> Plan:
    return make_plan(case.graph, case.profile, case.device, case.policy, banned=case.banned, **more)
