"""What a person does to a command line: files that are missing, unreadable, binary, huge or something else, options
with typing errors, closed pipes, Ctrl-C. Always one sentence, the right exit code, and nothing half done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from autoprec import serial
from tests.campaigns import inputs

CODE = "from autoprec.cli.main import main; main()"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a valid file of each kind, and with bad ones."""
    (tmp_path / "profile.safetensors").write_bytes(save(inputs.ARRAYS, {"autoprec": json.dumps(inputs.HEADER)}))
    (tmp_path / "profile.safetensors.device.json").write_text(json.dumps(inputs.DEVICE))
    (tmp_path / "plan.json").write_text(json.dumps(inputs.PLAN))
    (tmp_path / "policy.yaml").write_text("name: x\nformats: [fp32]\n")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(np.random.default_rng(0).bytes(4096))
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "latin.yaml").write_bytes("name: über\n".encode("latin-1"))
    with open(tmp_path / "huge.yaml", "wb") as file:
        file.truncate(3 << 30)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "other.yaml").write_text("autoprec: device\nversion: 1\n")
    (tmp_path / "model.py").write_text("def target(): return 1\n")
    return tmp_path


def started(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-c", CODE, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


BAD = {
    "missing.yaml": "does not exist",
    "no/such/folder/x.yaml": "does not exist",
    "folder.yaml": "is a directory",
    "binary.yaml": "UTF-8",
    "empty.yaml": "is empty",
    "latin.yaml": "latin.yaml:1:7: the byte 0xfc is not UTF-8",
    "huge.yaml": "has 3221225472 bytes; at most",
    "pipe.yaml": "not a regular file",
    "other.yaml": "",
}

USES: dict[str, Callable[[str], list[str]]] = {
    "explain PLAN": lambda bad: ["explain", bad],
    "plan PROFILE": lambda bad: ["plan", bad, "--device", "profile.safetensors.device.json"],
    "plan --policy": lambda bad: ["plan", "profile.safetensors", "--policy", bad],
    "plan --device": lambda bad: ["plan", "profile.safetensors", "--device", bad],
    "diff PLAN PLAN": lambda bad: ["diff", "plan.json", bad],
    "check POLICY": lambda bad: ["check", bad],
    "check POLICY PROFILE": lambda bad: ["check", "policy.yaml", bad],
    "pareto PROFILE": lambda bad: ["pareto", bad, "--device", "profile.safetensors.device.json"],
    "replay CASE": lambda bad: ["replay", bad],
    "calibrate --policy": lambda bad: ["calibrate", "model.py:target", "--policy", bad],
}


@pytest.mark.parametrize("use", USES)
def test_a_bad_file_is_one_sentence(use: str, files: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    before = sorted(p.name for p in files.iterdir())
    for bad, words in BAD.items():
        code, out, err = run(*USES[use](bad))
        assert (code, out) == (2, ""), (bad, err)
        first, *rest = err.strip().split("\n")
        assert first.startswith(f"autoprec: error: {bad}"), err
        # Profiles are binary: what is not one is said in other words.
        assert words in first or "PROFILE" in use and "is not a profile" in first, err
        assert len(rest) <= 10
    assert sorted(p.name for p in files.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pln", "x"], "pln"),
        (["plan"], "PROFILE"),
        (["plan", "profile.safetensors", "--budgt", "1"], "--budgt"),
        (["plan", "profile.safetensors", "--budget", "60 percent"], "valid: null, whole bytes"),
        (["plan", "profile.safetensors", "--budget", "0%"], "must be above 0%"),
        (["plan", "profile.safetensors", "--budget", ""], "valid: null, whole bytes"),
        (["plan", "profile.safetensors", "--policy", "memry"], "Did you mean 'memory'?"),
        (["plan", "profile.safetensors", "--policy", ""], "Valid: balanced"),
        (["plan", "profile.safetensors", "-o", "no/such/folder/p.yaml"], "does not exist"),
        (["plan", "profile.safetensors", "-o", "folder.yaml"], "is a directory"),
        (["explain", "plan.json", "blocks.O:linear#0"], "Did you mean 'blocks."),
        (["explain", "plan.json", ""], ""),
        (["calibrate", "model.py"], "there is no colon"),
        (["calibrate", "model.py:targt"], "Did you mean 'target'?"),
        (["calibrate", "model.py:target"], "must return (model, batches, loss_fn), not int"),
        (["calibrate", "modle.py:target"], "modle.py: does not exist"),
    ],
)  # fmt: skip
def test_a_typing_error_is_one_sentence(arguments: list[str], words: str, files: Path) -> None:
    done = started(*arguments, cwd=files)
    assert done.returncode == 2 and done.stdout == "", done
    assert words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (files / "plan.yaml").exists() and not (files / "net.safetensors").exists()


def test_a_file_that_may_not_be_read(files: Path) -> None:
    path = files / "plan.json"
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything: the same through the reader's own test
        path.chmod(0o600)
        assert serial.read_plan(path).policy == "balanced"
        return
    done = started("explain", path, cwd=files)
    assert done.returncode == 2 and "check its permissions" in done.stderr


SLOW = """
import time
import torch
from torch import nn

def batches():
    print("begun", flush=True)
    while True:
        time.sleep(0.05)
        yield torch.randn(4, 8)

def target():
    return nn.Linear(8, 2), batches(), lambda model, batch: (time.sleep(0.5), model(batch).square().mean())[1]
"""


def test_ctrl_c_while_calibrating(files: Path) -> None:
    (files / "slow.py").write_text(SLOW)
    before = sorted(p.name for p in files.iterdir())
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in a background job
    command = [sys.executable, "-c", f"{heard}; {CODE}", "calibrate", "slow.py:target"]
    process = subprocess.Popen(command, cwd=files, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert sorted(p.name for p in files.iterdir() if p.name != "__pycache__") == before
