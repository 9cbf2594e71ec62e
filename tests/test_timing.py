"""What is timed is what the role costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import autoprec
from autoprec.calibration import clocks, timing
from autoprec.devices import Device
from autoprec.graphs import OpClass, Role
from autoprec.numerics import gemm
from autoprec.numerics.norms import layer_norm
from autoprec.rewriting.rewrite import rewrite
from tests.test_lowering import plan_of


def test_each_gradient_of_a_narrow_product_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An autograd.Function makes every gradient that was wanted when its graph was made."""
    runs: dict[Any, Any] = {}
    monkeypatch.setattr(timing, "rounds", lambda each, device: runs.update(each) or dict.fromkeys(each, 1e-6))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = autoprec.Policy(name="p", formats=("fp32", "bf16"), calibration={"steps": 2})
    batches = [torch.randn(4, 8) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    made: list[str] = []
    for name in ("_input_gradient", "channel_sums"):
        function = getattr(gemm, name)
        monkeypatch.setattr(gemm, name, lambda *a, f=function, n=name: made.append(n) or f(*a))
    runs[Role.GRAD_INPUT, "bf16"]()
    assert made == ["_input_gradient"]
    made.clear()
    runs[Role.GRAD_WEIGHT, "bf16"]()
    assert made == ["channel_sums"]


class Scores(nn.Module):
    """A product of two activations, of which one wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * x) @ x.mT


def test_the_gradients_of_a_product_of_activations_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[Any, Any] = {}
    monkeypatch.setattr(timing, "rounds", lambda each, device: runs.update(each) or dict.fromkeys(each, 1e-6))
    policy = autoprec.Policy(name="p", formats=("fp32", "bf16"), calibration={"steps": 2})
    batches = [torch.randn(4, 8) for _ in range(2)]
    autoprec.compile(Scores(), policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    made: list[int] = []
    one = gemm._product_to
    monkeypatch.setattr(gemm, "_product_to", lambda *a: made.append(1) or one(*a))
    runs[Role.OUTPUT, "bf16"]()
    assert made == []
    runs[Role.GRAD_INPUT, "bf16"]()
    assert made == [1]


def test_a_device_from_before_a_role_was_timed_alone_is_asked_again() -> None:
    """Its one figure was for the gradients as well."""
    policy = autoprec.Policy(name="p", formats=("fp32", "bf16"), calibration={"steps": 2})
    batches = [torch.randn(4, 8) for _ in range(2)]

    def measured(device: Device | None) -> Device:
        model = autoprec.compile(Scores(), policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(),
                                 device=device, events=None)  # fmt: skip
        found = autoprec.session(model).device
        assert found is not None
        return found

    now = measured(None)
    products = {t.timing_key for t in now.timings if t.role == Role.GRAD_INPUT}
    before = tuple(
        replace(t, seconds=123.0) if t.timing_key in products else t for t in now.timings if t.role == Role.OUTPUT
    )
    again = measured(replace(now, timings=before))
    assert products and set(again.seconds_by_key) == set(now.seconds_by_key)
    assert max(again.seconds_by_key.values()) < 1.0
    assert [t for t in again.timings if t.timing_key not in products] == [
        t for t in before if t.timing_key not in products
    ]


def test_repeats_go_on_while_other_work_takes_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the first three repeats, after the warm-up, take five times as long."""
    now = [0.0]
    script = iter([0.01, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01, 0.01])
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += next(script)

    assert clocks.seconds_of(run, torch.device("cpu")) == pytest.approx(0.01)
    assert next(script) == 0.01  # no more repeats than it took


class _Behind:
    """A GPU that works behind the host: what it is asked for waits in a queue. Events say when it came to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cycle_seconds: float) -> None:
        self.host = self.free = 0.0
        told = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(told.host, told.free)

            def synchronize(self) -> None:
                told.host = max(told.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work(cycles * cycle_seconds))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(self, "host", max(self.host, self.free)))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.host)
        clocks._seconds_of_a_cycle.cache_clear()

    def work(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds


@pytest.mark.parametrize("cycle_seconds", [5e-10, 2e-9])
def test_a_gpu_is_timed_by_what_it_does(cycle_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve kernels of 5 µs, each of which the host takes 40 µs to ask for."""
    gpu = _Behind(monkeypatch, cycle_seconds)

    def run() -> None:
        for _ in range(12):
            gpu.host += 40e-6
            gpu.work(5e-6)

    found = clocks.rounds({"small": run, "large": lambda: gpu.work(1e-3)}, torch.device("cuda"))
    clocks._seconds_of_a_cycle.cache_clear()
    assert found == {"small": pytest.approx(60e-6), "large": pytest.approx(1e-3)}


_RUN: list[str] = []


@torch.library.custom_op("autoprec_tests::counted", mutates_args=())
def _counted(x: Tensor) -> Tensor:
    _RUN.append("op")
    return 2.0 * x


@_counted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_counted.register_autograd(lambda ctx, g: 2.0 * g)


class _Waits(torch.autograd.Function):
    """Its bodies call what a user registered: in a job of several processes, it may wait for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cumsum(_counted(x), -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2.0 * g


def _loop(y: Tensor) -> Tensor:
    """With the zeros of a made-up stride it would go on for ever."""
    start = (torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long), _counted(y.detach()))
    turns = while_loop(lambda i, by, v: i.sum() < 5, lambda i, by, v: (i + by, by.clone(), 1.5 * v), start)
    return y * turns[2]


def _branch(y: Tensor) -> Tensor:
    return torch.cond(y.sum() > 0, lambda y: _counted(y), lambda y: _counted(y) + 1.0, (y,))


@torch._dynamo.nonstrict_trace
def _untraced(y: Tensor) -> Tensor:
    _RUN.append("function")
    return 2.0 * y


@pytest.mark.parametrize("op", [_counted, _Waits.apply, _loop, _branch, _untraced])
def test_what_a_user_made_runs_in_steps_alone(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing runs torch's own functions."""
    timed: dict[str, int] = {}
    time_case = timing._time_case

    def counting(key: str, *how: Any) -> Any:
        before = len(_RUN)
        found = time_case(key, *how)
        timed[key.partition("(")[0]] = len(_RUN) - before
        return found

    monkeypatch.setattr(timing, "_time_case", counting)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return op(self.up(x)).sum()

    policy = autoprec.Policy(name="p", formats=("fp32", "bf16"), calibration={"steps": 3})
    batches = [torch.randn(4, 8) for _ in range(3)]
    _RUN.clear()
    autoprec.compile(Model(), policy=policy, batches=batches, loss_fn=lambda m, x: m(x), events=None)
    assert _RUN and timed["linear"] == 0 and not any(timed.values())
    assert not {"counted", "hop.autograd_function_apply", "hop.while_loop", "hop.cond"} & timed.keys()


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_norms_are_timed_with_the_weights_that_a_plan_gives_them(kind: type[nn.Module], device_type: str) -> None:
    """A GPU's kernels want one dtype. (The tensors are on the CPU, whatever the function is told.)"""
    model = autoprec.compile(nn.Sequential(nn.Linear(8, 8), kind(8)), policy="observe", batches=[torch.randn(4, 8)] * 2,
                             loss_fn=lambda m, x: m(x).square().mean(), events=None)  # fmt: skip
    session = autoprec.session(model)
    (case,) = (c for c in session._observed.cases.values() if c.op.op_class is OpClass.NORM)
    run, leaves, _ = timing._callable(case, "bf16", device_type)
    planned = torch.bfloat16 if device_type == "cuda" else torch.float32
    assert [t.dtype for t in leaves] == [torch.bfloat16] + [planned] * (len(leaves) - 1)
    assert run().dtype is torch.bfloat16

    plan = plan_of({case.op.id: "bf16"})
    rewritten = rewrite(next(iter(session._slots.values())).binding, plan, device_type)
    seen: list[str] = []
    for node in rewritten.module.graph.nodes:
        if node.target in (torch.rms_norm, torch.nn.functional.rms_norm, layer_norm):
            seen = [n.op for n in node.all_input_nodes[1:]]
    assert seen == [("call_function" if device_type == "cuda" else "placeholder")] * (len(leaves) - 1)
