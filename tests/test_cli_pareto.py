"""`autoprec pareto`: a table and a picture of what budgets cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autoprec.serial import write_device, write_profile
from tests.test_cli_why_not import made_case

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def files() -> None:
    case = made_case()
    write_profile("p.safetensors", case.profile, case.graph)
    write_device("p.safetensors.device.json", case.device)


def test_a_row_per_plan_and_the_same_in_json(run: Run) -> None:
    code, out, _ = run("pareto", "p.safetensors", "--points", 4, "--json")
    assert code == 0
    said = json.loads(out)
    peaks = [p["predicted"]["peak_bytes"] for p in said["points"]]
    assert len(peaks) > 2 and peaks == sorted(set(peaks)) and peaks[0] == said["smallest_peak_bytes"]
    assert [p["budget_bytes"] for p in said["points"]][-1] is None and said["budgets_planned"] == 4
    for p in said["points"]:
        assert p["seconds_over_fp32"] == p["predicted"]["seconds"] / said["predicted_fp32"]["seconds"]
        assert p["budget_bytes"] is None or p["predicted"]["peak_bytes"] <= p["budget_bytes"]
    assert sum(p["chosen"] for p in said["points"]) == (said["chosen"] is not None)
    code, text, _ = run("pareto", "p.safetensors", "--points", 4)
    assert code == 0 and "predicted" in text.splitlines()[0] and "as written" in text
    assert text.count("│") and f"{said['smallest_peak_bytes']} bytes" in text
    assert list(Path().glob("*.svg")) == []


def test_a_named_budget_is_marked(run: Run) -> None:
    code, out, _ = run("pareto", "p.safetensors", "--points", 3, "--budget", "95%", "--json")
    said = json.loads(out)
    assert code == 0 and said["why"] == "budget"
    marked = said["points"][said["chosen"]]
    _, planned, _ = run("plan", "p.safetensors", "--budget", "95%", "--dry-run", "--json")
    assert marked["budget_bytes"] == json.loads(planned)["budget_bytes"]
    assert marked["fingerprint"] == json.loads(planned)["fingerprint"]
    code, text, _ = run("pareto", "p.safetensors", "--points", 3, "--budget", "95%")
    assert code == 0 and "← the budget" in text
    code, out, err = run("pareto", "p.safetensors", "--budget", "1KiB")
    assert code == 1 and out == "" and "smallest feasible budget" in err


def test_the_picture_is_svg_and_says_that_it_predicts(run: Run) -> None:
    code, text, _ = run("pareto", "p.safetensors", "--points", 3, "-o", "a.svg")
    assert code == 0 and "picture  a.svg" in text
    root = ElementTree.parse("a.svg").getroot()
    said = " ".join("".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text"))
    assert "predicted peak of a step" in said and "predicted step time" in said
    assert "Made, policy balanced, timings of modelled" in said and "no budget" in said and "fp32" in said
    run("pareto", "p.safetensors", "--points", 3, "-o", "b.svg")
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "a.png"), "a.png: the picture is an SVG"),
        (("-o", "no/such/folder/a.svg"), "its directory does not exist"),
        (("--points", "1"), "'--points'"),
        (("--budget", "lots"), "lots"),
    ],
)
def test_bad_options(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("pareto", "p.safetensors", *arguments)
    assert (code, out) == (2, "") and words in err


def test_matplotlib_and_torch_are_not_imported_for_a_table() -> None:
    code = (
        "import sys\nfrom autoprec.cli.main import app\n"
        "try: app(['pareto', 'p.safetensors', '--points', '2'], prog_name='autoprec')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
