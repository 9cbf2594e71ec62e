"""Targets that do not work: one line each, with the file and the line where they have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli_targets import TARGETS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With targets.py."""
    made = tmp_path_factory.mktemp("targets")
    (made / "targets.py").write_text(TARGETS, encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("targt", "Did you mean 'target'?"),
        ("value", "'value' is not a function"),
        ("needs", "missing a required argument: 'argument'"),
        ("two_values", "must return (model, batches, loss_fn), not tuple of 2"),
        ("no_model", "the model must be an nn.Module, not int"),
        ("no_batches", "batches must be iterable, not int"),
        ("no_loss", "loss_fn must be callable"),
        ("empty", "at least 2 batches"),
        ("vector_loss", "must return a scalar tensor"),
        ("fails", "(in fails): KeyError: 'missing'"),
        ("loss_fails", "(in loss): NameError: name 'undefined' is not defined"),
        ("batches_fail", "(in broken): OSError: the disk is gone"),
        ("wrong_width", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_target_that_does_not_work(folder: Path, run: Run, name: str, said: str) -> None:
    file = folder / "targets.py"
    code, out, err = run("calibrate", f"{file}:{name}")
    assert (code, out) == (2, "")
    last = err.strip().rsplit("\n", 1)[-1]
    assert last.startswith("autoprec: error: ") and said in last
    line = next((i for i, text in enumerate(TARGETS.split("\n"), 1) if text.endswith(f"# line {name}")), None)
    assert line is None or f"{file}:{line} " in last
    assert not Path("profile.safetensors").exists()


@pytest.mark.parametrize("target", ["targets.py", "target", ":", "targets.py:", ":target", ""])
def test_a_target_without_both_parts(run: Run, target: str) -> None:
    code, _, err = run("calibrate", target)
    assert code == 2 and "TARGET is file.py:function or module:function" in err


def test_a_target_that_is_not_there(run: Run, tmp_path: Path) -> None:
    for target, said in (
        ("gone.py:target", "gone.py: does not exist"),
        (f"{tmp_path}/:target", "is a directory"),
        ("no_such_module:target", "no module named 'no_such_module'"),
        ("no_such.module:target", "no module named 'no_such.module'"),
    ):
        code, _, err = run("calibrate", target)
        assert code == 2 and said in err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def target(:\n    pass\n", "broken.py:1: SyntaxError"),
        ("\nimport no_such_module_at_all\n", "broken.py:2 (in <module>): ModuleNotFoundError"),
        ("raise SystemExit(5)\n", "broken.py:1 (in <module>): SystemExit: 5"),
    ],
)
@pytest.mark.parametrize("target", ["broken.py:target", "./broken.py:target"])
def test_a_target_that_cannot_be_imported(run: Run, source: str, said: str, target: str) -> None:
    Path("broken.py").write_text(source)
    code, _, err = run("calibrate", target)
    assert code == 2 and said in err


def test_a_target_may_be_named_like_a_library(folder: Path, run: Run) -> None:
    Path("json.py").write_text((folder / "targets.py").read_text())
    assert run("calibrate", "json.py:target")[0] == 0


def test_bad_options(folder: Path, run: Run) -> None:
    target = f"{folder / 'targets.py'}:target"
    code, _, err = run("calibrate", target, "--policy", "memry")
    assert code == 2 and "Did you mean 'memory'?" in err
    code, _, err = run("calibrate", target, "-o", "no/such/folder/p.safetensors")
    assert code == 2 and "does not exist" in err


LIB = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def batches():
    return [torch.randn(3, 4) for _ in range(4)]

def broken(model, batch):
    raise KeyError("in the library")

def one_argument(batch):
    return batch.sum()

def broken_batches():
    yield torch.randn(3, 4)
    raise OSError("the disk is gone")
"""

SPLIT = """
from torch import nn
import torch
import lib

def library_loss(): return lib.model(), lib.batches(), lib.broken
def one_argument(): return lib.model(), lib.batches(), lib.one_argument
def torchs_loss(): return lib.model(), lib.batches(), nn.functional.mse_loss
def library_batches(): return lib.model(), lib.broken_batches(), lambda m, b: m(b).sum()
def detached(): return lib.model(), lib.batches(), lambda m, b: m(b).sum().detach()
def frozen(): return lib.model().requires_grad_(False), lib.batches(), lambda m, b: m(b).sum()
def scripted(): return torch.jit.script(lib.model()), lib.batches(), lambda m, b: m(b).sum()
def nowhere(): return lib.model().to("meta"), lib.batches(), lambda m, b: m(b).sum()
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("library_loss", ("KeyError: 'in the library'", "raised at", "lib.py:12 (in broken)")),
        ("one_argument", ("TypeError: one_argument() takes 1 positional argument but 2 were given",)),
        ("torchs_loss", ("split.py: AttributeError: ", "raised at")),
        ("library_batches", ("OSError: the disk is gone", "lib.py:19 (in broken_batches)")),
        ("detached", ("depends on no parameter that is trained",)),
        ("frozen", ("every parameter is frozen",)),
        ("scripted", ("TorchScript",)),
        ("nowhere", ("meta device",)),
    ],
)
def test_a_target_whose_parts_are_elsewhere(name: str, said: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    """No line of the target's file was running when it failed."""
    Path("lib.py").write_text(LIB)
    Path("split.py").write_text(SPLIT)
    code, out, err = run("calibrate", f"split.py:{name}")
    last = err.strip().rsplit("\n", 1)[-1]
    assert (code, out) == (2, "") and last.startswith("autoprec: error: ") and all(part in last for part in said), err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("builtins:print", "must return (model, batches, loss_fn), not NoneType"),
        ("null.py:t", "null.py: SyntaxError: source code string cannot contain null bytes"),
        ("library.so:t", "ImportError"),
    ],
)
def test_a_target_that_is_no_source(target: str, said: str, run: Run) -> None:
    Path("null.py").write_bytes(b"a = 1\x00\n")
    Path("library.so").write_bytes(b"\x7fELF")
    code, _, err = run("calibrate", target if not target.startswith("library") else f"./{target}")
    assert code == 2 and said in err, err
