"""Policies, plans, devices, datasheets and events: their files and lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from autoprec.checks import described
from autoprec.devices import Datasheet, Device
from autoprec.errors import DeviceError, InputError, PlanError, PolicyError, nearest
from autoprec.plans import Event, Plan
from autoprec.policies import Policy
from autoprec.policy_problems import dotted, policy_problems
from autoprec.serial.codec import Problem, decode, encode, refused, take_envelope
from autoprec.serial.files import PathLike, read_tree, write_atomic
from autoprec.serial.trees import Node, Source, dump_yaml, parse_json

__all__ = [
    "datasheet_names",
    "event_from_json_line",
    "event_to_json_line",
    "load_device",
    "load_policy",
    "policy_path",
    "policy_names",
    "read_datasheet",
    "read_device",
    "read_plan",
    "read_policy",
    "rule_places",
    "write_device",
    "write_plan",
]

VERSION = 1
POLICY_LIMIT = 64 << 10
VALUE_LIMIT = 16 << 20
#: Short items, and many of them.
_INLINE = ("alternatives", "dropped")

T = TypeVar("T")


# -- policies ------------------------------------------------------------------------------------------------------


def read_policy(path: PathLike) -> Policy:
    """The policy in a YAML file; `PolicyError` with every problem and its place."""
    source = Source(os.fspath(path), PolicyError)
    root = read_tree(source, POLICY_LIMIT)
    if not isinstance(root.value, dict):
        raise source.refused_at(root.line, root.column, f"a policy must be a mapping, not {described(root.value)}")
    try:
        return Policy.model_validate(root.plain)
    except ValidationError as error:
        problems = [
            Problem(*_place(root, at, of_key), dotted(at).removesuffix(": "), what)
            for at, what, of_key in policy_problems(error, Policy)
        ]
        raise refused(problems, source) from error


def _place(root: Node, at: tuple[str | int, ...], of_key: bool) -> tuple[int, int]:
    """Where the value is, or its key, or what should hold it."""
    node, place = root, (root.line, root.column)
    for part in at:
        if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
            place = node.keys[part]
            node = node.value[part]
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            place = node.line, node.column
        else:
            return node.line, node.column
    return place if of_key else (node.line, node.column)


def _shipped_folder(name: str) -> Path:
    """In a wheel inside the package, in a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    packed = package / f"_{name}"
    return packed if packed.is_dir() else package.parent / name


def _shipped_names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _shipped_folder(folder).glob("*.yaml")))


def _is_path(text: str) -> bool:
    """Whether it is meant as a path and not as the name of something that is shipped."""
    return text.endswith((".yaml", ".yml", ".json")) or any(s in text for s in (os.sep, os.altsep) if s)


def policy_names() -> tuple[str, ...]:
    """Names of the policies that come with autoprec, sorted."""
    return _shipped_names("policies")


def load_policy(policy: str | os.PathLike[str] | Policy) -> Policy:
    """A policy by name, by path (a string with a separator or ending in .yaml, .yml or .json), or itself."""
    return policy if isinstance(policy, Policy) else read_policy(policy_path(policy))


def policy_path(policy: str | os.PathLike[str]) -> PathLike:
    """The file of a policy, by its name or path as in `load_policy`."""
    if isinstance(policy, os.PathLike):
        return policy
    if not isinstance(policy, str):
        raise PolicyError(f"a policy must be a name, a path or a Policy, not {described(policy)}")
    if _is_path(policy):
        return policy
    if policy not in policy_names():
        raise PolicyError(
            f"unknown policy {policy[:60]!r}.{nearest(policy, policy_names())} A path ends in .yaml or holds a {os.sep}"
        )
    return _shipped_folder("policies") / f"{policy}.yaml"


def rule_places(path: PathLike) -> tuple[str, ...]:
    """file:line:column of each rule in a policy file."""
    root = read_tree(Source(os.fspath(path), PolicyError), POLICY_LIMIT)
    rules = root.value.get("rules") if isinstance(root.value, dict) else None
    items = rules.value if rules is not None and isinstance(rules.value, list) else []
    return tuple(f"{os.fspath(path)}:{item.line}:{item.column}" for item in items)


# -- plans and devices ---------------------------------------------------------------------------------------------


def read_plan(path: PathLike) -> Plan:
    """The plan in a YAML file (JSON if it ends in .json)."""
    return _read(path, "plan", Plan, PlanError)


def write_plan(path: PathLike, plan: Plan) -> None:
    """Write a plan as YAML (JSON if the path ends in .json): the same bytes every time."""
    _write(path, "plan", plan, PlanError)


def read_device(path: PathLike) -> Device:
    """The device in a JSON file (YAML if it does not end in .json)."""
    return _read(path, "device", Device, DeviceError)


def write_device(path: PathLike, device: Device) -> None:
    """Write a device as JSON (YAML if the path does not end in .json): the same bytes every time."""
    _write(path, "device", device, DeviceError)


def read_datasheet(path: PathLike) -> Datasheet:
    """The datasheet in a YAML file (JSON if it ends in .json)."""
    return _read(path, "datasheet", Datasheet, DeviceError)


def datasheet_names() -> tuple[str, ...]:
    """Names of the devices whose datasheets come with autoprec, sorted."""
    return _shipped_names("devices")


def load_device(device: PathLike) -> Device | Datasheet:
    """A device by the name of a shipped datasheet, or the file of a device or of a datasheet by its path (with a
    separator, ending in .yaml, .yml or .json, or there)."""
    name = os.fspath(device)
    if name in datasheet_names():
        return read_datasheet(_shipped_folder("devices") / f"{name}.yaml")
    if not _is_path(name) and not os.path.exists(name):
        raise DeviceError(
            f"{name[:60]}: there is no such file, and no datasheet of that name.{nearest(name[:60], datasheet_names())}"
        )
    source = Source(name, DeviceError)
    root = read_tree(source, VALUE_LIMIT)
    said = root.value.get("autoprec") if isinstance(root.value, dict) else None
    if said is not None and isinstance(said.value, str) and said.value not in (kinds := ("device", "datasheet")):
        what = f"expected `autoprec: device` or `autoprec: datasheet`, not {described(said.value)}."
        raise source.refused_at(said.line, said.column, what + nearest(said.value[:60], kinds))
    if said is not None and said.value == "datasheet":
        return _decoded(root, "datasheet", Datasheet, source)
    return _decoded(root, "device", Device, source)


def _read(path: PathLike, name: str, kind: type[T], error: type[InputError]) -> T:
    source = Source(os.fspath(path), error)
    return _decoded(read_tree(source, VALUE_LIMIT), name, kind, source)


def _decoded(root: Node, name: str, kind: type[T], source: Source) -> T:
    take_envelope(root, name, VERSION, source)
    return decode(root, kind, source)


def _write(path: PathLike, name: str, value: Any, error: type[InputError]) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise error(f"the path comes first, then the {name}; a {type(path).__name__} is no path")
    try:
        fields = sorted(encode(value).items(), key=lambda item: isinstance(item[1], list))
        plain = {"autoprec": name, "version": VERSION, **dict(fields)}
        if os.fspath(path).lower().endswith(".json"):
            text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
        else:
            text = dump_yaml(plain, _INLINE)
        data = text.encode()
    except (InputError, ValueError) as reason:
        raise error(f"{os.fspath(path)}: this {name} cannot be written: {reason}") from reason
    write_atomic(path, data, error)


# -- events --------------------------------------------------------------------------------------------------------


def event_to_json_line(event: Event, run: str = "") -> str:
    """One line of JSON, without its end. `run`: whose event it is, for `run_of`, in a file that several runs write."""
    return json.dumps(encode(event) | ({"run": run} if run else {}), allow_nan=False)


def event_from_json_line(line: str, path: str = "event") -> Event:
    """The event of a line, of whichever run; `InputError` that names `path` otherwise."""
    source = Source(path, InputError)
    root = parse_json(line, source)
    if isinstance(root.value, dict) and isinstance((run := root.value.get("run")) and run.value, str):
        del root.value["run"]
    return decode(root, Event, source)
