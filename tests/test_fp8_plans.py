"""Plans with products in FP8: what runs is what they say, and what they cannot say is refused."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.errors import PlanError
from autoprec.graphs import Role
from autoprec.numerics import gemm, products
from autoprec.planning.evaluator import evaluate
from autoprec.planning.planner import ask, propose
from autoprec.planning.solutions import Solution
from autoprec.planning.uniform import uniform_choice
from autoprec.plans import Assignment, Plan, Storage
from autoprec.policies import Policy
from autoprec.reporting.differences import differences
from autoprec.reporting.plans import summary


class Net(nn.Module):
    """Two products that read the same tensor, one that reads their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return self.c(F.gelu(self.a(h) + self.b(h)))


class Spread(nn.Module):
    """A product of a tensor whose rows differ by powers of ten."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(2.0 * x)


def assignment(op: str, role: Role, fmt: str) -> Assignment:
    return Assignment(op=op, role=role, format=fmt, reason="test")


def fp8_plan(*, storages: tuple[Storage, ...] = ()) -> Plan:
    """FP8 forward, E5M2 gradients back, weight gradients in BF16; all else in BF16."""
    found = [assignment(op, Role.OUTPUT, "bf16") for op in (":tanh#0", ":add#0", ":gelu#0")]
    for op in ("a:linear#0", "b:linear#0", "c:linear#0"):
        found += [assignment(op, Role.OUTPUT, "fp8_e4m3"), assignment(op, Role.GRAD_INPUT, "fp8_e5m2"),
                  assignment(op, Role.GRAD_WEIGHT, "bf16")]  # fmt: skip
    return Plan(assignments=tuple(found), storages=storages)


@pytest.mark.parametrize("stored", ["", "fp8_e4m3", "bf16"])
def test_a_plan_by_role_runs_as_planned(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: three products for each layer, each in its format; one FP8 copy for both readers of a tensor."""
    formats: Counter[str] = Counter()
    encoded: Counter[tuple[str, tuple[int, ...]]] = Counter()
    own_encode = products.encode

    def noted(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(a: Any, b: Any, fmt: str, *rest: Any) -> Tensor:
            formats[fmt] += 1
            return own(a, b, fmt, *rest)

        return product

    def counted(x: Tensor, fmt: str, **kwargs: Any) -> Any:
        encoded[fmt, tuple(x.shape)] += 1
        return own_encode(x, fmt, **kwargs)

    for name in ("rows_times_rows", "operands_product"):
        monkeypatch.setattr(gemm, name, noted(getattr(gemm, name)))
    for module in ("numerics.products", "numerics.keeping", "rewriting.rewrite"):
        monkeypatch.setattr(f"autoprec.{module}.encode", counted)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 16, requires_grad=True)
    storages = (Storage(tensor=":tanh#0", format=stored, reason="test"),) if stored else ()
    autoprec.compile(model, plan=fp8_plan(storages=storages), events=None)
    model(x).square().sum().backward()
    assert formats == {"fp8_e4m3": 3, "fp8_e5m2": 3, "bf16": 3}
    session = autoprec.session(model)
    executed = session.executed_formats()
    assert {op: executed[op] for op in ("a:linear#0", "c:linear#0", ":gelu#0")} == dict.fromkeys(
        ("a:linear#0", "c:linear#0", ":gelu#0"), "bf16"
    )
    if stored == "fp8_e4m3":  # the copy that is kept is the one that was read
        assert sum(n for (fmt, shape), n in encoded.items() if fmt == "fp8_e4m3" and math.prod(shape) == 96) == 1
    else:
        assert encoded["fp8_e4m3", (6, 16)] == 1


@pytest.mark.parametrize("stored", [False, True])
def test_scales_by_row_are_a_policys_to_ask_for(stored: bool) -> None:
    """One huge row of activations takes nothing from the others: with one scale they are zeros."""
    torch.manual_seed(0)
    x = torch.randn(6, 16)
    model = Net()
    rules = [{"kinds": ["linear"], "match": "[ab]", "pin": "fp8_e4m3"}]
    policy = Policy(name="p", formats=("fp32", "bf16", "fp8_e4m3"), rules=rules, calibration={"steps": 2},
                    noise={"gradient": 1000.0, "loss": 1000.0})  # fmt: skip
    loss = lambda m, batch: m(batch).square().mean()  # noqa: E731
    found = {}
    for scales in ("tensorwise", "rowwise"):
        made = copy.deepcopy(model)
        autoprec.compile(made, policy=policy.replaced(scales=scales), batches=[x, -x], loss_fn=loss, events=None)
        plan = autoprec.session(made).plan
        assert plan is not None and plan.scales == scales
        found[scales] = plan
    assert found["tensorwise"].fingerprint != found["rowwise"].fingerprint
    assert not differences(*found.values()).same_decisions
    said = [str(summary(plan)) for plan in (*found.values(), Plan(assignments=(), scales="rowwise"))]
    assert ["by row" in text for text in said] == [False, True, False]
    wide = torch.randn(6, 16) * torch.tensor([1e8, 1, 1, 1, 1, 1])[:, None]
    spread = Spread()
    storages = (Storage(tensor=":mul#0", format="fp8_e4m3", reason="test"),) if stored else ()
    errors = {}
    for scales in ("tensorwise", "rowwise"):
        made = copy.deepcopy(spread)
        roles = (assignment("a:linear#0", Role.OUTPUT, "fp8_e4m3"),)
        autoprec.compile(made, plan=Plan(assignments=roles, storages=storages, scales=scales), events=None)
        y = made(wide)[1:]
        errors[scales] = float((y - spread(wide)[1:]).norm().detach() / y.norm().detach())
    assert errors["rowwise"] < 0.05 < 0.5 < errors["tensorwise"]


def test_fp8_tensors_go_nowhere_else() -> None:
    """They are bytes in the graph: torch would run a plain product of its own FP8 dtypes without a word."""
    model, x = Net(), torch.randn(6, 16)
    autoprec.compile(model, plan=fp8_plan(), events=None)
    seen: set[torch.dtype] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.add(t.dtype), t)[1], lambda t: t):
        model(x).square().sum().backward()
    assert torch.uint8 in seen and not any(str(d).startswith("torch.float8") for d in seen)


def test_formats_of_products_are_for_products() -> None:
    model, x = Net(), torch.randn(6, 16)
    autoprec.compile(model, plan=Plan(assignments=(assignment(":gelu#0", Role.OUTPUT, "fp8_e4m3"),)), events=None)
    with pytest.raises(PlanError, match="products alone"):
        model(x)


def policy(*rules: dict[str, Any], formats: tuple[Any, ...] = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2")) -> Policy:
    every = {"match": "*", "kinds": ["linear"], "pin": "fp8_e4m3"}
    return Policy(name="test", formats=formats, rules=(*rules, every), calibration={"steps": 2},
                  noise={"gradient": 1e3, "loss": 1e3}, storage={"formats": ()})  # fmt: skip


def planned(policy: Policy) -> dict[tuple[str, Role], str]:
    torch.manual_seed(0)
    model, batches = Net(), [torch.randn(6, 16) for _ in range(2)]
    autoprec.compile(model, policy=policy, batches=batches, loss_fn=lambda m, b: m(b).square().mean(), events=None)
    return autoprec.session(model).plan.format_of


def test_a_rule_for_one_role_of_one_layer_changes_only_that() -> None:
    plain = planned(policy())
    raised = planned(policy({"match": "b", "roles": ["grad_weight"], "pin": "bf16"}))
    assert {k for k in plain if plain[k] != raised[k] and "linear" in k[0]} == {("b:linear#0", Role.GRAD_WEIGHT)}
    assert raised["b:linear#0", Role.GRAD_WEIGHT] == "bf16"


def test_what_would_be_emulated_is_not_chosen_unless_a_rule_pins_it() -> None:
    """FP8 products on a CPU are slower than BF16: nobody gets them by accident, and the plan says why not."""
    torch.manual_seed(0)
    model, batches = Net(), [torch.randn(6, 16) for _ in range(2)]
    found = Policy(name="test", formats=("fp32", "bf16", "fp8_e4m3"), calibration={"steps": 2})
    autoprec.compile(model, policy=found, batches=batches, loss_fn=lambda m, b: m(b).square().mean(), events=None)
    plan = autoprec.session(model).plan
    assert "fp8_e4m3" not in {a.format for a in plan.assignments}
    (layer,) = (a for a in plan.assignments if (a.op, a.role) == ("a:linear#0", Role.OUTPUT))
    assert "would emulate it" in next(d.why for d in layer.dropped if d.format == "fp8_e4m3")
    assert "fp8" not in layer.reason  # which speaks of this op: the same words under each would hide the others


def test_formats_of_ones_own_by_value_and_by_name() -> None:
    mine = autoprec.Format(name="fp8_e3m4", exponent_bits=3, mantissa_bits=4)
    by_value = policy({"match": "a", "pin": "fp8_e3m4"}, formats=("fp32", "bf16", mine, "int8", "fp8_e4m3"))
    assert by_value.formats == ("fp32", "bf16", "fp8_e3m4", "int8", "fp8_e4m3")
    formats = planned(by_value)
    assert {formats["a:linear#0", role] for role in Role} == {"fp8_e3m4"}
    wrong = autoprec.Format(name="fp8_e4m3", exponent_bits=4, mantissa_bits=3)
    with pytest.raises(autoprec.PolicyError, match="not what its name says"):
        policy(formats=("fp32", wrong))


@pytest.mark.in_repository
def test_the_example_for_gpus_runs_on_a_cpu() -> None:
    """In small: the same code as on a GPU, with its own assertions about casts and products."""
    command = [sys.executable, "examples/fp8_on_a_gpu.py", "--small", "--steps", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {line[:32].strip(): line.split() for line in done.stdout.splitlines()}
    for name in ("autocast bf16 + torch.compile", "autoprec bf16", "autoprec fp8-hopper"):
        assert 4.0 < float(rows[name][len(name.split()) + 3]) < 7.0


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_what_is_kept_finer_than_it_is_read_is_rounded_twice(storage: str) -> None:
    """The error of a weight's gradient whose product reads its input in E4M3, kept in a format of more bits, of as many
    or of fewer, is about what is predicted."""
    torch.manual_seed(0)
    model, data = Net(), [torch.randn(64, 16) for _ in range(3)]
    policy = Policy(name="p", formats=("fp32", "fp8_e4m3", "fp8_e5m2"), noise={"gradient": 10.0, "loss": 10.0},
                    rules=[{"match": "c", "roles": ["grad_weight"], "pin": "fp8_e4m3"}],
                    storage={"formats": (storage,)})  # fmt: skip
    plain, calibrated = copy.deepcopy(model), copy.deepcopy(model)
    autoprec.compile(calibrated, policy=policy, batches=data, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(calibrated)
    proposals = propose(ask(session.graph, session.profile, session.device, policy))
    problem = proposals.problem
    choice = uniform_choice(problem, "fp32").keeping(problem.tensor_index[":gelu#0"], storage)
    evaluation = evaluate(problem, choice)
    plan = proposals.decisions(Solution(choice=choice, evaluation=evaluation, bound=0.0))
    predicted = evaluation.rows[next(k for k, r in enumerate(problem.rows) if r.weight == "c.weight")]
    autoprec.compile(model, plan=plan, events=None)
    error = 0.0
    for x in data:
        found = []
        for own in (plain, model):
            own.zero_grad()
            own(x).square().mean().backward()
            found.append(own.c.weight.grad)
        error += float((found[0] - found[1]).square().sum()) / len(data)
    assert 0.75 <= predicted / error <= 1.33
