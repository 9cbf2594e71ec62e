from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples at every run: a change is judged by what it changes, not by the day's luck.
# `pytest --hypothesis-profile=default` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Workers share the cores: one thread each, also in the processes that tests start. They take files in the order
    of `pytest_collection_modifyitems`, not those with the most tests first."""
    if hasattr(config.option, "loadscopereorder"):  # not without pytest-xdist
        config.option.loadscopereorder = False
    if hasattr(config, "workerinput"):
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or each imports torch into processes that it compiles with


#: Files of few tests that take long: first, so that at the end no worker is alone with one (a quarter of the time).
_LONG = (
    "campaigns/",
    "hf/",
    "test_bench",
    "test_growth",
    "test_lowering",
    "test_memory",
    "test_replanning",
    "test_testing",
    "test_worker",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first; the others stay as they are."""
    items.sort(key=lambda item: not any(part in item.nodeid for part in _LONG))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Event files go to the current folder; tests must not litter the repository. Where the command line looks for
    modules of a target nobody else should look: processes that are started later would take its json.py for theirs."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    if request.node.get_closest_marker("in_repository") is None:
        monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through() -> None:
    """What is there between two files stays: to look for garbage among a million objects takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def reproducible() -> None:
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        # Whenever Dynamo captures it empties the caches, 22 ms, to log how long its guards take.
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


#: Files that hold what a race finds against something measured: theirs are as long as users'.
_RACES = ("test_tournament", "test_bench", "test_demo")


@pytest.fixture(autouse=True)
def short_races(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Contestants race for a quarter of a second, and not for four: in minutes of tests nobody looks at who won."""
    import sys

    tournament = sys.modules.get("autoprec.execution.tournament")
    if tournament is not None and not any(name in request.node.nodeid for name in _RACES):
        monkeypatch.setattr(tournament, "_BUDGET_SECONDS", 0.25)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of a command, in this process."""
    from autoprec.cli.main import app

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(a) for a in arguments], prog_name="autoprec")
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(caught.value.code or 0), out, err

    return call


@pytest.fixture
def profile() -> str:
    """The file of a small model's profile, in the test's folder, with timings beside it."""
    from autoprec.serial import write_device, write_profile
    from tests.test_cli_why_not import made_case

    case = made_case()
    write_profile("p.safetensors", case.profile, case.graph)
    write_device("p.safetensors.device.json", case.device)
    return "p.safetensors"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that stands for a GPU: its tensors say that they are elsewhere, its optimizers may leave updates out."""
    import torch

    from autoprec.execution import stepping

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(stepping, "LEAVES_OUT", {"cpu"})
