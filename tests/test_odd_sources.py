"""What is made again of copies, of expanded tensors, of sizes, of ReLU in place; and what changes meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import autoprec
from autoprec.execution.measuring import saved_bytes
from autoprec.graphs import Role
from autoprec.numerics import remaking
from autoprec.planning.planner import ask
from autoprec.plans import RECOMPUTED, Plan, Storage
from tests.test_gated_units import Gated
from tests.test_remaking import planned

pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def differences(model: nn.Module, plain: nn.Module, x: Tensor) -> dict[str, float]:
    """Of each gradient, relative to its norm."""
    found, exact = gradients(model, x), gradients(plain, x)
    assert found.keys() == exact.keys()
    return {n: float((found[n] - g).norm() / g.norm()) for n, g in exact.items()}


def under(plan: Plan, model: nn.Module, **more: str) -> nn.Module:
    compiled: nn.Module = autoprec.compile(copy.deepcopy(model), plan=plan, events=None, **more)
    return compiled


def narrow(format_name: str, *tensors: str) -> tuple[Storage, ...]:
    return tuple(Storage(tensor=t, format=format_name, reason="") for t in tensors)


def again(tensor: str, *made_from: str) -> Storage:
    return Storage(tensor=tensor, format=RECOMPUTED, made_from=made_from, reason="")


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "clone": lambda h: h.clone(),
    "index": lambda h: h[torch.arange(63, -1, -1)],
    "contiguous": lambda h: h.unflatten(0, (8, 8)).transpose(0, 1).contiguous().view(64, -1),
    "reshape": lambda h: h.unflatten(0, (8, 8)).transpose(0, 1).reshape(64, -1),
}
READERS: dict[str, Callable[[Gated, Tensor], Tensor]] = {
    "a norm": lambda s, h: F.layer_norm(h, h.shape[-1:]),
    "GELU": lambda s, h: F.gelu(h),
    "a gate": lambda s, h: F.silu(s.x @ s.u) * h,
}


class Copied(Gated):
    """What reads a copying view of a product."""

    def __init__(self, copied: str, reader: str) -> None:
        super().__init__(lambda s, x: READERS[reader](s, COPIES[copied](x @ s.a)))

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return super().forward(x)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_a_source_as_any_other(copied: str, reader: str) -> None:
    plain = Copied(copied, reader)
    for storages in ((), ("fp8_e4m3",)):
        session = planned(copy.deepcopy(plain), objective="bytes", storage={"formats": storages})
        solver = next(c for c in session.plan.contestants if c.name == "solver")  # type: ignore[union-attr]
        assert solver.adopted and not solver.measured.failure and RECOMPUTED in solver.formats
        allowed = 0.05 if storages or "bf16" in solver.formats else 1e-6
        assert max(differences(session.model, plain, torch.randn(64, 6)).values()) <= allowed


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_copy_that_the_plan_does_not_name_is_kept_as_it_is(backend: str) -> None:
    """And not as what it is a copy of: nobody has predicted that."""
    plain = Gated(lambda s, x: (lambda h: h + (h.flip(0).pow(3) @ s.c[0, :32].diag()) * 0.1)(x @ s.a))
    model = under(Plan(assignments=(), storages=narrow("fp8_e4m3", ":matmul#0")), plain, backend=backend)
    found = differences(model, plain, torch.randn(64, 6))
    assert found["a"] <= 1e-5 and found["c"] <= 1e-5


EXPANDED: dict[str, tuple[Callable[[Gated, Tensor], Tensor], str, tuple[str, ...]]] = {
    "a row": (lambda s, x: F.gelu((x[:1] @ s.a).expand(64, -1)), ":gelu#0", (":matmul#0",)),
    "four copies": (lambda s, x: F.gelu((x @ s.a).expand(4, -1, -1)), ":gelu#0", (":matmul#0",)),
    "in the middle": (lambda s, x: F.gelu((x @ s.a)[:, None].expand(-1, 4, -1)), ":gelu#0", (":matmul#0",)),
    "a norm": (lambda s, x: F.layer_norm((x @ s.a).expand(4, -1, -1), (32,)), ":layer_norm#0", (":matmul#0",)),
    "two factors": (
        lambda s, x: (x[:1] @ s.a).expand(64, -1) * (x[:1] @ s.u).expand(64, -1), ":mul#0", (":matmul#0", ":matmul#1"),
    ),
    "into a product": (lambda s, x: (x @ s.a).expand(4, -1, -1), "", (":matmul#0",)),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", EXPANDED)
def test_what_is_expanded_is_kept_narrow_once_and_read_as_often_as_it_is_there(name: str, backend: str) -> None:
    body, made, sources = EXPANDED[name]
    storages = narrow("fp8_e4m3", *sources) + ((again(made, *sources),) if made else ())
    model = under(Plan(assignments=(), storages=storages), plain := Gated(body), backend=backend)
    found = differences(model, plain, torch.randn(64, 6))
    assert 0.0 < max(found.values()) <= 0.05


class Numbers(nn.Module):
    """Factors that are a size, a function of one, and an argument that is no tensor; a norm over a size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.u, self.d = nn.Linear(6, 32), nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor, t: float) -> Tensor:
        h = F.silu(self.g(x)) * self.u(x) * (1.0 / x.shape[1] ** 0.5)
        h = self.d(F.silu(self.g(x)) * x.shape[1]) + self.d(h * t)
        return h + self.d(F.layer_norm(self.u(x), self.u(x).shape[1:]))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_sizes_and_numbers_that_change_are_factors(backend: str) -> None:
    plain = Numbers()
    model = copy.deepcopy(plain)
    policy = autoprec.Policy(name="p", formats=["fp32"], objective="bytes", storage={"formats": []})
    batches = [torch.randn(8, 16, 6) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x, 1.0).square().mean(),
                     events=None, backend=backend)  # fmt: skip
    plan = autoprec.session(model).plan
    assert plan is not None and sum(s.format == RECOMPUTED for s in plan.storages) >= 3
    for length, t in ((16, 1.0), (12, 1.1), (20, 1.2), (16, 1.3)):
        x, found = torch.randn(8, length, 6), list[list[Tensor]]()
        for own in (model, plain):
            own.zero_grad()
            own(x, t).square().mean().backward()
            found.append([p.grad for p in own.parameters()])  # type: ignore[misc]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of", ["its transpose", "a part of it", "itself"])
def test_a_factor_times_what_shows_its_memory_is_planned_as_it_runs(of: str) -> None:
    other = {"its transpose": lambda h: h.t(), "a part of it": lambda h: h[:1], "itself": lambda h: h}[of]
    plain = Gated(lambda s, x: (lambda h: h * other(h))(F.silu(x @ s.a)))
    model = copy.deepcopy(plain)
    policy = autoprec.Policy(name="p", formats=["fp32"], objective="bytes", storage={"formats": []})
    batches = [torch.randn(32, 6) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    contestants = autoprec.session(model).plan.contestants  # type: ignore[union-attr]
    assert not [c.name for c in contestants if c.measured is None or c.measured.failure]
    assert max(differences(model, plain, torch.randn(32, 6)).values()) <= 1e-5


def test_what_is_read_twice_runs_once_and_costs_so() -> None:
    session = planned(Gated(lambda s, x: (lambda h: h * h)((lambda h: h * h)(x @ s.a))), storage={"formats": []})
    problem = ask(session.graph, session.profile, session.device, session.policy).problem
    (found,) = [t.remaking for t in problem.tensors if t.id == ":mul#1"]
    one, other = (session.graph.op_by_id[f":mul#{k}"].timing_key for k in (0, 1))
    seconds = session.device.seconds_by_key | session.device.forward_seconds_by_key
    assert one == other and found is not None
    assert dict(found.seconds)["fp32"] == pytest.approx(2.0 * seconds[one, Role.OUTPUT, "fp32"])


CHANGED: dict[str, tuple[Callable[[Gated, Tensor], Tensor], tuple[Storage, ...]]] = {
    "a factor beside one that is made again": (
        lambda s, x: F.gelu(x @ s.a) * s.u[0], (again(":gelu#0", ":matmul#0"),),
    ),
    "a factor beside one that is kept narrow": (
        lambda s, x: torch.sin(x @ s.a) * s.u[0], narrow("fp8_e4m3", ":sin#0"),
    ),
    "the weight of a norm": (lambda s, x: F.layer_norm(x @ s.a, (32,), s.u[0]), narrow("fp8_e4m3", ":matmul#0")),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_between_the_passes_is_an_error_as_it_is_without_a_plan(name: str) -> None:
    body, storages = CHANGED[name]
    plain = Gated(body)
    for model in (plain, under(Plan(assignments=(), storages=storages), plain)):
        loss = model(torch.randn(64, 6)).square().mean()
        with torch.no_grad():
            model.u.mul_(5.0)  # type: ignore[operator, union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Heads(nn.Module):
    """Two products that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(*s)) for s in ((6, 32), (32, 5), (32, 2)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(x @ self.a)
        return h @ self.b, h @ self.c


def test_what_is_made_again_for_nobody_else_goes_with_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two that would keep it is not differentiated."""
    made: list[StorageWeakRef] = []
    run = remaking._Making._run

    def noted(self: remaking._Making, read: Callable[[int], Tensor]) -> Tensor:
        result = run(self, read)
        made.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(remaking._Making, "_run", noted)
    model = under(Plan(assignments=(), storages=(again(":gelu#0", ":matmul#0"),)), Heads())
    first, _ = model(torch.randn(64, 6))
    loss = first.square().mean()
    loss.backward()
    assert len(made) == 1 and made[0].expired()
    assert loss is not None  # its graph is here still


@pytest.mark.parametrize("inplace", [False, True])
def test_a_relu_in_place_is_kept_as_one_that_is_not(inplace: bool) -> None:
    """The plan runs it out of place, so it keeps a bit of each of its results, which are kept narrow."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.Conv2d(16, 16, 3, padding=1),
              nn.BatchNorm2d(16), nn.ReLU(inplace), nn.Conv2d(16, 8, 3), nn.ReLU(inplace),
              nn.Conv2d(8, 4, 3)]  # fmt: skip
    model, batches = nn.Sequential(*layers), [torch.randn(8, 3, 16, 16) for _ in range(2)]
    policy = autoprec.Policy(name="p", formats=["fp32"], objective="bytes", noise={"gradient": 1e3, "loss": 1e3},
                             storage={"formats": ["fp8_e4m3"]})  # fmt: skip
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    plan = autoprec.session(model).plan
    assert plan is not None
    (solver,) = [c for c in plan.contestants if c.name == "solver"]
    assert solver.adopted and solver.measured is not None
    assert solver.predicted.peak_bytes == pytest.approx(solver.measured.peak_bytes, rel=0.01)
    kept = saved_bytes(lambda: model(batches[0]).square().mean(), [*model.parameters(), batches[0]])
    assert kept <= 0.30 * 4 * 8 * 16 * 16 * (16 * 4)  # of two convolutions and what normalizes and cuts them, in FP32
    assert plan.storage_of["5:relu#0"] == RECOMPUTED or plan.storage_of["5:relu#0"] == "fp8_e4m3"
