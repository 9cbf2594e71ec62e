"""Gradients of sums, against what autograd does with them: one tensor, handed on until another is added to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoprec.graphs import OpClass, OpGraph
from autoprec.planning.evaluator import Step
from autoprec.planning.problem import build_problem
from autoprec.planning.solutions import Choice
from autoprec.policies import Policy
from tests.planning.maker import Maker

#: Bytes of every tensor below.
SIZE = 4 * 6

FP32 = Policy.model_validate({
    "name": "test", "formats": ("fp32",), "storage": {"formats": ()}, "noise": {"gradient": 1.0, "loss": 1.0}
})  # fmt: skip


def relu(make: Maker, x: str) -> str:
    return make.op("relu", OpClass.POINTWISE, (x,), (2, 3), saves_output=True)


def add(make: Maker, *terms: str) -> str:
    return make.op("add", OpClass.POINTWISE, terms, (2, 3))


def planned(make: Maker, graph: OpGraph) -> list[int]:
    """Tensors of gradients at each op's backward pass, as the planner counts them."""
    problem = build_problem(graph, make.profile(graph), make.device(graph), FP32)
    step = Step(problem, Choice(options=(0,) * len(problem.units)))
    for t in problem.tensors:
        step.gradients(t, "fp32")
    n = len(problem.ops)
    step.hold("the gradient that enters", "", n, 2 * n - 1, SIZE)
    phases = map(problem.phase, range(n, 2 * n))
    held = [sum(size for _, first, last, size in step.held if first <= k <= last) for k in phases]
    assert not any(size % SIZE for size in held)
    return [size // SIZE for size in reversed(held)]


def handed_on(graph: OpGraph) -> list[int]:
    """The same of an engine that hands on the gradient of a sum as it is, and makes a new tensor of two, unless the op
    was handed the gradient that enters, which somebody holds: then of one that nobody else has, it adds in place, as
    torch does."""
    entered = object()
    waiting: dict[str, object] = {graph.ops[-1].outputs[0]: entered}
    most = []
    for op in reversed(graph.ops):
        arrived = waiting.pop(op.outputs[0], None)
        if arrived is None:
            most.append(len({id(x) for x in (entered, *waiting.values())}))
            continue
        senders = [t for t in op.inputs if graph.tensor_by_id[t].requires_grad]
        sent = [(t, arrived if op.kind == "add" else object()) for t in senders]
        alive = [len({id(x) for x in (entered, *waiting.values(), arrived, *(g for _, g in sent))})]
        while sent:
            t, own = sent.pop()
            before = waiting.get(t)
            others = [entered, *(g for w, g in waiting.items() if w != t), *(g for _, g in sent)]
            alone = arrived is entered and all(before is not g for g in others)
            waiting[t] = own if before is None else before if alone else object()
            now = (entered, *waiting.values(), own, before or own, *(g for _, g in sent))
            alive.append(len({id(x) for x in now}))
        most.append(max(alive))
    return most[::-1]


def test_a_residual_sum_is_counted_once() -> None:
    make = Maker(np.random.default_rng(0))
    make.tensor("input:x", (2, 3))
    x = relu(make, "input:x")
    y = relu(make, relu(make, x))
    graph = make.graph(relu(make, add(make, y, x)))
    # The last relu sends what the sum hands on; then it waits for the block, whose relus hold two beside it.
    assert handed_on(graph) == [3, 4, 3, 2, 2]
    found = planned(make, graph)
    assert found[2:] == handed_on(graph)[2:]
    assert sum(found) <= sum(handed_on(graph)) + 1  # where the block's gradient is added


def test_what_is_added_to_itself_is_a_tensor_of_its_own() -> None:
    make = Maker(np.random.default_rng(0))
    make.tensor("input:x", (2, 3))
    x = relu(make, "input:x")
    graph = make.graph(relu(make, add(make, x, x)))
    assert handed_on(graph)[1] == 3
    assert planned(make, graph)[1] == 3


@pytest.mark.parametrize("how", ["scaled", "part"])
def test_what_is_scaled_or_a_part_is_not_handed_on_as_it_is(how: str) -> None:
    """As with a difference, which negates what it sends."""
    counts = []
    for kind in ("add", "sub"):
        make = Maker(np.random.default_rng(0))
        x = relu(make, make.tensor("input:x", (2, 3)))
        if how == "part":
            x = make.op("exp", OpClass.POINTWISE, (x,), (4, 3), saves_output=True)
            x = make.op("getitem", OpClass.VIEW, (x,), (2, 3), base=x)
        y = relu(make, relu(make, x))
        out = make.op(kind, OpClass.POINTWISE, (y, x), (2, 3))
        key = "f(float32[2, 3], float32[2, 3], alpha=2)" if how == "scaled" else "f(float32[2, 3], float32[2, 3])"
        make.ops[-1] = replace(make.ops[-1], timing_key=key)
        counts.append(planned(make, make.graph(relu(make, out))))
    shares = [a != b for a, b in zip(*counts, strict=True)]
    assert not any(shares) if how == "scaled" else sum(shares) == 1  # the other term is whole, and has it


@pytest.mark.parametrize("seed", range(200))
def test_no_gradient_is_forgotten(seed: int) -> None:
    rng = np.random.default_rng(seed)
    make = Maker(rng)
    live = [make.tensor("input:x", (2, 3))]
    for _ in range(int(rng.integers(3, 12))):
        x, y = (live[-1 - int(rng.integers(min(3, len(live))))] for _ in range(2))
        live.append(add(make, x, y) if rng.random() < 0.6 else relu(make, x))
    graph = make.graph(live[-1])
    found, held = planned(make, graph), handed_on(graph)
    assert all(a >= b for a, b in zip(found, held, strict=True)), (found, held)
