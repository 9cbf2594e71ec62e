"""Thousands of files with damaged text: keys, indents, characters, bytes. `tests.campaigns.inputs` damages trees."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec import serial
from autoprec.errors import InputError, PolicyError
from autoprec.formats import COMPUTE_FORMATS, STORAGE_FORMATS
from autoprec.plans import Plan
from autoprec.policies import Policy
from autoprec.serial import values
from autoprec.serial.trees import dump_yaml
from tests.test_serial import DEVICE, PLAN, SHIPPED, quick

JUNK = ["", "no", "true", "1", "-1", "0", "1e-3", "1e999", ".nan", ".inf", "[]", "{}", "[1, [2]]", "{a: 1}"]
JUNK += ["null", "~", "'1'", '"', "&a b", "*a", "!!int 1", "<<: {a: 1}", "fp8_e4m3", "fb16"]
JUNK += ["999999999999999999999999", "%", "a: b"]
POSITION = re.compile(r"F:(\d+):(\d+): .")


def mutated(text: str, random: random.Random) -> bytes:
    """The text after one to three random edits of its keys, values, indents, characters or bytes."""
    lines = text.splitlines()
    for _ in range(random.randint(1, 3)):
        i, j = random.randrange(len(lines)), random.randrange(len(lines))
        key, colon, value = lines[i].partition(":")
        edit = random.randrange(11)
        if edit == 0 and len(lines) > 1:
            del lines[i]
        elif edit == 1:
            lines.insert(j, lines[i])
        elif edit == 2:
            lines[i] = f"{key}{colon} {random.choice(JUNK)}"
        elif edit == 3:
            lines[i] = f"{key}{random.choice(['x', '?', ' ', '.'])}{colon}{value}"
        elif edit == 4:
            lines[i] = random.choice(["\t", " ", "  ", "- ", "    \t"]) + lines[i]
        elif edit == 5:
            lines[i], lines[j] = lines[j], lines[i]
        elif edit == 6:
            lines[i] = lines[i][: random.randrange(len(lines[i]) + 1)]
        elif edit == 7:
            lines[i] = re.sub(r"\w+", lambda m: random.choice([m[0], m[0], random.choice(JUNK)]), lines[i])
        elif edit == 8:
            lines[i] = lines[i].replace(random.choice("[]{},:\"'- ") or " ", random.choice("[]{},:\"'-|>&*!%@` "), 1)
        elif edit == 9:
            lines[i:] = ["\n".join(lines[i:])[: random.randrange(200)]]
        elif edit == 10:
            lines[i] = lines[i].lstrip()
    data = "\n".join(lines).encode()
    if random.random() < 0.15:
        at = random.randrange(len(data) + 1)
        data = data[:at] + random.randbytes(random.randint(1, 4)) + data[at + random.randint(0, 4) :]
    return data


def valid_policy(policy: Policy) -> bool:
    """What a policy may hold, said again."""
    return (
        policy.version == 1
        and policy.name != ""
        and "fp32" in policy.formats
        and set(policy.formats) <= set(COMPUTE_FORMATS)
        and set(policy.storage.formats) <= set(STORAGE_FORMATS)
        and 0 < policy.noise.gradient < math.inf
        and 0 < policy.noise.loss < math.inf
        and 1 <= policy.monitor.interval_steps <= policy.monitor.window_steps
        and policy.calibration.steps >= 2
        and policy.guard.patience_steps >= 1
        and all((rule.pin is None) != (rule.floor is None) for rule in policy.rules)
        and all(rule.pin in (None, *policy.formats) for rule in policy.rules)
    )


def valid_plan(plan: Plan) -> bool:
    """What a plan may hold, said again."""
    roles = [(a.op, a.role) for a in plan.assignments]
    known = {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}
    return len(set(roles)) == len(roles) and {a.format for a in plan.assignments} <= known and not math.isnan(plan.gap)


def check_message(message: str, data: bytes) -> None:
    """Each line has a place in the file; or the file is empty."""
    lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", data.decode(errors="replace"))  # as YAML counts them
    if "\r" in (text := data.decode(errors="replace")) or len(lines) != text.count("\n") + 1:
        lines = [text] * (len(lines) + 1)
    for line in message.split("\n"):
        if re.fullmatch(r"F: and \d+ more|F: is empty.*", line):
            continue
        found = POSITION.match(line)
        assert found, message
        assert 1 <= int(found[1]) <= len(lines) + 1 and int(found[2]) >= 1, message
        assert int(found[1]) > len(lines) or int(found[2]) <= len(lines[int(found[1]) - 1]) + 1, (message, data)
    assert len(message) < 5000


def texts(tmp_path: Path) -> list[tuple[str, str]]:
    """A .yaml or .json name and its text, for each kind of file."""
    serial.write_plan(tmp_path / "plan.yaml", PLAN)
    serial.write_device(tmp_path / "device.json", DEVICE)
    folder = Path(values._shipped_folder("policies"))
    paths = [*(folder / f"{name}.yaml" for name in SHIPPED), tmp_path / "plan.yaml", tmp_path / "device.json"]
    return [(path.name, path.read_text(encoding="utf-8")) for path in paths]


def test_three_thousand_damaged_files(tmp_path: Path) -> None:
    chance = random.Random(20240517)
    originals = texts(tmp_path)
    accepted = 0
    for number in range(3000):
        name, text = originals[number % len(originals)]
        path = tmp_path / f"mutated-{name}"
        data = mutated(text, chance)
        path.write_bytes(data)
        read: Callable[[Path], Any] = serial.read_policy
        if name in ("plan.yaml", "device.json"):
            read = serial.read_plan if name == "plan.yaml" else serial.read_device
        try:
            with quick(data):
                value = read(path)
        except InputError as error:
            check_message(str(error).replace(str(path), "F"), data)
            continue
        accepted += 1
        if isinstance(value, Policy):
            assert valid_policy(value), data
            path.write_text(dump_yaml(value.model_dump()), encoding="utf-8")
        elif isinstance(value, Plan):
            assert valid_plan(value), data
            serial.write_plan(path, value)
        else:
            serial.write_device(path, value)
        assert read(path) == value, data
    assert 150 < accepted < 2400  # the edits are neither all harmless nor all fatal


def test_the_worst_that_fits_is_read_in_time(tmp_path: Path) -> None:
    limit = values.POLICY_LIMIT
    for text in ["-\n", "[],", "? ", "{a: ", "- - -\n", "'", "!", "a: |\n x\n", "[\n", "k: [1,2\n", "a\n: "]:
        path = tmp_path / "p.yaml"
        path.write_text((text * limit)[:limit], encoding="utf-8")
        with pytest.raises(PolicyError), quick(text):
            serial.read_policy(path)
