"""The command line: quick and lean help, a chain of files, and a clear answer to every bad input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.serial import read_device, read_plan, read_profile, write_device, write_plan
from tests.cli_targets import TARGETS

COMMANDS = ("demo", "calibrate", "plan", "explain", "diff", "pareto", "check", "schema", "replay", "doctor",
            "watch", "chaos")  # fmt: skip

Answer = tuple[int, str, str]
Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with targets.py and what calibrate wrote."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "targets.py").write_text(TARGETS, encoding="utf-8")
    done = autoprec("calibrate", "targets:target", "-o", "net.safetensors", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said.json").write_text(done.stdout, encoding="utf-8")
    return folder


def autoprec(*arguments: object, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    code = "from autoprec.cli.main import main; main()"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=cwd, check=False, **options)


def imported_by(*commands: list[str], cwd: Path | None = None) -> set[str]:
    """The modules that a process has imported that ran these commands."""
    code = (
        "import sys\nfrom autoprec.cli.main import app\n"
        f"for arguments in {commands!r}:\n"
        "    try: app(arguments, prog_name='autoprec')\n"
        "    except SystemExit as end: print('code', end.code, *arguments, file=sys.stderr)\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    lines = done.stderr.strip().splitlines()
    assert sum("code 0 " in line for line in lines) == len(commands), done.stderr
    return set(lines[-1].split())


# Help ---------------------------------------------------------------------------------------------------------------


def test_help_imports_next_to_nothing() -> None:
    heavy = {"torch", "numpy", "scipy", "pydantic", "yaml", "rich"}
    assert imported_by(["--help"]) & heavy == set()
    helps = ([command, "--help"] for command in COMMANDS)
    assert imported_by(*helps) & heavy <= {"pydantic"}  # some versions of typer convert with it


def test_help_is_there_in_a_blink() -> None:
    def cpu_seconds() -> float:  # of the children: a busy machine does not count
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    taken = []
    for _ in range(3):
        before = cpu_seconds()
        assert autoprec("--help").returncode == 0
        taken.append(cpu_seconds() - before)
    assert min(taken) < 0.3


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "autoprec", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, autoprec("--help").stdout)


def test_help_names_every_command_in_one_line_each(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].*\.$", out, re.MULTILINE), command
        code, text, _ = run(command, "--help")
        assert code == 0 and "--json" in text


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0 and re.fullmatch(r"autoprec \d+\.\d+\.\d+\n", out)


def test_an_unknown_command_is_bad_input(run: Run) -> None:
    code, out, err = run("calibrat")
    assert code == 2 and out == "" and "calibrat" in err


# The chain calibrate → plan → explain -----------------------------------------------------------------------------


def test_calibrate_writes_one_profile_and_the_timings_beside_it(calibrated: Path) -> None:
    said = json.loads((calibrated / "said.json").read_text())
    profile, graph = read_profile(calibrated / "net.safetensors")
    device = read_device(calibrated / "net.safetensors.device.json")
    assert profile.steps == said["steps"] == 4
    assert {op.kind for op in graph.ops} >= {"linear", "layer_norm", "relu"}
    assert said["timings"] == len(device.timings) > 0
    # Any policy can plan from these files, whatever the one was that they were made with.
    assert {t.format for t in device.timings} == {"fp32", "bf16", "fp16"}  # FP8 would be emulated
    assert not (calibrated / "autoprec_events.jsonl").exists()


def test_calibrate_by_file(calibrated: Path, run: Run) -> None:
    code, out, _ = run(
        "calibrate", f"{calibrated / 'targets.py'}:target", "-o", "a.safetensors", "--device-out", "b.json"
    )
    assert code == 0
    assert "autoprec plan a.safetensors --device b.json" in out
    assert read_device("b.json").timings
    assert run("plan", "a.safetensors")[0] == 2  # no timings beside it
    assert run("plan", "a.safetensors", "--device", "b.json")[0] == 0


def test_commands_about_files_take_no_torch(calibrated: Path) -> None:
    found = imported_by(
        ["plan", "net.safetensors", "--policy", "memory", "-o", "lean.yaml", "--save-case", "lean.json"],
        ["explain", "lean.yaml"],
        ["explain", "lean.yaml", "up", "--json"],
        ["explain", "lean.yaml", "up", "--why-not", "bf16"],
        ["diff", "lean.yaml", "lean.yaml"],
        ["check", "memory", "net.safetensors"],
        ["schema"],
        ["pareto", "net.safetensors", "--points", "2"],
        ["replay", "lean.json"],
        cwd=calibrated,
    )
    assert "numpy" in found and not {"torch", "matplotlib"} & found


def test_plan_says_what_it_wrote(calibrated: Path, run: Run) -> None:
    code, out, err = run("plan", calibrated / "net.safetensors", "--policy", "memory", "--json")
    assert (code, err) == (0, "")
    said, plan = json.loads(out), read_plan("plan.yaml")
    assert said["plan"] == "plan.yaml"
    assert said["fingerprint"] == plan.fingerprint
    assert plan.predicted is not None and plan.predicted_fp32 is not None
    assert said["predicted"]["saved_bytes"] == plan.predicted.saved_bytes < plan.predicted_fp32.saved_bytes
    code, out, _ = run("plan", calibrated / "net.safetensors", "--policy", "memory")
    assert code == 0
    for word in (
        "policy   memory",
        "budget   none",
        "binding",
        "gap",
        "kept for backward",
        "autoprec explain plan.yaml",
    ):
        assert word in out
    code, out, _ = run("plan", calibrated / "net.safetensors", "-o", "my plan.yaml")
    assert code == 0 and "autoprec explain 'my plan.yaml'," in out  # a command that a shell takes as it is


def test_a_dry_run_says_all_and_writes_nothing(calibrated: Path, run: Run) -> None:
    profile = calibrated / "net.safetensors"
    _, wet, _ = run("plan", profile, "--policy", "memory", "--json")
    _, wet_text, _ = run("plan", profile, "--policy", "memory")
    Path("plan.yaml").unlink()
    code, out, err = run("plan", profile, "--policy", "memory", "--dry-run", "--json")
    assert (code, err) == (0, "") and list(Path().iterdir()) == []
    assert json.loads(out) == json.loads(wet) | {"plan": None, "dry_run": True}
    # Not even where nothing could be written.
    code, out, _ = run("plan", profile, "--policy", "memory", "--dry-run", "-o", "no/such/folder/plan.yaml")
    assert code == 0 and out.endswith("nothing was written: this was a dry run\n")
    assert out.splitlines()[:-1] == wet_text.splitlines()[:-2] and list(Path().iterdir()) == []


def test_plan_keeps_a_budget_or_says_what_the_smallest_is(calibrated: Path, run: Run) -> None:
    profile = calibrated / "net.safetensors"
    code, out, _ = run("plan", profile, "--policy", "memory", "--budget", "99%", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["predicted"]["peak_bytes"] <= said["budget_bytes"] < said["predicted_fp32"]["peak_bytes"]
    Path("plan.yaml").unlink()
    code, out, err = run("plan", profile, "--policy", "memory", "--budget", "1KiB")
    assert code == 1 and out == "" and "smallest feasible budget" in err
    assert not Path("plan.yaml").exists()
    code, _, err = run("plan", profile, "--budget", "lots")
    assert code == 2 and "lots" in err


def test_the_optimizer_that_the_policy_names_counts(calibrated: Path, run: Run) -> None:
    peaks = {}
    for optimizer in ("sgd", "adamw"):
        Path(f"{optimizer}.yaml").write_text(f"version: 1\nname: x\nformats: [fp32]\noptimizer: {optimizer}\n")
        _, out, _ = run("plan", calibrated / "net.safetensors", "--policy", f"{optimizer}.yaml", "--json")
        peaks[optimizer] = json.loads(out)["predicted"]["peak_bytes"]
    _, graph = read_profile(calibrated / "net.safetensors")
    assert peaks["adamw"] - peaks["sgd"] == 2 * graph.gradient_bytes > 0


def test_a_plan_for_a_device_of_another_kind_needs_its_timings(calibrated: Path, run: Run) -> None:
    device = read_device(calibrated / "net.safetensors.device.json")
    write_device("bare.json", type(device)(name="bare", type=device.type, native=("fp32",)))
    code, _, err = run("plan", calibrated / "net.safetensors", "--device", "bare.json")
    assert code == 2 and "bare" in err


@pytest.fixture
def plan(calibrated: Path, run: Run) -> Path:
    assert run("plan", calibrated / "net.safetensors", "--policy", "memory")[0] == 0
    return Path("plan.yaml").resolve()


def test_explain_has_a_row_for_each_op_and_the_totals(plan: Path, run: Run) -> None:
    code, out, _ = run("explain", plan)
    assert code == 0
    made = read_plan(plan)
    for op in {a.op for a in made.assignments}:
        assert op in out
    words = "output", "grad_input", "grad_weight", "kept as", "bf16", "exceed its limit", "budget", "binding", "gap"
    for word in words:
        assert word in out


def test_explain_memory_says_where_every_byte_is(plan: Path, run: Run) -> None:
    """The parts are the whole, for this plan and for FP32; the layers are the model's."""
    code, out, _ = run("explain", plan, "--memory")
    assert code == 0 and "peak, predicted" in out and "gradients of activations" in out and "And by layer" in out
    code, out, _ = run("explain", plan, "--memory", "--json")
    told, made = json.loads(out), read_plan(plan)
    assert code == 0 and made.predicted is not None and made.predicted_fp32 is not None
    assert told["predicted"]["plan"] == made.predicted.peak_bytes == sum(h["plan"] for h in told["holdings"])
    assert told["predicted"]["fp32"] == made.predicted_fp32.peak_bytes == sum(h["fp32"] for h in told["holdings"])
    assert {h["layer"] for h in told["holdings"]} & {"up", "down"}
    assert any(h["kind"].startswith("activations, ") and h["plan"] for h in told["holdings"])


def test_explain_memory_mistakes(plan: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run("explain", plan, "up", "--memory")
    assert code == 2 and "--memory is about the whole plan" in err
    bare = tmp_path / "bare.yaml"
    write_plan(bare, replace(read_plan(plan), memory=()))
    code, _, err = run("explain", bare, "--memory")
    assert code == 2 and str(bare) in err and "does not say where its bytes are" in err


def test_explain_json_holds_every_decision(plan: Path, run: Run) -> None:
    code, out, _ = run("explain", plan, "--json")
    assert code == 0
    said, made = json.loads(out), read_plan(plan)
    roles = {(a["op"], a["role"]): (a["format"], a["reason"]) for op in said["ops"] for a in op.get("roles", [])}
    assert roles == {(a.op, str(a.role)): (a.format, a.reason) for a in made.assignments}
    kept = {s["tensor"]: s["format"] for op in said["ops"] for s in op.get("storages", [])}
    assert kept == made.storage_of


def test_explain_one_op_or_a_glob(plan: Path, run: Run) -> None:
    code, out, _ = run("explain", plan, "up:linear#0")
    assert code == 0 and "up:linear#0" in out and out.count("grad_weight") == 1
    for pattern, ops in (("up", ["up:linear#0"]), ("*:linear#0", ["up:linear#0", "down:linear#0"])):
        code, out, _ = run("explain", plan, pattern, "--json")
        assert code == 0 and [op["op"] for op in json.loads(out)["ops"]] == ops


def test_explain_names_the_nearest_op(plan: Path, run: Run) -> None:
    code, out, err = run("explain", plan, "dwn")
    assert code == 2 and out == "" and "'dwn'" in err and "'down'" in err


# Doctor, and how commands end -------------------------------------------------------------------------------------


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    said = json.loads(out)
    cpu = said["devices"][0]
    formats = {f["format"]: f for f in cpu["formats"]}
    assert cpu["type"] == "cpu" and formats["fp32"]["arithmetic"] == "native"
    assert formats["bf16"]["arithmetic"] in ("native", "emulated")
    assert formats["fp8_e4m3"] == {"format": "fp8_e4m3", "arithmetic": "emulated", "storage": True}
    assert said["torch"] and said["threads"] >= 1
    assert {(c["source"], c["target"]) for c in cpu["casts"]} >= {("fp32", "bf16"), ("fp32", "fp8_e4m3")}
    code, out, _ = run("doctor")
    assert code == 0 and "emulated" in out and "fp32 → bf16" in out


def test_what_is_missing_here_is_not_supported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, out, err = run("demo")
    assert (code, out) == (3, "") and "pip install 'autoprec[demo]'" in err


def test_an_interrupted_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoprec.cli.doctor.show_doctor", interrupted)
    assert run("doctor")[:2] == (130, "")


def test_an_interrupt_that_was_dropped_comes_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when C++ asks Python for an attribute, and drops what is raised there."""

    def deaf(**_: object) -> int:
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        time.sleep(60.0)
        return 0

    monkeypatch.setattr("autoprec.cli.doctor.show_doctor", deaf)
    monkeypatch.setattr("autoprec.cli.interrupts.AGAIN_SECONDS", 0.05)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    assert run("doctor")[:2] == (130, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_closed_pipe_is_quiet(plan: Path, options: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = autoprec("explain", plan, *options, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
