"""`autoprec watch`: what it shows is what the run was, however the file grew; and it never shows a file of something
else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autoprec.plans import Event
from autoprec.reporting.runs import WatchedRun, follow
from autoprec.reporting.watching import run_view
from autoprec.serial import event_to_json_line

Run = Callable[..., tuple[int, str, str]]

NAME = "autoprec_events.jsonl"


def event(step: int, kind: str, op: str = "", role: str = "", **more: str) -> Event:
    return Event(step=step, kind=kind, op=op, role=role, **more)


def planned(step: int, **more: str) -> Event:
    return event(step, "planned", evidence="bf16, fp16; binding: nothing", **more)


def assigned(step: int, op: str, role: str, now: str, was: str = "fp32") -> Event:
    return event(step, "assigned", op, role, was=was, now=now)


def observed(step: int, op: str, now: str, role: str = "output", **told: float) -> Event:
    parts = {"amax": 2.5, "largest": 65504, "overflow_frac": 0, "saturation_frac": 0, "underflow_frac": 0, **told}
    return event(step, "observed", op, role, now=now, evidence=" ".join(f"{k}={v:.4g}" for k, v in parts.items()))


def window(step: int, **told: object) -> Event:
    parts = {"steps": step, "skipped_steps": 0, **told}
    return event(step, "window", evidence=" ".join(f"{name}={value}" for name, value in parts.items()))


def text_of(events: list[Event]) -> str:
    return "".join(f"{event_to_json_line(e)}\n" for e in events)


def write(events: list[Event], path: str = NAME) -> None:
    Path(path).write_text(text_of(events), encoding="utf-8")


def append(path: Path, data: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def watched(run: Run, path: str = ".") -> tuple[dict[str, Any], str]:
    """As JSON and as text."""
    code, data, err = run("watch", path, "--json")
    assert (code, err) == (0, "")
    code, text, err = run("watch", path, "--once")
    assert (code, err) == (0, "")
    return json.loads(data), text


def row_of(text: str, op: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{op} "))
    return line.split()


UP, DOWN = "blocks.0.up:linear#0", "head:linear#0"
SMALL = [
    planned(4),
    *(assigned(4, UP, role, "fp16") for role in ("output", "grad_input", "grad_weight")),
    assigned(4, DOWN, "output", "fp32"),
    assigned(4, UP, "kept", "fp8_e4m3", was="as_is"),
    window(4, predicted_peak_bytes=3 << 20, budget_bytes=4 << 20, loss_scale=1024.0),
]


# What the events say ------------------------------------------------------------------------------------------------


def test_formats_figures_and_the_run(run: Run) -> None:
    figures = {"amax": 1234.0, "overflow_frac": 0.25, "saturation_frac": 0.5, "underflow_frac": 0.125}
    seen = [observed(12, UP, "fp16", amax=9.0), observed(20, UP, "fp16", **figures)]
    write([*SMALL, *seen, window(20, skipped_steps=2, predicted_peak_bytes=3 << 20, budget_bytes=4 << 20)])
    data, text = watched(run)
    assert (data["steps"], data["skipped_steps"], data["window_step"], data["loss_scale"]) == (20, 2, 20, None)
    assert (data["predicted_peak_bytes"], data["budget_bytes"]) == (3 << 20, 4 << 20)
    assert [op["op"] for op in data["ops"]] == [UP, DOWN] and data["calibrating"] is False
    assert data["ops"][0]["formats"] == dict.fromkeys(("output", "grad_input", "grad_weight"), "fp16")
    assert data["ops"][0]["kept"] == {UP: "fp8_e4m3"} and data["ops"][1]["figures"] is None
    own = {"step": 20, "role": "output", "format": "fp16", "largest": 65500.0}
    assert data["ops"][0]["figures"] == figures | own
    told = "fp16 fp16 fp16 fp8_e4m3 0.25 0.5 0.12 1.23e3 of 6.55e4 20"
    assert row_of(text, UP)[1:] == told.split() and row_of(text, DOWN)[1:] == ["fp32"]
    for words in ("20 at the newest line of the file, 2 skipped", "3 MiB predicted, 75.0 % of the budget of 4 MiB"):
        assert words in text
    assert "of the loss" not in text
    write(SMALL)
    assert "1024, of the loss" in watched(run)[1]


def test_a_new_plan_begins_anew_and_one_that_was_asked_for_goes_on(run: Run) -> None:
    first = [
        *SMALL,
        event(30, "promoted", UP, "output", was="fp16", now="fp32", trigger="overflow", evidence="too large"),
        assigned(30, UP, "output", "fp32", was="fp16"),
        planned(40, trigger="asked"),
        assigned(40, DOWN, "output", "bf16"),
        window(40, skipped_steps=5),
    ]
    write(first)
    data, _ = watched(run)
    assert [op["formats"]["output"] for op in data["ops"]] == ["fp32", "bf16"]
    assert (data["ops"][0]["promoted"], data["planned"]["step"], data["skipped_steps"]) == (1, 40, 5)
    assert (data["predicted_peak_bytes"], data["budget_bytes"]) == (None, None)
    write([*first, event(0, "warning", trigger="graph_break", evidence="of the second"), planned(4),
           assigned(4, "other:linear#0", "output", "bf16"), window(4)])  # fmt: skip
    data, text = watched(run)
    assert [op["op"] for op in data["ops"]] == ["other:linear#0"]
    assert (data["steps"], data["skipped_steps"], data["planned"]["step"]) == (4, 0, 4)
    # Of the events, those that led to it stay.
    assert [e["kind"] for e in data["recent"]] == ["warning", "planned"]
    assert "of the second" in text and UP not in text


def test_promotions_are_counted_and_told(run: Run) -> None:
    changes = [
        event(8, "promoted", UP, "output", was="fp16", now="fp32", trigger="overflow", evidence=f"{UP}: so large"),
        event(16, "demoted", UP, "output", was="fp32", now="fp16", trigger="quiet", evidence="well"),
        event(24, "promoted", UP, "output", was="fp16", now="bf16", trigger="growth", evidence="soon"),
        event(32, "released", DOWN, "output", was="fp32", now="fp32", trigger="quiet", evidence="may"),
        event(32, "incident", trigger="loss_spike", evidence="the loss\nis\x1b[31m off"),
    ]
    write([*SMALL, *changes])
    data, text = watched(run)
    told = {op["op"]: (op["promoted"], op["demoted"], op["trigger"]) for op in data["ops"]}
    assert told == {UP: (2, 1, "growth"), DOWN: (0, 0, "quiet")}
    assert row_of(text, UP)[-3:] == ["2", "1", "growth"] and row_of(text, DOWN)[-1] == "quiet"
    lines = [line.split() for line in text.splitlines()]
    assert ["8", "promoted", UP, "fp16", "→", "fp32", "overflow:", "so", "large"] in lines
    # One line each, and nothing in it is a command to the terminal.
    assert "incident  loss_spike: the loss is\ufffd[31m off" in text and "\x1b" not in text
    assert json.loads(json.dumps(data["recent"])) == data["recent"] and len(data["recent"]) == 6


def test_the_events_are_the_last_ones(run: Run) -> None:
    write([*SMALL, *(event(10 + k, "warning", trigger="memory", evidence=f"number {k}") for k in range(50))])
    data, text = watched(run)
    assert [e["step"] for e in data["recent"]] == list(range(50, 60))
    assert "number 49" in text and "number 40" in text and "number 39" not in text


def test_a_bad_step_counts_though_the_plan_changes_within_it() -> None:
    bad = event(9, "bad_step", UP, "output", trigger="overflow")
    run = follow(WatchedRun(), [*SMALL, bad, window(9, skipped_steps=0)])
    assert run.skipped_steps == 1
    assert follow(run, [window(12, skipped_steps=1)]).skipped_steps == 1
    assert follow(run, [window(12, skipped_steps=3)]).skipped_steps == 3


def test_figures_of_a_format_that_is_gone_are_not_shown() -> None:
    def figures(*events: Event) -> Any:
        return next(op.figures for op in follow(WatchedRun(), [*SMALL, *events]).ops if op.op == UP)

    of_result, of_gradient = observed(9, UP, "fp16"), observed(9, UP, "fp16", role="grad_input")
    for seen in (of_result, of_gradient):
        assert figures(seen).format == "fp16"
        assert figures(seen, assigned(9, UP, "output", "fp32"), window(9)) == (None if seen is of_result
                                                                              else figures(seen))  # fmt: skip
    gone = [assigned(9, UP, role, "bf16") for role in ("grad_input", "grad_weight")]
    assert figures(of_gradient, gone[0]) is not None and figures(of_gradient, *gone) is None
    assert figures(of_result, *gone) is not None
    # A norm has no format of its own for gradients.
    norm = [planned(4), assigned(4, "n", "output", "fp16"), observed(9, "n", "fp16", role="grad_input")]
    assert follow(WatchedRun(), norm).ops[0].figures is not None
    assert follow(WatchedRun(), [*norm, assigned(9, "n", "output", "fp32")]).ops[0].figures is None


def test_a_tensor_is_kept_by_the_op_that_makes_it(run: Run) -> None:
    kept = {f"{UP}.1": "recomputed", "input:x": "bf16", "param:emb.weight": "fp8_e4m3"}
    write([*SMALL, *(assigned(4, t, "kept", storage, was="as_is") for t, storage in kept.items())])
    data, text = watched(run)
    told = {op["op"]: op["kept"] for op in data["ops"] if op["kept"]}
    assert told == {
        UP: {UP: "fp8_e4m3", f"{UP}.1": "recomputed"},
        "input:x": {"input:x": "bf16"},
        "emb:weight": {"param:emb.weight": "fp8_e4m3"},
    }
    assert "fp8_e4m3, recomputed" in text


def test_what_happens_to_a_kept_tensor_happens_to_the_op_that_makes_it(run: Run) -> None:
    told = {"was": "fp8_e4m3", "now": "as_is", "trigger": "noise_budget"}
    write([*SMALL, assigned(4, "lstm:lstm#0", "output", "bf16"), event(9, "promoted", "lstm:lstm#0.1", "kept", **told)])
    data, _ = watched(run)
    ops = {op["op"]: (op["promoted"], op["trigger"]) for op in data["ops"]}
    assert ops["lstm:lstm#0"] == (1, "noise_budget") and "lstm:lstm#0.1" not in ops


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "none yet: the run calibrates"),
        ([event(0, "warning", trigger="graph_break", evidence="on their own")], "none yet: the run calibrates"),
        ([window(500), observed(500, UP, "fp16")], "not told in this file"),
        ([planned(4), window(4)], "its formats are not told in this file"),
        ([event(4, "warning", trigger="no_plan", evidence="all in fp32"), window(8)], "of step 4: all in fp32"),
    ],
)
def test_a_run_without_a_plan_says_so(run: Run, events: list[Event], words: str) -> None:
    write(events)
    data, text = watched(run)
    assert words in text and data["calibrating"] is words.startswith("none yet")


# The table ------------------------------------------------------------------------------------------------------------


def layered(layers: int) -> list[Event]:
    return [planned(4), *(assigned(4, f"blocks.{i}.up:linear#0", "output", "fp16") for i in range(layers)), window(4)]


def test_layers_that_say_the_same_share_a_row_with_the_worst_of_their_figures(run: Run) -> None:
    name = "blocks.{}.up:linear#0".format
    old = observed(12, name(1), "fp16", amax=60000, underflow_frac=0.9)
    seen = [
        observed(20, name(2), "fp16", amax=100, underflow_frac=0.25),
        observed(20, name(3), "fp16", amax=900, underflow_frac=0.01),
        observed(20, name(4), "fp16", amax=70000, overflow_frac=0.5),
    ]
    promoted = event(20, "promoted", name(5), "output", was="fp16", now="fp32", trigger="noise")
    write([*layered(30), old, *seen, promoted])
    data, text = watched(run)
    assert len(data["ops"]) == 30
    # Who leaves the format, or left it, stands alone.
    assert row_of(text, "blocks.*.up:linear#0") == "blocks.*.up:linear#0 28 fp16 0 0 0.25 900 of 6.55e4 20".split()
    assert row_of(text, name(4)) == f"{name(4)} fp16 0.5 0 0 7e4 of 6.55e4 20".split()
    assert row_of(text, name(5)) == f"{name(5)} fp16 1 noise".split()
    assert name(3) not in text


def unlike(ops: int) -> list[Event]:
    """Ops that share no row."""
    return [planned(4), *(assigned(4, f"layer_{i}x:linear#0", "output", "fp32") for i in range(ops)), window(4)]


def test_a_long_table_shows_what_there_is_to_see_and_says_what_it_leaves_out(run: Run) -> None:
    name = "layer_{}x:linear#0".format
    write([*unlike(100), event(9, "promoted", name(90), "output", was="fp16", now="fp32", trigger="overflow"),
           observed(9, name(80), "fp16", saturation_frac=0.1), assigned(9, name(70), "output", "bf16")])  # fmt: skip
    data, text = watched(run)
    assert len(data["ops"]) == 100
    shown = [int(i) for i in re.findall(r"^layer_(\d+)x:linear#0 ", text, re.MULTILINE)]
    assert shown == [*range(37), 70, 80, 90]  # in the order of the plan
    assert "and 60 more rows (60 ops) with less to see; --json has them all" in text


@pytest.mark.parametrize("width", [20, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("height", [10, 24, 50])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    name = "model.layers_of_the_decoder_{}x.attention.projection:linear#0".format
    events = [planned(4)]
    for i in range(60):
        events += [assigned(4, name(i), role, "fp16") for role in ("output", "grad_input", "grad_weight")]
        events += [assigned(4, name(i), "kept", "recomputed"), observed(9, name(i), "fp16", role="grad_input")]
        events += [event(9, "promoted", name(i), trigger="saturation", evidence="x " * 200)]
        events += [event(9, "demoted", name(i), trigger="saturation", evidence="x " * 200)]
    run = follow(WatchedRun(), [*events, window(9, predicted_peak_bytes=1, budget_bytes=2, loss_scale=4.0)])
    console = Console(width=width, height=height, force_terminal=False, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(run_view(run, "a/b.jsonl", width=width, height=height))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= max(height, 20)
    if width >= 60:
        rows = [line for line in lines if line.startswith("model")]
        assert len(rows) >= 3 and all(":linear#0" in row and "fp16" in row and row[-1] != "…" for row in rows)
        assert any("more rows" in line for line in lines)
        # What there is no room for is named.
        assert ("amax of" in lines[6]) != any("no room for" in line and "amax" in line for line in lines)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("nowhere",), ("nowhere", "--json"), (".",), ("n" * 300,), ("\u00e4/b",)])
def test_where_there_is_no_file(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("watch", *arguments)
    assert (code, out) == (2, "") and arguments[0] in err and err.count("\n") == 1


def test_a_folder_without_the_file_says_which_file(run: Run) -> None:
    assert f"no {NAME} is in this folder" in run("watch", ".")[2]
    Path(NAME).mkdir()
    assert run("watch", ".")[0] == 2


def test_a_pipe_is_not_waited_for(run: Run) -> None:
    os.mkfifo("pipe")
    code, _, err = run("watch", "pipe")
    assert code == 2 and "pipe: is not a regular file" in err


GOOD = text_of([planned(4)]).encode()


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        (b"nonsense\n", ":2:1:", "is not JSON"),
        (b"nonsense", ":2:1:", "is not JSON"),  # no rest of a line makes an event of it
        (b'{"step": 1, "kind": "x"\n', ":2:24:", "is not JSON"),
        (b'{"step": 1, "knd": "x"}\n', ":2:1:", "the key 'kind' is missing"),
        (b'{"step": 1.5, "kind": "x"}\n', ":2:10:", "step: must be a whole number"),
        (b'{"step": 1, "kind": "x", "op": 7}\n', ":2:32:", "op: must be text"),
        (b'{"step": 1, "step": 2, "kind": "x"}\n', ":2:13:", "step"),
        (b'[["step", 1], ["kind", "x"]]\n', ":2:1:", "must be a mapping"),
        (b"[" * 5000 + b"\n", ":2:", "nested deeper"),
        (b"\n", ":2:", "is empty"),
        (b'{"step": 1, "kind": "\xff"}\n', ":2:", "0xff is not UTF-8"),
        (b'{"step": ' + b"1" * 5000 + b', "kind": "x"}\n', ":2:10:", "a number of more than 400 characters"),
        (text_of([event(1, "observed", "x", evidence="amax=1 largest")]).encode(), ":2:", "'largest' is no figure"),
        (text_of([event(1, "observed", "x", evidence="amax=1 largest=2")]).encode(), ":2:", "overflow_frac"),
        (text_of([event(1, "window", evidence="steps=many")]).encode(), ":2:", "'steps=many' is no figure"),
        (text_of([event(1, "window", evidence="loss_scale=inf")]).encode(), ":2:", "loss_scale must be finite"),
        (b'{"' + b"x" * (1 << 20), ":2:", "has more than 1048576 bytes"),
    ],
)
def test_a_line_that_is_no_event(run: Run, line: bytes, place: str, words: str) -> None:
    Path("e.jsonl").write_bytes(GOOD + line)
    for options in ((), ("--json",), ("--once",)):
        code, out, err = run("watch", "e.jsonl", *options)
        assert (code, out) == (2, "") and err.startswith(f"autoprec: error: e.jsonl{place}"), err
        assert words in err and "is this its file of events?" in err and err.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_an_interval_that_is_none(run: Run, seconds: str) -> None:
    write(SMALL)
    code, out, err = run("watch", ".", "--interval", seconds)
    assert (code, out) == (2, "") and "--interval" in err


def test_a_name_is_no_markup(run: Run) -> None:
    Path("[/red]").mkdir(parents=True)
    write(SMALL, f"[/red]/{NAME}")
    assert f"[/red]/{NAME}" in watched(run, "[/red]")[1]


def test_half_a_character_is_no_traceback(run: Run) -> None:
    Path(NAME).write_text('{"step": 1, "kind": "warning", "evidence": "\\ud83d and \\ud83d\\ude00"}\n')
    data, text = watched(run)
    assert data["recent"][0]["evidence"] == "? and 😀" and "? and 😀" in text


# A real run -----------------------------------------------------------------------------------------------------------


def test_it_shows_what_a_run_was(run: Run) -> None:
    import torch
    from torch import nn

    import autoprec

    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    policy = autoprec.Policy(
        name="half",
        formats=("fp32", "fp16"),
        rules=[{"match": "3", "pin": "fp16"}, {"match": "5", "pin": "fp16"}],
        objective="bytes",
        storage={"formats": ("fp8_e4m3",)},
        calibration={"steps": 4},
        noise={"gradient": 10.0, "loss": 10.0},
        monitor={"window_steps": 6, "interval_steps": 2},
        budget="90%",
    )
    autoprec.compile(model, policy=policy, events=NAME)
    session = autoprec.session(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for k in range(24):
        if k == 13:
            with torch.no_grad():
                model[3].weight.mul_(1e5)  # beyond fp16
        if k == 19:
            autoprec.testing.inject(model, "0:linear#0", "forward_overflow")
        optimizer.zero_grad()
        model(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()
    data, text = watched(run)
    plan, events = session.plan, session.events
    assert plan is not None and plan.predicted is not None
    told = {(op["op"], role): fmt for op in data["ops"] for role, fmt in op["formats"].items()}
    assert told == {(op, str(role)): fmt for (op, role), fmt in plan.format_of.items()}
    kept = {tensor: storage for op in data["ops"] for tensor, storage in op["kept"].items() if storage != "as_is"}
    assert kept == {tensor: storage for tensor, storage in plan.storage_of.items() if storage != "as_is"} != {}
    for kind in ("promoted", "demoted"):
        counts = {op["op"]: op[kind] for op in data["ops"] if op[kind]}
        assert counts == {op: sum((e.kind, e.op) == (kind, op) for e in events) for op in counts}
        assert sum(counts.values()) == sum(e.kind == kind for e in events)
    assert any(e.kind == "promoted" for e in events) and session.skipped_steps > 0
    assert (data["skipped_steps"], data["budget_bytes"]) == (session.skipped_steps, plan.budget_bytes)
    assert data["predicted_peak_bytes"] == plan.predicted.peak_bytes
    # The file has a promotion after what came of it.
    kept_in_mind = [json.loads(event_to_json_line(e)) for e in events]
    assert len(data["recent"]) == 10 and all(e in kept_in_mind for e in data["recent"])
    assert "promoted" in text and "bad_step" in text and "0:linear#0" in text
