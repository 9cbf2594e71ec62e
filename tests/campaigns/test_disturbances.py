"""A few of its runs; `python -m tests.campaigns.disturbances` makes all of them. And bugs that it must see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autoprec.floors import Floors, Turn
from tests.bench.measure import one_thread
from tests.campaigns.clean_tasks import TASKS
from tests.campaigns.disturbances import Disturbance, disturbed_run

OFTEN = Disturbance(period=2, cooldown=3, size=4.0)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", ["digits", "visits"])
@pytest.mark.parametrize("size", [4.0, 0.9])
def test_a_disturbance_that_comes_and_goes(name: str, size: float) -> None:
    row = disturbed_run(TASKS[name], replace(OFTEN, cooldown=1, size=size), windows=12)
    assert row.wrong == () and row.disturbed["promoted"] > 0 and row.after["promoted"] == 0


def test_formats_that_come_back_too_soon_would_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    after = Floors.after
    monkeypatch.setattr(Floors, "after", lambda self, verdicts, is_well, _: after(self, verdicts, is_well, 1))
    monkeypatch.setattr("autoprec.floors._MOST_DOUBLINGS", 0)
    row = disturbed_run(TASKS["digits"], OFTEN, windows=12)
    assert any("times in 12 windows" in w for w in row.wrong)


def test_formats_that_never_come_back_would_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Floors, *_: object) -> Turn:
        return Turn(floors=replace(self, windows=self.windows + 1), banned=(), lifted=())

    monkeypatch.setattr(Floors, "after", never)
    monkeypatch.setattr("tests.campaigns.disturbances._LONGEST_WAIT", 2)
    row = disturbed_run(TASKS["digits"], OFTEN, windows=6)
    assert any("came back, not" in w for w in row.wrong)
    assert "the formats at the end are not those at the beginning" in row.wrong
