"""The first sample of each of torch's modules; `python -m tests.campaigns.modules --samples 0` runs all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.campaigns import modules, ops


@pytest.mark.filterwarnings("ignore")
def test_modules_are_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    tally = modules.campaign((), 1)
    with capsys.disabled():
        print(f"\n  {tally.samples} samples, {tally.captured} captured, {tally.narrow} narrow runs", end="")
    assert tally.broken == []
    assert tally.captured > 115 and tally.narrow > 65


def test_a_planted_format_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts by hand to the wrong format are not what the rewriter makes."""
    monkeypatch.setitem(ops.DTYPES, "bf16", torch.float16)
    tally = modules.campaign(("nn.Linear", "nn.GELU"), 1)
    assert len(tally.broken) >= 2


def test_a_planted_buffer_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running mean that a compiled batch norm moves once too often is seen."""
    run = modules.autoprec.Session.run

    def twice(self: Any, *args: Any) -> Any:
        with torch.no_grad():
            run(self, *args)
        return run(self, *args)

    monkeypatch.setattr(modules.autoprec.Session, "run", twice)
    assert modules.campaign(("nn.BatchNorm1d",), 1).broken != []
