"""Profile files: exact to the bit, and damaged or foreign ones refused."""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from autoprec import serial
from autoprec.errors import InputError, ProfileError
from autoprec.graphs import Op, OpClass, OpGraph, TensorKind, TensorSpec
from autoprec.profiles import LossProfile, Profile, RangeHistogram, TensorProfile, WeightProfile

GRAPH = OpGraph(
    model="Net",
    ops=(Op(id="fc:linear#0", kind="linear", op_class=OpClass.GEMM, fqn="fc", inputs=("input:x",), outputs=("y",)),),
    tensors=(
        TensorSpec(id="input:x", shape=(2, 3), dtype="float32", kind=TensorKind.INPUT, requires_grad=False),
        TensorSpec(id="y", shape=(), dtype="float32", kind=TensorKind.ACTIVATION, requires_grad=True, base="input:x"),
    ),
)


@contextmanager
def quick(what: object) -> Iterator[None]:
    """Fails above 0.2 s of this thread's own time; a garbage collection of everything else does not count."""
    gc.disable()
    start = time.thread_time()
    try:
        yield
    finally:
        gc.enable()
        assert time.thread_time() - start < 0.2, what


def refusal(read: Callable[[Path], object], path: Path, data: bytes | str, error: type[InputError]) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(error) as caught:
        read(path)
    return str(caught.value).replace(str(path), "F")


IDS = st.text(max_size=8)
FLOATS = st.floats(allow_nan=False)
EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
ANY_FLOAT = st.floats()


@st.composite
def histograms(draw: st.DrawFn) -> RangeHistogram:
    bins = sorted(draw(st.sets(st.integers(0, 1023), max_size=5)))
    moments = draw(st.lists(FLOATS.filter(math.isfinite), min_size=3 * len(bins), max_size=3 * len(bins)))
    return RangeHistogram(
        bins=np.array(bins, np.int64),
        moments=np.array(moments).reshape(-1, 3),
        amax=draw(ANY_FLOAT),
        nonfinite=draw(ANY_FLOAT),
        elements=draw(ANY_FLOAT),
    )


MAYBE = st.none() | histograms()
PROFILES = st.builds(
    Profile,
    graph_fingerprint=st.just(GRAPH.fingerprint),
    steps=st.integers(0, 2**40),
    tensors=st.lists(
        st.builds(
            TensorProfile,
            id=IDS,
            values=histograms(),
            loss=MAYBE,
            gradients=MAYBE,
            input_weight_grad=MAYBE,
            gradient_weight_grad=MAYBE,
        ),
        max_size=3,
        unique_by=lambda t: t.id,
    ).map(tuple),
    weights=st.lists(
        st.builds(
            WeightProfile,
            fqn=IDS,
            grad_sum=st.lists(ANY_FLOAT, max_size=4).map(lambda x: np.array(x, np.float64)),
            grad_square_sum=ANY_FLOAT,
            fraction=st.floats(0.0, 1.0, exclude_min=True),
            steps=st.integers(0, 99),
        ),
        max_size=3,
        unique_by=lambda w: w.fqn,
    ).map(tuple),
    loss=st.none() | st.builds(LossProfile, steps=st.integers(0, 9), total=ANY_FLOAT, square_total=ANY_FLOAT),
)


def bits(value: Any) -> Any:
    """Everything that a value holds, floats and arrays as bytes: equal only if equal to the bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, tuple):
        return tuple(bits(item) for item in value)
    return {k: bits(v) for k, v in vars(value).items()} if hasattr(value, "__dataclass_fields__") else value


@EXAMPLES
@given(PROFILES)
def test_any_profile_round_trips_to_the_bit(tmp_path: Path, profile: Profile) -> None:
    serial.write_profile(tmp_path / "p.safetensors", profile, GRAPH)
    read, graph = serial.read_profile(tmp_path / "p.safetensors")
    assert bits(read) == bits(profile)
    assert graph == GRAPH and graph.fingerprint == GRAPH.fingerprint


def small_profile() -> Profile:
    histogram = RangeHistogram(bins=np.array([3, 508]), moments=np.ones((2, 3)), amax=1.5, elements=2.0)
    return Profile(
        graph_fingerprint=GRAPH.fingerprint,
        steps=2,
        tensors=(TensorProfile(id="y", values=histogram, gradients=histogram),),
        weights=(WeightProfile(fqn="fc.w", grad_sum=np.arange(3.0), grad_square_sum=9.0, fraction=0.5, steps=2),),
        loss=LossProfile(steps=2, total=1.0, square_total=0.6),
    )


def test_a_profile_of_another_graph_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="not of"):
        serial.write_profile(tmp_path / "p.safetensors", small_profile(), OpGraph(model="Other", ops=(), tensors=()))
    assert not list(tmp_path.iterdir())


def test_foreign_and_damaged_profiles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    serial.write_profile(path, small_profile(), GRAPH)
    data = path.read_bytes()
    arrays = load(data)
    header = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["autoprec"])

    def refused(change: dict[str, Any], **replaced: np.ndarray[Any, Any]) -> str:
        return refusal(
            serial.read_profile, path, save(arrays | replaced, {"autoprec": json.dumps(header | change)}), ProfileError
        )

    assert "not a profile; name" in refusal(serial.read_profile, path, save(arrays), ProfileError)
    assert "expected `version: 1`, not 2; it was written by a newer autoprec" in refused({"version": 2})
    assert "header):1:14: expected `autoprec: profile`, not text 'plan'" in refused({"autoprec": "plan"})
    assert "header):1:" in refused({"steps": "2"}) and "steps: must be a whole number" in refused({"steps": "2"})
    negative = {"weights": [{"fqn": "a", "steps": 1, "samples": -1}]}
    assert "weights[0].samples: samples must be finite and at least 0, not -1" in refused(negative)
    for histograms in ([], [("values", -1)], [("value", 1)], [("loss", 1)], [("values", 1)] * 2):
        tensor = {"id": "y", "histograms": [{"part": part, "bins": bins} for part, bins in histograms]}
        assert "tensors[0]" in refused({"tensors": [tensor]})
    assert "grad_sum is float64 (3,), not float64 (4,)" in refused(
        {"weights": [{"fqn": "a", "steps": 1, "samples": 4}]}
    )
    assert "bins is int32" in refused({}, bins=arrays["bins"].astype(np.int32))
    assert "it holds" in refused({}, extra=np.zeros(1))
    assert "must ascend" in refused({}, bins=np.array([508, 3, 3, 508], np.int16))
    assert "moments must be finite" in refused({}, moments=np.full((4, 3), np.nan))
    assert "fraction 2.0" in refused({}, weights=np.array([[9.0, 2.0]]))


def test_hundreds_of_damaged_profiles(tmp_path: Path) -> None:
    chance = random.Random(7)
    path = tmp_path / "p.safetensors"
    serial.write_profile(path, small_profile(), GRAPH)
    data = path.read_bytes()
    accepted = 0
    for _ in range(600):
        at = chance.randrange(len(data))
        junk = chance.choice([chance.randbytes(1), b"", b'"', b"1", b"\xff\xff\xff\xff", data[at : at + 9]])
        cut = chance.choice([0, 1, 1, len(junk), len(data)])
        path.write_bytes(data[:at] + junk + data[at + cut :])
        try:
            with quick(at):
                serial.read_profile(path)
            accepted += 1
        except ProfileError as error:
            assert str(error).startswith(str(path)) and len(str(error)) < 5000
    assert accepted < 300
