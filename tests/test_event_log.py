"""The log of a run and its file: a file that cannot be written costs nothing, and others write to it, too."""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoprec
from autoprec.reporting.runs import WatchedRun, follow
from autoprec.serial.appending import append_line
from autoprec.serial.events import EventsFile
from tests.states import edited


def policy(fmt: str = "bf16", **how: Any) -> autoprec.Policy:
    """Plans after three steps, for what must not depend on the day's timings."""
    return autoprec.Policy(
        name="pinned",
        formats=("fp32", fmt),
        noise={"gradient": 1e3, "loss": 1e3},
        rules=({"match": "*", "pin": fmt, "optional": True},),
        storage={"formats": (), "recompute": False},
        calibration={"steps": 3},
        monitor={"window_steps": 8, "interval_steps": 2},
        **how,
    )


class Run:
    """A small model, and its steps; some batches are bad."""

    def __init__(self, events: Path | str | None, fmt: str = "bf16") -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        autoprec.compile(self.model, policy=policy(fmt), events=events)
        self.session = autoprec.session(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self, start: int, end: int, bad: tuple[int, ...] = ()) -> Run:
        for i in range(start, end):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            x[0, 0] = float("nan") if i in bad else 1.0
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
        return self


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(path: Path) -> list[tuple[int, str]]:
    return [(e["step"], e["kind"]) for e in lines_of(path) if e.get("kind") in ("planned", "bad_step")]


def watched(path: Path) -> WatchedRun:
    """What whoever watches makes of it; an error for a line that is no event."""
    file = EventsFile(path, WatchedRun, follow)
    file.read()
    return file.run


# A file that cannot be written ---------------------------------------------------------------------------------------


@contextmanager
def full(size: int) -> Iterator[None]:
    """No file may be longer, as on a disk that is full."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def without_figures(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k not in ("evidence", "run")} for e in lines_of(path)]


@pytest.mark.parametrize("room", [0, 300])
def test_a_full_disk_costs_neither_the_plan_nor_a_step(tmp_path: Path, room: int) -> None:
    path = tmp_path / "events.jsonl"
    run = Run(path)
    with full(room), pytest.warns(RuntimeWarning) as caught:
        run.train(0, 6, bad=(4,))
    assert run.session.steps == 5 and run.session.plan is not None and run.session.plan.formats_used() == ("bf16",)
    assert [e.kind for e in run.session.events] == ["planned", "bad_step"]
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(f"{path}: ") and os.strerror(27) in text and "make room" in text
    assert path.read_bytes()[-1:] in (b"", b"\n")
    run.session.close()  # tells of itself, and of what was not written
    straight = Run(tmp_path / "straight.jsonl").train(0, 6, bad=(4,))
    straight.session.close()
    assert without_figures(path) == without_figures(tmp_path / "straight.jsonl")


def test_a_disk_that_is_full_for_a_moment_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run = Run(path).train(0, 6)
    for room in (0, 1, 60):
        with full(path.stat().st_size + room), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.train(6, 8, bad=(7,))
        watched(path)
        run.train(8, 10)
    run.train(10, 12, bad=(11,))
    assert [kind for _, kind in told(path)] == [e.kind for e in run.session.events] == ["planned"] + ["bad_step"] * 4


def test_the_page_of_a_run_has_what_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run = Run(path).train(0, 6)
    with full(path.stat().st_size), pytest.warns(RuntimeWarning):
        run.train(6, 8, bad=(7,))
        _, events = run.session._log.told()
    assert "bad_step" in [e.kind for e in events]


@pytest.mark.parametrize(
    ("begun", "stays"),
    [
        ('{"step": 3, "kind": "plan', ""),
        ('{"st', ""),
        ('{"step": 3, "kind": "x"}', '{"step": 3, "kind": "x"}\n'),
        ("notes of mine", "notes of mine\n"),
        ('{"step": 3, "kind": "\udcc3', ""),
    ],
)
@pytest.mark.parametrize("before", ["", '{"step": 1, "kind": "y"}\n'])
def test_a_line_without_its_end_is_completed_or_taken_away(tmp_path: Path, begun: str, stays: str, before: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(f"{before}{begun}".encode(errors="surrogateescape"))
    append_line(path, '{"step": 4, "kind": "z"}')
    assert path.read_text() == f'{before}{stays}{{"step": 4, "kind": "z"}}\n'


def test_a_run_goes_on_behind_a_line_that_power_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Run(path).train(0, 4)
    path.write_text(path.read_text()[:-40])
    whole = path.read_text().rpartition("\n")[0]
    Run(path).train(0, 4)
    assert path.read_text().startswith(f"{whole}\n") and watched(path).steps == 3


# A file that others write to, too ------------------------------------------------------------------------------------


def test_a_resume_takes_away_nothing_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = Run(path).train(0, 6, bad=(4,))
    state = first.session.state_dict()
    first.train(6, 9, bad=(7,))
    Run(path, "fp16").train(0, 7, bad=(5,))
    path.write_bytes(path.read_bytes() + b"\xff of a stranger's\r\n")
    before = path.read_bytes()
    last = b"".join(line for line in before.splitlines(True) if b'"bad_step"' in line and b'"step": 6' in line)
    second = Run(path)
    second.session.load_state_dict(state)
    assert last and path.read_bytes() == before.replace(last, b"")


def test_two_models_of_one_program_neither_double_nor_lose_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def train(runs: list[Run], start: int, end: int) -> None:
        for i in range(start, end):
            for run in runs:
                run.train(i, i + 1, bad=(5, 9))

    runs = [Run(path), Run(path)]
    train(runs, 0, 7)
    states = [run.session.state_dict() for run in runs]
    train(runs, 7, 12)
    straight = without_figures(path)
    assert len({e["run"] for e in lines_of(path)}) == 2
    for _ in range(2):
        runs = [Run(path), Run(path)]
        for run, state in zip(runs, states, strict=True):
            run.session.load_state_dict(state)
        train(runs, 7, 12)
        assert without_figures(path) == straight
        for run in runs:
            own = [e for e in run.session._log.told()[1] if e.kind in ("planned", "bad_step")]
            assert own == run.session.events


def test_a_program_that_changes_its_folder_goes_on_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    run = Run("events.jsonl").train(0, 5)
    monkeypatch.chdir(tmp_path / "b")
    run.train(5, 10, bad=(7,))
    assert told(tmp_path / "a" / "events.jsonl") == [(3, "planned"), (7, "bad_step")]
    assert [*(tmp_path / "b").iterdir()] == []


def test_a_run_that_went_on_while_its_file_could_not_be_written_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = Run(path).train(0, 5)
    with full(path.stat().st_size), pytest.warns(RuntimeWarning):
        first.train(5, 7, bad=(6,))
    state = first.session.state_dict()
    second = Run(path)
    with full(0), pytest.warns(RuntimeWarning):
        second.session.load_state_dict(state)
    second.train(7, 9, bad=(8,))
    assert told(path) == [(3, "planned"), (6, "bad_step"), (7, "bad_step")]


def test_a_run_that_went_on_without_a_file_for_a_while_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = Run(path).train(0, 6)
    before, state = path.read_text(), first.session.state_dict()
    second = Run(None)
    second.session.load_state_dict(state)
    state = second.train(6, 8, bad=(7,)).session.state_dict()
    third = Run(path)
    third.session.load_state_dict(state)
    assert path.read_text().startswith(before) and told(path) == [(3, "planned"), (7, "bad_step")]


def test_an_older_state_finds_its_lines_by_their_place(tmp_path: Path) -> None:
    """Its lines have no name, and get one."""
    path = tmp_path / "events.jsonl"
    first = Run(path).train(0, 6, bad=(4,))
    state = first.session.state_dict()
    first.train(6, 9, bad=(7,))
    header = json.loads(state["autoprec"])
    del header["run"]["events_run"]
    header["run"]["events_before"] = 1
    older = edited(state, header)
    unnamed = [json.dumps({k: v for k, v in e.items() if k != "run"}) for e in lines_of(path)]
    path.write_text("\n".join(['{"of": "another run"}', *unnamed]) + "\n")
    Run(path, "fp16").train(0, 4)
    second = Run(path)
    second.session.load_state_dict(older)
    assert told(path)[:3] == [(3, "planned"), (4, "bad_step"), (3, "planned")] and len(told(path)) == 3
    second.train(6, 9, bad=(7,))
    mine = [e["kind"] for e in lines_of(path)[1:] if e["run"] == second.session._log.run]
    assert [kind for kind in mine if kind in ("planned", "bad_step")] == ["planned", "bad_step", "bad_step"]
