"""States of runs: one .safetensors file each, JSON in its metadata and the floats of profiles in arrays.

In the JSON is a digest of all of it: a number that is another one by a bit would be a run that goes on, and goes on
otherwise, which no check of single values can see.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from autoprec.errors import InputError, StateError
from autoprec.serial.cases import finite
from autoprec.serial.codec import decode, encode, take_envelope
from autoprec.serial.files import PathLike, read_bytes, write_atomic
from autoprec.serial.profiles import Arrays, Contents, mismatch, pack, unpack
from autoprec.serial.trees import Source, parse_json
from autoprec.states import Run, RunState

__all__ = ["read_state", "state_from_parts", "state_parts", "write_state"]

VERSION = 1
STATE_LIMIT = 4 << 30

#: Of the header where the digest is not in it yet, and of all arrays. A state of an older version has none.
_DIGEST = '"sha256": "{}"'


@dataclass(frozen=True, kw_only=True)
class _Learned:
    number: int
    contents: Contents


@dataclass(frozen=True, kw_only=True)
class _Header:
    run: Run
    calibration: Contents | None = None
    window: Contents | None = None
    learned: tuple[_Learned, ...] = ()


def state_parts(state: RunState) -> tuple[str, Arrays]:
    """The header, as JSON, and the arrays by their names."""
    arrays: Arrays = {}

    def packed(prefix: str, profile: object) -> Contents | None:
        if profile is None:
            return None
        contents, found = pack(profile)  # type: ignore[arg-type]
        arrays.update({f"{prefix}.{name}": a for name, a in found.items()})
        return contents

    learned = []
    for k, (number, profile) in enumerate(state.learned):
        contents = packed(f"learned{k}", profile)
        assert contents is not None
        learned.append(_Learned(number=number, contents=contents))
    told = _Header(
        run=state.run,
        calibration=packed("calibration", state.calibration),
        window=packed("window", state.window),
        learned=tuple(learned),
    )
    plain = {"autoprec": "state", "version": VERSION, "sha256": "", **encode(told)}
    header = json.dumps(finite(plain), allow_nan=False)
    return header.replace(_DIGEST.format(""), _DIGEST.format(_digest(header, arrays)), 1), arrays


def _digest(header: str, arrays: Arrays) -> str:
    found = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        found.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def state_from_parts(header: str, arrays: Arrays, source: Source) -> RunState:
    """What `state_parts` was given; the source's error where anything is not as it should be."""
    inside = Source(f"{source.path} (header)", source.error)
    root = parse_json(header, inside)
    take_envelope(root, "state", VERSION, inside)
    assert isinstance(root.value, dict)
    told = root.value.pop("sha256", None)
    found = decode(root, _Header, inside, infinite="inf")
    known = set[str]()
    graph = "" if found.run.graph is None else found.run.graph.fingerprint

    def unpacked(prefix: str, contents: Contents, fingerprint: str) -> object:
        mine = {name.partition(".")[2]: a for name, a in arrays.items() if name.partition(".")[0] == prefix}
        known.update(f"{prefix}.{name}" for name in mine)
        if (problem := mismatch(mine, contents)) is not None:
            raise source.refused(f"is damaged: of {prefix}, {problem}")
        return unpack(contents, mine, fingerprint)

    try:
        profiles = {
            name: None if contents is None else unpacked(name, contents, graph)
            for name, contents in (("calibration", found.calibration), ("window", found.window))
        }
        learned = tuple((one.number, unpacked(f"learned{k}", one.contents, "")) for k, one in enumerate(found.learned))
        if strange := sorted(set(arrays) - known):
            raise source.refused(f"is damaged: it holds {strange[0]}, of which its header says nothing")
        if told is not None:
            without = header.replace(_DIGEST.format(told.value), _DIGEST.format(""), 1)
            if told.value != _digest(without, arrays):
                raise source.refused("is damaged: it is not what was written (sha256); load the one before it")
        return RunState(run=found.run, learned=learned, **profiles)  # type: ignore[arg-type]
    except InputError as error:
        if isinstance(error, StateError) and source.path in str(error):
            raise
        raise source.refused(f"is damaged: {error}") from error


def write_state(path: PathLike, state: RunState) -> None:
    """Write a state, wholly or not at all."""
    header, arrays = state_parts(state)
    write_atomic(path, save(arrays or {"empty": np.zeros(0)}, metadata={"autoprec": header}), StateError)


def read_state(path: PathLike) -> RunState:
    """The state in a file; `StateError` if the file is anything else."""
    source = Source(os.fspath(path), StateError)
    data = read_bytes(source, STATE_LIMIT)
    try:
        arrays: Arrays = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise source.refused(f"is not the state of a run, or is damaged ({error})") from error
    if "autoprec" not in metadata:
        raise source.refused("is a safetensors file, but not the state of a run; name a file that session.save wrote")
    arrays.pop("empty", None)
    return state_from_parts(metadata["autoprec"], arrays, source)
