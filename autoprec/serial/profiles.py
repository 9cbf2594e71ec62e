"""Profile files: a profile and its graph in one .safetensors file.

Ids, counts and the graph are JSON in the file's metadata; every float is in one of six arrays, so a round trip is
exact to the bit. The histograms of all tensors lie one after the other, in the order of the header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from autoprec.checks import check_amount, check_choice, check_unique
from autoprec.errors import InputError, ProfileError
from autoprec.graphs import OpGraph
from autoprec.profiles import LossProfile, Profile, RangeHistogram, TensorProfile, WeightProfile
from autoprec.serial.codec import decode, encode, take_envelope
from autoprec.serial.files import PathLike, read_bytes, write_atomic
from autoprec.serial.trees import Source, parse_json

__all__ = ["Arrays", "Contents", "mismatch", "pack", "read_profile", "unpack", "write_profile"]

VERSION = 1
PROFILE_LIMIT = 1 << 30

_PARTS = tuple(f.name for f in fields(TensorProfile) if f.name != "id")
_ARRAYS: dict[str, tuple[type[np.generic], int | None]] = {  # dtype, and columns if two-dimensional
    "bins": (np.int16, None),
    "moments": (np.float64, 3),
    "ranges": (np.float64, 3),  # amax, nonfinite, elements of each histogram
    "grad_sum": (np.float64, None),
    "weights": (np.float64, 2),  # grad_square_sum, fraction of each weight
    "loss": (np.float64, 2),  # total, square_total
}
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class _Histogram:
    """Which field of a `TensorProfile` it is, and its number of occupied bins."""

    part: str
    bins: int

    def __post_init__(self) -> None:
        check_choice(self.part, _PARTS, "part", ProfileError, "part")
        check_amount(self.bins, "bins", ProfileError, "bins")


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    id: str
    histograms: tuple[_Histogram, ...]

    def __post_init__(self) -> None:
        parts = [h.part for h in self.histograms]
        if "values" not in parts or len(set(parts)) != len(parts):
            raise ProfileError(f"the histograms of {self.id!r} must be different ones and hold 'values', not {parts}")


@dataclass(frozen=True, kw_only=True)
class _Weight:
    fqn: str
    steps: int
    samples: int

    def __post_init__(self) -> None:
        check_amount(self.steps, "steps", ProfileError, "steps")
        check_amount(self.samples, "samples", ProfileError, "samples")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A profile without its floats, which are in arrays."""

    steps: int
    tensors: tuple[_Tensor, ...]
    weights: tuple[_Weight, ...]
    loss_steps: int | None = None

    def __post_init__(self) -> None:
        check_amount(self.steps, "steps", ProfileError, "steps")
        check_amount(self.loss_steps, "loss_steps", ProfileError, "loss_steps")
        check_unique([t.id for t in self.tensors], "the tensor", ProfileError, "tensors")
        check_unique([w.fqn for w in self.weights], "the weight", ProfileError, "weights")


@dataclass(frozen=True, kw_only=True)
class _Header(Contents):
    graph: OpGraph


def write_profile(path: PathLike, profile: Profile, graph: OpGraph) -> None:
    """Write a profile and the graph that it was recorded on."""
    if profile.graph_fingerprint != graph.fingerprint:
        raise ProfileError(
            f"{os.fspath(path)}: the profile is of the graph {profile.graph_fingerprint}, not of {graph.fingerprint}"
        )
    contents, arrays = pack(profile)
    header = _Header(graph=graph, **{f.name: getattr(contents, f.name) for f in fields(Contents)})
    plain = {"autoprec": "profile", "version": VERSION, **encode(header)}
    data = save(arrays, metadata={"autoprec": json.dumps(plain, allow_nan=False)})
    write_atomic(path, data, ProfileError)


def pack(profile: Profile) -> tuple[Contents, Arrays]:
    """A profile as what goes into a header, and arrays."""
    found = [[(p, h) for p in _PARTS if (h := getattr(t, p)) is not None] for t in profile.tensors]
    histograms: list[RangeHistogram] = [h for parts in found for _, h in parts]
    contents = Contents(
        steps=profile.steps,
        tensors=tuple(
            _Tensor(id=t.id, histograms=tuple(_Histogram(part=p, bins=h.bins.size) for p, h in parts))
            for t, parts in zip(profile.tensors, found, strict=True)
        ),
        weights=tuple(_Weight(fqn=w.fqn, steps=w.steps, samples=w.grad_sum.size) for w in profile.weights),
        loss_steps=profile.loss.steps if profile.loss else None,
    )
    rows: dict[str, list[Any]] = {
        "bins": [h.bins for h in histograms],
        "moments": [h.moments for h in histograms],
        "ranges": [[[h.amax, h.nonfinite, h.elements]] for h in histograms],
        "grad_sum": [w.grad_sum for w in profile.weights],
        "weights": [[[w.grad_square_sum, w.fraction]] for w in profile.weights],
        "loss": [[[profile.loss.total, profile.loss.square_total]]] if profile.loss else [],
    }
    arrays = {}
    for name, (dtype, columns) in _ARRAYS.items():
        empty = np.zeros((0, columns) if columns else 0, dtype)
        arrays[name] = np.concatenate([empty, *(np.asarray(r, dtype) for r in rows[name])])
    return contents, arrays


def unpack(contents: Contents, arrays: Arrays, graph_fingerprint: str) -> Profile:
    """What `pack` was given. The arrays must be those that the contents announce."""
    histograms = _histograms(contents, arrays)
    parts = np.cumsum([w.samples for w in contents.weights])[:-1]
    sums = np.split(arrays["grad_sum"], parts) if contents.weights else []
    weights = tuple(
        WeightProfile(fqn=w.fqn, grad_sum=total.copy(), grad_square_sum=square, fraction=fraction, steps=w.steps)
        for w, total, (square, fraction) in zip(contents.weights, sums, arrays["weights"].tolist(), strict=True)
    )
    loss = None
    if contents.loss_steps is not None:
        total, square = arrays["loss"][0].tolist()
        loss = LossProfile(steps=contents.loss_steps, total=total, square_total=square)
    return Profile(
        graph_fingerprint=graph_fingerprint,
        steps=contents.steps,
        tensors=tuple(
            TensorProfile(id=t.id, **{h.part: next(histograms) for h in t.histograms}) for t in contents.tensors
        ),
        weights=weights,
        loss=loss,
    )


def read_profile(path: PathLike) -> tuple[Profile, OpGraph]:
    """The profile in a file, and the graph that it was recorded on; `ProfileError` if the file is anything else."""
    source = Source(os.fspath(path), ProfileError)
    data = read_bytes(source, PROFILE_LIMIT)
    try:
        arrays: Arrays = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise source.refused(f"is not a profile, or is damaged ({error}); calibrate again") from error
    if "autoprec" not in metadata:
        raise source.refused("is a safetensors file, but not a profile; name a file that `calibrate` wrote")
    header = _header(metadata["autoprec"], source)
    _check_arrays(arrays, header, source)
    try:
        return unpack(header, arrays, header.graph.fingerprint), header.graph
    except InputError as error:
        raise source.refused(f"is damaged: {error}; calibrate again") from error


def _header(text: str, source: Source) -> _Header:
    inside = Source(f"{source.path} (header)", source.error)
    root = parse_json(text, inside)
    take_envelope(root, "profile", VERSION, inside)
    return decode(root, _Header, inside)


def _check_arrays(arrays: Arrays, header: Contents, source: Source) -> None:
    if (problem := mismatch(arrays, header)) is not None:
        raise source.refused(f"is damaged: {problem}; calibrate again")


def mismatch(arrays: Arrays, contents: Contents) -> str | None:
    """Every array is there, with the dtype and the rows that the contents announce; else what is not."""
    counts = [h.bins for t in contents.tensors for h in t.histograms]
    bins = sum(counts)
    rows = {
        "bins": bins,
        "moments": bins,
        "ranges": len(counts),
        "grad_sum": sum(w.samples for w in contents.weights),
        "weights": len(contents.weights),
        "loss": int(contents.loss_steps is not None),
    }
    if set(arrays) != set(_ARRAYS):
        return f"it holds {sorted(arrays)}, not {sorted(_ARRAYS)}"
    for name, (dtype, columns) in _ARRAYS.items():
        shape = (rows[name], columns) if columns else (rows[name],)
        if arrays[name].dtype != dtype or arrays[name].shape != shape:
            return f"{name} is {arrays[name].dtype} {arrays[name].shape}, not {np.dtype(dtype)} {shape}"
    return None


def _histograms(header: Contents, arrays: Arrays) -> Iterator[RangeHistogram]:
    """In the order in which they were written."""
    counts = [h.bins for t in header.tensors for h in t.histograms]
    start = 0
    for count, (amax, nonfinite, elements) in zip(counts, arrays["ranges"].tolist(), strict=True):
        rows = slice(start, start + count)
        start += count
        yield RangeHistogram(
            bins=arrays["bins"][rows].astype(np.int64),
            moments=arrays["moments"][rows].astype(np.float64),
            amax=amax,
            nonfinite=nonfinite,
            elements=elements,
        )
