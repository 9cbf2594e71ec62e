"""`autoprec report` on the file of a real run: what the page says is what the file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import autoprec
from autoprec.plans import Event
from autoprec.reporting.histories import history_of
from autoprec.reporting.pages import run_page
from autoprec.reporting.plans import maker
from autoprec.reporting.timelines import _rows
from autoprec.serial import event_from_json_line
from autoprec.serial.values import event_to_json_line
from tests.windows import half, layers, overflow_for_some_windows

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    events = tmp_path_factory.mktemp("run") / "autoprec_events.jsonl"
    overflow_for_some_windows(events)
    return events


@pytest.fixture(scope="module")
def events(file: Path) -> list[Event]:
    return [event_from_json_line(line) for line in file.read_text().splitlines()]


class Page(HTMLParser):
    """Rows of tables, texts, and every address; tags must be closed in their order."""

    VOID = {"meta"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        self.close()
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.tags.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_the_page_says_what_the_file_says(run: Run, file: Path, events: list[Event]) -> None:
    code, out, _ = run("report", file.parent, "report.html", "--json")
    said = json.loads(out)
    code_watch, watched, _ = run("watch", file, "--json")
    assert code == code_watch == 0 and said["ops"] == json.loads(watched)["ops"]
    page = Page(Path("report.html").read_text())
    ops, happened = page.tables
    assert [row[0] for row in ops[1:]] == [op["op"] for op in said["ops"]]
    assert [row[1:4] for row in ops[1:]] == [
        [op["formats"].get(role, "") for role in ("output", "grad_input", "grad_weight")] for op in said["ops"]
    ]
    told = [e for e in events if e.kind not in ("assigned", "observed", "window")]
    assert [row[:2] + row[5:] for row in happened[1:]] == [[str(e.step), e.kind, e.evidence] for e in told]
    assert {e.kind for e in told} >= {"planned", "bad_step", "promoted", "demoted"}
    assert said["events"] == {kind: sum(e.kind == kind for e in told) for kind in said["events"]}


def test_the_page_needs_nothing_else(run: Run, file: Path) -> None:
    assert run("report", file, "report.html")[0] == 0
    text = Path("report.html").read_text()
    page = Page(text)
    assert all(a.startswith("#") for a in page.addresses) and not page.seen & {"script", "link", "img", "iframe"}
    pictures = [f"<svg{part.split('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
    ids = [e.get("id") for picture in pictures for e in ElementTree.fromstring(picture).iter() if e.get("id")]
    assert len(pictures) == 2
    clips = [i for i in ids if i and i.startswith(("p", "m")) and not i.startswith(("patch", "matplotlib"))]
    assert len(set(clips)) == len(clips) > 0  # of one page: an id names one thing


def test_the_same_file_gives_the_same_page(run: Run, file: Path) -> None:
    run("report", file, "a.html")
    run("report", file, "b.html")
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()


def test_formats_of_every_step(events: list[Event]) -> None:
    """Held against a format per op and step, told by the lines before it."""
    history = history_of(events)
    assert any(len(spans) > 2 for spans in history.formats.values())
    for op, spans in history.formats.items():
        for step in range(history.now.steps):
            lines = [e for e in events if (e.kind, e.role, e.op) == ("assigned", "output", op) and e.step <= step]
            expected = lines[-1].now if lines else "fp32"
            assert [s.format for s in spans if s.begin <= step < s.end] == [expected]


def test_a_kept_tensor_is_marked_in_the_row_of_the_op_that_makes_it(events: list[Event]) -> None:
    """Its event names the tensor, which has no row."""

    def marks(of: list[Event]) -> dict[str, tuple[tuple[int, str], ...]]:
        return {label: marked for label, _, marked in _rows(history_of(of))}

    before = marks(events)
    op = next(iter(history_of(events).formats))
    tensor = f"{op}.1"  # its second result
    kept = Event(step=events[-1].step, kind="promoted", op=tensor, role="kept", was="fp8_e4m3", trigger="noise_budget")
    assert maker(tensor) == op
    assert marks([*events, kept])[op] == (*before[op], (kept.step, "promoted"))


def test_the_newest_run_of_a_file_is_shown(events: list[Event]) -> None:
    warning = Event(step=0, kind="warning", trigger="graph_break", evidence="told while the second run calibrates")
    both = history_of([*events, warning, *events])
    alone = history_of(events)
    assert both.told == (warning, *alone.told) and both.formats == alone.formats and both.curves == alone.curves
    asked = replace(next(e for e in events if e.kind == "planned"), step=events[-1].step, trigger="asked")
    assert history_of([*events, asked]).told == (*alone.told, asked)


def test_names_are_no_markup(events: list[Event]) -> None:
    evil = "<script>alert('&amp;')</script>"
    renamed = [replace(e, op=evil if e.op == "1:relu#0" else e.op, evidence=e.evidence or evil) for e in events]
    told = Event(step=events[-1].step, kind="warning", trigger=evil, evidence=evil)
    text = run_page(history_of([*renamed, told]), evil)
    page = Page(text)
    assert "script" not in page.seen
    assert page.tables[1][-1][4:] == [evil, evil] and evil in [row[0] for row in page.tables[0]]


def test_of_very_many_events_the_newest_have_rows(events: list[Event]) -> None:
    many = [Event(step=events[-1].step + i, kind="bad_step", evidence=str(i)) for i in range(3000)]
    text = run_page(history_of([*events, *many]), "run")
    assert [row[5] for row in Page(text).tables[1][1:]] == [str(i) for i in range(2000, 3000)]
    told = sum(e.kind not in ("assigned", "observed", "window") for e in events)
    assert f"The first {told + 2000} events are left out" in text and "3001 bad_step" in text


def test_memory_and_loss_scale_have_curves_where_they_are_told(events: list[Event]) -> None:
    assert "predicted peak" in run_page(history_of(events), "run")
    window = Event(
        step=events[-1].step, kind="window", evidence="predicted_peak_bytes=3e9 budget_bytes=4e9 loss_scale=8"
    )
    text = run_page(history_of([*events, window]), "run")
    assert ">GiB<" in text and ">budget<" in text and text.count(">loss scale<") == 1
    assert ">budget<" not in run_page(history_of(events), "run")
    planned = Event(step=0, kind="planned", evidence="bf16; given")
    assert "Memory and loss scale" not in run_page(history_of([planned]), "run")


def test_a_run_that_calibrates_and_one_without_formats(run: Run) -> None:
    Path("empty.jsonl").write_text("")
    assert run("report", "empty.jsonl", "report.html")[0] == 0
    page = Path("report.html").read_text()
    assert "none yet" in page and "<svg" not in page and Page(page).tables == []
    given = Event(step=0, kind="planned", trigger="given", evidence="bf16; given")
    Path("given.jsonl").write_text(event_to_json_line(given) + "\n")
    assert run("report", "given.jsonl", "report.html")[0] == 0
    assert "its formats are not told in this file" in Path("report.html").read_text()


def test_mistakes(run: Run, file: Path, tmp_path: Path) -> None:
    code, _, err = run("report", file, "report.pdf")
    assert code == 2 and "report.pdf: the report is an HTML page; name a file that ends in .html" in err
    code, _, err = run("report", tmp_path / "none.jsonl", "report.html")
    assert code == 2 and "there is no such file" in err
    lines = file.read_text().splitlines()
    Path("broken.jsonl").write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")
    code, _, err = run("report", "broken.jsonl", "report.html")
    assert code == 2 and "broken.jsonl:4" in err
    window = Event(step=1, kind="window", evidence="steps=many")
    Path("figures.jsonl").write_text("\n".join([*lines, event_to_json_line(window)]) + "\n")
    code, _, err = run("report", "figures.jsonl", "report.html")
    assert code == 2 and f"figures.jsonl:{len(lines) + 1}" in err
    code, _, err = run("report", file, tmp_path / "no folder" / "report.html")
    assert code == 2 and "report.html" in err and not (tmp_path / "no folder").exists()


def test_a_session_writes_the_page_of_its_own_run(events: list[Event], tmp_path: Path) -> None:
    """Behind the lines of another run, which has a plan while this one calibrates."""
    file = Path("autoprec_events.jsonl")
    file.write_text("".join(event_to_json_line(e) + "\n" for e in events))
    model = layers()
    autoprec.compile(model, policy=half(), events=file)
    session = autoprec.session(model)
    session.report("report.html")
    assert "none yet" in Path("report.html").read_text()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(6):
        model(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()
    session.report(tmp_path / "report.html")
    own = [event_from_json_line(line) for line in file.read_text().splitlines()[len(events) :]]
    assert Path("report.html").read_text() == run_page(history_of(own), str(file))
    assert "bad_step" not in Path("report.html").read_text().partition("</style>")[2]
    with pytest.raises(autoprec.InputError, match="name a file that ends in .html"):
        session.report("report.txt")
    quiet = layers()
    autoprec.compile(quiet, policy=half(), events=None)
    with pytest.raises(autoprec.InputError, match="this run writes no file of events"):
        autoprec.session(quiet).report("other.html")
    assert not Path("other.html").exists()
