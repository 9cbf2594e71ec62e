"""The first sample of every fourth of torch's ops; `python -m tests.campaigns.ops --samples 0` runs all of them."""

from __future__ import annotations

import pytest
import torch

from tests.campaigns import ops


@pytest.mark.filterwarnings("ignore")
def test_ops_are_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    tally = ops.campaign((), 1, every=4)
    with capsys.disabled():
        print(f"\n  {tally.samples} samples, {tally.captured} captured, {tally.narrow} narrow runs", end="")
    assert tally.broken == []
    assert tally.captured > 130 and tally.narrow > 20


def test_a_planted_difference_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts by hand to the wrong format are not what the rewriter makes."""
    monkeypatch.setitem(ops.DTYPES, "bf16", torch.float16)
    tally = ops.campaign(("nn.functional.linear", "nn.functional.gelu"), 1)
    assert len(tally.broken) >= 2
