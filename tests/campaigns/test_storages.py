"""Every twentieth op; `python -m tests.campaigns.storages` runs them all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoprec.numerics import keeping
from autoprec.numerics.packing import Packed
from tests.campaigns import storages

NAMES = ("exp", "tanh", "mul", "nn.functional.gelu", "nn.functional.layer_norm", "matmul", "cos")


@pytest.mark.filterwarnings("ignore")
def test_ops_keep_narrow_what_they_may(capsys: pytest.CaptureFixture[str]) -> None:
    tally, named = storages.campaign((), every=20), storages.campaign(NAMES)
    with capsys.disabled():
        print(f"\n  {tally.samples} planned samples, {tally.narrow} and {named.narrow} keep something narrow", end="")
    assert tally.broken == named.broken == []
    assert tally.samples > 45 and tally.narrow >= 2 and named.narrow >= 12


def keep_everything(x: Tensor, storage: str) -> Packed:
    return Packed(x.detach(), None, "fp32")


def keep_the_first_row(packed: Packed, x: Tensor) -> Packed:
    return packed._replace(payload=packed.payload.as_strided(x.shape, [0] * x.dim(), 0))


@pytest.mark.parametrize(("what", "plant"), [("encode", keep_everything), ("_seen_as", keep_the_first_row)])
def test_a_planted_bug_is_red(what: str, plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, what, plant)
    assert storages.campaign(("exp", "mul")).broken


def test_rounding_by_hand() -> None:
    x = torch.tensor([[1.0, 1.0625, -2.3], [0.0, 100.0, 3e-3]])
    assert torch.equal(storages.rounded(x, "bf16"), x.bfloat16().float())
    view = x.t()[1:]
    assert torch.equal(storages.rounded(view, "fp8_e4m3"), storages.rounded(x, "fp8_e4m3").t()[1:])
