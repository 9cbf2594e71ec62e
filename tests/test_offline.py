"""Calibrate, plan, explain, and train with the plan in a new process: the commands as a person types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "language_model.py"

TRAIN = """
import os, sys
import torch, autoprec
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import language_model as example
model, batches, loss_fn = example.target()
model = autoprec.compile(model, plan="plan.yaml")
optimizer = torch.optim.AdamW(model.parameters())
for _, batch in zip(range(3), batches):
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()
session = autoprec.session(model)
claimed = {a.op: a.format for a in session.plan.assignments if a.role == "output"}
executed = session.executed_formats()
assert {op: executed[op] for op in claimed} == claimed
assert session.steps == 3 and not session.plan.is_identity
print(len(claimed), "ops as planned")
"""


def command(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_offline_plan_trains_in_a_new_process(tmp_path: Path) -> None:
    autoprec = ("-c", "from autoprec.cli.main import main; main()")
    command(tmp_path, *autoprec, "calibrate", f"{EXAMPLE}:target", "-o", "p")
    for policy in ("balanced", "memory"):
        command(tmp_path, *autoprec, "plan", "p", "--policy", policy, "--budget", "60%", "-o", "plan.yaml")
        explained = command(tmp_path, *autoprec, "explain", "plan.yaml")
        assert "linear#0" in explained and "budget" in explained
        assert "ops as planned" in command(tmp_path, "-c", TRAIN, str(EXAMPLE))
