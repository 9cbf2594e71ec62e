"""Several processes that train one model: no bad step of one changes anything in any, and all of them stay the same.

Each case is run by two processes, in one pair for all cases (starting them takes longer than the steps).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autoprec
from autoprec.execution import stepping
from autoprec.serial import load_policy
from tests.test_guard import same

STEPS, BAD = 16, 14
MONITOR = {"interval_steps": 6, "window_steps": 12}  # step BAD is not observed
Update = Callable[[Any], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Normed(Net):
    """With buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Run:
    """One rank's run of one case. `step(k)` is a step; in step BAD rank 0 alone has a reason to veto it."""

    def __init__(self, rank: int, name: str, folder: str) -> None:
        torch.manual_seed(0)
        self.rank, self.name = rank, name
        self.model = Normed() if "buffer" in name or "norm" in name else Net()
        guard = {"loss_spike": "skip"} if name == "loss" else {}
        policy = load_policy("bf16").replaced(calibration={"steps": 2}, guard=guard, monitor=MONITOR)
        autoprec.compile(self.model, policy=policy, events=f"{folder}/{name}.jsonl")
        self.session = autoprec.session(self.model)
        options = {"bucket view": {"gradient_as_bucket_view": True}, "static graph": {"static_graph": True}}
        options |= {"unused": {"find_unused_parameters": True}}
        options |= dict.fromkeys(("buffer of one", "buffer, left"), {"broadcast_buffers": False})
        self.called: Any = self.model
        if name != "by hand":
            self.called = DistributedDataParallel(self.model, **options.get(name, {}))
        fused = "left" in name
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)

    def batch(self, k: int, *, bad: bool) -> Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * k + self.rank))
        return x.index_fill(0, torch.tensor([0]), math.nan) if bad else x

    def backward(self, k: int) -> None:
        bad = k == BAD and self.rank == 0
        in_data = bad and self.name not in ("buffer of one", "loss", "buffer, left")
        if self.name == "accumulation":
            for part in range(3):
                with self.called.no_sync() if part < 2 else nullcontext():
                    self.called(self.batch(10 * k + part, bad=in_data and part == 0)).square().mean().backward()
            return
        if self.name == "cancelled":
            for part in range(3):
                factor = (1e22, -1e22, 1.0)[part] if bad else 1.0
                with self.called.no_sync() if part < 2 else nullcontext():
                    (self.called(self.batch(10 * k + part // 2, bad=False)).square().mean() * factor).backward()
            return
        loss = self.called(self.batch(k, bad=in_data)).square().mean()
        if bad and "buffer" in self.name:
            self.model.norm.running_var.data.fill_(math.inf)
        if self.name == "loss":
            self.session.note_loss(1e6 if bad else 1.0 + 0.01 * k)
        loss.backward()
        if self.name == "by hand":
            for p in self.model.parameters():
                dist.all_reduce(p.grad)
        if self.name == "clipped":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)

    def state(self) -> list[Any]:
        return copy.deepcopy([[*self.model.parameters()], self.optimizer.state_dict()])

    def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {"left": 0}
        for k in range(STEPS):
            self.optimizer.zero_grad()
            before = self.state()
            buffers = copy.deepcopy([*self.model.buffers()])
            self.backward(k)
            self.optimizer.step()
            if k == BAD:
                found["unchanged"] = same(before, self.state())
                if "buffer" in self.name:
                    found["unchanged"] &= same(buffers, [*self.model.buffers()])
            found["left"] += self.session._guard.owes
            if k >= BAD:
                found.setdefault("skipped", []).append(self.session.step_was_skipped)
        bad = [e for e in self.session.events if e.kind == "bad_step"]
        found |= {"steps": self.session.steps, "told": [(e.op, e.evidence) for e in bad]}
        mine = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        found["agree"] = all(torch.equal(everyone[0], other) for other in everyone)
        found["finite"] = bool(mine.isfinite().all())
        return found


CASES = ("plain", "bucket view", "static graph", "unused", "accumulation", "clipped", "by hand", "norm")
CASES += ("buffer of one", "loss", "left", "buffer, left")
GOOD = ("cancelled",)


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    is_cpu = Tensor.is_cpu
    found = {}
    for name in CASES + GOOD:
        if "left" in name:  # as on a GPU
            Tensor.is_cpu, stepping.LEAVES_OUT = property(lambda self: False), {"cpu"}  # type: ignore[misc, assignment]
        found[name] = Run(rank, name, folder).run()
        Tensor.is_cpu, stepping.LEAVES_OUT = is_cpu, {"cuda"}  # type: ignore[misc]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for name in CASES + GOOD:
        for rank, file in enumerate((f"{name}.jsonl", f"{name}.rank1.jsonl")):
            lines = (folder / file).read_text().splitlines()
            found[rank][name]["written"] = [e for e in map(json.loads, lines) if e["kind"] == "bad_step"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_bad_for_one_is_bad_for_all(found: list[dict[str, Any]], name: str) -> None:
    for rank in range(2):
        seen = found[rank][name]
        assert seen["unchanged"] and seen["finite"] and seen["agree"], (rank, seen)
        assert seen["skipped"] == [True, False] and seen["steps"] == STEPS - 1, (rank, seen)
        assert len(seen["told"]) == len(seen["written"]) == 1, (rank, seen)
    if name in ("buffer of one", "loss", "buffer, left"):
        assert "another rank" in found[1][name]["told"][0][1]
    else:
        assert found[0][name]["told"][0][0] == "first:linear#0"
        assert "another rank" in found[1][name]["told"][0][1]
    assert (found[0][name]["left"] > 0) == ("left" in name)


def test_what_the_average_does_not_have_is_no_reason(found: list[dict[str, Any]]) -> None:
    """Gradients that were too large in parts of one rank, and are not in the sum of its parts."""
    for rank in range(2):
        seen = found[rank]["cancelled"]
        assert seen["skipped"] == [False, False] and seen["agree"] and not seen["unchanged"], (rank, seen)
