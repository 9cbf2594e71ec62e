"""Every eighth op; `python -m tests.campaigns.planning` runs them all."""

from __future__ import annotations

import pytest

from autoprec.calibration import timing
from tests.campaigns import planning


@pytest.mark.filterwarnings("ignore")
def test_ops_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    tally = planning.campaign((), every=8)
    with capsys.disabled():
        print(f"\n  {tally.ops} runs, {tally.narrow} planned narrow", end="")
    assert tally.broken == []
    assert tally.ops > 110 and tally.narrow > 10


def test_a_kernel_that_is_not_there_would_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotTaken(Exception):
        pass

    monkeypatch.setattr(timing, "RuntimeError", NotTaken, raising=False)
    broken = planning.campaign(("nn.functional.avg_pool3d",)).broken
    assert len(broken) == 2 and "NotImplementedError" in broken[0]
