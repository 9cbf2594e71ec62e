"""Cross entropy that keeps its logits narrow: torch's own on the rounded logits, in what a step then takes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.formats import format_named
from autoprec.numerics.losses import LossOptions, cross_entropy
from autoprec.numerics.packing import decode, encode
from autoprec.planning.kept_inputs import keeps_logits
from autoprec.planning.saved import logits_variance
from autoprec.plans import Plan, Storage
from tests.memory_study import peak_of
from tests.planning.maker import histogram

STORAGES = ["fp8_e4m3", "fp8_e5m2", "bf16", "fp16"]
SHAPES = [(7, 5), (64, 300), (3, 11, 6), (2, 4, 5, 6), (0, 4), (1, 1)]


def classes(shape: tuple[int, ...], ignored: int) -> Tensor:
    found = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    found.view(-1)[::3] = ignored
    return found


@pytest.mark.parametrize("pieces", ["whole", "in pieces"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_it_is_torchs_on_the_rounded_logits(
    smoothing: float, reduction: str, weighted: bool, pieces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is that of the logits as they are; bit for bit but where class weights are added up."""
    if pieces == "in pieces":
        monkeypatch.setattr("autoprec.numerics.packing._CPU_PIECE", 24)
    torch.manual_seed(0)
    for shape in SHAPES:
        for storage in STORAGES:
            for ignored in (-100, 2 % shape[1]):
                x, target = 3 * torch.randn(shape), classes(shape, ignored)
                weight = torch.rand(shape[1]) if weighted else None
                kept = encode(x, storage)
                mine, rounded = x.clone().requires_grad_(), decode(kept, torch.float32).requires_grad_()
                given = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing}
                found = cross_entropy(mine, target, weight, kept, LossOptions(**given))
                torchs = [F.cross_entropy(t, target, weight, **given) for t in (x, rounded)]
                arriving = torch.randn(found.shape)
                found.backward(arriving)
                torchs[1].backward(arriving)
                rtol = 1e-6 if weighted else 0.0
                torch.testing.assert_close(found, torchs[0], rtol=rtol, atol=0.0, equal_nan=True)
                # Of a class that is nearly sure, what is left is a difference of what is rounded.
                atol = rtol * float(rounded.grad.abs().max()) if rounded.numel() else 0.0
                torch.testing.assert_close(mine.grad, rounded.grad, rtol=rtol, atol=atol, equal_nan=True)


def test_what_is_kept_is_the_narrow_copy() -> None:
    x, target = torch.randn(64, 1000, requires_grad=True), torch.randint(0, 1000, (64,))
    kept = encode(x, "fp8_e4m3")
    held = saved_bytes(lambda: cross_entropy(x, target, None, kept, LossOptions()), exclude=[x, target])
    assert held == 64 * 1000 + 4 + 4  # a byte each, the scale, what the mean divides by
    assert saved_bytes(lambda: F.cross_entropy(x, target), exclude=[x, target]) >= 4 * 64 * 1000


def test_a_second_derivative_is_refused() -> None:
    x, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    y = cross_entropy(x, target, None, encode(x, "bf16"), LossOptions())
    with pytest.raises(autoprec.UnsupportedError, match="create_graph=True goes through cross entropy"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("classes", [10, 200, 2000])
@pytest.mark.parametrize("storage", ["fp8_e4m3", "bf16"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_price_is_about_what_is_measured(smoothing: float, storage: str, classes: int) -> None:
    """Of unsure and of sure predictions, right and wrong ones. Too much is allowed where nothing is at stake."""
    generator, fmt = torch.Generator().manual_seed(0), format_named(storage)
    for spread in (0.1, 1.0, 4.0, 10.0):
        for right in (0.0, 0.5, 0.95, 1.0):
            x = spread * torch.randn(300, classes, generator=generator)
            others = torch.randint(0, classes, (300,), generator=generator)
            target = torch.where(torch.rand(300, generator=generator) < right, x.argmax(1), others)

            def gradient(logits: Tensor, target: Tensor = target) -> Tensor:
                leaf = logits.double().requires_grad_()
                return torch.autograd.grad(F.cross_entropy(leaf, target, label_smoothing=smoothing), leaf)[0]

            exact, rounded = gradient(x), gradient(decode(encode(x, storage), torch.float32))
            measured = float((rounded - exact).square().sum() / exact.square().sum())
            values, slopes = x.numpy(), exact.numpy()
            predicted = logits_variance(
                histogram(values), histogram(values, slopes.ravel() ** 2), histogram(slopes), fmt
            )
            assert predicted is not None
            assert 0.3 * measured <= predicted <= max(5.0 * measured, 1e-4), (spread, right, predicted, measured)


class Tagger(nn.Module):
    """A loss of classes for each token, inside of the model."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.body, self.head, self.options = nn.Linear(16, 32), nn.Linear(32, 50), options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(x))).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(0, 1), **self.options)  # type: ignore[arg-type]


LOGITS = "head:linear#0"
NARROW = Plan(assignments=(), storages=(Storage(tensor=LOGITS, format="fp8_e4m3", reason="test"),))


def step(model: nn.Module, *batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    y = model(*batch)
    y.backward()
    return y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("backend", "smoothing"), [("eager", 0.0), ("eager", 0.1), ("inductor", 0.1)])
def test_a_plan_that_keeps_them_narrow(backend: str, smoothing: float) -> None:
    """The gradients are those of a model that rounds its logits where the gradient looks at them."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, target: Tensor) -> Tensor:
            ctx.save_for_backward(decode(encode(x, "fp8_e4m3"), torch.float32), target)  # type: ignore[attr-defined]
            return forward(x, target)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
            logits, target = ctx.saved_tensors  # type: ignore[attr-defined]
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                return torch.autograd.grad(forward(leaf, target), leaf, grad)[0], None

    def forward(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, label_smoothing=smoothing)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Tagger(label_smoothing=smoothing), (torch.randn(4, 9, 16), torch.randint(0, 50, (4, 9)))
    oracle = copy.deepcopy(model)
    autoprec.compile(model, plan=NARROW, events=None, backend=backend)
    loss, gradients = step(model, *batch)
    y = Rounded.apply(oracle.head(torch.tanh(oracle.body(batch[0]))).flatten(0, 1), batch[1].flatten())
    y.backward()
    exact = backend == "eager"
    torch.testing.assert_close(loss, y.detach(), rtol=0.0 if exact else 1e-5, atol=0.0)
    for found, parameter in zip(gradients, oracle.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=0.0 if exact else 1e-4, atol=0.0 if exact else 1e-6)
    if not exact:
        (made,) = autoprec.session(model).lowering.compiled
        kept = {k.dtype: k for k in made.kept if k.tensor == LOGITS}
        assert kept["float8_e4m3fn"].planned and kept["float8_e4m3fn"].bytes == 36 * 50
        assert kept["float32"].bytes == 4 and len(kept) == 2  # the scale


@pytest.mark.parametrize("case", ["classes", "weights", "deprecated", "smoothed", "smoothed sum", "smoothed weights",
                                  "probabilities"])  # fmt: skip
def test_what_ours_does_not_compute_stays_torchs(case: str) -> None:
    """The planner sees by what torch's keeps which it is; a plan by hand changes nothing there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {
        "weights": {"weight": torch.rand(50)},
        "smoothed": {"label_smoothing": 0.1},
        "smoothed sum": {"label_smoothing": 0.1, "reduction": "sum"},
        "smoothed weights": {"label_smoothing": 0.1, "weight": torch.rand(50)},
        "deprecated": {"size_average": False},
    }.get(case, {})
    model, x, target = Tagger(**options), torch.randn(4, 9, 16), torch.randint(0, 50, (4, 9))
    if case == "probabilities":
        target = torch.rand(4, 9, 50).softmax(-1)
    before = step(model, x, target)
    plain = copy.deepcopy(model)
    policy = autoprec.Policy.model_validate({"name": "test", "formats": ("fp32",), "calibration": {"steps": 2}})
    autoprec.compile(model, policy=policy, batches=[(x, target)] * 2, loss_fn=lambda m, b: m(*b), events=None)
    graph = autoprec.session(model).graph
    assert graph is not None
    loss = next(op for op in graph.ops if op.kind == "cross_entropy")
    ours = case != "probabilities"
    assert keeps_logits(loss, graph) == ours
    autoprec.compile(plain, plan=NARROW, events=None)
    after = step(plain, x, target)
    assert torch.equal(before[0], after[0]) or "weights" in case
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True)) != ours


def test_logits_that_are_born_in_bf16_are_kept_once() -> None:
    """In a byte for each, of which the loss in FP32 reads its cast."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Tagger(), (torch.randn(4, 9, 16), torch.randint(0, 50, (4, 9)))
    roles = (autoprec.Role.OUTPUT, autoprec.Role.GRAD_INPUT, autoprec.Role.GRAD_WEIGHT)
    head = tuple(autoprec.Assignment(op=LOGITS, role=r, format="bf16", reason="test") for r in roles)
    as_is, narrow = (Plan(assignments=head, storages=kept) for kept in ((), NARROW.storages))
    held, found = [], []
    for plan in (as_is, narrow):
        mine = copy.deepcopy(model)
        autoprec.compile(mine, plan=plan, events=None)
        found.append(step(mine, *batch))
        held.append(saved_bytes(lambda mine=mine: mine(*batch), exclude=[*batch, *mine.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert held[0] - held[1] == 36 * 50 * (4 - 1) - 4  # the logarithms go, a byte and the scale come
    head_bias = [gradients[3] for _, gradients in found]
    assert 0.0 < float((head_bias[0] - head_bias[1]).norm() / head_bias[0].norm()) < 0.1


def test_the_peak_of_a_large_vocabulary() -> None:
    found = {plan: peak_of("vocabulary", plan) for plan in ("fp32", "lowest")}
    for p in found.values():
        assert p.ratio is not None and abs(p.ratio - 1.0) <= 0.05, p
    low, high = found["lowest"].measured, found["fp32"].measured
    assert low is not None and high is not None and low <= 0.5 * high
