"""Half of the campaign's mutations, the laws' own tests, and the same mutations drawn by hypothesis."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec import serial
from autoprec.errors import InputError, PlanError
from tests.campaigns import inputs

KINDS = ("policy", "plan", "device", "datasheet", "profile")


def test_mutations(capsys: pytest.CaptureFixture[str]) -> None:
    tally = inputs.campaign(inputs.COUNT // 8)
    with capsys.disabled():
        print(f"\n  {dict(tally.made)}, refused {dict(tally.refused)}", end="")
    assert tally.broken == []
    assert all(0 < tally.refused[kind] < tally.made[kind] for kind in tally.made)


def test_mutations_of_datasheets(tmp_path: Path) -> None:
    """The campaign's turns are counted in the documents; datasheets have turns of their own."""
    chance, tally = Random(20261121), inputs.Tally()
    sheets = inputs.originals()["datasheet"]
    for _ in range(800):
        tree = chance.choice(sheets)
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            tree = inputs.mutate(tree, chance)
        inputs.check_tree("datasheet", tree, chance, tmp_path, tally)
    assert tally.broken == []
    assert 0 < tally.refused["datasheet"] < tally.made["datasheet"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS), st.randoms(use_true_random=False), st.integers(1, 4))
def test_any_mutation(tmp_path: Path, kind: str, chance: Random, changes: int) -> None:
    tally = inputs.Tally()
    tree = inputs.originals()[kind][-1]
    for _ in range(changes):
        tree = inputs.mutate(tree, chance)
    inputs.check_tree(kind, tree, chance, tmp_path, tally)
    assert tally.broken == []


def raise_something_else(path: Path) -> None:
    raise KeyError(path)


def refuse_everything(path: Path) -> None:
    raise InputError(f"{path}:1:1: no")


def say_no_place(path: Path) -> None:
    try:
        serial.read_plan(path)
    except PlanError as error:
        raise PlanError(f"{path}: something is wrong") from error


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (raise_something_else, "traceback KeyError"),
        (lambda path: None, "accepted"),
        (refuse_everything, "valid, but refused"),
        (refuse_everything, "at (1, 1), not at one of"),
        (say_no_place, "no place"),
    ],
)
def test_a_planted_bug_is_red(reader: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inputs.READERS, "plan", reader)
    assert any(said in line for line in inputs.campaign(200).broken)
