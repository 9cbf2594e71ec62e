"""What narrow formats do to values that are not ordinary: masks, integers, nothing at all, batches without noise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.graphs import Role
from autoprec.serial import load_policy, read_device, write_device

LOWEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Causal, with a mask of the lowest number there is; if `blind`, one query sees nothing at all."""

    def __init__(self, mask: Callable[[Any, Tensor], Tensor], *, blind: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(8, 8) / 10)
        allowed = torch.ones(8, 8).tril().bool()
        allowed[3] &= not blind
        self.register_buffer("mask", torch.zeros(8, 8).masked_fill(~allowed, LOWEST), persistent=False)
        self.attend = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(self, x)).square().mean()


def added_to_scores(m: Any, x: Tensor) -> Tensor:
    scores = m.q(x) @ m.k(x).transpose(-2, -1) / 4
    return torch.softmax(scores + m.mask, -1) @ m.v(x)


def with_a_learned_bias(m: Any, x: Tensor) -> Tensor:
    q, k, v = (f(x)[:, None] for f in (m.q, m.k, m.v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias + m.mask)[:, 0]


def sliced(m: Any, x: Tensor) -> Tensor:
    q, k, v = (f(x)[:, None] for f in (m.q, m.k, m.v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.mask[None, None, :, :8][..., : x.shape[1], :])[:, 0]


def trained(model: nn.Module, steps: int = 12) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, 16))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("attend", [added_to_scores, with_a_learned_bias, sliced], ids=lambda f: f.__name__)
def test_a_mask_of_the_lowest_number_masks(attend: Callable[[Any, Tensor], Tensor], fmt: str, blind: bool) -> None:
    """Every op that can be in the format is. A row that sees nothing means nothing, but it is no NaN: in FP32 the
    lowest number swallows the scores and the row is their mean, in FP16 it does not."""
    torch.manual_seed(0)
    model = Attention(attend, blind=blind)
    expected = trained(copy.deepcopy(model))
    policy = autoprec.Policy(
        name="narrow",
        formats=["fp32", fmt],
        rules=[autoprec.Rule(pin=fmt, optional=True)],
        storage={"formats": []},
        noise={"gradient": 1e3, "loss": 1e3},
        calibration={"steps": 3},
    )
    found = trained(autoprec.compile(model, policy=policy, events=None))
    session = autoprec.session(model)
    assert [e.kind for e in session.events] == ["planned"]  # nothing vetoed
    assert found == pytest.approx(expected, rel=0.2 if blind else 0.02)
    executed = session.executed_formats()
    assert executed[":softmax#0" if attend is added_to_scores else ":scaled_dot_product_attention#0"]
    assert executed["out:linear#0"] == executed["q:linear#0"] == fmt


@pytest.mark.parametrize("attend", [added_to_scores, with_a_learned_bias], ids=lambda f: f.__name__)
def test_uniform_bf16_reaches_what_reads_a_mask(attend: Callable[[Any, Tensor], Tensor]) -> None:
    """The huge values are a mask's: they forbid no format."""
    model = autoprec.compile(Attention(attend), policy="bf16", events=None)
    trained(model)
    executed = autoprec.session(model).executed_formats()
    reads = ":add#0" if attend is added_to_scores else ":scaled_dot_product_attention#0"
    assert executed[reads] == "bf16"


def test_an_optional_rule_gives_way_where_values_leave_the_format() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * 1e6 / 1e6).square().mean()

    for optional in (True, False):
        policy = autoprec.Policy(
            name="half", formats=["fp32", "fp16"], rules=[autoprec.Rule(pin="fp16", optional=optional)],
            noise={"gradient": 1e3, "loss": 1e3}, calibration={"steps": 2},
        )  # fmt: skip
        model = autoprec.compile(Huge(), policy=policy, events=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def steps(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for _ in range(4):
                model(torch.randn(4, 8)).backward()
                optimizer.step()

        if not optional:
            with pytest.raises(autoprec.InfeasibleError, match=r":mul#0.*fp16 overflows"):
                steps()
            continue
        steps()
        formats = autoprec.session(model).plan.format_of
        assert formats[":mul#0", Role.OUTPUT] == "fp32" and formats["a:linear#0", Role.OUTPUT] == "fp16"


def test_an_op_on_integers_alone_stays_as_it_is() -> None:
    """`positions / 8` is float32 whatever a plan would like."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) * (torch.arange(8) / 8)).square().mean()

    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    autoprec.compile(model, policy="bf16", events=None)
    for _ in range(10):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
    executed = autoprec.session(model).executed_formats()
    assert executed[":div#0"] == "fp32" and executed[":mul#0"] == "bf16"


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4)])
def test_products_of_nothing(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(shape[-1], 5), nn.ReLU())
    expected = [model(torch.zeros(shape)).shape, *(p.shape for p in model.parameters())]
    autoprec.compile(model, policy="bf16", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        y = model(torch.zeros(shape))
        y.sum().backward()
        optimizer.step()
    assert [y.shape, *(p.grad.shape for p in model.parameters())] == expected
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_equal_batches_leave_no_noise_to_hide_behind() -> None:
    """With batches that differ the same policy does use narrow formats."""
    used = []
    for equal in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        fixed = torch.randn(64, 16)
        autoprec.compile(model, policy="memory", events=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(9):
            optimizer.zero_grad()
            model(fixed if equal else torch.randn(64, 16)).square().mean().backward()
            optimizer.step()
        used.append(autoprec.session(model).plan.formats_used())
    assert used[0] == ("fp32",)
    assert len(used[1]) > 1


def test_an_op_without_a_kernel_in_a_format_keeps_fp32(tmp_path: Path) -> None:
    """torch's CPU has no BF16 or FP16 `avg_pool3d`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(4 * 27, 2))
    autoprec.compile(model, policy="bf16", events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(2, 1, 8, 8, 8)).square().mean().backward()
        optimizer.step()
    session = autoprec.session(model)
    assert session.executed_formats()["0:conv3d#0"] == "bf16"
    (why,) = [a.reason for a in session.plan.assignments if a.op == "1:avg_pool3d#0"]
    assert "cannot run it: \"avg_pool3d_out_frame\" not implemented for 'BFloat16'" in why
    device = session.measure_device()
    (lacking,) = device.no_kernels
    assert lacking.format == "bf16" and "avg_pool3d" in lacking.timing_key
    write_device(tmp_path / "device.json", device)
    assert read_device(tmp_path / "device.json") == device


@pytest.mark.parametrize("inside", [False, True])
def test_a_product_that_reads_one_result_of_several_is_judged(inside: bool) -> None:
    """Also inside an activation checkpoint."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

        def body(self, x: Tensor) -> Tensor:
            a, b = self.up(x).chunk(2, -1)
            return self.down(a) + self.down(b)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if inside else self.body(x)

    model = Gated()
    batches = [torch.randn(6, 8) for _ in range(3)]
    autoprec.compile(model, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(model)
    found = [session.profile.tensor_by_id[f"down:linear#{k}"] for k in range(2)]
    for t in found:
        assert t.input_weight_grad is not None and t.gradient_weight_grad is not None
    assert all("cannot be judged" not in a.reason for a in session.plan.assignments)


def test_a_monitored_step_meets_a_branch_that_was_not_planned() -> None:
    """A product without a format that reads a tensor which the plan keeps narrow."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.extra = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(64, 16)
            self.more = False

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(x))
            return self.down(h) + self.extra(h) if self.more else self.down(h)

    model = Branching()
    policy = load_policy("memory").replaced(calibration={"steps": 2}, monitor={"interval_steps": 2, "window_steps": 4},
                                            noise={"gradient": 1000.0, "loss": 1000.0})  # fmt: skip
    autoprec.compile(model, policy=policy, events=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(8):
        model.more = step > 3
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    session = autoprec.session(model)
    assert session.steps == 8 and any(s.format != "as_is" for s in session.plan.storages)


class Mixed(nn.Module):
    """An op of most kinds that keep something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.bn(self.conv(x)))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.out(F.dropout(F.relu(attended), 0.1, self.training))


@pytest.mark.parametrize("policy", ["bf16", "memory"])
def test_what_is_evaluated_in_inference_mode_is_what_no_grad_gives(policy: str) -> None:
    """Tensors made in it have no versions, by which copies of what is kept are known."""
    model = autoprec.compile(Mixed(), policy=policy, events=None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(12):
        model.eval()
        x = torch.randn(4, 8, 16)
        with torch.no_grad():
            expected = model(x)
        with torch.inference_mode():
            assert torch.equal(model(x), expected) and torch.equal(model(x.clone()), expected)
        model.train()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert autoprec.session(model).plan is not None


class Shifted(nn.Module):
    """Adds a buffer that was made in inference mode, as a table that was grown while evaluating is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(16, width)
        with torch.inference_mode():
            self.register_buffer("table", torch.randn(4096, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table[: x.shape[0]]


@pytest.mark.parametrize("width", [4, 256], ids=["small", "large"])
def test_buffers_made_in_inference_mode(width: int) -> None:
    """They cannot be written to, and have no versions."""
    model = autoprec.compile(Shifted(width), policy="bf16", events=None)
    session, optimizer = autoprec.session(model), torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(12):
        table, before = model.table, {n: x.clone() for n, x in model.state_dict().items()}
        x = torch.randn(8, 16)
        x[0, 0] = float("nan") if step == 10 else 0.0
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 10:
            model.table = table.clone()
        optimizer.step()
        assert session.step_was_skipped == (step == 10)
        changed = [n for n, x in model.state_dict().items() if not torch.equal(x, before[n])]
        assert changed == ([] if step == 10 else ["layer.weight", "layer.bias"]) and model.table is table
