"""Strict reading and atomic writing: traps, positions, thousands of damaged files, exact round trips."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec import serial
from autoprec.devices import CastTiming, Device, OpTiming
from autoprec.errors import DeviceError, InputError, PlanError, PolicyError, ProfileError
from autoprec.formats import COMPUTE_FORMATS, STORAGE_FORMATS
from autoprec.graphs import Op, OpClass, OpGraph, Role, TensorKind, TensorSpec
from autoprec.plans import Assignment, Event, Plan, Region, Storage, Totals
from autoprec.serial import files, values
from autoprec.serial.trees import dump_yaml

SHIPPED = ("balanced", "bf16", "dynamic", "fp16", "fp8-hopper", "memory", "observe", "safe", "speed")
PLAN = Plan(
    assignments=(
        Assignment(op="0:linear#0", role=Role.OUTPUT, format="bf16", reason="no: it is 3× faster"),
        Assignment(op="0:linear#0", role=Role.GRAD_WEIGHT, format="fp16", reason="1e-3"),
    ),
    storages=(Storage(tensor="input:x", format="fp8_e4m3", reason="yes"),),
    regions=(Region(ops=("0:linear#0",), scale_log2=-12, reason="null\ntwo lines"),),
    saturating=("mask",),
    predicted=Totals(seconds=0.1 + 0.2, saved_bytes=2**40, peak_bytes=0, loss_sigma=5e-324, gradient_ratio=math.inf),
    budget_bytes=6 << 30,
    gap=1e-17,
    policy="balanced",
)
DEVICE = Device(
    name="cpu AVX2",
    type="cpu",
    native=("fp32",),
    timings=(OpTiming(timing_key="linear[8, 8]", role="output", format="bf16", seconds=1.25e-6),),
    casts=(CastTiming(source="fp32", target="bf16", seconds_per_element=1e-10),),
)
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
    """Fails above half a second of this thread's own time; a garbage collection of everything else does not count."""
    gc.disable()
    start = time.thread_time()
    try:
        yield
    finally:
        gc.enable()
        assert time.thread_time() - start < 0.5, what


def refusal(read: Callable[[Path], object], path: Path, data: bytes | str, error: type[InputError]) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(error) as caught:
        read(path)
    return str(caught.value).replace(str(path), "F")


# -- files -----------------------------------------------------------------------------------------------------------

READERS = [
    (serial.read_policy, "x.yaml", PolicyError),
    (serial.read_plan, "x.yaml", PlanError),
    (serial.read_plan, "x.json", PlanError),
    (serial.read_device, "x.json", DeviceError),
    (serial.read_profile, "x.safetensors", ProfileError),
]


@pytest.mark.parametrize(("read", "name", "error"), READERS)
def test_a_file_that_cannot_be_read_is_one_clear_error(
    read: Callable[[Path], object], name: str, error: type[InputError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pipe, loop = tmp_path / f"d{name}", tmp_path / f"p{name}", tmp_path / f"l{name}"
    folder.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path, words in [
        (tmp_path / name, "does not exist"),
        (folder, "is a directory"),
        (pipe, "not a regular file"),
        (loop, "cannot be read"),
        (tmp_path / f"a\0{name}", "cannot be read"),
        (tmp_path / ("n" * 300 + name), "cannot be read"),
    ]:
        with pytest.raises(error, match=words) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
    assert "is empty" in (empty := refusal(read, tmp_path / name, b"", error)) or "calibrate" in empty
    monkeypatch.setattr(os, "stat", lambda *a, **k: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(error, match="permissions"):
        read(tmp_path / name)


def test_text_that_is_not_utf8_or_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    assert refusal(serial.read_policy, path, "a: ü".encode() + b"\n\xc3\xbc\xff", PolicyError).startswith(
        "F:2:2: the byte 0xff is not UTF-8"
    )
    assert "0xff is not UTF-8" in refusal(serial.read_policy, path, "a: 1".encode("utf-16"), PolicyError)
    assert "has 65537 bytes; at most 65536" in refusal(serial.read_policy, path, b"#" * 65537, PolicyError)
    assert "F:1:1: a policy must be a mapping, not text 'abc'" in refusal(serial.read_policy, path, "abc", PolicyError)
    assert "F: is empty" in refusal(serial.read_policy, path, "# nothing\n", PolicyError)
    path.write_bytes(b"\xef\xbb\xbfname: a\nformats: [fp32]\n")
    assert serial.read_policy(path).name == "a"


def test_a_policy_of_mistakes_tells_all_with_their_places(tmp_path: Path) -> None:
    text = (
        "name: x\nformatz: [bf16]\nformats: [fp32,\n  fp8_e4m4]\nobjective: tim\nrules:\n"
        "  - {match: '*', pin: fp16, floor: bf16}\n  - pin: bf61\nnoise: {gradient: yes}\nguard:\n"
    )
    message = refusal(serial.read_policy, tmp_path / "p.yaml", text, PolicyError)
    starts = [line.split(": ")[:2] for line in message.splitlines()]
    assert starts == [
        ["F:2:1", "formatz"],
        ["F:4:3", "formats[1]"],
        ["F:5:12", "objective"],
        ["F:7:5", "rules[0]"],
        ["F:8:10", "rules[1].pin"],
        ["F:9:19", "noise.gradient"],
        ["F:10:7", "guard"],
    ]
    assert "Did you mean 'formats'" in message and "Did you mean 'time'" in message and "text 'yes'" in message
    assert refusal(serial.read_policy, tmp_path / "p.yaml", "name: x\n", PolicyError) == (
        "F:1:1: the key 'formats' is missing"
    )
    many = "name: x\nformats: [fp32]\n" + "".join(f"k{i}: 1\n" for i in range(5000))
    lines = refusal(serial.read_policy, tmp_path / "p.yaml", many, PolicyError).splitlines()
    assert len(lines) == 11 and lines[-1] == "F: and 4990 more"


# -- shipped policies, names -----------------------------------------------------------------------------------------


def test_shipped_policies() -> None:
    assert serial.policy_names() == SHIPPED
    policies = {name: serial.load_policy(name) for name in SHIPPED}
    assert all(p.name == name and p.description for name, p in policies.items())
    assert len({p.fingerprint for p in policies.values()}) == len(SHIPPED)
    assert policies["observe"].formats == ("fp32",) and policies["observe"].storage.formats == ()
    assert policies["memory"].objective == "peak"
    assert all(rule.why for p in policies.values() for rule in p.rules)
    for policy in policies.values():
        policy.check_against(GRAPH)


def test_load_policy_takes_names_paths_and_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    balanced = serial.load_policy("balanced")
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(balanced.model_dump()), encoding="utf-8")
    assert serial.load_policy(balanced) is balanced
    assert serial.load_policy(path) == serial.load_policy(str(path)) == balanced
    for name, words in [("balance", "'balanced'"), ("..", "Valid: balanced"), ("", "Valid: "), ("a/b", "not exist")]:
        with pytest.raises(PolicyError, match=words):
            serial.load_policy(name)
    with pytest.raises(PolicyError, match="a name, a path or a Policy, not 3"):
        serial.load_policy(3)  # type: ignore[arg-type]
    packed = tmp_path / "site" / "autoprec" / "_policies"
    packed.mkdir(parents=True)
    (packed / "only.yaml").write_bytes(path.read_bytes())
    monkeypatch.setattr(values, "__file__", str(packed.parent / "serial" / "values.py"))
    assert serial.policy_names() == ("only",)
    assert serial.load_policy("only") == balanced


# -- plans, devices, events ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_plan_and_device_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    plan = PLAN if suffix == "yaml" else Plan(assignments=PLAN.assignments)
    serial.write_plan(path, plan)
    first = path.read_bytes()
    assert serial.read_plan(path) == plan
    assert b"\n" in first and (suffix == "json" or first.startswith(b"autoprec: plan\nversion: 1\n"))
    assert first.index(b"gap") < first.index(b"assignments")  # what is short comes first
    serial.write_plan(path, serial.read_plan(path))
    assert path.read_bytes() == first
    serial.write_device(path, DEVICE)
    assert serial.read_device(path) == DEVICE
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(PlanError, match=r":\d+:\d+: expected `autoprec: plan`, not text 'device'"):
        serial.read_plan(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("assignments: []\n", "F:1:1: expected `autoprec: plan`, not a file without that key"),
        ("autoprec: plan\nassignments: []\n", "F:1:1: expected `version: 1`, not a file without that key"),
        ("autoprec: plan\nversion: 2\n", "F:2:10: expected `version: 1`, not 2; it was written by a newer autoprec"),
        ("autoprec: plan\nversion: true\n", "F:2:10: expected `version: 1`, not true"),
        ("autoprec: plan\nversion: 1\n", "F:1:1: the key 'assignments' is missing"),
        ("autoprec: plan\nversion: 1\nassignment: []\nassignments: []\n", "F:3:1: assignment: unknown key 'assign"),
        ("autoprec: plan\nversion: 1\nassignments: {}\n", "F:3:14: assignments: must be a list, not a mapping"),
        ("autoprec: plan\nversion: 1\nassignments: []\ngap: .nan\n", "F:4:6: gap: must be a number, not nan"),
        ("autoprec: plan\nversion: 1\nassignments: []\ngap: true\n", "F:4:6: gap: must be a number, not true"),
        ("autoprec: plan\nversion: 1\nassignments: []\nbudget_bytes: true\n", "F:4:15: budget_bytes: must be a whole"),
        ("autoprec: plan\nversion: 1\nassignments: []\nbudget_bytes: 1.0\n", "F:4:15: budget_bytes: must be a whole"),
        ("autoprec: plan\nversion: 1\nassignments: []\nsaturating: [a, 1]\n", "F:4:17: saturating[1]: must be text"),
        (
            "autoprec: plan\nversion: 1\nassignments:\n- {op: a, role: outptu, format: bf16, reason: r}\n",
            "F:4:17: assignments[0].role: text 'outptu' is not valid. Did you mean 'output'?",
        ),
        (
            "autoprec: plan\nversion: 1\nassignments:\n- {op: a, role: output, format: bf61, reason: r}\n",
            "F:4:33: assignments[0].format: unknown format 'bf61'. Did you mean 'bf16'?",
        ),
        (
            "autoprec: plan\nversion: 1\nassignments: []\nstorages:\n"
            + "- {tensor: t, format: as_is, reason: r}\n" * 2
            + "gap: 0.5\n",
            "F:6:3: storages[1]: the tensor 't' is there twice",
        ),
    ],
)
def test_a_wrong_plan_is_refused_at_its_place(text: str, expected: str, tmp_path: Path) -> None:
    assert refusal(serial.read_plan, tmp_path / "p.yaml", text, PlanError).startswith(expected)


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    plan = Plan(assignments=(), gap=np.float64(0.1), budget_bytes=np.int64(3))  # type: ignore[arg-type]
    serial.write_plan(tmp_path / "p.yaml", plan)
    assert serial.read_plan(tmp_path / "p.yaml") == plan


def test_what_cannot_be_stored_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    serial.write_plan(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(PlanError, match="cannot be written"):
        serial.write_plan(path, Plan(assignments=(), saturating=("\ud800",)))
    with pytest.raises(PlanError, match="cannot be written"):  # JSON has no infinity
        serial.write_plan(tmp_path / "p.json", PLAN)
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, call, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(PlanError, match="No space left"):
                serial.write_plan(path, Plan(assignments=()))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(PlanError, match="create it first"):
        serial.write_plan(tmp_path / "no" / "p.yaml", PLAN)
    with pytest.raises(PlanError, match="is a directory"):
        serial.write_plan(tmp_path, PLAN)
    assert list(tmp_path.iterdir()) == [path]


def test_writing_follows_links_and_the_umask(tmp_path: Path) -> None:
    link, target = tmp_path / "link.yaml", tmp_path / "target.yaml"
    link.symlink_to(target)
    serial.write_plan(link, PLAN)
    assert link.is_symlink() and serial.read_plan(target) == PLAN
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode


def test_events_are_lines() -> None:
    event = Event(step=3, kind="bad_step", op="a:linear#0", evidence="two\nlines \u2028 ü")
    line = serial.event_to_json_line(event)
    assert len(line.splitlines()) == 1 and json.loads(line)["step"] == 3
    assert serial.event_from_json_line(line) == event
    with pytest.raises(InputError, match="log:1:10: step: must be a whole number, not text"):
        serial.event_from_json_line('{"step": "3", "kind": "x"}', "log")


IDS = st.text(min_size=1, max_size=8)
FLOATS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)
ROLES = st.sampled_from(list(Role))
FORMATS = st.sampled_from(COMPUTE_FORMATS)
BIG = st.integers(0, 2**62)
STORED = st.sampled_from(("as_is", *STORAGE_FORMATS))
TOTALS = st.builds(
    Totals, seconds=FLOATS, saved_bytes=BIG, peak_bytes=BIG, loss_sigma=FLOATS, gradient_ratio=st.floats(min_value=0.0)
)
PLANS = st.builds(
    Plan,
    assignments=st.lists(
        st.builds(Assignment, op=IDS, role=ROLES, format=FORMATS, reason=IDS), unique_by=lambda a: (a.op, a.role)
    ).map(tuple),
    storages=st.lists(st.builds(Storage, tensor=IDS, format=STORED, reason=IDS), unique_by=lambda s: s.tensor).map(
        tuple
    ),
    regions=st.lists(
        st.builds(
            Region,
            ops=st.lists(IDS, min_size=1, unique=True).map(tuple),
            scale_log2=st.integers(-126, 126),
            reason=IDS,
        ),
        max_size=3,
    ).map(tuple),
    saturating=st.lists(IDS, unique=True).map(tuple),
    predicted=st.none() | TOTALS,
    budget_bytes=st.none() | st.integers(1, 2**62),
    gap=FLOATS,
    binding=IDS,
)
EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(PLANS)
def test_any_plan_round_trips(tmp_path: Path, plan: Plan) -> None:
    serial.write_plan(tmp_path / "p.yaml", plan)
    read = serial.read_plan(tmp_path / "p.yaml")
    assert repr(read) == repr(plan) and read.fingerprint == plan.fingerprint


def test_path_and_value_in_the_other_order(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the path comes first, then the plan; a Plan is no path"):
        serial.write_plan(Plan(assignments=()), tmp_path / "plan.yaml")  # type: ignore[arg-type]
