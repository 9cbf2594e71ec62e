"""`autoprec tensorboard` on the files of real runs, read back with TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoprec.cli.main import app
from autoprec.cli.tensorboard import _summary_writer, _Written
from autoprec.errors import InputError
from autoprec.plans import Event
from autoprec.reporting.curves import Curves
from autoprec.serial import event_from_json_line
from tests.windows import overflow_for_some_windows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    overflow_for_some_windows(folder / "autoprec_events.jsonl")
    return folder


def events_of(run: Path) -> list[Event]:
    lines = (run / "autoprec_events.jsonl").read_text().splitlines()
    return [event_from_json_line(line) for line in lines]


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tensorboard", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def read_back(logdir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(logdir), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    scalars = {tag: [(s.step, s.value) for s in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    texts = {tag: [(s.step, 0.0) for s in found.Tensors(tag)] for tag in found.Tags()["tensors"]}
    return scalars | texts


def test_tensorboard_reads_what_the_run_wrote(run: Path, tmp_path: Path) -> None:
    code, output = invoke(run, tmp_path / "board")
    assert code == 0 and "tensorboard --logdir" in output
    found, events = read_back(tmp_path / "board"), events_of(run)
    kinds = Counter(e.kind for e in events)
    assert kinds["promoted"] and kinds["demoted"] and kinds["bad_step"]
    for kind in ("promoted", "demoted", "bad_step", "planned"):
        assert found[f"events/{kind}"][-1][1] == kinds[kind], kind
        assert len(found[f"events/{kind}/text_summary"]) == kinds[kind]
    outputs = {e.op for e in events if e.kind == "assigned" and e.role == "output"}
    halves, wides = dict(found["formats/fp16"]), dict(found["formats/fp32"])
    assert len(set(halves.values())) > 1  # promoted and given back
    assert all(halves[step] + wides[step] == len(outputs) for step in halves)
    (seen, *_) = (e for e in events if e.kind == "observed")
    told = dict(part.split("=") for part in seen.evidence.split())
    step, value = found[f"amax of largest/{seen.op}"][0]
    assert step == seen.step and value == pytest.approx(float(told["amax"]) / float(told["largest"]), rel=1e-6)
    assert found["run/skipped_steps"][-1][1] == kinds["bad_step"]


def test_a_folder_with_points_is_refused(run: Path, tmp_path: Path) -> None:
    assert invoke(run, tmp_path / "board")[0] == 0
    before = read_back(tmp_path / "board")
    code, output = invoke(run, tmp_path / "board")
    assert code == 2 and "name a new folder" in output and "Traceback" not in output
    assert read_back(tmp_path / "board") == before
    (tmp_path / "file").write_text("")
    assert invoke(run, tmp_path / "file")[0] == 2
    assert invoke(tmp_path / "nothing", tmp_path / "other")[0] == 2 and not (tmp_path / "other").exists()
    assert invoke(run, tmp_path / "other", "--follow", "--interval", "0")[0] == 2


def test_what_comes_later_is_added_and_what_comes_again_takes_its_place(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint has other lines from there on."""
    first = [Event(step=k, kind="window", evidence=f"steps={k} loss_scale={k}") for k in range(0, 50, 10)]
    written = _Written(_summary_writer(), tmp_path)
    assert written.write(first[:3]) == 3 and written.write(first[:3]) == 0 and written.write(first) == 2
    again = [*first[:3], *(Event(step=k, kind="window", evidence=f"steps={k} loss_scale=7") for k in (30, 40, 50))]
    assert written.write(again) == 3 and written.write(again) == 0
    found = read_back(tmp_path)["run/loss_scale"]
    assert found == [(0, 0.0), (10, 10.0), (20, 20.0), (30, 7.0), (40, 7.0), (50, 7.0)]


def test_formats_are_told_when_a_change_is_whole() -> None:
    def assigned(step: int, op: str, fmt: str) -> Event:
        return Event(step=step, kind="assigned", op=op, role="output", now=fmt)

    curves = Curves()
    points = list(curves.after([assigned(2, "a", "fp16"), assigned(2, "b", "fp16"), Event(step=2, kind="planned")]))
    assert [(p.name, p.value) for p in points] == [("formats/fp16", 2.0), ("events/planned", 1.0)]
    points = list(curves.after([assigned(3, "a", "fp16"), assigned(9, "b", "bf16")]))
    assert {(p.name, p.step, p.value) for p in points} == {("formats/fp16", 9, 1.0), ("formats/bf16", 9, 1.0)}
    assert [p.value for p in curves.after([assigned(12, "a", "bf16")])] == [0.0, 2.0]
    with pytest.raises(InputError, match="no figure"):
        list(curves.after([Event(step=1, kind="window", evidence="steps=one")]))


def test_without_tensorboard_there_is_an_answer(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from autoprec.cli.main import main\n"
        f"sys.argv = ['autoprec', 'tensorboard', {str(run)!r}, {str(tmp_path / 'board')!r}]\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "autoprec[tensorboard]" in done.stderr and "Traceback" not in done.stderr
