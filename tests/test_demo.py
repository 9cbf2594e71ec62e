"""The demo's promises, on one run that the tests share; and the examples."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autoprec.cli.main import app
from tests.cpus import HAS_BF16

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("language model", "digits")
SEEDS = 3 if HAS_BF16 else 1  #: autocast takes six times FP32's time without
CONTESTANTS = ("fp32", "autocast bf16", "autoprec balanced", "autoprec memory")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code = "from autoprec.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--json", "--seeds", str(SEEDS)],
        cwd=tmp_path_factory.mktemp("demo"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["holds"] == (done.returncode == 0)
    return found


def figure(demo: dict[str, Any], task: str, contestant: str, name: str) -> Any:
    return demo["tasks"][task]["contestants"][contestant][name]["value"]


@pytest.mark.parametrize("contestant", ["autoprec balanced", "autoprec memory"])
def test_the_language_model_learns_as_in_fp32(demo: dict[str, Any], contestant: str) -> None:
    plain = figure(demo, "language model", "fp32", "score")
    assert plain < 3.0  # it has learnt something: ln 256 is 5.5
    assert abs(figure(demo, "language model", contestant, "score") / plain - 1.0) <= 0.01


@pytest.mark.parametrize("contestant", ["autoprec balanced", "autoprec memory"])
def test_the_digits_are_recognised_as_in_fp32(demo: dict[str, Any], contestant: str) -> None:
    plain = figure(demo, "digits", "fp32", "score")
    assert plain > 0.95
    assert figure(demo, "digits", contestant, "score") >= plain - 0.01


@pytest.mark.parametrize("task", TASKS)
def test_memory_holds_less_than_autocast(demo: dict[str, Any], task: str) -> None:
    """At the peak; and between the passes, where a CPU has BF16 instructions."""
    peak = {who: figure(demo, task, who, "peak_bytes") for who in CONTESTANTS}
    kept = {who: figure(demo, task, who, "saved_bytes") for who in CONTESTANTS}
    assert peak["autoprec memory"] <= peak["autocast bf16"] < peak["fp32"]
    assert HAS_BF16 is False or kept["autoprec memory"] <= 0.80 * kept["autocast bf16"] < kept["fp32"]


def test_a_layer_that_overflows_is_caught_and_the_run_goes_on(demo: dict[str, Any]) -> None:
    growth = demo["growth"]
    assert growth["was"] == "fp16" and growth["largest"]["value"] > growth["limit"] == 65504.0
    assert growth["op"] in growth["promoted"] and growth["now"] == "fp32"
    assert growth["op"] in growth["caught"][0]
    assert growth["bad_steps"]["value"] >= 1 and growth["bad_updates"]["value"] == 0
    assert growth["good_steps_after"]["value"] >= 5 and growth["last_loss"] < growth["first_loss"]


def test_all_claims_hold_and_are_those_of_the_figures(demo: dict[str, Any]) -> None:
    assert [c["text"] for c in demo["claims"] if not c["holds"]] == []
    assert len(demo["claims"]) == (12 if HAS_BF16 else 10)


def test_each_figure_names_the_function_that_measured_it(demo: dict[str, Any]) -> None:
    figures = [f for task in TASKS for who in CONTESTANTS for f in demo["tasks"][task]["contestants"][who].values()]
    named = {f["measured_by"] for f in figures if isinstance(f, dict) and "measured_by" in f}
    assert "autoprec.execution.measuring.saved_bytes" in named and "autoprec.execution.measuring.peak_bytes" in named
    for name in named | {demo["growth"]["bad_updates"]["measured_by"]}:
        assert callable(pkgutil.resolve_name(name)), name


def test_every_contestant_has_every_figure(demo: dict[str, Any]) -> None:
    for task in TASKS:
        for who in CONTESTANTS:
            assert figure(demo, task, who, "step_seconds") > 0.0
            assert figure(demo, task, who, "peak_bytes") > 0
            assert len(demo["tasks"][task]["contestants"][who]["score_by_seed"]) == SEEDS
        assert figure(demo, task, "autocast bf16", "formats") == ["bf16", "fp32"]
        assert "fp8_e4m3 storage" in figure(demo, task, "autoprec memory", "formats")
        assert figure(demo, task, "autoprec memory", "skipped_steps") == 0


# Examples -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ops this small wait for a second thread when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks the functions of a module up by its name
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["balanced", "memory"])
@pytest.mark.parametrize(("name", "options"), [("language_model", ["--steps", "41"]), ("digits", ["--epochs", "3"])])
def test_an_example_trains(
    name: str, options: list[str], policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--policy", policy, *options])
    example(name).main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss " in line]
    assert losses[-1] < 0.8 * losses[0]
    assert lines[-1].startswith("formats: ")
    assert ("fp8_e4m3 storage" in lines[-1]) == (policy == "memory")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["language_model", "digits"])
def test_an_example_is_a_target(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(["calibrate", f"{ROOT / 'examples' / name}.py:target", "--json"], prog_name="autoprec")
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    with pytest.raises(SystemExit) as end:
        app(["plan", "profile.safetensors", "--policy", "memory", "--json"], prog_name="autoprec")
    said = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert said["predicted"]["saved_bytes"] < said["predicted_fp32"]["saved_bytes"]
