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
import copy
import gc
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from tests.campaigns import schemas
from tests.campaigns.schemas import faults

SLOW_SECONDS = 0.2
COUNT = 20_000

READERS: dict[str, Callable[[Path], Any]] = {
    "policy": serial.read_policy,
    "plan": serial.read_plan,
    "device": serial.read_device,
    "profile": serial.read_profile,
}

RICH_POLICY = {
    "version": 1,
    "name": "everything",
    "description": "each key once",
    "formats": ["fp32", "bf16", "fp16"],
    "objective": "time",
    "budget": "6GiB",
    "optimizer": "adamw",
    "noise": {"gradient": 0.05, "loss": 5e-3},
    "rules": [
        {"match": "*lm_head", "kinds": ["linear"], "floor": "bf16", "optional": True, "why": "logits"},
        {"match": "blocks.*", "kinds": ["linear", "conv2d"], "pin": "fp16"},
        {"match": "*", "floor": "fp8_e4m3"},
    ],
    "storage": {"formats": ["fp8_e4m3"]},
    "calibration": {"steps": 4},
    "monitor": {"window_steps": 100, "interval_steps": 10, "saturation_frac": 1e-4},
    "guard": {"nonfinite": "skip", "patience_steps": 20},
    "loss_scaling": {"mode": "regional"},
    "uncaptured": "error",
}
_TOTALS = {"seconds": 0.3, "saved_bytes": 1 << 40, "peak_bytes": 7, "loss_sigma": 1e-9, "gradient_ratio": 0.02}
PLAN = {
    "autoprec": "plan",
    "version": 1,
    "budget_bytes": 6 << 30,
    "gap": 1e-17,
    "binding": "the budget",
    "policy": "balanced",
    "graph_fingerprint": "0123456789abcdef",
    "device": "cpu",
    "predicted": _TOTALS,
    "predicted_fp32": dict(_TOTALS, gradient_ratio=0.0),
    "assignments": [
        {"op": f"blocks.{i}:linear#0", "role": role, "format": fmt, "reason": "no: it is 3× faster"}
        for i, fmt in enumerate(schemas.COMPUTE)
        for role in schemas.ROLES
    ],
    "storages": [
        {"tensor": "input:x", "format": "fp8_e4m3", "reason": "yes"},
        {"tensor": "blocks.0:linear#0:0", "format": "as_is", "reason": "null\ntwo lines"},
    ],
    "regions": [{"ops": ["blocks.2:linear#0", "blocks.2:gelu#0"], "scale_log2": -12, "reason": "1e-3"}],
    "saturating": ["mask", "input:mask"],
}
DEVICE = {
    "autoprec": "device",
    "version": 1,
    "name": "cpu AVX2",
    "type": "cpu",
    "native": ["fp32", "bf16"],
    "source": "measured",
    "timings": [
        {"timing_key": "linear[8, 8]", "role": role, "format": fmt, "seconds": 1.25e-6, "private_saved_bytes": 64}
        for role in schemas.ROLES
        for fmt in ("fp32", "bf16")
    ],
    "casts": [{"source": "fp32", "target": "bf16", "seconds_per_element": 1e-10, "seconds_per_call": 1e-6}],
    "no_kernels": [{"timing_key": "avg_pool3d", "format": "bf16", "reason": "not implemented"}],
}
HEADER = {
    "autoprec": "profile",
    "version": 1,
    "steps": 8,
    "loss_steps": 8,
    "graph": {
        "model": "Net",
        "parameter_bytes": 24,
        "gradient_bytes": 24,
        "optimizer_bytes": 48,
        "input_bytes": 24,
        "ops": [
            {
                "id": "fc:linear#0",
                "kind": "linear",
                "op_class": "gemm",
                "fqn": "fc",
                "inputs": ["input:x", "fc.weight"],
                "outputs": ["fc:linear#0:0"],
                "weights": ["fc.weight"],
                "flops": 96,
                "saves": ["input:x"],
                "timing_key": "linear[2, 3]",
                "calls": 1,
            },
            {
                "id": ":relu#0",
                "kind": "relu",
                "op_class": "pointwise",
                "fqn": "",
                "inputs": ["fc:linear#0:0"],
                "outputs": [":relu#0:0"],
                "private_saved_bytes": 4,
                "pinned": False,
                "checkpoints": [":checkpoint#0"],
            },
        ],
        "tensors": [
            {"id": "input:x", "shape": [2, 3], "dtype": "float32", "kind": "input", "requires_grad": False},
            {"id": "fc.weight", "shape": [2, 3], "dtype": "float32", "kind": "parameter", "requires_grad": True},
            {"id": "fc:linear#0:0", "shape": [2, 2], "dtype": "float32", "kind": "activation", "requires_grad": True},
            {
                "id": ":relu#0:0",
                "shape": [2, 2],
                "dtype": "float32",
                "kind": "activation",
                "requires_grad": True,
                "base": "fc:linear#0:0",
                "is_output": True,
            },
        ],
    },
    "tensors": [
        {"id": "input:x", "histograms": [{"part": "values", "bins": 2}]},
        {"id": ":relu#0:0", "histograms": [{"part": "values", "bins": 1}, {"part": "gradients", "bins": 1}]},
    ],
    "weights": [{"fqn": "fc.weight", "steps": 8, "samples": 3}],
}
ARRAYS = {
    "bins": np.array([3, 508, 500, 501], np.int16),
    "moments": np.ones((4, 3)),
    "ranges": np.array([[1.5, 0.0, 6.0]] * 3),
    "grad_sum": np.arange(3.0),
    "weights": np.array([[9.0, 0.5]]),
    "loss": np.array([[1.0, 0.6]]),
}


# -- mutations of trees ------------------------------------------------------------------------------------------------

Path_ = tuple[str | int, ...]


def places(tree: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Paths of all values, the root's last."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))
    yield at


def value_at(tree: Any, at: Path_) -> Any:
    for part in at:
        tree = tree[part]
    return tree


def typo(word: str, chance: Random) -> str:
    """One letter left out, doubled, swapped with the next, replaced, or its case changed."""
    i = chance.randrange(max(1, len(word)))
    head, letter, tail = word[:i], word[i : i + 1], word[i + 1 :]
    return chance.choice(
        [head + tail, head + 2 * letter + tail, head + tail[:1] + letter + tail[1:], head + "q" + tail, word.swapcase()]
    )


def other_value(value: Any, chance: Random) -> Any:
    """A value of another type, range or spelling."""
    if isinstance(value, str) and chance.random() < 0.6:
        return chance.choice([typo(value, chance), "", value + " ", "x" * 300, "ü", "no", "1e-3", "~", "null"])
    if isinstance(value, bool) and chance.random() < 0.5:
        return chance.choice([0, 1, "true", "yes", None])
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.7:
        extreme = [0, -1, -value, value + 0.5, float(value), value * 10**30, 2**63, -(2**70), 10**90, 1e-320]
        return chance.choice([*extreme, math.nan, math.inf, -math.inf, 1e308, str(value), True, 2, 127])
    return chance.choice(
        [None, True, False, 0, 1, -1, 2.5, "", "fp8_e5m2", "fp64", [], {}, [1], [None], {"a": 1}, [["bf16"]], "60%"]
    )


def mutate(tree: Any, chance: Random) -> Any:
    """The tree after one change of a key, a value, or the order or number of things."""
    tree = copy.deepcopy(tree)
    at = chance.choice(list(places(tree)))
    if not at:
        return chance.choice([None, [], {}, "text", 3, [tree], {"policy": tree}])
    holder, key = value_at(tree, at[:-1]), at[-1]
    change = chance.randrange(10)
    if change <= 3:
        holder[key] = other_value(holder[key], chance)
    elif change == 4:
        del holder[key]
    elif change == 5 and isinstance(holder, dict):
        renamed = chance.choice([typo(str(key), chance), "extra", f"{key} ", "version_", "x" * 100])
        pairs = [(renamed if k == key else k, v) for k, v in holder.items()]
        holder.clear()
        holder.update(pairs)
    elif change == 6 and isinstance(holder, dict):
        holder[chance.choice(["extra", typo(str(key), chance), "x" * 80])] = copy.deepcopy(holder[key])
    elif change in (5, 6, 7) and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif change == 8:
        other = chance.choice([p for p in places(tree) if p])
        if other[: len(at)] != at and at[: len(other)] != other:
            there = value_at(tree, other[:-1])
            holder[key], there[other[-1]] = there[other[-1]], holder[key]
    else:  # an order that means nothing, or does
        items = list(holder.items()) if isinstance(holder, dict) else holder
        chance.shuffle(items)
        if isinstance(holder, dict):
            ordered = dict(items)
            holder.clear()
            holder.update(ordered)
    return tree


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
    message = tally.attempt("budget", lambda: parse_budget(value), schemas.valid_budget(value), repr(value))
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
    name = chance.choice(names)
    name = typo(name, chance) if name and chance.random() < 0.4 else name
    place = chance.choice(
        [str(file), str(file), typo(file.name, chance), str(folder), "", "no.such.module", "..", "a b"]
    )
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
    return {"policy": [*shipped, *[RICH_POLICY] * 6], "plan": [PLAN], "device": [DEVICE], "profile": [HEADER]}


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
