"""`autoprec plan PROFILE --target TARGET`: the plans run against each other, as they are or compiled."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autoprec
from autoprec.execution.measuring import peak_bytes
from autoprec.planning.problem import fixed_bytes
from autoprec.serial import read_plan, read_profile
from tests.test_cli import autoprec as command

Run = Callable[..., tuple[int, str, str]]

TARGETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 4)

    def forward(self, x):
        y = self.up(x)
        for _ in range(4):
            y = y * torch.sigmoid(y) + torch.tanh(y)
        return self.down(torch.sin(y))


class Deeper(Net):
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def loss(model, x):
    return model(x).square().mean()


def target(model=Net, rows=1024):
    torch.manual_seed(0)
    return model(), [torch.randn(rows, 32) for _ in range(3)], loss


def other():
    return target(Deeper)


def wider():
    return target(lambda: Net(96))


def longer():
    return target(rows=1025)
"""

POLICY = """
name: narrow
formats: [fp32, {more}bf16]
rules: [{match: up, pin: {pin}, optional: true}]
storage: {formats: []}
noise: {loss: 10.0, gradient: 10.0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With targets, policies and a profile."""
    made = tmp_path_factory.mktemp("contest")
    (made / "targets.py").write_text(TARGETS, encoding="utf-8")
    for name, pin, more in (("narrow", "bf16", ""), ("choice", "bf16", "tf32, "), ("switched", "tf32", "tf32, ")):
        text = POLICY.replace("{pin}", pin).replace("{more}", more)
        (made / f"{name}.yaml").write_text(text, encoding="utf-8")
    done = command("calibrate", "targets.py:target", "-o", "net.safetensors", "--json", cwd=made)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path, in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder)
    for left in folder.glob("*.plan.yaml"):
        left.unlink()


def measured_peak(plan: str, backend: str) -> int:
    """Of a plain step under the plan, beyond what is there anyway, in a run that was given the file."""
    model, batches, loss = runpy.run_path("targets.py")["target"]()
    autoprec.compile(model, plan=plan, backend=backend, events=None)
    session = autoprec.session(model)

    def step() -> None:
        loss(model, batches[0]).backward()
        session.step()

    step()
    step()
    return peak_bytes(step, torch.device("cpu"))


@pytest.mark.parametrize(("how", "backend"), [("--eager", "eager"), ("--compiled", "inductor")])
def test_the_peak_in_the_file_is_that_of_a_run_with_it(run: Run, how: str, backend: str) -> None:
    given = ("plan", "net.safetensors", "--policy", "narrow.yaml", how, "-o", "a.plan.yaml")
    code, out, err = run(*given, "--target", "targets.py:target", "--json")
    assert code == 0, err
    said, plan = json.loads(out), read_plan("a.plan.yaml")
    contestants = {c["name"]: c for c in said["contestants"]}
    assert contestants["fp32"]["measured"]["peak_bytes"] > 0 and plan.adopted is not None
    assert plan.adopted.measured is not None and plan.predicted is not None
    assert said["predicted"]["peak_bytes"] == plan.predicted.peak_bytes
    _, graph = read_profile("net.safetensors")
    beside = plan.predicted.peak_bytes - plan.adopted.measured.peak_bytes
    measured = measured_peak("a.plan.yaml", backend)
    state = 2 * graph.gradient_bytes  # the policy's optimizer
    assert plan.predicted.peak_bytes - fixed_bytes(graph) - state == pytest.approx(measured, rel=0.05)
    assert abs(beside) < 0.05 * measured
    code, text, _ = run(*given, "--target", "targets.py:target")
    assert code == 0 and "Which plan was adopted" in text and "without fusion" not in text


def test_without_a_target_the_peak_of_a_compiled_step_is_not_known_and_that_is_said(run: Run) -> None:
    code, out, _ = run("plan", "net.safetensors", "--policy", "narrow.yaml", "--compiled", "-o", "a.plan.yaml")
    assert code == 0 and "without fusion" in out and "--target" in out and "backend='inductor'" in out
    code, out, _ = run("plan", "net.safetensors", "--policy", "narrow.yaml", "-o", "a.plan.yaml")
    assert code == 0 and "without fusion" not in out and "backend" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "targets.py:other"), "calibrate this target"),
        (("--target", "targets.py:wider"), "calibrate this target"),
        (("--target", "targets.py:longer"), "[1025, 32] here and [1024, 32] in the profile"),
        (("--target", "targets.py:targt"), "Did you mean 'target'?"),
        (("--target", "targets.py"), "there is no colon"),
        (("--target", "targets.py:target", "--device", "h100"), "leave out --target, or --device"),
        (("--compiled", "--policy", "switched.yaml"), "a rule computes in tf32"),
    ],
)
def test_one_line_says_what_is_wrong_and_nothing_is_written(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("plan", "net.safetensors", "--policy", "narrow.yaml", *arguments, "-o", "a.plan.yaml")
    assert code == 2 and said in err and "Traceback" not in err and not Path("a.plan.yaml").exists()
    assert out == ""


def test_nothing_is_written_but_what_is_asked_for(folder: Path) -> None:
    """Not the lines of torch's profiler either."""
    done = command("plan", "net.safetensors", "--policy", "narrow.yaml", "--target", "targets.py:target", cwd=folder)
    assert done.returncode == 0 and done.stderr == ""


def test_tf32_is_no_choice_for_a_compiled_step(run: Run) -> None:
    """A run would refuse the plan."""
    given = ("plan", "net.safetensors", "--policy", "choice.yaml", "-o", "a.plan.yaml", "--json")
    code, out, err = run(*given, "--compiled")
    assert code == 0 and "tf32" not in json.dumps(json.loads(out)["contestants"]), err
    assert "tf32" not in Path("a.plan.yaml").read_text(encoding="utf-8")
