"""Outputs that cannot be written, and outputs that would overwrite what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.plans import Event
from autoprec.serial import event_to_json_line

Run = Callable[..., tuple[int, str, str]]

COMMAND = (sys.executable, "-c", "from autoprec.cli.main import app; app(prog_name='autoprec')")


def written(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "p.safetensors", "-o", "p.safetensors"), "the plan would overwrite the profile"),
        (("plan", "p.safetensors", "-o", "p.safetensors.device.json"), "the plan would overwrite the timings"),
        (("plan", "p.safetensors", "-o", "a.json", "--save-case", "a.json"), "the case would overwrite the plan"),
        (("plan", "p.safetensors", "--policy", "own.yaml", "-o", "own.yaml"), "the plan would overwrite the policy"),
        (("calibrate", "train.py:target", "-o", "train.py"), "the profile would overwrite the target"),
        (("calibrate", "t.py:t", "-o", "a", "--device-out", "./a"), "the timings would overwrite the profile"),
        (("report", "e.jsonl", "e.jsonl"), "the report would overwrite the events"),
    ],
)
def test_nothing_that_is_read_is_overwritten(
    arguments: tuple[str, ...], says: str, run: Run, profile: str, tmp_path: Path
) -> None:
    Path("own.yaml").write_text("name: own\nformats: [fp32, bf16]\n")
    Path("train.py").write_text("def target(): ...\n")
    Path("e.jsonl").write_text(event_to_json_line(Event(step=1, kind="planned", trigger="given", evidence="x")) + "\n")
    before = written(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and says in err and "name another file" in err
    assert written(tmp_path) == before


def called(*arguments: str, stdout: int | None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, check=False, env={**os.environ, **environment}
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_output_that_is_full_is_an_error(profile: str) -> None:
    with open("/dev/full", "wb") as full:
        done = called("check", "balanced", stdout=full.fileno())
    told = done.stderr.decode()
    assert done.returncode == 2 and "No space left on device" in told and "Traceback" not in told


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_an_encoding_does_not_have_is_escaped(more: tuple[str, ...], profile: str) -> None:
    assert called("plan", profile, "-o", "plan.yaml", stdout=subprocess.DEVNULL).returncode == 0
    ascii_ = called("explain", "plan.yaml", *more, stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert ascii_.returncode == 0 and ascii_.stdout.isascii() and not ascii_.stderr


def test_without_a_standard_output(profile: str) -> None:
    script = 'exec "$0" "$@" >&-'
    done = subprocess.run(["sh", "-c", script, *COMMAND, "check", "balanced"], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("command", [("calibrate", "train.py:target"), ("chaos", "train.py:target", "--faults", "1")])
def test_shares_of_steps_need_no_steps_where_nobody_takes_them(command: tuple[str, ...], run: Run) -> None:
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\ndef target():\n"
        "    return nn.Linear(4, 4), [torch.randn(8, 4) for _ in range(3)], lambda m, b: m(b).square().mean()\n"
    )
    Path("late.yaml").write_text(
        "name: late\nformats: [fp32, bf16]\nschedule: [{after: 0.5, raise: '*', to: bf16, optional: true}]\n"
    )
    code, _, err = run(*command, "--policy", "late.yaml")
    assert code in (0, 1) and "error" not in err, err


def test_any_storage_can_be_planned_from_a_calibration(run: Run) -> None:
    Path("train.py").write_text(
        "import torch\nfrom torch import nn\ndef target():\n"
        "    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))\n"
        "    return model, [torch.randn(64, 16) for _ in range(3)], lambda m, b: m(b).square().mean()\n"
    )
    Path("narrow.yaml").write_text(
        "name: narrow\nformats: [fp32, bf16]\nobjective: peak\nstorage: {formats: [fp8_e5m2]}\n"
    )
    assert run("calibrate", "train.py:target", "-o", "p.safetensors")[0] == 0
    code, _, err = run("plan", "p.safetensors", "--policy", "narrow.yaml", "--dry-run")
    assert (code, err) == (0, "")


def test_more_steps_than_anybody_observes_are_an_error(run: Run) -> None:
    Path("long.yaml").write_text("name: long\nformats: [fp32, bf16]\ncalibration: {steps: 99999999999999999999999}\n")
    code, _, err = run("check", "long.yaml")
    assert code == 2 and "long.yaml:3:22: calibration.steps: must be at most 1000000" in err
