"""Bad input: seeded structural mutations of every kind of file, of budgets and of targets.

`python -m tests.campaigns.inputs [--count N] [--seed S]` makes N of them (20,000) and ends with exit code 1 if a law is
broken. What is valid is said a second time in `schemas.py`; where things are, PyYAML says.

* Nothing but an `InputError` is raised; what is not valid is refused, and what is valid is not.
* Each line of an error names the file, and the line and column of a mutated part.
* An unknown key or name is answered with the nearest valid one or with all of them.
* Reading takes less than 0.2 s of the thread's own time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save

from autoprec import serial
from autoprec.cli.targets import load_target
from autoprec.errors import InputError
from autoprec.policies import parse_budget
from autoprec.serial.codec import encode
from tests.campaigns import budget_texts
from tests.campaigns.mutations import ARRAYS, DEVICE, HEADER, PLAN, RICH_POLICY, Path_, mutate, places, typo, value_at
from tests.campaigns.schemas import faults

SLOW_SECONDS = 0.2
COUNT = 20_000

READERS: dict[str, Callable[[Path], Any]] = {
    "policy": serial.read_policy,
    "plan": serial.read_plan,
    "device": serial.read_device,
    "datasheet": serial.read_datasheet,
    "profile": serial.read_profile,
}


# -- text, and where things are in it ------------------------------------------------------------------------------


class _Quoting(yaml.SafeDumper):
    """Text is always in quotes: YAML 1.1 leaves some bare that are numbers in 1.2. Nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def rendered(tree: Any, chance: Random, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(tree, indent=chance.choice([None, 1, 4]), ensure_ascii=chance.random() < 0.5)
    flow = chance.choice([True, False, None])
    width = chance.choice([40, 10_000])
    return str(yaml.dump(tree, Dumper=_Quoting, default_flow_style=flow, sort_keys=False, width=width))


def positions(text: str) -> dict[tuple[Path_, bool], tuple[int, int]]:
    """(path, whether the key is meant) → line and column, 1-based."""
    found: dict[tuple[Path_, bool], tuple[int, int]] = {}

    def walk(node: yaml.Node, at: Path_) -> None:
        found[at, False] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[(*at, key.value), True] = (key.start_mark.line + 1, key.start_mark.column + 1)
                walk(value, (*at, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                walk(item, (*at, i))

    walk(yaml.compose(text, Loader=yaml.CSafeLoader), ())
    return found


def _place(where: dict[tuple[Path_, bool], tuple[int, int]], at: Path_, of_key: bool) -> tuple[int, int]:
    """Of the key, of the value, or of what should hold it."""
    if (at, of_key) in where:
        return where[at, of_key]
    return _place(where, at, False) if of_key else _place(where, at[:-1], False)


def not_finite(tree: Any) -> list[tuple[Path_, bool]]:
    """What JSON cannot say."""
    values = ((p, value_at(tree, p)) for p in places(tree))
    return [(p, False) for p, v in values if isinstance(v, float) and not math.isfinite(v)]


# -- laws ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was counted."""

    made: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0

    def attempt(self, kind: str, call: Callable[[], Any], valid: bool, what: str) -> str | None:
        """The message of the refusal, or None."""
        self.made[kind] += 1
        message = None
        gc.disable()  # a collection of everything else is not the reader's time
        begin = time.thread_time()
        try:
            call()
        except InputError as error:
            message = str(error)
        except Exception as error:
            self.broken.append(f"{kind}: traceback {type(error).__name__}: {error}: {what}")
            return None
        finally:
            taken = time.thread_time() - begin
            gc.enable()
            self.slowest_seconds = max(self.slowest_seconds, taken)
        self.refused[kind] += message is not None
        if taken > SLOW_SECONDS and kind != "target":  # a target is the user's own code
            self.broken.append(f"{kind}: {taken:.2f} s: {what}")
        if valid and message is not None:
            self.broken.append(f"{kind}: valid, but refused: {message}: {what}")
        if not valid and message is None:
            self.broken.append(f"{kind}: accepted: {what}")
        return message


_LINE = re.compile(r"F(?: \(header\))?:(\d+):(\d+): (.+)", re.DOTALL)
_HINT = re.compile(r"Did you mean|Valid: |must be one of|implemented: |expected `|upgrade")


def check_message(kind: str, message: str, text: str, wrong: list[tuple[Path_, bool]], tally: Tally) -> None:
    """Every line points at something that is wrong, and unknown names come with valid ones."""
    where = positions(text)
    allowed = {_place(where, *fault): fault for fault in wrong}
    for line in message.split("\nF"):
        line = line if line.startswith("F") else f"F{line}"
        if re.fullmatch(r"F(?: \(header\))?: and \d+ more", line):
            continue
        found = _LINE.fullmatch(line)
        if not found:
            tally.broken.append(f"{kind}: no place: {line}")
        elif (place := (int(found[1]), int(found[2]))) not in allowed:
            tally.broken.append(f"{kind}: at {place}, not at one of {allowed}: {line}: {text}")
        elif "unknown" in found[3] and not _HINT.search(found[3]):
            tally.broken.append(f"{kind}: no valid choice: {line}")
    if len(message) > 5000:
        tally.broken.append(f"{kind}: a message of {len(message)} characters")


def check_tree(kind: str, tree: Any, chance: Random, folder: Path, tally: Tally) -> None:
    """One tree in one of its files."""
    as_json = kind == "profile" or chance.random() < 0.3
    text = rendered(tree, chance, as_json=as_json)
    wrong = faults(kind, tree) + (not_finite(tree) if as_json else [])
    path = folder / ("x.safetensors" if kind == "profile" else "x.json" if as_json else "x.yaml")
    valid = not wrong
    if kind == "profile":
        path.write_bytes(save(ARRAYS, {"autoprec": text}))
        valid = valid and fits(tree)
    else:
        path.write_text(text, encoding="utf-8")
    message = tally.attempt(kind, lambda: READERS[kind](path), valid, text)
    if message is not None and wrong:
        check_message(kind, message.replace(str(path), "F"), text, wrong, tally)


def fits(header: Any) -> bool:
    """Whether `ARRAYS` hold what a valid header announces."""
    counts = [h["bins"] for t in header["tensors"] for h in t["histograms"]]
    rows = {"bins": sum(counts), "ranges": len(counts), "weights": len(header["weights"])}
    rows |= {"grad_sum": sum(w["samples"] for w in header["weights"]), "loss": header.get("loss_steps") is not None}
    if any(ARRAYS[name].shape[0] != n for name, n in rows.items()):
        return False
    bins = np.split(ARRAYS["bins"], np.cumsum(counts)[:-1])
    return all(bool((np.diff(b) > 0).all()) for b in bins)


def check_arrays(chance: Random, folder: Path, tally: Tally) -> None:
    """A profile with a good header and bad arrays, or a file that is cut."""
    name = chance.choice(sorted(ARRAYS))
    array = ARRAYS[name]
    changed: dict[str, Any] = dict(ARRAYS)
    edit = chance.randrange(6)
    if edit == 0:
        del changed[name]
    elif edit == 1:
        changed[name] = array[: chance.randrange(len(array))]
    elif edit == 2:
        changed[name] = array.astype(chance.choice([np.float32, np.int64, np.uint8]))
    elif edit == 3:
        changed[chance.choice(["extra", name + "_"])] = array
    elif edit == 4:
        changed[name] = array[..., None]
    else:
        broken = {
            "moments": np.full((4, 3), chance.choice([math.nan, math.inf])),
            "bins": np.array(
                chance.choice([[508, 3, 500, 501], [3, 3, 500, 501], [-1, 3, 0, 0], [3, 1024, 0, 0]]), "i2"
            ),
            "weights": np.array([[9.0, chance.choice([0.0, 2.0, -1.0, math.nan])]]),
        }
        changed |= dict([chance.choice(sorted(broken.items()))])
    data = save(changed, {"autoprec": json.dumps(HEADER)})
    if chance.random() < 0.2:
        data = save(ARRAYS, {"autoprec": json.dumps(HEADER)})
        data = data[: chance.randrange(len(data))]
    path = folder / "x.safetensors"
    path.write_bytes(data)
    message = tally.attempt("profile", lambda: serial.read_profile(path), False, f"{name}, edit {edit}")
    if message is not None and not message.startswith(f"{path}: "):
        tally.broken.append(f"profile: does not name the file: {message}")


# -- budgets and targets ---------------------------------------------------------------------------------------------


def some_budget(chance: Random) -> Any:
    """Something that is, or might be taken for, a budget."""
    number = chance.choice(
        ["6", "1.5", "0", "00", "0.001", "9" * 18, "9" * 19, "1e3", "-1", "+1", "", ".5", "5.", "100"]
    )
    unit = chance.choice(
        ["", "B", "GiB", "gib", "GB", "MiB", "kB", "TiB", "%", "G", "PiB", "GiBs", "bytes", "％", "ib"]
    )
    space = chance.choice(["", " ", "  ", "\t", "\n"])
    text = chance.choice(["", " "]) + number + space + unit + chance.choice(["", " ", "\n", "x"])
    return chance.choice(
        [text, text, text, typo("60%", chance), typo("512 MiB", chance), 0, 1, -1, 2**63, 2.5, True, None, [], {}]
    )


def check_budget(chance: Random, tally: Tally) -> None:
    value = some_budget(chance)
    message = tally.attempt("budget", lambda: parse_budget(value), budget_texts.valid(value), repr(value))
    if message is not None and not re.search(r"valid: |above 0%|at least 1 byte", message):
        tally.broken.append(f"budget: no valid choice: {message}")


TARGETS = """
from torch import nn
value = 3
def target(): return nn.Linear(1, 1), [1], print
def pair(): return nn.Linear(1, 1), [1]
def no_model(): return 1, [1], print
def no_batches(): return nn.Linear(1, 1), 1, print
def no_loss(): return nn.Linear(1, 1), [1], 1
def needs(x): return target()
def fails(): return 1 / 0
"""
GOOD = "target"


def check_target(chance: Random, folder: Path, tally: Tally) -> None:
    file = folder / "made_for_targets.py"
    if not file.exists():
        file.write_text(TARGETS)
    names = ["target", "pair", "no_model", "no_batches", "no_loss", "needs", "fails", "value", "nn", "__name__", ""]
    name = chance.choice([*names, *[GOOD] * len(names)])  # or of a hundred none would be good
    name = typo(name, chance) if name and chance.random() < 0.4 else name
    place = chance.choice([*[str(file)] * 6, typo(file.name, chance), str(folder), "", "no.such.module", "..", "a b"])
    text = chance.choice(["{p}:{n}", "{p}:{n}", "{p}:{n}", "{p}", "{n}", "{p}::{n}", ":{n}", "{p}:{n}:"])
    text = text.format(p=place, n=name)
    before = list(sys.path)
    try:
        message = tally.attempt("target", lambda: load_target(text), text == f"{file}:{GOOD}", text)
    finally:
        sys.path[:] = before
    if message is not None and not re.search(
        r"TARGET is|must |Did you mean|Valid: |ZeroDivisionError|no function", message
    ):
        tally.broken.append(f"target: does not say what to do: {message}")


# -- the campaign --------------------------------------------------------------------------------------------------


def originals() -> dict[str, list[Any]]:
    """Valid trees of each kind."""
    shipped = [serial.load_policy(name).model_dump(mode="json") for name in serial.policy_names()]
    sheets = [{"autoprec": "datasheet", "version": 1} | encode(serial.load_device(n)) for n in serial.datasheet_names()]
    return {
        "policy": [*shipped, *[RICH_POLICY] * 6],
        "plan": [PLAN],
        "device": [DEVICE],
        "datasheet": sheets,
        "profile": [HEADER],
    }


def check_one(number: int, chance: Random, trees: dict[str, list[Any]], folder: Path, tally: Tally) -> None:
    """One mutation of the kind whose turn it is."""
    turn = number % 20
    if turn < 14:
        kind = ("policy", "plan", "policy", "device", "profile", "plan", "policy")[turn % 7]
        tree = chance.choice(trees[kind])
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            tree = mutate(tree, chance)
        check_tree(kind, tree, chance, folder, tally)
    elif turn < 16:
        check_arrays(chance, folder, tally)
    elif turn < 19:
        check_budget(chance, tally)
    else:
        check_target(chance, folder, tally)


def campaign(count: int, seed: int = 20261121) -> Tally:
    """So many mutations; the same for the same seed."""
    chance, trees, tally = Random(seed), originals(), Tally()
    for kind, each in trees.items():
        for tree in each:
            assert faults(kind, tree) == [], (kind, faults(kind, tree))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            check_one(number, chance, trees, Path(folder), tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=20261121)
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()
    tally = campaign(arguments.count, arguments.seed)
    for kind in sorted(tally.made):
        print(f"  {kind:8} {tally.made[kind]:6} made, {tally.refused[kind]:6} refused")
    for line in tally.broken:
        print(f"RED {line}")
    laws = Counter(next((w for w in ("traceback", "accepted") if f": {w}" in b), "other") for b in tally.broken)
    print(
        f"{sum(tally.made.values())} mutations: {laws['traceback']} tracebacks, {laws['accepted']} invalid accepted,"
        f" {laws['other']} other broken laws; slowest {1e3 * tally.slowest_seconds:.0f} ms;"
        f" {time.perf_counter() - begin:.0f} s"
    )
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
