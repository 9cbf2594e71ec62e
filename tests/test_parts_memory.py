"""Predicted and measured peaks of models whose tensors, or gradients, are views: slices, chunks, what was expanded."""

from __future__ import annotations

import pytest

from tests.cpus import missed_without_bf16
from tests.views_study import ratios

NAMES = (
    "gated",
    "slices",
    "unbound",
    "one_slice",
    "one_for_nobody",
    "parts_of_parts",
    "expanded",
    "normalized",
    "attention",
    "gated_attention",
    "sliced_and_summed",
    "broken",
    "skipping",
)


MARKS = {
    "broken": missed_without_bf16("1.034 is predicted"),
    # What tanh keeps narrow is counted with the sum of the gradients of what it read, which is made when it is gone:
    # 1.065 without what is made again, whose peak hides less of it. Not strict: seen on a CPU without BF16
    # instructions alone, and which other peak hides it is the kernels' workspaces to say.
    "skipping": pytest.mark.xfail(strict=False, reason="1.039 and 1.141 are predicted of two mixtures"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS[n]) if n in MARKS else n for n in NAMES])
def test_the_peak_of_what_is_used_in_parts_or_by_several_graphs_is_predicted(name: str) -> None:
    """All in FP32, all in BF16, and two mixtures of the two, with random storages."""
    found = ratios(name, 2)
    assert max(abs(ratio - 1.0) for ratio in found) <= 0.005, found


def test_what_a_function_of_the_users_takes_on_its_way_back_is_known() -> None:
    found = ratios("own_function", 2)
    assert max(abs(ratio - 1.0) for ratio in found) <= 0.05, found
