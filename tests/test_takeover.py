"""Plans that are compiled beside the run: by a copy of the process, and taken over at a step that no clock decides."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autoprec
from autoprec.execution import compiling, inductor, takeover
from autoprec.execution.beside import can_copy
from tests.states import edited
from tests.test_lowering import plan_of
from tests.test_replanning import Training, layers, policy

STEPS = 6


#: Of the hidden layer: other ones in each process, of which the compiler's cache knows nothing.
WIDTH = 65 + os.getpid() % 1000


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def training(**changes: object) -> Training:
    """Four steps, and a first plan that runs a product in BF16."""
    monitor = {"window_steps": 100, "interval_steps": 50, "takeover_steps": STEPS}
    rules = [{"match": "2", "pin": "bf16", "optional": True}]
    run = Training(policy(objective="time", rules=rules, monitor=monitor, **changes), made(), backend="inductor")
    run.steps(4)
    assert run.session.plan is not None and run.session.executed_formats()["2:linear#0"] == "bf16"
    return run


def promote(run: Training) -> None:
    """A product leaves BF16."""
    run.session._stability.floors = run.session._stability.floors.with_ban("2:linear#0", "bf16", "noise")
    run.session.replan()


def cache(what: str) -> int:
    return counters["inductor"][f"fxgraph_cache_{what}"]


def test_a_new_plan_runs_at_once_and_is_compiled_beside_it() -> None:
    run = training()
    made, before = run.session.lowering.compiled, run.session.plan
    random_state = torch.get_rng_state()
    promote(run)
    assert run.session.plan is not before and torch.equal(torch.get_rng_state(), random_state)
    counters.clear()
    run.steps(STEPS - 1)
    assert run.session.executed_formats().get("2:linear#0", "fp32") == "fp32"
    assert run.session.lowering.compiled == made and not run.told("lowered") and not counters["inductor"]
    run.step()
    assert [e.step for e in run.told("lowered")] == [4 + STEPS] and not run.told("warning")
    assert len(run.session.lowering.compiled) == len(made) + 1
    assert cache("hit") == 2 and cache("miss") == 0  # forward and backward pass, compiled by the copy
    run.steps(2)
    assert before is not None
    run.session.adopt(before)  # what was compiled comes back at once
    assert run.session._takeover.due_step is None
    run.steps(2)
    assert cache("miss") == 0 and len(run.session.lowering.compiled) == len(made) + 1


def test_a_run_that_goes_on_from_a_state_takes_over_at_the_same_step() -> None:
    whole = training()
    promote(whole)
    whole.steps(2)
    state, weights, rng = whole.session.state_dict(), whole.model.state_dict(), torch.get_rng_state()
    weights = {name: x.clone() for name, x in weights.items()}
    whole.steps(STEPS)

    rest = Training(whole.session.policy, made(), backend="inductor")
    rest.model.load_state_dict(weights)
    rest.session.load_state_dict(state)
    torch.set_rng_state(rng)
    rest.step()
    assert not any(isinstance(slot.runner, inductor.Inductor) for slot in rest.session._slots.values())
    rest.steps(STEPS - 1)
    assert all(torch.equal(x, rest.model.state_dict()[name]) for name, x in whole.model.state_dict().items())
    assert rest.session.events == whole.session.events and len(rest.told("lowered")) == 1
    # And a plan that was compiled before the state was taken is not new to it.
    assert all(rest.session.lowering.knows(p) for p in (whole.session.plan, rest.session.plan) if p is not None)
    assert whole.session.lowering.known == rest.session.lowering.known


def test_another_plan_in_the_meantime_ends_the_copy() -> None:
    run = training()
    before = run.session.plan
    promote(run)
    run.step()
    copy = run.session._takeover._beside
    assert copy is not None and before is not None and copy._end.alive
    run.session.adopt(before)
    assert not copy._end.alive
    run.steps(STEPS)
    assert not run.told("lowered")


def test_where_there_is_no_room_for_a_copy_the_run_compiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training()

    def no_room() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", no_room)
    promote(run)
    run.step()
    [warning] = run.told("warning")
    assert "can compile it ([Errno 12] Cannot allocate memory): the run waits for its compiler" in warning.evidence
    assert [e.step for e in run.told("lowered")] == [5] and run.session._takeover.due_step is None
    run.step()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_without_the_copy_the_run_compiles_for_itself(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run = training()
    owner = os.getpid()
    compiler = inductor.compile_fx

    def only_here(*arguments: object, **options: object) -> object:
        while os.getpid() != owner:
            if how == "fails":
                os._exit(3)
            time.sleep(1)
        return compiler(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(inductor, "compile_fx", only_here)
    if how == "hangs":
        monkeypatch.setattr(takeover, "_PATIENCE_SECONDS", 1.0)
        monkeypatch.setattr(takeover, "_PATIENCE_TIMES", 0.0)
    promote(run)
    counters.clear()
    run.steps(STEPS)
    [warning] = run.told("warning")
    assert "the run waits for its compiler" in warning.evidence and cache("hit") + cache("miss") == 2
    assert len(run.told("lowered")) == 1
    run.steps(2)


class HalfFrozen(nn.Module):
    """Two graphs, of which one has no trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.head = nn.Linear(16, 32).requires_grad_(False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.back(x))
        torch._dynamo.graph_break()
        return self.head(x)


def test_graphs_that_are_compiled_when_they_are_called_take_over_too() -> None:
    """Or a run that goes on from a state would run them otherwise."""
    monitor = {"window_steps": 100, "interval_steps": 50, "takeover_steps": 2}
    run = Training(policy(objective="time", monitor=monitor), HalfFrozen(), backend="inductor")
    run.steps(4)
    run.session.adopt(plan_of({"head:linear#0": "bf16"}))
    run.steps(1)
    slots = run.session._slots.values()
    assert [slot.trains for slot in slots] == [False, True]
    assert not any(isinstance(slot.runner, inductor.Inductor) for slot in slots)
    run.steps(2)
    assert len(run.told("lowered")) == 1
    assert all(isinstance(slot.runner, inductor.Inductor) for slot in slots)


def test_a_plan_that_comes_while_another_waits_waits_no_longer() -> None:
    run = training()
    promote(run)
    run.steps(2)
    due = run.session._takeover.due_step
    run.session.adopt(run.session.plan)  # type: ignore[arg-type]
    assert run.session._takeover.due_step == due and run.session._takeover._beside is not None
    run.session.adopt(plan_of({"0:linear#0": "bf16"}))
    assert run.session._takeover.due_step == due == 4 + STEPS and run.session._takeover._beside is None
    run.steps(STEPS - 2)
    assert [e.step for e in run.told("lowered")] == [due]


def test_a_state_of_a_step_that_was_due_runs_compiled_at_once() -> None:
    run = training()
    promote(run)
    run.steps(2)
    state = run.session.state_dict()
    assert run.session._takeover.due_step == 4 + STEPS
    header = json.loads(state["autoprec"])
    header["run"]["takeover_step"] = 6
    rest = Training(run.session.policy, made(), backend="inductor")
    rest.session.load_state_dict(edited(state, header))
    assert rest.session._takeover.due_step is None
    rest.step()
    assert all(isinstance(slot.runner, inductor.Inductor) for slot in rest.session._slots.values())


def test_a_step_may_end_where_there_are_no_gradients() -> None:
    """A plan is compiled as it will run, wherever that is."""
    run = training()
    promote(run)
    run.optimizer = None  # type: ignore[assignment]
    for _ in range(STEPS + 2):
        run.model.zero_grad()
        run.model(torch.randn(128, 16)).square().mean().backward()
        with torch.no_grad():
            run.session.step()
    assert len(run.told("lowered")) == 1


def test_what_a_copy_was_making_has_no_name(tmp_path: Path) -> None:
    """Whoever finds a file in the cache takes it for whole."""
    seen = list[tuple[str, bool]]()

    def build(command: str, cwd: str) -> None:
        made = command.split()[-1]
        (tmp_path / made).write_text("half")
        seen.append((made, (tmp_path / "kernel.so").exists()))

    compiling.whole(build)("g++ kernel.cpp -o kernel.so", str(tmp_path))
    assert [there for _, there in seen] == [False] and seen[0][0] != "kernel.so"
    assert (tmp_path / "kernel.so").read_text() == "half" and not (tmp_path / seen[0][0]).exists()


@pytest.mark.parametrize(("platform", "device"), [("linux", "cuda"), ("darwin", "cpu"), ("win32", "cpu")])
def test_where_a_process_cannot_be_copied(monkeypatch: pytest.MonkeyPatch, platform: str, device: str) -> None:
    assert can_copy("cpu")
    monkeypatch.setattr(sys, "platform", platform)
    assert not can_copy(device)


@pytest.mark.parametrize("how", ["fx_graph_cache", "force_disable_caches"])
def test_without_a_cache_the_run_waits(how: str) -> None:
    run = training()
    with torch._inductor.config.patch({how: how != "fx_graph_cache"}):
        promote(run)
        assert run.session._takeover.due_step is None
        run.step()


def test_unwrap_ends_the_copy() -> None:
    run = training()
    promote(run)
    run.step()
    copy = run.session._takeover._beside
    assert copy is not None
    autoprec.unwrap(run.model)
    assert not copy._end.alive


def test_eager_plans_have_nothing_to_wait_for() -> None:
    monitor = {"window_steps": 100, "interval_steps": 50, "takeover_steps": STEPS}
    run = Training(policy(objective="time", monitor=monitor), layers())
    run.steps(4)
    promote(run)
    assert run.session._takeover.due_step is None


def test_a_copy_of_a_process_with_threads_compiles_for_as_many() -> None:
    """OpenMP's threads are not copied; the copy would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(1 << 20).exp()  # they are there
        with torch._inductor.config.patch(compile_threads=2):  # as outside of the suite
            run = training()
            promote(run)
            counters.clear()
            run.steps(STEPS)
    finally:
        torch.set_num_threads(threads)
    assert len(run.told("lowered")) == 1 and not run.told("warning")
    assert cache("hit") == 2 and cache("miss") == 0
