"""Datasheets: the shipped ones, finding them, what is said about bad ones, and plans for machines that are not here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoprec
from autoprec import serial
from autoprec.cli.main import app
from autoprec.devices import Datasheet, Device, Peak, Sourced
from autoprec.errors import DeviceError
from autoprec.serial import values

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("a100", "cpu-generic", "h100", "h200")


def sheet(name: str) -> Datasheet:
    found = serial.load_device(name)
    assert isinstance(found, Datasheet)
    return found


# The shipped ones -----------------------------------------------------------------------------------------------------


def numbers(value: Any) -> Iterator[Any]:
    """Everything in a datasheet that is not a name."""
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        yield from part if isinstance(part, tuple) else [part] if not isinstance(part, (str, type(None))) else []


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_has_a_source(name: str) -> None:
    found = list(numbers(sheet(name)))
    assert len(found) >= 6 and all(isinstance(n, (Sourced, Peak)) for n in found)
    assert all(n.source.strip() and any(c.isdigit() or c == "N" for c in n.source) for n in found)
    text = (ROOT / "devices" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("#") and "modelled" in text and text.count("source:") == len(found)


def test_the_shipped_names() -> None:
    assert serial.datasheet_names() == SHIPPED
    assert len({sheet(name).name for name in SHIPPED}) == len(SHIPPED)


@pytest.mark.parametrize(
    ("name", "units", "clock_hertz", "matrix_clock_hertz", "lanes", "matrix_flops"),
    [("h100", 132, 1.98e9, 1.83e9, 128, 4096), ("h200", 132, 1.98e9, 1.83e9, 128, 4096),
     ("a100", 108, 1.41e9, 1.41e9, 64, 2048)],
)  # fmt: skip
def test_peaks_are_units_times_clock(
    name: str, units: int, clock_hertz: float, matrix_clock_hertz: float, lanes: int, matrix_flops: int
) -> None:
    """Dense, and FP32 without tensor cores: multiprocessors × FLOP per clock × boost clock."""
    peak = {p.format: p.value for p in sheet(name).peak_flops_per_second}
    assert peak["fp32"] == pytest.approx(units * lanes * 2 * clock_hertz, rel=2e-3)
    assert peak["bf16"] == peak["fp16"] == pytest.approx(units * matrix_flops * matrix_clock_hertz, rel=2e-3)


def test_memory_is_as_printed() -> None:
    found = {n: (sheet(n).memory_bytes_per_second.value, sheet(n).memory_bytes) for n in SHIPPED}
    assert {n: (rate / 1e9, size and size.value / 1e9) for n, (rate, size) in found.items()} == {
        "a100": (2039.0, 80.0), "h100": (3350.0, 80.0), "h200": (4800.0, 141.0), "cpu-generic": (307.2, None)
    }  # fmt: skip


# Finding them ---------------------------------------------------------------------------------------------------------


def test_a_name_a_sheet_of_ones_own_and_measured_timings(tmp_path: Path) -> None:
    text = (ROOT / "devices" / "h100.yaml").read_text(encoding="utf-8")
    Path("mine.yaml").write_text(text.replace("name: NVIDIA H100 SXM", "name: mine"), encoding="utf-8")
    Path("bare").write_text(text, encoding="utf-8")
    assert serial.load_device("mine.yaml") == dataclasses.replace(sheet("h100"), name="mine")
    assert serial.load_device(Path("bare")) == sheet("h100")
    device = Device(name="measured here", type="cpu", native=("fp32",))
    serial.write_device("d.json", device)
    assert serial.load_device("d.json") == device == serial.read_device("d.json")
    Path("h100").write_text("nothing")  # a shipped name wins; a separator makes a path of it
    assert serial.load_device("h100") == sheet("h100")
    with pytest.raises(DeviceError, match="must be a mapping"):
        serial.load_device(f".{os.sep}h100")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    for name, words in (("h10O", "'h100'"), ("tpu", "Valid: a100, cpu-generic, h100, h200"), ("", "Valid: a100")):
        with pytest.raises(DeviceError, match=f"no datasheet of that name.*{words}"):
            serial.load_device(name)
    with pytest.raises(DeviceError, match="does not exist"):
        serial.load_device("h100.yaml")


def test_the_wheel_holds_policies_and_datasheets(tmp_path: Path) -> None:
    """Built as pip builds it, unpacked somewhere else, and asked there."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import autoprec; from autoprec import serial; print(autoprec.__file__); print(*serial.policy_names());"
        " print(*serial.datasheet_names()); print(serial.load_device('h200').name, serial.load_policy('memory').name)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    where, policies, devices, names = done.stdout.splitlines()
    assert where.startswith(str(site))
    assert policies.split() == list(serial.policy_names()) and devices.split() == list(SHIPPED)
    assert names == "NVIDIA H200 SXM memory"


def test_a_packed_folder_comes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "site" / "autoprec" / "_devices"
    packed.mkdir(parents=True)
    (packed / "only.yaml").write_bytes((ROOT / "devices" / "a100.yaml").read_bytes())
    monkeypatch.setattr(values, "__file__", str(packed.parent / "serial" / "values.py"))
    assert serial.datasheet_names() == ("only",)


# Bad ones -------------------------------------------------------------------------------------------------------------

GOOD = """autoprec: datasheet
version: 1
name: mine
type: cuda
peak_flops_per_second:
  - {format: fp32, value: 1.0e+12, source: a}
  - {format: bf16, value: 2.0e+12, source: b}
memory_bytes_per_second: {value: 1.0e+12, source: c}
launch_seconds: {value: 0, source: d}
attainable_compute_frac: {value: 1, source: e}
attainable_bandwidth_frac: {value: 0.5, source: f}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("autoprec: datasheet", "autoprec: datashet", "1:11: expected .*'datashet'.*Did you mean 'datasheet'"),
        ("launch_seconds", "lanch_seconds", "9:1: lanch_seconds: unknown key.*Did you mean 'launch_seconds'"),
        ("type: cuda", "type: cuds", "4:7: type: unknown device type 'cuds'.*Did you mean 'cuda'"),
        ("source: c", "source: ''", r"8:\d+: memory_bytes_per_second.source: source must not be empty"),
        (", source: c", "", "8:26: memory_bytes_per_second: the key 'source' is missing"),
        ("source: c", "sauce: c", r"8:\d+: memory_bytes_per_second.sauce: unknown key.*Did you mean 'source'"),
        ("format: bf16", "format: bf61", r"7:\d+: peak_flops_per_second\[1\].format: unknown format.*'bf16'"),
        ("format: bf16", "format: fp8_e3m3", r"7:\d+: .*make 7 bits, not 8"),
        ("format: bf16", "format: fp32", r"7:5: .*format 'fp32' is there twice"),
        ("format: fp32", "format: fp16", r"6:3: .*fp32 must be among"),
        ("value: 2.0e+12", "value: 0", r"7:\d+: .*value must be finite and at least 1, not 0"),
        ("value: 0,", "value: -1,", r"9:\d+: launch_seconds.value: launch_seconds must be finite and at least 0"),
        ("value: 0.5", "value: 1.5", r"11:\d+: .*attainable_bandwidth_frac must be above 0 and at most 1, not 1.5"),
        ("value: 1,", "value: 0,", r"10:\d+: .*attainable_compute_frac must be above 0 and at most 1, not 0"),
        ("value: 1,", "value: one,", r"10:\d+: attainable_compute_frac.value: must be a number, not text 'one'"),
        ("name: mine", "name: mine\nname: mine", "4:1: the key 'name' is there twice"),
    ],
)  # fmt: skip
def test_a_bad_sheet_is_told_at_its_place(old: str, new: str, said: str) -> None:
    path = Path("s.yaml")
    path.write_text(GOOD)
    assert isinstance(serial.load_device(path), Datasheet)
    assert GOOD.count(old) == 1
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(DeviceError, match=f"(?m)^s.yaml:{said}"):
        serial.load_device(path)


# Plans ----------------------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(a) for a in arguments], prog_name="autoprec")
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small model was seen doing, without timings beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Dropout(0.1),
                          nn.Softmax(-1), nn.Linear(64, 4))  # fmt: skip
    batches = [torch.randn(32, 16) for _ in range(3)]
    compiled = autoprec.compile(
        model, policy="memory", batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None
    )
    session = autoprec.session(compiled)
    path = tmp_path_factory.mktemp("seen") / "p.safetensors"
    serial.write_profile(path, session.profile, session.graph)
    return path


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("policy", ["balanced", "memory"])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_plan_for_each_shipped_device_says_that_it_is_modelled(
    name: str, policy: str, profile: Path, run: Run
) -> None:
    title = f"{sheet(name).name} (modelled from its datasheet)"
    code, out, err = run("plan", profile, "--device", name, "--policy", policy)
    assert code == 0, err
    assert f"device {title}" in flat(out) and f"predicted for {title}" in flat(out)
    plan = serial.read_plan("plan.yaml")
    assert plan.device == title and plan.predicted is not None and 0.0 < plan.predicted.seconds < 1.0
    assert (policy == "memory") == bool([s for s in plan.storages if s.format != "as_is"])
    if policy == "balanced":
        assert plan.is_identity  # launches are all that such a model costs
    for arguments in ((), ("*:linear#0",)):
        code, out, _ = run("explain", "plan.yaml", *arguments)
        assert code == 0 and title in flat(out)
        _, out, _ = run("explain", "plan.yaml", *arguments, "--json")
        assert json.loads(out)["device"] == title


def test_the_memory_of_the_datasheet_is_the_budget_that_nobody_gave(profile: Path, run: Run) -> None:
    assert run("plan", profile, "--device", "h200")[0] == 0
    assert serial.read_plan("plan.yaml").budget_bytes == 141 * 10**9
    assert run("plan", profile, "--device", "h200", "--budget", "6GiB")[0] == 0
    assert serial.read_plan("plan.yaml").budget_bytes == 6 << 30
    assert run("plan", profile, "--device", "cpu-generic")[0] == 0
    assert serial.read_plan("plan.yaml").budget_bytes is None
    Path("small.yaml").write_text(GOOD + "memory_bytes: {value: 1000, source: g}\n")
    code, out, err = run("plan", profile, "--device", "small.yaml")
    assert code == 1 and out == "" and "budget of 1000 bytes" in err


def test_errors_of_the_command(profile: Path, run: Run) -> None:
    code, _, err = run("plan", profile)
    assert code == 2 and "--device FILE" in err and "cpu-generic, h100" in err
    code, _, err = run("plan", profile, "--device", "h300")
    assert code == 2 and ("Did you mean 'h200'" in err or "Did you mean 'h100'" in err)
    Path("bad.yaml").write_text(GOOD.replace("launch", "lunch"))
    code, _, err = run("plan", profile, "--device", "bad.yaml")
    assert code == 2 and "bad.yaml:9:1: " in err and "'launch_seconds'" in err


def test_a_plan_from_a_datasheet_takes_no_torch(profile: Path) -> None:
    code = (
        "import sys\nfrom autoprec.cli.main import app\n"
        f"try: app(['plan', {str(profile)!r}, '--device', 'a100'], prog_name='autoprec')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'autoprec.planning.roofline' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
