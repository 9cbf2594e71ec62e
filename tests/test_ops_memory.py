"""Predicted and measured peaks of a layer and one op: what it makes of what it reads twice, and what norms take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import ops_study
from tests.cpus import missed_without_bf16
from tests.memory_study import predicted_and_measured


class One(nn.Module):
    """A layer and an op."""

    def __init__(self, op: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.op, self.norm = nn.Linear(16, 256), op, norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.op(y if self.norm is None else self.norm(y)).mean()


@pytest.mark.parametrize("plan", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "op",
    [
        lambda y: y * y,
        lambda y: (e := torch.exp(y)) / e,
        lambda y: torch.maximum(y, y),
        lambda y: torch.where(y > 0, y, y),
        lambda y: y @ y.transpose(1, 2),
        lambda y: torch.cat([y, y], -1),
        lambda y: y + y,
    ],
    ids=["mul", "div", "maximum", "where", "matmul", "cat", "add"],
)
def test_what_is_read_in_two_places_gets_two_gradients(op: Callable[[Tensor], Tensor], plan: str) -> None:
    batches = [torch.randn(4, 256, 16) for _ in range(3)]
    predicted, measured = predicted_and_measured(One(op), batches, lambda m, x: m(x), plan)
    assert abs(predicted / measured - 1.0) <= 0.02, (predicted, measured)


class _Tempered(torch.autograd.Function):
    """A function of a user's with tensors of its own on the way there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.logsumexp(torch.cat([x, 2.0 * x], -1), -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = torch.softmax(torch.cat([x, 2.0 * x], -1), -1).chunk(2, -1)
        return g[..., None] * (a + 2.0 * b)


@pytest.mark.parametrize("plan", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.logaddexp(y, y.flip(-1)),
        lambda y: torch.hypot(y, y.flip(-1)),
        lambda y: torch.special.entr(y.sigmoid()),
        lambda y: torch.fft.rfft(y).abs(),
        lambda y: torch.polar(y.abs(), y).abs(),
        lambda y: torch.ops.aten.logaddexp2.default(y, y.flip(-1)),
        _Tempered.apply,
    ],
    ids=["logaddexp", "hypot", "entr", "rfft", "polar", "overload", "function"],
)
def test_what_ops_of_kinds_that_nobody_knows_take_is_measured(op: Callable[[Tensor], Tensor], plan: str) -> None:
    batches = [torch.randn(4, 256, 16) for _ in range(3)]
    predicted, measured = predicted_and_measured(One(op), batches, lambda m, x: m(x), plan)
    assert abs(predicted / measured - 1.0) <= 0.05, (predicted, measured)


@pytest.mark.parametrize("plan", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.fft.irfft(torch.fft.rfft(y) * 2.0, n=256),
        lambda y: torch.float_power(y, 2.0),
        lambda y: (2.0 * y.double()).exp().float(),
        lambda y: (z := 2.0 * y.double()) + (z.exp() + z),
        lambda y: (p := (2.0 * y.double()).unbind(0))[0] * p[1] + p[2] * p[3],
        lambda y: (p := torch.complex(y, y).chunk(2, -1))[0].abs() + p[1].abs(),
        lambda y: torch.real(y) + torch.positive(y),
        lambda y: y.transpose(1, 2).contiguous(),
        lambda y: y.flip(-1),
    ],
    ids=["complex", "float64", "double", "sum", "unbind", "chunk", "itself", "contiguous", "flip"],
)
def test_what_is_not_fp32_and_what_is_a_copy_counts_as_such(
    op: Callable[[Tensor], Tensor], plan: str, request: pytest.FixtureRequest
) -> None:
    if "contiguous-bf16" in request.node.name:
        request.applymarker(missed_without_bf16("0.76 is predicted"))
    batches = [torch.randn(4, 256, 16) for _ in range(3)]
    predicted, measured = predicted_and_measured(One(op), batches, lambda m, x: m(x), plan)
    assert abs(predicted / measured - 1.0) <= 0.02, (predicted, measured)


def test_what_is_queries_keys_and_values_in_one_can_be_planned() -> None:
    model = One(lambda y: nn.functional.scaled_dot_product_attention(y, y, y))
    batches = [torch.randn(4, 256, 16) for _ in range(3)]
    predicted, measured = predicted_and_measured(model, batches, lambda m, x: m(x), "bf16")
    assert abs(predicted / measured - 1.0) <= 0.05, (predicted, measured)


@pytest.mark.parametrize("norm", [nn.LayerNorm(256), nn.LayerNorm(256, elementwise_affine=False), nn.RMSNorm(256)])
def test_what_a_norm_in_bf16_takes_is_measured_as_it_runs(norm: nn.Module) -> None:
    """Ours adds its weight's gradient up in FP32, a piece at a time."""
    batches = [torch.randn(4, 256, 16) for _ in range(3)]
    predicted, measured = predicted_and_measured(One(torch.relu, norm), batches, lambda m, x: m(x), "bf16")
    # Of an RMS norm the cast of its result is timed with it.
    assert -0.02 <= predicted / measured - 1.0 <= (0.1 if isinstance(norm, nn.RMSNorm) else 0.02), (predicted, measured)


def test_the_study_says_what_is_predicted_too_low(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ops_study", "hypot", "gather"])
    assert ops_study.main() == 0
    assert "3 within 5%\nnone else is predicted too low" in capsys.readouterr().out
    monkeypatch.setattr(ops_study, "LOW", {})
    assert ops_study.main() == 1
    assert "predicted too low: gather in bf16" in capsys.readouterr().out
