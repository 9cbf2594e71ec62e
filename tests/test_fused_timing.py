"""What FP8 takes in compiled code on a GPU: timed by kernels that read and write the same. On a CPU the same functions
run, on torch's own FP8 product."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoprec
from autoprec.calibration import timing
from autoprec.calibration.fusing import packs, product_runs, unpacks
from autoprec.devices import CastTiming, Device, NoKernel, OpTiming
from autoprec.execution import dry_run as dry_run_module
from autoprec.execution.dry_run import dry_run
from autoprec.graphs import Role
from autoprec.numerics.contractions import Contraction
from autoprec.numerics.packing import amax_of, decode, encode


@pytest.mark.parametrize("how", [Contraction("ak", "nk", "an"), Contraction("bak", "kn", "ban")])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_roles_multiply_what_they_say(how: Contraction, fmt: str) -> None:
    x = torch.randn(2, 16, 32) if len(how.x) == 3 else torch.randn(48, 32)
    weight = torch.randn(64, 32) if how.weight == "nk" else torch.randn(32, 64)
    w = weight if how.weight == "nk" else weight.t()
    torch.manual_seed(3)
    g = torch.randn(math.prod(x.shape[:-1]), 64, dtype=torch.bfloat16)
    torch.manual_seed(3)
    runs = product_runs(x.requires_grad_(), weight, how, fmt)
    assert runs is not None
    rows = x.detach().reshape(-1, 32)
    exact = {Role.OUTPUT: rows @ w.t(), Role.GRAD_INPUT: g.float() @ w, Role.GRAD_WEIGHT: g.float().t() @ rows}
    for role, expected in exact.items():
        made = runs[role]()
        assert isinstance(made, tuple)
        found = made[-1]
        assert isinstance(found, Tensor) and not found.requires_grad
        assert float((found.float() - expected).norm() / expected.norm()) < 0.15  # two operands in FP8


def test_no_other_product_is_taken_for_one() -> None:
    x = torch.randn(4, 6, 8)
    assert product_runs(x, torch.randn(4, 5, 8), Contraction("bak", "bnk", "ban"), "fp8_e4m3") is None
    assert product_runs(x, torch.randn(8, 6), Contraction("bka", "nk", "ban"), "fp8_e4m3") is None
    assert product_runs(x, torch.randn(5, 8), None, "fp8_e4m3") is None


def test_the_passes_are_those_of_a_cast() -> None:
    x = torch.randn(64, 64)
    amax, narrow = packs(x, "fp8_e4m3")  # type: ignore[misc]
    assert torch.equal(amax, amax_of(x)) and narrow.dtype is torch.float8_e4m3fn
    packed = encode(x, "fp8_e4m3")
    assert packed.inverse_scale is not None
    wide = unpacks(packed.payload, "fp8_e4m3", torch.float32)
    assert torch.equal(wide * packed.inverse_scale, decode(packed, torch.float32))  # type: ignore[operator]


@pytest.mark.parametrize("fused", [False, True])
def test_a_device_says_how_its_casts_were_timed(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = autoprec.compile(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), policy="observe",
                             batches=[torch.randn(16, 32)] * 2, loss_fn=lambda m, x: m(x).square().mean(),
                             events=None)  # fmt: skip
    session = autoprec.session(model)
    monkeypatch.setattr(timing, "native_formats", lambda _: ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2"))
    asked: list[str] = []
    real = timing.product_runs
    monkeypatch.setattr(timing, "product_runs", lambda x, w, how, fmt: asked.append(fmt) or real(x, w, how, fmt))
    device = timing.measure_casts("cpu", ("fp8_e4m3",), fused=fused)
    made = timing.time_ops(session._observed.cases, ("fp32", "bf16", "fp8_e4m3"), device)
    assert device.fused_casts == made.fused_casts == fused
    assert asked == (["fp8_e4m3"] * 2 if fused else [])  # two linears
    assert {t.role for t in made.timings if t.format == "fp8_e4m3"} == {"output", "grad_input", "grad_weight"}


def test_timings_made_the_other_way_are_made_again() -> None:
    device = Device(
        name="a GPU",
        type="cuda",
        native=("fp32", "bf16", "fp8_e4m3"),
        timings=tuple(OpTiming(timing_key="op", role="output", format=f, seconds=1e-3) for f in ("bf16", "fp8_e4m3")),
        casts=(CastTiming(source="fp32", target="bf16", seconds_per_element=1e-12),
               CastTiming(source="bf16", target="fp8_e4m3", seconds_per_element=1e-12)),
        no_kernels=tuple(NoKernel(timing_key="other", format=f, reason="no memory") for f in ("fp16", "fp8_e4m3")),
    )  # fmt: skip
    assert device.told_of_casts(fused=False) is device
    other = device.told_of_casts(fused=True)
    assert other.fused_casts and [t.format for t in other.timings] == ["bf16"] and len(other.casts) == 1
    assert [k.format for k in other.no_kernels] == ["fp16"]
    modelled = replace(device, source="modelled")
    assert modelled.told_of_casts(fused=True) is modelled


# Generated code for a GPU ---------------------------------------------------------------------------------------------


#: As torch's FP8 product, it does not say what it does on meta tensors.
_library = torch.library.Library("autoprec_gpu_tests", "DEF")
_library.define("product_into(Tensor x, Tensor w, *, Tensor(a!) out) -> Tensor(a!)")
_library.impl("product_into", lambda x, w, *, out: torch.mm(x, w, out=out), "CPU")


class _Triton:
    """As torch's compiler puts them into the module that it generates."""

    def run(self, *arguments: Any, stream: int) -> None:
        raise AssertionError("a kernel ran")


#: In the words of torch 2.11's compiler: a product into 4 KiB, which is cast into 2 KiB and let go of.
_CODE = """
def call(self, args):
    x, w = args
    args.clear()
    assert_size_stride(x, (32, 64), (64, 1))
    buf0 = empty_strided_cuda((32, 32), (32, 1), torch.float32)
    product_into(x, w, out=buf0)
    del x
    buf1 = empty_strided_cuda((32, 32), (32, 1), torch.bfloat16)
    stream0 = get_raw_stream(0)
    triton_poi_fused_0.run(buf0, buf1, 1024, stream=stream0)
    del buf0
    buf2 = reinterpret_tensor(buf1, (1024,), (1,), 0)
    return (buf2, w)
"""


@pytest.mark.parametrize("aligned", [False, True])
def test_code_for_a_gpu_is_run_dry(aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = torch._C._dynamo.guards
    names: dict[str, Any] = {
        "torch": torch, "product_into": torch.ops.autoprec_gpu_tests.product_into,
        "triton_poi_fused_0": _Triton(), "get_raw_stream": None,
        "assert_size_stride": guards.assert_size_stride, "reinterpret_tensor": guards._reinterpret_tensor,
        "empty_strided_cuda": None, "empty_strided_cpu": None,
    }  # fmt: skip
    exec(_CODE, names)
    model = type("Runner", (), {"call": names["call"]})().call

    def aligns(inputs: Any) -> Any:
        return model(inputs)

    workspaces: list[Any] = []
    monkeypatch.setattr(dry_run_module, "_workspace", lambda *a: workspaces.append(a) or 100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    with FakeTensorMode():
        inputs = [torch.empty(32, 64, device="cuda"), torch.empty(64, 32, device="cuda")]
    found = dry_run(aligns if aligned else model, inputs, [True, False])
    assert found is not None and [w[-1].type for w in workspaces] == ["cuda"]
    # The input of 8 KiB is its own, the product comes beside it; without it there are the product and its cast.
    assert (found.peak_bytes, found.held_bytes, found.own) == (8192 + 4096 + 100, 2048, (True, False))
