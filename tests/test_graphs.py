"""Graphs of several steps make one."""

from __future__ import annotations

import random

import pytest

from autoprec.graphs import Op, OpClass, OpGraph, TensorKind, TensorSpec


def step(chance: random.Random) -> OpGraph:
    """Some of eight ops in some order, each reading what was made before."""
    made, ops = ["input:x"], []
    for name in chance.sample("abcdefgh", chance.randint(1, 8)):
        inputs = tuple(chance.sample(made, min(len(made), chance.randint(1, 2))))
        ops.append(Op(id=name, kind="add", op_class=OpClass.POINTWISE, fqn="", inputs=inputs, outputs=(f"{name}:0",)))
        made.append(f"{name}:0")
    tensors = tuple(
        TensorSpec(id=t, shape=(2,), dtype="float32", kind=TensorKind.ACTIVATION, requires_grad=True) for t in made
    )
    return OpGraph(model="M", ops=tuple(ops), tensors=tensors)


@pytest.mark.parametrize("seed", range(50))
def test_graphs_of_steps_that_took_other_branches(seed: int) -> None:
    chance = random.Random(seed)
    steps = [step(chance) for _ in range(4)]
    whole = steps[0]
    for other in steps[1:]:
        longer = whole.extended(other)
        assert [op for op in longer.ops if op.id in whole.op_by_id] == list(whole.ops)  # nothing that was there moves
        whole = longer
    assert {op.id for op in whole.ops} == {op.id for s in steps for op in s.ops}
    assert {t.id for t in whole.tensors} == {t.id for s in steps for t in s.tensors}
    seen = {"input:x"}
    for op in whole.ops:  # noise and lifetimes are summed in this order
        assert set(op.inputs) <= seen
        seen |= set(op.outputs)
    assert whole.extended(steps[-1]) is whole
