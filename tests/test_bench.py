"""The suite's bars that do not depend on the machine's speed, on its smallest workloads."""

from __future__ import annotations

import pytest

from tests.bench.__main__ import OBSERVED_PEAK, misses, rows_of
from tests.bench.measure import one_thread
from tests.bench.workloads import WORKLOADS


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_peaks_and_budgets(name: str) -> None:
    with one_thread():
        rows, costs = rows_of(WORKLOADS[name])
    missed = [m for m in misses(rows, {name: costs}) if "peak" in m or "budget" in m]
    assert not missed
    assert costs["observed_peak"] <= OBSERVED_PEAK
    by_name = {r.contestant: r for r in rows}
    assert (
        by_name["60 %"].budget_bytes is not None and by_name["60 %"].live.peak_bytes < by_name["fp32"].live.peak_bytes
    )
    assert by_name["balanced"].adopted_from and by_name["60 %"].adopted_from
