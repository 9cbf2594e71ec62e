"""A run goes on from its state as if nothing had happened; what is no state of it is refused."""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load, save
from torch import nn

import autoprec
from autoprec.errors import StateError
from autoprec.serial import load_policy, read_state, state_parts, write_state
from autoprec.tracing.sites import SiteRegister
from tests.campaigns import kills
from tests.states import edited

STEPS = 60


class Broken(nn.Module):
    """A layer in a frame that Dynamo runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = torch.relu(layer(x))
        return x


class Run:
    """A training run of `kills.Net`, which leaves FP16 for a while, or of another model."""

    def __init__(
        self, model: Callable[[], nn.Module] = kills.Net, policy: autoprec.Policy | None = None, **how: Any
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        autoprec.compile(self.model, policy=policy or kills.policy(), **{"events": None, **how})
        self.session = autoprec.session(self.model)
        self.losses: list[str] = []  # of which NaN equals NaN

    def train(self, start: int, end: int) -> Run:
        for step in range(start, end):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(64, 16) * (3e5 if 20 <= step < 26 else 1.0)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(repr(float(loss.detach())))
        return self

    def saved(self) -> dict[str, Any]:
        """A checkpoint as people write it, through torch.save."""
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "session": self.session}
        torch.save({k: v.state_dict() for k, v in parts.items()} | {"rng": torch.get_rng_state()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]

    def load(self, found: dict[str, Any]) -> Run:
        for name in ("model", "optimizer", "session"):
            getattr(self, name).load_state_dict(found[name])
        torch.set_rng_state(found["rng"])
        return self

    def same_as(self, other: Run) -> None:
        mine, others = self.model.state_dict(), other.model.state_dict()
        assert all(torch.equal(mine[name], x) for name, x in others.items())
        assert self.session.events == other.session.events
        plans = [s.plan for s in (self.session, other.session)]
        assert plans[0] is not None and plans[1] is not None and plans[0].fingerprint == plans[1].fingerprint
        counts = [(s.steps, s.skipped_steps, s.step_was_skipped) for s in (self.session, other.session)]
        assert counts[0] == counts[1]


@pytest.fixture(scope="module")
def whole() -> Run:
    run = Run().train(0, STEPS)
    assert {"planned", "bad_step", "promoted", "demoted"} == {e.kind for e in run.session.events}
    return run


@pytest.mark.parametrize("cut", [4, 5, 7, 20, 21, 23, 30, 45])
def test_a_run_goes_on_as_if_nothing_had_happened(whole: Run, cut: int) -> None:
    """At the plan, inside windows, at the bad step, while a format is banned, and after it came back."""
    first = Run().train(0, cut)
    found = first.saved()
    second = Run().load(found).train(cut, STEPS)
    assert first.losses + second.losses == whole.losses
    second.same_as(whole)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_calibration_goes_on_too(cut: int) -> None:
    first = Run().train(0, cut)
    found = first.saved()
    second = Run().load(found).train(cut, 12)
    straight = Run().train(0, 12)
    assert second.session.plan is not None and straight.session.plan is not None
    assert second.session.plan.fingerprint == straight.session.plan.fingerprint
    assert first.losses + second.losses == straight.losses
    assert second.session.profile is not None and second.session.profile.steps == 4


def test_modules_that_are_captured_on_their_own_are_so_again() -> None:
    policy = kills.policy().replaced(calibration={"steps": 2})
    straight = Run(Broken, policy).train(0, 12)
    assert any(e.trigger == "graph_break" for e in straight.session.events)
    first = Run(Broken, policy).train(0, 7)
    found = first.saved()
    second = Run(Broken, policy).load(found).train(7, 12)
    assert first.losses + second.losses == straight.losses
    assert [e.kind for e in second.session.events] == [e.kind for e in straight.session.events]


def test_an_evaluation_may_come_first(whole: Run) -> None:
    """Call sites are numbered by the training graphs."""
    first = Run().train(0, 8)
    found = first.saved()
    second = Run().load(found)
    second.model.eval()
    with torch.no_grad():
        second.model(torch.ones(8, 16))
    second.model.train()
    second.train(8, 12)
    assert first.losses + second.losses == whole.losses[:12]


class Branches(nn.Module):
    """Two call sites of one kind in one module; which of them runs depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(16, 16) * 0.3) for _ in range(2))
        self.takes_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.takes_second:
            return nn.functional.linear(x, self.second)
        return nn.functional.linear(x, self.first)


class BranchingRun(Run):
    """Of `Branches`, the second of which leaves FP16 in the seventh step; ids of the ops that read each parameter."""

    def __init__(self) -> None:
        super().__init__(Branches, kills.policy().replaced(calibration={"steps": 3}))

    def train(self, start: int, end: int) -> BranchingRun:
        for step in range(start, end):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            self.model.takes_second = step % 2 == 1
            self.optimizer.zero_grad()
            loss = self.model(x * (2e5 if self.model.takes_second and step >= 7 else 1.0)).abs().mean() * 1e-4
            loss.backward()
            self.optimizer.step()
            self.losses.append(repr(float(loss.detach())))
        return self

    @property
    def ids(self) -> dict[str, str]:
        ops = [op for binding in self.session.bindings for op in binding.ops]
        return {op.weights[0]: op.id for op in ops if op.weights}


@pytest.mark.parametrize("cut", [2, 7, 12, 13])
@pytest.mark.parametrize("evaluated", [False, True])
def test_ops_are_called_the_same_whichever_branch_runs_first(cut: int, evaluated: bool) -> None:
    first = BranchingRun().train(0, cut)
    found = first.saved()
    first.train(cut, 24)
    second = BranchingRun()
    second.load(found)
    if evaluated:
        second.model.eval()
        second.model.takes_second = True
        with torch.no_grad():
            second.model(torch.ones(8, 16))
        second.model.train()
    second.train(cut, 24)
    assert second.ids == first.ids == {"first": ":linear#0", "second": ":linear#1"}
    assert second.losses == first.losses[cut:]
    second.same_as(first)


def test_an_older_state_knows_no_call_sites() -> None:
    found = BranchingRun().train(0, 13).saved()
    header = json.loads(found["session"]["autoprec"])
    assert header["run"].pop("sites")
    found["session"] = edited(found["session"], header)
    run = BranchingRun()
    run.load(found)
    run.train(13, 15)
    assert run.session.steps == 15


def test_call_sites_of_a_source_that_was_changed_take_the_numbers_that_are_free() -> None:
    sites = SiteRegister()
    assert sites.number("a", "mm", "x.py@1:6", 0) == 0 and sites.known == ()  # in an evaluation
    assert sites.settle() and not sites.settle()
    assert [sites.number("a", "mm", f"x.py@1:{line}", 0) for line in (8, 6, 8)] == [0, 1, 0]
    same, other = SiteRegister(sites.known), SiteRegister(sites.known)
    assert [same.number("a", "mm", f"x.py@1:{line}", 0) for line in (9, 6, 8)] == [2, 1, 0]
    assert [other.number("a", "mm", f"x.py@2:{line}", 0) for line in (9, 7, 9, 11)] == [0, 1, 0, 2]
    assert other.number("b", "mm", "x.py@2:9", 0) == 0


def test_a_file_holds_every_bit(tmp_path: Path) -> None:
    run = Run().train(0, 23)
    run.session.save(tmp_path / "state.safetensors")
    found = read_state(tmp_path / "state.safetensors")
    write_state(tmp_path / "again.safetensors", found)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "state.safetensors").read_bytes()
    header, arrays = state_parts(found)
    given = run.session.state_dict()
    assert header == given["autoprec"] and set(given) == {"autoprec", *arrays}
    assert all(torch.equal(torch.from_numpy(a), given[name]) for name, a in arrays.items())
    assert found.run.plan == run.session.plan and found.run.floors.banned


@pytest.mark.parametrize("cut", [2, 19])
def test_events_beyond_the_state_come_again(tmp_path: Path, cut: int) -> None:
    """What another run wrote before stays."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"of": "another run"}\n')
    first = Run(events=path).train(0, cut)
    found = first.saved()
    first.train(cut, 30)
    lines = path.read_text()
    assert "bad_step" in lines and "another run" in lines
    second = Run(events=path).load(found)
    assert "bad_step" not in path.read_text() and "another run" in path.read_text()
    second.train(cut, 30)
    assert path.read_text() == lines


def test_a_file_with_other_events_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    found = Run(events=tmp_path / "elsewhere.jsonl").train(0, 19).saved()
    path.write_text("a\nb\nc\n")
    Run(events=path).load(found)
    assert path.read_text().startswith("a\nb\nc\n") and '"planned"' in path.read_text()


# Refusals ----------------------------------------------------------------------------------------------------------


class Other(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return Run().train(0, 12).session.state_dict()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"model": partial(Other, 48)},
            r"another model: first.weight is float32\[48, 16\] here, and float32\[32, 16\]",
        ),
        ({"model": lambda: nn.Sequential(nn.Linear(16, 4))}, "another model: 0.weight .* no such parameter"),
        ({"policy": kills.policy().replaced(budget="80%")}, "said something else.*its budget"),
        ({"policy": kills.policy().replaced(name="mine")}, None),
        ({"backend": "inductor"}, "backend='eager', not 'inductor'"),
    ],
    ids=["width", "model", "budget", "name", "backend"],
)
def test_the_state_of_another_run_is_refused(state: dict[str, Any], how: dict[str, Any], words: str | None) -> None:
    run = Run(**how)
    if words is None:  # a policy that says the same under another name
        run.session.load_state_dict(state)
        return
    with pytest.raises(StateError, match=words):
        run.session.load_state_dict(state)
    assert run.session.plan is None and run.session.steps == 0


def half_frozen(frozen: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(not frozen)
    return model


def test_a_load_that_failed_changed_nothing_and_can_be_tried_again() -> None:
    """Somebody forgot to freeze what lives in a narrow format."""
    policy = kills.policy().replaced(formats=("fp32", "bf16"), storage={"formats": (), "frozen": ("bf16",)})
    first = Run(half_frozen, policy).train(0, 8)
    found = first.saved()
    assert first.session.plan is not None and first.session.plan.living
    second = Run(partial(half_frozen, False), policy)
    fresh = second.session.state_dict()
    before = {name: p.detach().clone() for name, p in second.model.named_parameters()}
    with pytest.raises(StateError, match=r"does not fit this model: .* 0\.\w+ in bf16 .*freeze it"):
        second.session.load_state_dict(found["session"])
    after = second.session.state_dict()
    assert second.session.profile is None and second.session.graph is None and after["autoprec"] == fresh["autoprec"]
    assert all(type(p) is nn.Parameter and torch.equal(p, before[n]) for n, p in second.model.named_parameters())
    second.model[0].requires_grad_(False)
    second.load(found).train(8, 16)
    assert first.losses + second.losses == Run(half_frozen, policy).train(0, 16).losses


def test_the_state_of_a_model_with_other_modules_is_refused(state: dict[str, Any]) -> None:
    header = json.loads(state["autoprec"])
    header["run"]["parts"] = ["first", "nowhere"]
    run = Run()
    with pytest.raises(StateError, match="another model: it has the module nowhere"):
        run.session.load_state_dict(edited(state, header))
    assert run.session.plan is None and run.session.steps == 0
    run.session.load_state_dict(state)


def test_what_was_evaluated_before_the_load_runs_under_the_plan(whole: Run) -> None:
    first = Run().train(0, 8)
    found = first.saved()
    second = Run()
    second.model.eval()
    with torch.no_grad():
        second.model(torch.ones(8, 16))
    second.model.train()
    second.load(found).train(8, 12)
    assert first.losses + second.losses == whole.losses[:12]


def test_a_state_is_of_the_time_between_two_steps(state: dict[str, Any]) -> None:
    run = Run()
    run.model(torch.randn(64, 16)).sum().backward()
    with pytest.raises(StateError, match=r"after optimizer.step"):
        run.session.state_dict()
    with pytest.raises(StateError, match="before its first step"):
        run.session.load_state_dict(state)
    run.optimizer.step()
    with pytest.raises(StateError, match="before its first step"):
        run.session.load_state_dict(state)


@pytest.mark.parametrize("what", [{}, {"autoprec": 3}, [], {"autoprec": "{}"}, {"autoprec": "", "x": 1}])
def test_what_is_no_state_is_refused(what: Any) -> None:
    with pytest.raises(StateError):
        Run().session.load_state_dict(what)


def test_damaged_files_are_refused_and_change_nothing(tmp_path: Path, state: dict[str, Any]) -> None:
    good = tmp_path / "good.safetensors"
    run = Run()
    run.session.load_state_dict(state)
    run.session.save(good)
    data = good.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["autoprec"]
    arrays = load(data)
    newer = json.loads(header) | {"version": 2}
    strange = {**arrays, "window2.bins": next(iter(arrays.values()))}
    fewer = dict(list(arrays.items())[1:])
    damaged = {
        "cut": data[: len(data) // 2],
        "empty": b"",
        "text": b"plan: none",
        "newer": save(arrays, metadata={"autoprec": json.dumps(newer)}),
        "nothing": save(arrays),
        "header": save(arrays, metadata={"autoprec": header[:-20]}),
        "strange": save(strange, metadata={"autoprec": header}),
        "fewer": save(fewer, metadata={"autoprec": header}),
    }
    for name, what in damaged.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(what)
        fresh = Run()
        with pytest.raises(StateError, match=f"{name}.safetensors") as caught:
            fresh.session.load(path)
        assert "upgrade" in str(caught.value) or name != "newer"
        assert fresh.session.plan is None and not fresh.session.events
    with pytest.raises(StateError, match="does not exist"):
        Run().session.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(StateError, match="create it first"):
        run.session.save(tmp_path / "no" / "where.safetensors")


def test_no_bit_of_a_file_may_be_another(tmp_path: Path, state: dict[str, Any]) -> None:
    """Most are of numbers, each of which would be as good: a run would go on, and otherwise."""
    run, path, chance = Run(), tmp_path / "state.safetensors", random.Random(0)
    run.session.load_state_dict(state)
    run.session.save(path)
    good, data, refused = shutil.copy(path, tmp_path / "good.safetensors"), path.read_bytes(), 0
    for _ in range(200):
        place = chance.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        try:
            found = read_state(path)
        except StateError as error:
            assert str(path) in str(error)
            refused += 1
        else:  # in the name of the digest
            assert state_parts(found)[0] == state_parts(read_state(good))[0]  # which has the digest of all
    assert refused >= 198


def test_a_state_dict_that_somebody_wrote_to_is_refused(state: dict[str, Any]) -> None:
    name = next(n for n, x in state.items() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel())
    other = state[name].clone()
    other.view(-1)[0] += 1.0
    run = Run()
    with pytest.raises(StateError, match="not what was written"):
        run.session.load_state_dict(state | {name: other})
    with pytest.raises(StateError, match="not what was written"):
        run.session.load_state_dict(state | {"autoprec": state["autoprec"].replace('"steps": 12', '"steps": 13')})
    run.session.load_state_dict(edited(state, json.loads(state["autoprec"])))  # of an older version
    assert run.session.steps == 12


def test_killed_runs_go_on() -> None:
    """A smaller set of `python -m tests.campaigns.kills`."""
    assert kills.campaign(1, seed=1) == []


def test_a_copy_of_a_state_is_a_state(state: dict[str, Any]) -> None:
    run = Run()
    run.session.load_state_dict(copy.deepcopy(state))
    assert run.session.steps == 12


def trained(act: nn.Module, steps: int, **how: Any) -> nn.Module:
    """Activations have no parameters that could differ."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), act, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    autoprec.compile(model, policy=load_policy("bf16").replaced(calibration={"steps": 3}), events=None, **how)
    more(model, steps)
    return model


def more(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [2, 5], ids=["calibrating", "planned"])
def test_the_state_of_a_model_with_other_ops_is_refused_when_they_are_seen(steps: int) -> None:
    """Before anything is updated."""
    state = autoprec.session(trained(nn.GELU(), steps)).state_dict()
    other = trained(nn.Tanh(), 0)
    autoprec.session(other).load_state_dict(state)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(StateError, match=r"another model: it has 1:gelu#0, and this one has 1:tanh#0 in its place"):
        more(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    same = trained(nn.GELU(), 0)
    autoprec.session(same).load_state_dict(state)
    more(same, 4)
    assert autoprec.session(same).steps == steps + 4


def test_the_plan_of_a_model_with_other_ops_is_refused() -> None:
    plan = autoprec.session(trained(nn.GELU(), 4)).plan
    with pytest.raises(autoprec.PlanError, match=r"another model: it has 1:gelu#0, and this one has 1:relu#0"):
        trained(nn.ReLU(), 1, plan=plan)
    trained(nn.GELU(), 1, plan=plan)
