"""`autoprec chaos`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.execution.guard import PutAside
from tests.cli_targets import TARGETS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def targets(tmp_path: Path) -> Path:
    path = tmp_path / "targets.py"
    path.write_text(TARGETS, encoding="utf-8")
    return path


def test_faults_against_a_target(run: Run, targets: Path) -> None:
    policy = targets.with_name("policy.yaml")
    policy.write_text("{name: narrow, formats: [fp32, bf16], objective: bytes, noise: {gradient: 9.0, loss: 9.0}}")
    code, out, _ = run("chaos", f"{targets}:target", "--faults", "10", "--policy", policy, "--json")
    data = json.loads(out)
    assert code == 0 and data["holds"] and data["faults"] == 10 == len(data["trials"])
    assert data["changed"] == data["missed"] == 0 and data["bad_steps"] >= 4
    assert {t["kind"] for t in data["trials"]} >= {"forward_overflow", "gradient_overflow", "underflow", "zero"}


def test_a_guard_that_puts_nothing_aside_is_red(run: Run, targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PutAside, "__init__", lambda self, optimizer: None)
    monkeypatch.setattr(PutAside, "restore", lambda self: None)
    code, out, _ = run("chaos", f"{targets}:target", "--faults", "2")
    told = " ".join(out.split())  # lines are as long as the path of the target has it
    assert code == 1 and "changed parameter" in told and "Faults, and what became of them" in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--optimizer", "adan"), "Did you mean 'adamw'"),
        (("--backend", "inductr"), "Did you mean 'inductor'"),
        (("--policy", "memmory"), "memory"),
        (("--faults", "0"), "--faults"),
    ],
)
def test_mistakes(run: Run, targets: Path, arguments: tuple[str, str], text: str) -> None:
    code, out, err = run("chaos", f"{targets}:target", *arguments)
    assert code == 2 and text in err + out


def test_a_target_without_batches(run: Run, targets: Path) -> None:
    code, _, err = run("chaos", f"{targets}:empty", "--faults", "1")
    assert code == 2 and "no batch" in err
