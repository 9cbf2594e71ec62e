"""Compiled convolutions hold no copies of what is there anyway, and copy nothing that could be made as it is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import autoprec
from autoprec.execution import finishing
from autoprec.execution.measuring import peak_bytes
from autoprec.graphs import Role
from autoprec.plans import Assignment, Plan
from tests.test_lowering import step


class Residual(nn.Module):
    """Two convolutions with norms, the last of which is added to a third: the gradient of a sum of two, of a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.second, self.norm2 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.skip = nn.Conv2d(3, 64, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.first(x)).relu()
        return (self.norm2(self.second(h)) + self.skip(x)).relu().mean((2, 3))


#: All in BF16, but the gradients of one weight.
WIDE = "skip:conv2d#0"
OPS = ("first:conv2d#0", "norm1:batch_norm#0", ":relu#0", "second:conv2d#0", "norm2:batch_norm#0", WIDE, ":add#0")
PLAN = Plan(
    assignments=tuple(
        Assignment(op=op, role=role, format="fp32" if (op, role) == (WIDE, Role.GRAD_WEIGHT) else "bf16", reason="test")
        for op in OPS
        for role in Role
    )
)


@cache
def as_it_is() -> tuple[nn.Module, Tensor, dict[str, Tensor], int]:
    return compiled()


def compiled() -> tuple[nn.Module, Tensor, dict[str, Tensor], int]:
    """The model, its input, the gradients of a step, and what it peaks at."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(16, 3, 16, 16)
    autoprec.compile(model, plan=PLAN, events=None, backend="inductor")
    with fresh_cache():
        _, gradients = step(model, x)
    peak = peak_bytes(lambda: model(x).square().mean().backward(), x.device)
    told = autoprec.session(model).lowering.compiled[0].peak_bytes
    assert told == pytest.approx(peak, rel=0.02)
    return model, x, gradients, peak


CAST = torch.ops.prims.convert_element_type.default

IMAGE = 16 * 64 * 16 * 16 * 2  # of what the convolutions make, in BF16


@pytest.mark.parametrize(
    ("part", "least"), [("_make_channels_last", 0.5 * IMAGE), ("_give_back_as_given", 64 * 64 * 9 * 4)]
)
def test_parts_of_it_make_the_peak_lower_and_change_no_gradient(
    part: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, gradients, peak = as_it_is()
    monkeypatch.setattr(finishing, part, lambda _: None)
    _, _, others, higher = compiled()
    assert peak <= higher - least
    assert gradients.keys() == others.keys()
    for name, g in gradients.items():
        assert torch.equal(g, others[name]), name


def a_gradient_read_twice(grad: Tensor, x: Tensor, weight: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
    """By a sum, and, when something large was there and is gone, by a convolution: both in FP32."""
    wide = grad.float()
    sums = wide.sum((0, 2, 3))
    rows = torch.mm(torch.mm(large, sums.expand(64, 64)).t(), large)
    options = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, [False, True, False])
    return rows, torch.ops.aten.convolution_backward(wide, x * rows.sum(), weight, *options)[1]


def test_what_a_convolution_reads_wide_is_widened_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, large = torch.randn(16, 64, 16, 16, dtype=torch.bfloat16), torch.randn(1 << 14, 64)
    x, weight = torch.randn(16, 3, 16, 16), torch.randn(64, 3, 3, 3)

    def measured() -> tuple[tuple[Tensor, Tensor], int]:
        torch._dynamo.reset()
        with config.patch(post_grad_custom_post_pass=finishing.Finishing()), fresh_cache():
            run = torch.compile(a_gradient_read_twice)
            found = run(grad, x, weight, large)
        return found, peak_bytes(lambda: run(grad, x, weight, large), x.device)

    found, peak = measured()
    monkeypatch.setattr(finishing, "_widen_late", lambda _: None)
    others, higher = measured()
    assert peak <= higher - 0.9 * 2 * grad.nbytes
    for y, other in zip(found, others, strict=True):  # the sum may add up in another order
        torch.testing.assert_close(y, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_weights_are_not_kept_beside_themselves() -> None:
    model, x, _, _ = as_it_is()
    sizes = {p.numel() * 4 for p in model.parameters() if p.ndim == 4}
    kept = list[int]()

    def pack(t: Tensor) -> Tensor:
        kept.append(0 if any(t is p for p in model.parameters()) else t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    assert kept and not sizes.intersection(kept)


def test_a_pass_that_the_user_has_chosen_stays() -> None:
    seen = list[int]()

    def theirs(graph: fx.Graph) -> None:
        seen.append(len(graph.nodes))

    with config.patch(post_grad_custom_post_pass=theirs):
        _, _, gradients, _ = compiled()
    assert len(seen) == 2  # forward and backward
    _, _, others, _ = as_it_is()
    assert all(torch.equal(g, others[name]) for name, g in gradients.items())


def test_code_is_taken_from_the_cache_for_this_version_and_for_the_vectors_that_it_was_written_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = finishing.Finishing().uuid()
    assert made == finishing.Finishing().uuid()
    monkeypatch.setattr(finishing, "pick_vec_isa", lambda: "narrower")
    assert made != finishing.Finishing().uuid()


def finished(build: Callable[[fx.Graph], object]) -> list[Any]:
    """The targets of what is left of a graph."""
    graph = fx.Graph()
    graph.output((build(graph),))
    module = fx.GraphModule({}, graph)
    finishing.Finishing()(module.graph)
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def call(of: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    made = of.graph.call_function(target, (of, *arguments))
    made.meta["val"] = target(of.meta["val"], *arguments)
    return made


@pytest.mark.parametrize(
    ("narrow", "wide", "back", "is_there"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16, True),
        (torch.float16, torch.float32, torch.float16, True),
        (torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn, True),
        (torch.bfloat16, torch.float32, torch.float16, False),
        (torch.bfloat16, torch.float16, torch.bfloat16, False),  # which has other exponents
        (torch.float32, torch.bfloat16, torch.float32, False),
        (torch.float8_e8m0fnu, torch.float16, torch.float8_e8m0fnu, False),
    ],
)
def test_what_is_kept_narrow_is_not_made_of_its_own_copy(
    narrow: torch.dtype, wide: torch.dtype, back: torch.dtype, is_there: bool
) -> None:
    def build(graph: fx.Graph) -> list[fx.Node]:
        x = graph.placeholder("x")
        x.meta["val"] = torch.randn(8)
        made = call(call(x, torch.ops.aten.relu.default), CAST, narrow)
        copy = call(made, CAST, wide)
        return [made, call(copy, torch.ops.aten.sin.default), call(copy, CAST, back)]

    assert finished(build).count(CAST) == (2 if is_there else 3)


def test_what_the_graph_is_given_is_not_given_back_in_the_place_of_a_copy() -> None:
    def build(graph: fx.Graph) -> list[fx.Node]:
        x = graph.placeholder("x")
        x.meta["val"] = torch.randn(8, dtype=torch.bfloat16)
        return [call(call(x, CAST, torch.float32), CAST, torch.bfloat16)]

    assert finished(build).count(CAST) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_of_one_channel_are_not_copied(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, 1, 28, 28, dtype=dtype), nn.Conv2d(1, 32, 3, padding=1, bias=False, dtype=dtype)

    def measured() -> tuple[Tensor, int]:
        torch._dynamo.reset()
        with config.patch(post_grad_custom_post_pass=finishing.Finishing()), fresh_cache(), torch.no_grad():
            run = torch.compile(lambda x: model(x).mean((2, 3)))
            return run(x), peak_bytes(lambda: run(x), x.device)

    found, peak = measured()
    monkeypatch.setattr(finishing, "_say_channels_last", lambda _: None)
    other, higher = measured()
    assert peak <= higher - 0.9 * 64 * 32 * 28 * 28 * x.element_size()
    assert (found - other).norm() <= 1e-2 * other.norm()
