"""The roofline: FLOPs against torch's own count, bytes and kernels against a count by hand, and its laws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import autoprec
from autoprec import serial
from autoprec.devices import Datasheet, Device, Peak, Sourced
from autoprec.formats import COMPUTE_FORMATS, STORAGE_FORMATS
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind, TensorSpec
from autoprec.planning.planner import fp32_totals, make_plan
from autoprec.planning.roofline import modelled_device
from autoprec.policies import Policy
from tests.models import CASES, Case
from tests.planning import planning_cases

NEVER = 1e300


def sheet(
    flops: float = NEVER, bandwidth: float = NEVER, launch: float = 0.0, narrow: dict[str, float] | None = None
) -> Datasheet:
    """A device with one bottleneck: with a rate of 1, seconds are what is counted."""
    peaks = {"fp32": flops, "bf16": flops, "fp16": flops} if narrow is None else {"fp32": flops, **narrow}
    one = Sourced(value=1.0, source="made up")
    return Datasheet(
        name="made up",
        type="cuda",
        peak_flops_per_second=tuple(Peak(format=f, value=v, source="made up") for f, v in peaks.items()),
        memory_bytes_per_second=Sourced(value=bandwidth, source="made up"),
        launch_seconds=Sourced(value=launch, source="made up"),
        attainable_compute_frac=one,
        attainable_bandwidth_frac=one,
    )


def tensor(name: str, *shape: int, grad: bool = True, dtype: str = "float32") -> TensorSpec:
    kind = {"param": TensorKind.PARAMETER, "input": TensorKind.INPUT}.get(name.partition(":")[0], TensorKind.ACTIVATION)
    return TensorSpec(id=name, shape=shape, dtype=dtype, kind=kind, requires_grad=grad)


def graph_of(op_class: OpClass, kind: str, inputs: list[TensorSpec], output: TensorSpec, **more: Any) -> OpGraph:
    op = Op(id=f"m:{kind}#0", kind=kind, op_class=op_class, fqn="m", inputs=tuple(t.id for t in inputs),
            outputs=(output.id,), timing_key=kind, **more)  # fmt: skip
    return OpGraph(model="Made", ops=(op,), tensors=tuple({t.id: t for t in (*inputs, output)}.values()))


def linear(rows: int, inputs: int, outputs: int, **more: Any) -> OpGraph:
    x, w, y = tensor("x", rows, inputs), tensor("param:w", outputs, inputs), tensor("y", rows, outputs)
    more = {"flops": 2 * rows * inputs * outputs, "saves": ("x",), "weights": ("w",)} | more
    return graph_of(OpClass.GEMM, "linear", [x, w], y, **more)


def seconds(device: Device) -> dict[tuple[str, str], float]:
    return {(t.role, t.format): t.seconds for t in device.timings}


def counted(graph: OpGraph, what: str, **changes: Any) -> dict[tuple[str, str], float]:
    return seconds(modelled_device(sheet(**{what: 1.0}, **changes), graph))


# FLOPs ----------------------------------------------------------------------------------------------------------------


class Products(nn.Module):
    """A convolution, linears with and without bias, and attention by hand, partly recomputed."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.into, self.out = nn.Linear(64, 16), nn.Linear(16, 5, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        h = F.gelu(self.into(x))
        return torch.matmul(torch.softmax(torch.matmul(h, h.transpose(1, 2)), -1), h)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2)
        h = checkpoint(self.mix, x, use_reentrant=False) if self.recompute else self.mix(x)
        return self.out(h)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_of_a_step_are_those_that_torch_counts(recompute: bool) -> None:
    model, x = Products(recompute), torch.randn(3, 4, 8, 8)
    counter = FlopCounterMode(display=False)
    # A checkpoint is priced as if it ran to its end, as it is where it is timed.
    with set_checkpoint_early_stop(False), counter:
        squares(model, x).backward()
    policy = Policy(name="p", formats=("fp32",))
    compiled = autoprec.compile(model, policy=policy, batches=[x, x + 1.0], loss_fn=squares, events=None)
    session = autoprec.session(compiled)
    device = modelled_device(sheet(flops=1.0), session.graph)
    # Exactly: with rates of 1e300 nothing else takes any time.
    assert fp32_totals(session.graph, session.profile, device, policy).seconds == counter.get_total_flops() > 0


# Bytes and kernels ----------------------------------------------------------------------------------------------------


def test_bytes_of_a_product_by_role() -> None:
    found = counted(linear(4, 8, 16), "bandwidth")
    x, w, y = 32, 128, 64
    for name, width, cast in (("fp32", 4, 0), ("bf16", 2, 6 * w), ("fp16", 2, 6 * w)):
        for role in Role:  # the weight is cast in the first two, its gradient in the third
            assert found[role, name] == width * (x + w + y) + cast
    launches = counted(linear(4, 8, 16), "launch")
    dtypes = ("fp32", "bf16", "fp16")
    assert all(launches[role, name] == (1.0 if name == "fp32" else 2.0) for role in Role for name in dtypes)


def test_bytes_of_a_product_in_fp8_by_role() -> None:
    """Operands of a byte, results in BF16. It rounds its weight (from FP32) and the gradient that arrives (from BF16)
    itself, reading each twice: for the largest magnitude, and to round."""
    found = counted(linear(4, 8, 16), "bandwidth", narrow={"fp8_e4m3": NEVER, "bf16": NEVER})
    x, w, y = 32, 128, 64
    weight, arriving = (4 + 4 + 1) * w, (2 + 2 + 1) * y
    assert found[Role.OUTPUT, "fp8_e4m3"] == x + w + 2 * y + weight
    assert found[Role.GRAD_INPUT, "fp8_e4m3"] == y + w + 2 * x + weight + arriving
    assert found[Role.GRAD_WEIGHT, "fp8_e4m3"] == x + y + 2 * w + (2 + 4) * w + arriving
    emulated = counted(linear(4, 8, 16), "bandwidth", narrow={"bf16": NEVER})
    assert emulated[Role.OUTPUT, "fp8_e4m3"] == 3 * (x + w) + 2 * (x + w + y) + weight


def test_the_gradient_of_a_bias_is_a_kernel_of_its_own() -> None:
    x, w, b, y = tensor("x", 4, 8), tensor("param:w", 16, 8), tensor("param:b", 16), tensor("y", 4, 16)
    graph = graph_of(OpClass.GEMM, "linear", [x, w, b], y, flops=1024, weights=("w", "b"))
    assert counted(graph, "launch")["grad_weight", "fp32"] == 2.0
    assert counted(graph, "launch")["grad_weight", "bf16"] == counted(graph, "launch")["output", "bf16"] == 3.0
    assert counted(graph, "bandwidth")["output", "fp32"] == 4 * (32 + 128 + 16 + 64)
    assert counted(graph, "bandwidth")["grad_weight", "fp32"] == 4 * (32 + 128 + 64) + 4 * (64 + 16)


def test_a_product_in_a_format_that_is_not_native_is_emulated() -> None:
    """Operands upcast, FP32 product, result rounded: FP32's arithmetic and more bytes and kernels."""
    graph, native = linear(4, 8, 16), {"bf16": NEVER}
    size = counted(graph, "bandwidth", narrow=native)
    x, w, y = 32, 128, 64
    assert size["output", "fp16"] == 6 * w + 6 * (x + w) + 4 * (x + w + y) + 6 * y
    assert counted(graph, "launch", narrow=native)["output", "fp16"] == 5.0
    flops = seconds(modelled_device(sheet(flops=1.0, narrow={"bf16": 2.0}), graph))
    assert flops["output", "fp16"] == flops["output", "fp32"] == 2 * flops["output", "bf16"]


@pytest.mark.parametrize(("name", "width"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_of_other_ops_forward_and_backward(name: str, width: int) -> None:
    x, y, n = tensor("x", 10, 10), tensor("y", 10, 10), 100
    gelu = graph_of(OpClass.POINTWISE, "gelu", [x], y, saves=("x",), private_saved_bytes=7)
    assert counted(gelu, "bandwidth")["output", name] == width * (2 * n + 3 * n) + 7
    assert counted(gelu, "launch")["output", name] == 2.0
    frozen = graph_of(OpClass.POINTWISE, "gelu", [tensor("x", 10, 10, grad=False)], tensor("y", 10, 10, grad=False))
    assert counted(frozen, "bandwidth")["output", name] == width * 2 * n
    add = graph_of(OpClass.POINTWISE, "add", [x, tensor("z", 10, 10)], y)
    assert counted(add, "launch")["output", name] == 1.0  # its gradients are the one that arrives
    row = graph_of(OpClass.POINTWISE, "add", [x, tensor("param:b", 10)], y)
    assert counted(row, "bandwidth")["output", name] == width * (2 * n + 10) + width * (n + 10)


def test_what_is_recomputed_runs_forward_again() -> None:
    x, y = tensor("x", 10), tensor("y", 10)
    for depth in (1, 2):
        path = tuple("ab"[:depth])
        gelu = graph_of(OpClass.POINTWISE, "gelu", [x], y, saves=("x",), checkpoints=path)
        assert counted(gelu, "launch")["output", "fp32"] == 2.0 + depth
        found = counted(linear(4, 8, 16, checkpoints=path), "flops")
        assert found["output", "fp32"] == (1 + depth) * found["grad_weight", "fp32"]


def test_norms_read_their_parameters_in_fp32_and_compute_fp16_in_it() -> None:
    x, w, y = tensor("x", 10, 10), tensor("param:w", 10), tensor("y", 10, 10)
    graph = graph_of(OpClass.NORM, "layer_norm", [x, w], y, saves=("x",), weights=("w",))
    found = counted(graph, "bandwidth")
    assert found["output", "bf16"] == 2 * 200 + 40 + 2 * 300 + 40
    assert found["output", "fp16"] == (2 * 600 + 840) + (3 * 600 + 840 + 1240)
    assert counted(graph, "launch")["output", "fp16"] == 3.0 + 5.0


def test_a_lookup_reads_rows_and_its_gradient_is_a_whole_table() -> None:
    indices, table = tensor("input:i", 3, grad=False, dtype="int64"), tensor("param:t", 1000, 8)
    graph = graph_of(OpClass.LOOKUP, "embedding", [indices, table], tensor("y", 3, 8), weights=("t",))
    wide, cast = 3 * 8 + 4 * 24 + 4 * 24 + 4 * 24 + 4 * 8000, (4 + 2) * 24
    expected = {"fp32": wide, "bf16": wide + 2 * cast, "fp16": wide + 2 * cast}
    assert counted(graph, "bandwidth") == {("output", name): size for name, size in expected.items()}
    assert counted(graph, "launch") == {("output", n): k for n, k in {"fp32": 2.0, "bf16": 4.0, "fp16": 4.0}.items()}


def test_products_of_activations_have_a_product_for_each_gradient() -> None:
    a, b, y = tensor("a", 2, 3, 4), tensor("b", 2, 4, 5), tensor("y", 2, 3, 5)
    both = graph_of(OpClass.GEMM, "matmul", [a, b], y, flops=240, saves=("a", "b"))
    assert counted(both, "flops")["output", "bf16"] == 240
    assert counted(both, "flops")["grad_input", "bf16"] == 2 * 240
    assert counted(both, "bandwidth")["output", "bf16"] == 2 * (24 + 40 + 30)
    assert counted(both, "bandwidth")["grad_input", "bf16"] == 2 * 2 * (24 + 40 + 30)
    one = graph_of(OpClass.GEMM, "matmul", [tensor("a", 2, 3, 4, grad=False), b], y, flops=240)
    assert counted(one, "flops")["grad_input", "bf16"] == 240


def test_attention_is_a_kernel_each_way_with_its_products_and_their_gradients() -> None:
    q, k, v, y = (tensor(n, 2, 8, 4) for n in "qkvy")
    products = 2 * 2 * (2 * 8 * 8 * 4)
    graph = graph_of(OpClass.GEMM, "scaled_dot_product_attention", [q, k, v], y, flops=products, saves=("q", "k", "v"))
    for role, flops, tensors in (("output", products, 4), ("grad_input", 2 * products, 1 + 3 + 3)):
        assert counted(graph, "flops")[role, "bf16"] == flops
        assert counted(graph, "launch")[role, "bf16"] == 1.0
        assert counted(graph, "bandwidth")[role, "bf16"] == 2 * 64 * tensors


def test_what_is_not_decided_or_not_known() -> None:
    x, y = tensor("x", 10), tensor("y", 10)
    assert set(counted(graph_of(OpClass.WIDE, "softmax", [x], y, saves=("y",)), "launch")) == {("output", "fp32")}
    assert set(counted(graph_of(OpClass.POINTWISE, "gelu", [x], y, pinned=True), "launch")) == {("output", "fp32")}
    for op_class, kind in ((OpClass.VIEW, "view"), (OpClass.UNKNOWN, "odd"), (OpClass.WIDE, "hop.cond")):
        assert counted(graph_of(op_class, kind, [x], y), "launch") == {}


def test_casts_and_packing() -> None:
    device = modelled_device(sheet(bandwidth=1.0, launch=1.0), linear(1, 1, 1))
    assert device.cast_by_pair["fp32", "bf16"].seconds_per_element == 6.0
    assert device.cast_by_pair["fp32", "bf16"].seconds_per_call == 1.0
    packing = device.cast_by_pair["bf16", "fp8_e4m3"]
    assert (packing.seconds_per_element, packing.seconds_per_call) == (2 + 2 + 1, 2.0)  # once more for the amax
    assert device.cast_by_pair["fp8_e4m3", "bf16"].seconds_per_element == 3.0
    names = {*COMPUTE_FORMATS, *STORAGE_FORMATS} - {"tf32"}  # whose tensors are FP32's
    assert set(device.cast_by_pair) == {(a, b) for a in names for b in names if a != b}


# Laws -----------------------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 1 << 14)


@given(SIZES, SIZES, SIZES, st.sampled_from([0, 1, 2]), st.sampled_from(serial.datasheet_names()))
def test_more_work_never_takes_less_time(rows: int, inputs: int, outputs: int, grown: int, name: str) -> None:
    device = serial.load_device(name)
    assert isinstance(device, Datasheet)
    sizes = [rows, inputs, outputs]
    small = seconds(modelled_device(device, linear(*sizes)))
    sizes[grown] *= 2
    large = seconds(modelled_device(device, linear(*sizes)))
    assert small.keys() == large.keys()
    assert all(large[key] >= small[key] >= device.launch_seconds.value for key in small)
    more = seconds(modelled_device(device, linear(rows, inputs, outputs, flops=1 << 60)))
    assert all(more[key] > small[key] for key in small)


@pytest.mark.parametrize("name", serial.datasheet_names())
def test_a_large_product_gains_the_ratio_of_peaks_and_a_tiny_one_nothing(name: str) -> None:
    device = serial.load_device(name)
    assert isinstance(device, Datasheet)
    peak = {p.format: p.value for p in device.peak_flops_per_second}
    large = seconds(modelled_device(device, linear(1 << 22, 1 << 16, 1 << 16)))  # beside that the casts vanish
    for role in ("output", "grad_input", "grad_weight"):
        assert large[role, "fp32"] / large[role, "bf16"] == pytest.approx(peak["bf16"] / peak["fp32"], rel=1e-3)
    if "fp16" not in peak:
        assert large["output", "fp16"] > large["output", "fp32"]
    tiny = seconds(modelled_device(device, linear(1, 1, 1)))
    for format_name in device.native:
        # The others cast the weight; FP8 looks for its largest magnitude first.
        kernels = 1 if format_name in ("fp32", "tf32") else 3 if format_name.startswith("fp8") else 2
        assert tiny["output", format_name] == pytest.approx(kernels * device.launch_seconds.value, rel=1e-3)


def test_attainable_fractions_scale_the_roofs() -> None:
    plain = sheet(flops=1.0)
    half = dataclasses.replace(plain, attainable_compute_frac=Sourced(value=0.5, source="made up"))
    graph = linear(4, 8, 16)
    assert seconds(modelled_device(half, graph))["output", "fp32"] == 2 * 1024
    slow = dataclasses.replace(sheet(bandwidth=1.0), attainable_bandwidth_frac=Sourced(value=0.25, source="made up"))
    assert seconds(modelled_device(slow, graph))["output", "fp32"] == 4 * 4 * 224


# Plans ----------------------------------------------------------------------------------------------------------------


def priced(width: int, rows: int) -> tuple[planning_cases.Maker, OpGraph]:
    """The made-up transformer with the FLOPs of its linears."""
    make, graph = planning_cases.transformer(2, width=width, rows=rows)
    specs = graph.tensor_by_id
    ops = tuple(
        dataclasses.replace(op, flops=2 * specs[op.outputs[0]].numel * specs[op.inputs[0]].shape[-1],
                            timing_key=f"{op.kind}{[specs[t].shape for t in op.inputs]}")
        if op.kind == "linear" else op
        for op in graph.ops
    )  # fmt: skip
    return make, dataclasses.replace(graph, ops=ops)


def plans(width: int, rows: int, formats: tuple[str, ...]) -> dict[str, Any]:
    make, graph = priced(width, rows)
    profile = make.profile(graph)
    policy = Policy(name="p", formats=formats, storage={"formats": ()}, noise={"gradient": 1e3, "loss": 1e3})
    found = {}
    for name in serial.datasheet_names():
        device = serial.load_device(name)
        assert isinstance(device, Datasheet)
        found[name] = make_plan(graph, profile, modelled_device(device, graph), policy)
        assert "modelled" in found[name].device
    return found


def test_a_tiny_model_stays_in_fp32_everywhere() -> None:
    assert all(plan.is_identity for plan in plans(8, 4, ("fp32", "bf16")).values())


def test_fp16_pays_where_it_is_native_and_only_there() -> None:
    """The large model in FP16: products at 15 times FP32's rate on an H100, at FP32's on the generic CPU."""
    found = plans(4096, 4096, ("fp32", "fp16"))

    def products(name: str) -> set[str]:
        return {a.format for a in found[name].assignments if ":linear" in a.op and a.reason.count("nobody") == 0}

    for name in ("h100", "h200", "a100"):
        assert products(name) == {"fp16"}
        assert found[name].predicted.seconds < 0.25 * found[name].predicted_fp32.seconds
    assert products("cpu-generic") == {"fp32"}
    assert found["h200"].predicted.seconds < found["h100"].predicted.seconds < found["a100"].predicted.seconds
    slow = found["cpu-generic"].predicted_fp32.seconds / found["h100"].predicted_fp32.seconds
    assert 66.9 / 2.56 == pytest.approx(slow, rel=0.2)  # bound by arithmetic


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_is_measured_of_a_model_can_be_modelled(case: Case) -> None:
    """The same keys (and those of gradients that the measured device was not asked for), and a plan."""
    policy = Policy(name="p", formats=COMPUTE_FORMATS, calibration={"steps": 2}, noise={"gradient": 1e3, "loss": 1e3})
    model = autoprec.compile(case.model(), policy=policy, batches=case.batches()[:2], loss_fn=case.loss, events=None)
    session = autoprec.session(model)
    session.measure_device()
    measured = {(t.timing_key, t.role, t.format) for t in session.device.timings}
    for name in serial.datasheet_names():
        device = serial.load_device(name)
        assert isinstance(device, Datasheet)
        modelled = modelled_device(device, session.graph)
        assert modelled.seconds_by_key.keys() >= measured > set()
        assert set(modelled.cast_by_pair) >= set(session.device.cast_by_pair)
        assert make_plan(session.graph, session.profile, modelled, policy).device == modelled.name


def test_ops_with_one_timing_key_are_priced_once() -> None:
    _, graph = priced(16, 4)
    device = modelled_device(sheet(launch=1.0), graph)
    keys = {op.timing_key for op in graph.ops if op.op_class in (OpClass.GEMM, OpClass.NORM, OpClass.POINTWISE)}
    assert {t.timing_key for t in device.timings} >= keys
    assert len(device.timings) < len([r for op in graph.ops for r in op.roles]) * len(COMPUTE_FORMATS)
    assert device.source == "modelled" and math.isfinite(sum(t.seconds for t in device.timings))
