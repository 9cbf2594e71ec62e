"""Values that training itself makes larger than 65504, at a small size: FP16 alone dies, autoprec finishes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.measure import one_thread
from tests.growth_contestants import AUTOCAST, FP32, HALF, OURS, OURS_BF16, Setting
from tests.growth_study import LARGEST, Run, compete, missed, picture

#: One block, whose values pass 65504 at about the thirtieth step.
SMALL = Setting(
    width=32, depth=1, context=32, rows=8, steps=120, warm_steps=20, patience=30, mlp_rate=0.15, window_steps=8
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("events")
    with one_thread():
        return {name: compete(name, 0, SMALL, folder) for name in (FP32, AUTOCAST, HALF, OURS, OURS_BF16)}


def test_fp16_alone_dies_where_fp32_is_well(runs: dict[str, Run]) -> None:
    plain = runs[FP32]
    assert plain.died is None and max(plain.largest) > LARGEST
    first = next(i for i, largest in enumerate(plain.largest) if largest > LARGEST)
    for name in (AUTOCAST, HALF):
        died = runs[name].died
        assert died is not None and abs(died - first) < SMALL.steps // 4, name


@pytest.mark.parametrize("name", [OURS, OURS_BF16])
def test_autoprec_promotes_what_grows_and_finishes(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert run.died is None and run.nonfinite == [] and len(run.losses) == SMALL.steps
    assert max(run.largest) > LARGEST
    assert len(run.skipped) == len(run.of("bad_step")) < 10
    assert abs(run.loss - runs[FP32].loss) < 0.05
    grown = {e["op"] for e in run.of("promoted") if e["role"] == "output" and e["was"] == "fp16"}
    # Who passes 65504 first depends on what the race gave other ops: the product, the sum that it is added to, or the
    # norm that reads the sum of an op in FP32.
    assert grown & {"blocks.0.down:linear#0", "blocks.0:add#1", "norm:layer_norm#0"}
    last = {e["op"]: e["now"] for e in run.of("assigned") if e["role"] == "output"}
    assert all(last[op] != "fp16" for op in grown)
    assert "fp16" in last.values()  # the others keep it


def test_claims_that_do_not_hold_are_told(runs: dict[str, Run]) -> None:
    assert missed(list(runs.values())) == []
    survivor, dead = replace(runs[AUTOCAST], died=None), replace(runs[OURS], died=3, nonfinite=[7])
    told = "\n".join(missed([runs[FP32], survivor, dead]))
    assert "did not die" in told and ": died" in told and "not finite" in told
    elsewhere = [replace(runs[FP32], seed=seed, loss=2.5 + 0.01 * seed) for seed in range(3)]
    assert "beyond the spread" in "\n".join(missed([*elsewhere, replace(runs[OURS], loss=2.6)]))


def test_the_picture_has_every_op_and_every_format(runs: dict[str, Run], tmp_path: Path) -> None:
    drawn = picture(runs[OURS_BF16], list(runs.values()), SMALL)
    assert all(f">{word}<" in drawn for word in ("0 down", "0 attention", "head", "fp32", "fp16", "bf16", "65504"))
    assert f">end of {AUTOCAST}<" in drawn
    assert picture(runs[OURS_BF16], list(runs.values()), SMALL) == drawn
    assert len(drawn) < 200_000
