"""`kill -9` at random times, and on from the last checkpoint: `python -m tests.campaigns.kills [--count 50]`.

A training process (`--run FOLDER`) writes a checkpoint of model, optimizer, random state and session every few steps,
and a line for every step: its loss, and a digest of parameters, buffers and plan. It is killed at a random time and
started again until it is through; every line of every process must be the one that an undisturbed process wrote, and so
must the events be. Exit code 1 if one is not, or if a checkpoint could not be read.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

import autoprec
from autoprec.serial import load_policy

STEPS, EVERY = 160, 3


class Net(nn.Module):
    """A buffer that steps change, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.1, self.training))


def policy() -> autoprec.Policy:
    """Windows of four steps; what is planned does not depend on the time that anything takes."""
    return load_policy("memory").replaced(
        formats=("fp32", "fp16"),
        rules=(),
        storage={"formats": ()},
        objective="bytes",
        calibration={"steps": 4},
        noise={"gradient": 10.0, "loss": 10.0},
        monitor={"window_steps": 4, "interval_steps": 2, "cooldown_windows": 2},
    )


def size_of(step: int) -> float:
    """Inputs in the fortieth to fiftieth step, and again in the hundredth, leave FP16."""
    return 3e5 if 40 <= step < 50 or 100 <= step < 104 else 1.0


def digest(model: nn.Module, session: autoprec.Session) -> str:
    """Of all that must be the same."""
    found = hashlib.sha256()
    for x in (*model.parameters(), *model.buffers()):
        found.update(
            x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.dim() else repr(float(x)).encode()
        )
    plan = session.plan
    found.update(f"{None if plan is None else plan.fingerprint} {session.steps} {session.skipped_steps}".encode())
    return found.hexdigest()[:16]


def train(folder: Path) -> None:
    """Until the last step, from the last checkpoint."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    autoprec.compile(model, policy=policy(), events=folder / "events.jsonl")
    session = autoprec.session(model)
    start = resume(folder, model, optimizer, session)
    with (folder / "lines").open("a") as lines:
        for step in range(start, STEPS):
            optimizer.zero_grad()
            x = torch.randn(64, 16)
            loss = model(x * size_of(step)).square().mean()
            loss.backward()
            optimizer.step()
            lines.write(f"{step} {float(loss.detach())!r} {digest(model, session)}\n")
            lines.flush()
            if step % EVERY == EVERY - 1:
                save(folder, step + 1, model, optimizer, session)
    save(folder, STEPS, model, optimizer, session)


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, session: autoprec.Session) -> None:
    """A folder of its own, named once all is in it; the two last stay."""
    if (folder / f"checkpoint{step:05}").exists():
        return
    made = folder / f"making{os.getpid()}"
    made.mkdir(exist_ok=True)
    tensors = {f"model.{n}": x.detach().clone() for n, x in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{n}": x.clone() for n, x in state.items()}
    save_file(tensors | {"rng": torch.get_rng_state()}, made / "training.safetensors")
    session.save(made / "session.safetensors")
    made.rename(folder / f"checkpoint{step:05}")
    for old in sorted(folder.glob("checkpoint*"))[:-2]:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()


def resume(folder: Path, model: nn.Module, optimizer: Optimizer, session: autoprec.Session) -> int:
    """The step to go on with."""
    found = sorted(folder.glob("checkpoint*"))
    if not found:
        return 0
    tensors = load_file(found[-1] / "training.safetensors")
    model.load_state_dict({n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.")})
    plain, state = optimizer.state_dict(), dict[int, dict[str, Tensor]]()
    for name, x in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            state.setdefault(int(number), {})[key] = x
    optimizer.load_state_dict(plain | {"state": state})
    session.load(found[-1] / "session.safetensors")
    torch.set_rng_state(tensors["rng"])
    return int(found[-1].name.removeprefix("checkpoint"))


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.campaigns.kills", "--run", str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def events_of(folder: Path) -> str:
    """What its one run told, whatever its name is."""
    lines = (folder / "events.jsonl").read_text()
    names = set(re.findall(r', "run": "\w+"', lines))
    assert len(names) == 1, names
    return lines.replace(names.pop(), "")


def campaign(count: int, seed: int = 0) -> list[str]:
    """What was wrong, after so many kills."""
    chance, wrong, killed = random.Random(seed), list[str](), 0
    with tempfile.TemporaryDirectory() as place:
        plain = Path(place, "plain")
        plain.mkdir()
        begin = time.perf_counter()
        process = started(plain)
        _, errors = process.communicate()
        if process.returncode:
            return [errors.decode()[-2000:]]
        seconds = time.perf_counter() - begin
        expected = dict(line.split(" ", 1) for line in (plain / "lines").read_text().splitlines())
        events = events_of(plain)
        run = 0
        while killed < count:
            folder = Path(place, f"run{run}")
            folder.mkdir()
            run += 1
            while True:
                process = started(folder)
                # Half of a process's time is spent before the first step.
                soon = seconds * chance.uniform(0.3, 1.0) if killed < count else None
                try:
                    _, errors = process.communicate(timeout=soon)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    killed += 1
                    continue
                if process.returncode:
                    wrong.append(errors.decode()[-2000:])
                break
            wrong += [
                f"step {step}: {line}, not {expected[step]}"
                for step, line in (at.split(" ", 1) for at in (folder / "lines").read_text().splitlines() if at)
                if expected[step] != line
            ]
            if events_of(folder) != events:
                wrong.append(f"run {run}: other events")
        kinds = [line for line in events.splitlines() if "promoted" in line or "demoted" in line]
        print(
            f"{killed} kills, {run} runs of {STEPS} steps, {len(kinds)} changes of the plan in each; {len(wrong)} wrong"
        )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--run", type=Path)
    given = parser.parse_args()
    if given.run is not None:
        train(given.run)
        return
    wrong = campaign(given.count)
    print("\n".join(wrong[:20]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
