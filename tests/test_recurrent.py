"""LSTMs with a format: casts by hand, states, random numbers, noise, and formats that are not offered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.devices import Datasheet
from autoprec.execution import inductor
from autoprec.execution.measuring import peak_bytes
from autoprec.numerics import recurrent
from autoprec.numerics.dtypes import native_formats
from autoprec.planning.planner import ask, propose
from autoprec.planning.roofline import modelled_device
from autoprec.plans import Assignment, Plan, Region
from autoprec.serial import load_device
from tests.bench.measure import calibrate, one_thread
from tests.bench.recurrent import narrowed
from tests.bench.workloads import WORKLOADS
from tests.cpus import HAS_BF16


def plan_of(fmt: str, *regions: Region, op: str = "lstm:lstm#0") -> Plan:
    return Plan(assignments=(Assignment(op=op, role="output", format=fmt, reason="test"),), regions=regions)


class Carrying(nn.Module):
    """Two layers, both directions, dropout between them; takes and gives its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.25, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x, state)
        return y, state


class Headed(nn.Module):
    """One layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def by_hand(model: Carrying, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Two calls, the second with the state of the first, parameters cast in each; outputs, states, gradients."""
    params = [p.detach().clone().requires_grad_() for p in model.lstm._flat_weights]
    state = (torch.zeros(4, len(x), 16), torch.zeros(4, len(x), 16))
    y = torch.zeros(())
    for _ in range(2):
        narrow = [p.to(dtype) for p in params]
        hidden = tuple(s.to(dtype) for s in state)
        y, h, c = torch.lstm(x.to(dtype), hidden, narrow, True, 2, 0.25, True, True, True)
        y, state = y.float(), (h.float(), c.float())
    (y.square().mean() + state[1].mean()).backward()
    return [y.detach(), *(s.detach() for s in state), *(p.grad for p in params)]


def by_plan(model: Carrying, x: Tensor, plan: Plan | None) -> list[Tensor]:
    model = copy.deepcopy(model)
    if plan is not None:
        autoprec.compile(model, plan=plan, events=None)
    torch.manual_seed(0)
    _, state = model(x)
    y, state = model(x, state)
    (y.square().mean() + state[1].mean()).backward()
    return [y.detach(), *(s.detach() for s in state), *(p.grad for p in model.lstm._flat_weights)]


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_an_lstm_equals_casts_by_hand(fmt: str) -> None:
    """Bitwise, state and dropout's masks included; in FP16 with a region's scale, which is a power of two."""
    torch.manual_seed(1)
    model, x = Carrying(), torch.randn(3, 5, 8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    torch.manual_seed(0)
    expected = by_hand(model, x, dtype)
    found = by_plan(model, x, plan_of(fmt))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(t.dtype is torch.float32 for t in found)
    plain = by_plan(model, x, None)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)) == (fmt == "fp32")


def test_a_region_keeps_gradients_that_fp16_cannot_hold() -> None:
    torch.manual_seed(1)
    model, x = Headed(), torch.randn(3, 5, 8)
    plain = copy.deepcopy(model)
    (plain(x).mean() * 1e-7).backward()
    scaled = copy.deepcopy(model)
    autoprec.compile(scaled, plan=plan_of("fp16", Region(ops=("lstm:lstm#0",), scale_log2=24, reason="test")))
    (scaled(x).mean() * 1e-7).backward()
    for (name, p), q in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.02 * p.grad.norm(), name
    autoprec.compile(model, plan=plan_of("fp16"), events=None)
    (model(x).mean() * 1e-7).backward()
    lost = [
        float((p.grad - q.grad).norm() / p.grad.norm())
        for p, q in zip(plain.parameters(), model.parameters(), strict=True)
    ]
    assert max(lost) > 0.1


def test_noise_of_an_lstm_is_predicted() -> None:
    """Over eight batches that calibration did not see: loss change, and error of its weight gradients. Where
    torch has no fused kernel, and would round every step, BF16 is not offered."""
    with one_thread():
        calibrated = calibrate(WORKLOADS["recurrent"])
        if "bf16" not in native_formats("cpu"):
            lacking = calibrated.device.no_kernel_by_key
            keys = {op.timing_key for op in calibrated.session.graph.ops if op.kind == "lstm"}
            assert keys and all("fused LSTM" in lacking[key, "bf16"] for key in keys)
            return
        found = list(narrowed(calibrated, 8))
    assert len(found) == 3
    for r in found:
        assert 0.4 < r.loss_predicted / r.loss_measured < 2.5
        assert 0.6 < r.gradient_predicted / r.gradient_measured < 1.8


def test_the_gradient_limit_speaks_of_its_matrices() -> None:
    torch.manual_seed(0)

    def formats(limit: float) -> dict[str, str]:
        """On a device that has LSTMs in BF16."""
        model = Headed()
        policy = autoprec.Policy(
            name="test",
            formats=("fp32", "bf16"),
            objective="bytes",
            storage={"formats": ()},
            noise={"gradient": limit, "loss": 1e6},
        )
        batches = [torch.randn(64, 24, 8) for _ in range(4)]
        autoprec.compile(model, policy=policy, events=None)
        session = autoprec.session(model)
        session.calibrate(batches, lambda m, x: m(x).square().mean())
        sheet = load_device("h100")
        assert isinstance(sheet, Datasheet)
        device = modelled_device(sheet, session.graph)
        proposals = propose(ask(session.graph, session.profile, device, policy))
        plan = proposals.decisions(proposals.best.solution)
        return {a.op: a.format for a in plan.assignments if a.role == "output"}

    assert formats(1.0)["lstm:lstm#0"] == "bf16"
    assert formats(1e-4)["lstm:lstm#0"] == "fp32"


def test_fp16_is_not_offered_on_a_cpu() -> None:
    model = nn.LSTM(8, 16, batch_first=True)
    policy = autoprec.Policy(name="test", formats=("fp32", "fp16"))
    batches = [torch.randn(4, 6, 8) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x)[0].mean(), events=None)
    session = autoprec.session(model)
    (key,) = {op.timing_key for op in session.graph.ops if op.kind == "lstm"}
    assert "fused LSTM" in session.device.no_kernel_by_key[key, "fp16"]


def test_an_lstm_with_a_projection_keeps_fp32() -> None:
    """torch has no fused kernel for it."""
    model = nn.LSTM(8, 16, batch_first=True, proj_size=4)
    batches = [torch.randn(4, 6, 8) for _ in range(2)]
    autoprec.compile(model, policy="bf16", batches=batches, loss_fn=lambda m, x: m(x)[0].mean(), events=None)
    assert "lstm#0" not in {a.op.partition(":")[2] for a in autoprec.session(model).plan.assignments}


# -- compiled ------------------------------------------------------------------------------------------------------


def made_by(
    function: Callable[..., tuple[Tensor, ...]], layer: nn.LSTM, x: Tensor, state: list[Tensor]
) -> list[Tensor]:
    """Results, and gradients of all that goes in."""
    torch.manual_seed(1)
    options = (layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional, layer.batch_first)
    results = function(x, state, layer._flat_weights, *options)
    loss = sum((k + 1) * y.float().square().sum() for k, y in enumerate(results))
    assert isinstance(loss, Tensor)
    return [*results, *torch.autograd.grad(loss, [x, *state, *layer.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"batch_first": True}, {"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}]
    + [{"num_layers": 3, "dropout": 0.5, "bidirectional": True, "batch_first": True}, {"proj_size": 5}],
    ids=lambda o: ", ".join(o) or "plain",
)
def test_one_kernel_for_each_layer_gives_torchs_bits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for training in (True, False):
        layer = nn.LSTM(7, 11, **options, dtype=dtype).train(training)
        x = torch.randn(5, 3, 7, dtype=dtype, requires_grad=True)
        of_layers = layer.num_layers * (1 + layer.bidirectional), 5 if layer.batch_first else 3
        h = torch.randn(*of_layers, layer.proj_size or 11, dtype=dtype, requires_grad=True)
        state = [h, torch.randn(*of_layers, 11, dtype=dtype, requires_grad=True)]
        ours, torchs = (made_by(f, layer, x, state) for f in (recurrent.lstm, torch.lstm))
        assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def test_compiled_it_is_one_kernel_of_eagers_bits_whose_peak_is_told() -> None:
    """Also for other batches and lengths, for which a graph with symbols keeps less."""
    torch._dynamo.reset()
    models, fmt = [Headed(), Headed()], "bf16" if HAS_BF16 else "fp32"
    models[1].load_state_dict(models[0].state_dict())
    for model, backend in zip(models, ("inductor", "eager"), strict=True):
        autoprec.compile(model, plan=plan_of(fmt), events=None, backend=backend)
    lowering = autoprec.session(models[0]).lowering
    sizes = [(8, 40), (6, 40), (8, 40), (6, 41), (5, 42), (7, 43)]
    for batch, length in sizes:
        x = torch.randn(batch, length, 8)
        losses = [m(x).square().mean() for m in models]
        assert torch.equal(*losses)
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert p.grad is not None and q.grad is not None
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm()  # the head's sums are in another order
    assert len(lowering.compiled) == 3  # as Dynamo captured: the sizes of the first, any batch, any length
    elements = [8 * 40 * 16, 6 * 40 * 16, 6 * 41 * 16]  # of what the kernel makes, at the first call of each
    kept = [sum(t.bytes for t in c.kept) / n for c, n in zip(lowering.compiled, elements, strict=True)]
    assert kept[0] > 40 and max(kept[1:]) < 20
    x = torch.randn(6, 41, 8)
    measured = peak_bytes(lambda: models[0](x).square().mean().backward(), x.device)
    assert lowering.compiled[-1].peak_bytes == pytest.approx(measured, rel=0.02)


class Checkpointed(Headed):
    """Its LSTM in the body of a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=False))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Headed, Checkpointed])
def test_it_is_one_op_of_a_compiled_graph(kind: type[Headed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the body of a checkpoint, and the gradients of both biases are two tensors."""
    torch._dynamo.reset()
    calls: list[str] = []
    partition = inductor.Partitioner.__call__

    def look(self: Any, graph: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        calls.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return partition(self, graph, *arguments, **options)

    monkeypatch.setattr(inductor.Partitioner, "__call__", look)
    model, x = kind(), torch.randn(3, 6, 8)
    exact = model(x).square().mean()
    by_hand = torch.autograd.grad(exact, list(model.parameters()))
    autoprec.compile(model, plan=plan_of("fp32"), events=None, backend="inductor")
    loss = model(x).square().mean()
    loss.backward()
    assert calls.count("autoprec.lstm_layer.default") == 1 and len(calls) < 40  # 6 steps of time have 20 ops each
    assert torch.equal(loss, exact)
    for p, q in zip(model.parameters(), by_hand, strict=True):
        assert p.grad is not None and (p.grad - q).norm() <= 1e-5 * q.norm()
    biases = [p for n, p in model.lstm.named_parameters() if "bias" in n]
    asked = torch.autograd.grad(model(x).square().mean(), biases)
    assert len({g.data_ptr() for g in (*asked, *(p.grad for p in biases)) if g is not None}) == 4


def test_a_packed_sequence_is_left_to_torch() -> None:
    def packed(x: Tensor, sizes: Tensor, states: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.lstm(x, sizes, states, weights, True, 1, 0.0, True, False)

    module = fx.symbolic_trace(packed)
    recurrent.as_one_kernel(module)
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [torch.lstm]


def test_its_ops_are_what_a_compiler_is_told() -> None:
    """And differentiated twice, the graph gives the same gradients: the kernel writes to what it was left."""
    shapes = [(5, 3, 7), (44, 7), (44, 11), (44,), (44,), (3, 11), (3, 11)]
    given = [torch.randn(*s, requires_grad=True) for s in shapes]
    # What the kernel leaves is not all written to, so two calls leave different bytes.
    but_values = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(recurrent._layer, (*given, True, True, True), test_utils=but_values)
    torch.library.opcheck(recurrent._layer, (*given, False, True, False))
    made = [t.detach() for t in recurrent._layer(*given, False, True, True)]
    arguments = ([t.detach() for t in given], made, [torch.randn(5, 3, 11), None, torch.randn(3, 11)], False, True)
    torch.library.opcheck(recurrent._layer_backward, arguments, test_utils=but_values[1:])
    first, second = (recurrent._layer_backward(*arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.inference_mode():
        assert recurrent._layer(*given, False, True, True)[-1].numel() == made[-1].numel()


def test_what_it_keeps_is_in_its_peak() -> None:
    torch._dynamo.reset()
    model, x = Headed(), torch.randn(16, 50, 8)
    autoprec.compile(model, plan=plan_of("fp32"), events=None, backend="inductor")
    model(x).square().mean().backward()
    (made,) = autoprec.session(model).lowering.compiled
    measured = peak_bytes(lambda: model(x).square().mean().backward(), x.device)
    assert measured > 61 * 16 * 50 * 16 and made.peak_bytes == pytest.approx(measured, rel=0.02)
