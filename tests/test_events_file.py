"""A file of events that others write: however it grows, what is read of it is what it says."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.errors import InputError
from autoprec.plans import Event
from autoprec.reporting.runs import WatchedRun, follow
from autoprec.serial import event_from_json_line, event_to_json_line
from autoprec.serial.events import EventsFile, _quick_event
from tests.test_cli_watch import (
    DOWN,
    NAME,
    SMALL,
    UP,
    Run,
    append,
    assigned,
    event,
    observed,
    planned,
    text_of,
    window,
    write,
)


@pytest.fixture
def file() -> EventsFile[WatchedRun]:
    write(SMALL)
    found = EventsFile(Path(NAME), WatchedRun, follow)
    found.read()
    return found


def steps(file: EventsFile[WatchedRun]) -> int:
    file.read()
    return file.run.steps


def test_only_what_was_appended_is_read(file: EventsFile[WatchedRun]) -> None:
    with file.path.open("r+b") as other:
        other.write(b"?????")  # whoever reads it again finds no event
    append(file.path, text_of([window(12)]))
    assert steps(file) == 12
    with pytest.raises(InputError):
        EventsFile(file.path, WatchedRun, follow).read()


def test_a_line_without_its_end_waits(file: EventsFile[WatchedRun]) -> None:
    line = text_of([event(12, "warning", evidence="ä€😀")]).encode()
    for cut in range(len(line)):
        append(file.path, line[cut : cut + 1])
        assert steps(file) == (12 if cut == len(line) - 1 else 4)


def test_a_file_that_shrank_is_read_anew(file: EventsFile[WatchedRun]) -> None:
    append(file.path, text_of([window(12), window(20)]))
    assert steps(file) == 20
    os.truncate(file.path, len(text_of([*SMALL, window(12)])))
    assert steps(file) == 12
    append(file.path, text_of([window(16)]))
    assert steps(file) == 16 and len(file.run.ops) == 2


def test_a_file_that_was_replaced_is_read_anew(file: EventsFile[WatchedRun]) -> None:
    other = [replace(e, op=e.op and "x" * len(e.op)) for e in SMALL]
    write(other, "new")
    assert len(text_of(other)) == len(text_of(SMALL))
    os.replace("new", file.path)
    file.read()
    assert [op.op for op in file.run.ops] == ["x" * len(UP), "x" * len(DOWN)]


def test_a_file_that_was_written_anew_in_its_place_is_read_anew(file: EventsFile[WatchedRun]) -> None:
    identity = os.stat(file.path).st_ino
    write([planned(4), assigned(4, "x", "output", "bf16"), *(window(4) for _ in range(20))])
    assert os.stat(file.path).st_ino == identity
    file.read()
    assert [op.op for op in file.run.ops] == ["x"]


LINES = [
    planned(2),
    planned(6, trigger="asked"),
    assigned(2, UP, "output", "fp16"),
    assigned(2, UP, "kept", "bf16"),
    observed(3, UP, "fp16", amax=70000, overflow_frac=0.5),
    window(3, skipped_steps=1, budget_bytes=7),
    event(4, "promoted", UP, "output", was="fp16", now="fp32", trigger="overflow", evidence="ä"),
    event(4, "demoted", DOWN, now="fp16", trigger="quiet"),
    event(5, "bad_step", trigger="nonfinite"),
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(LINES), max_size=25), st.lists(st.integers(0, 4000), max_size=8))
def test_however_it_grew_it_says_what_it_says_at_once(events: list[Event], cuts: list[int]) -> None:
    data = text_of(events).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = EventsFile(Path(folder) / NAME, WatchedRun, follow)
        ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
        for start, end in zip([0, *ends], ends, strict=False):
            append(file.path, data[start:end])
            file.read()
        assert file.run == follow(WatchedRun(), events)


WORDS = st.one_of(st.text(max_size=3), st.sampled_from(["step", "kind", "op", "evidence", "run"]))
VALUES = st.one_of(st.integers(-3, 3), st.text(max_size=3), st.booleans(), st.none(), st.floats(), st.just([]))
JSON_LINES = st.one_of(
    st.dictionaries(WORDS, VALUES).map(json.dumps),
    st.lists(st.tuples(st.sampled_from(["step", "kind"]), VALUES)).map(json.dumps),
    st.builds(
        lambda step, more: json.dumps({"step": step, "kind": "x"} | more), VALUES, st.dictionaries(WORDS, VALUES)
    ),
    st.builds(
        lambda parts: "{" + ", ".join(parts) + "}",
        st.lists(
            st.sampled_from(['"step": 1', '"kind": "x"', '"op": "\\u00e4"', '"step": 1e0', '"op": {}', '"a": ""'])
        ),
    ),
)


@settings(max_examples=400)
@given(JSON_LINES)
def test_the_quick_reading_is_the_strict_one_or_none(line: str) -> None:
    found = _quick_event(line)
    if found is not None:
        assert found[1] == event_from_json_line(line)
    for run in ("", "1f3a"):
        assert _quick_event(event_to_json_line(LINES[6], run)) == (run, LINES[6])


def test_a_hundred_thousand_lines_of_fifteen_hundred_ops(run: Run) -> None:
    ops = [f"model.layers.{i // 5}.{'abcde'[i % 5]}:linear#0" for i in range(1500)]
    events = [planned(8), *(assigned(8, op, role, "fp16") for op in ops for role in ("output", "grad_input", "kept"))]
    for k in range(1460):
        events += [observed(500 * k + 8, ops[(7 * k + 11 * i) % 1500], "fp16", amax=i + 1.0) for i in range(64)]
        events.append(window(500 * k + 8))
    assert len(events) > 99_000
    write(events)
    file, before = EventsFile(Path(NAME), WatchedRun, follow), time.process_time()
    file.read()
    whole = time.process_time() - before
    append(file.path, text_of([window(10**6)]))
    before = time.process_time()
    file.read()
    more = time.process_time() - before
    assert whole < 10.0 and more < 0.1 and file.run.steps == 10**6
    code, text, _ = run("watch", ".")
    assert code == 0 and len(text.splitlines()) < 30 and "model.layers.*.a:linear#0" in text and " 300 " in text


def test_the_line_is_named_however_far_down(file: EventsFile[WatchedRun]) -> None:
    append(file.path, text_of([window(12), window(20)]))
    file.read()
    append(file.path, text_of([window(28), replace(window(36), evidence="steps")]))
    with pytest.raises(InputError, match=rf"^{NAME}:{len(SMALL) + 4}: evidence: 'steps' is no figure"):
        file.read()
    append(file.path, "nonsense\n")


def test_runs_that_write_in_turn_are_told_apart() -> None:
    """The one that was planned last is shown; one that is not planned yet changes nothing of it."""
    path = Path("two.jsonl")

    def append(run: str, **fields: Any) -> None:
        with path.open("a") as file:
            file.write(event_to_json_line(Event(**fields), run) + "\n")

    append("a", step=8, kind="planned", trigger="calibrated", evidence="a's")
    append("b", step=8, kind="planned", trigger="calibrated", evidence="b's")
    for step in range(9, 12):
        append("a", step=step, kind="bad_step", op="0:linear#0", trigger="overflow", evidence="x")
        append("b", step=step, kind="warning", trigger="memory", evidence="x")
    append("c", step=3, kind="bad_step", trigger="nonfinite", evidence="x")
    found = EventsFile(path, WatchedRun, follow)
    found.read()
    assert found.run.planned is not None and found.run.planned.evidence == "b's"
    assert (found.run.skipped_steps, found.run.steps, found.run.ops) == (0, 11, ())
    assert (found.of("a").skipped_steps, found.of("c").steps) == (3, 3)
    append("c", step=8, kind="planned", trigger="calibrated", evidence="c's")
    found.read()
    assert found.run.planned is not None and found.run.planned.evidence == "c's"


def test_a_step_that_no_run_has_is_an_error_with_its_line() -> None:
    path = Path("steps.jsonl")
    good = event_to_json_line(Event(step=1, kind="warning"))
    for step in (-1, 2**63, 10**30):
        path.write_text(f"{good}\n{good.replace('1', str(step), 1)}\n")
        with pytest.raises(InputError, match=r"steps.jsonl:2:1: step must be at least 0 and below 2\^63"):
            EventsFile(path, WatchedRun, follow).read()
