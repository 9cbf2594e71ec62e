"""From tensors to ranges: what a sample is, what is read of a tensor that lies elsewhere or in another order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoprec
from autoprec.numerics.histograms import histogram, histograms, reading, sample
from autoprec.serial import load_policy


@pytest.mark.parametrize("on_cpu", [True, False])
def test_ranges_are_counted_together_as_each_alone(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """On another device (here a CPU that says that it is none) the host waits twice for all of them."""
    shapes: list[tuple[tuple[int, ...], float]] = [((7,), 1.0), ((300, 64), 1e-3), ((3, 100, 200), 1e5), ((0,), 1.0)]
    given = [torch.randn(shape) * size for shape, size in shapes]
    given[1][3, 3], given[2][0, 0, 0] = torch.nan, -torch.inf
    given += [torch.zeros(9), torch.randn(300).bfloat16(), torch.randn(5000).half(), torch.full((3,), torch.nan)]
    given += [torch.tensor([1e300, 2.0], dtype=torch.float64)]  # beyond what a histogram of FP32 numbers has bins for
    alone = [histogram(sample(x, 4096)) for x in given]
    weighted = [histogram(s := sample(x, 4096), torch.ones_like(s.magnitudes)) for x in given]
    finite = [bool(x.isfinite().all()) for x in given]
    waits: list[str] = []
    if not on_cpu:
        monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
            method = getattr(Tensor, name)
            monkeypatch.setattr(Tensor, name, lambda self, *a, _n=name, _m=method: (waits.append(_n), _m(self, *a))[1])
    together = histograms([reading(x, 4096, masked=not f) for x, f in zip(given, finite, strict=True)])
    assert on_cpu or len(waits) == 2
    for a, b, c in zip(together, alone, weighted, strict=True):
        assert np.array_equal(a.bins, b.bins) and np.array_equal(a.moments, b.moments)
        assert np.array_equal(a.bins, c.bins) and np.allclose(a.moments, c.moments, rtol=1e-12)
        assert (a.amax, a.nonfinite, a.elements) == (b.amax, b.nonfinite, b.elements)
    assert histograms([]) == []


def test_a_sample_picks_its_own_elements_of_other_tensors() -> None:
    x = torch.randn(300, 64)
    taken = sample(x, 4096)
    assert taken.magnitudes.numel() <= 4096 and torch.equal(taken.pick(x).abs(), taken.magnitudes)
    rows = torch.arange(300).unsqueeze(1).expand(300, 64)
    assert torch.equal(taken.pick(rows), taken.rows(64))


LYING = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "turned": lambda x: x.permute(2, 0, 1),
    "a part": lambda x: x[:, 1:40],
    "a transposed part": lambda x: x[:, 1:40].transpose(0, 1),
    "every second": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, None].expand(-1, 3, -1, -1),
    "one": lambda x: x[0, 0, 0].expand(50, 60),
    "one of one": lambda x: x[0, 0, 0].expand(1, 1),
}


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("limit", [1 << 20, 1 << 12])
def test_whatever_its_order_a_tensor_has_the_ranges_of_a_copy(name: str, limit: int) -> None:
    """Exactly where all of it is looked at; where it is sampled, of other elements, and as many."""
    torch.manual_seed(0)
    x = LYING[name](torch.randn(8, 48, 100))
    (seen,), (copied,) = histograms([reading(x, limit)]), histograms([reading(x.contiguous(), limit)])
    assert (seen.amax, seen.nonfinite, seen.elements) == (copied.amax, copied.nonfinite, copied.elements)
    assert seen.energy == pytest.approx(copied.energy, rel=1e-12 if x.numel() <= limit else 0.2)
    if x.numel() <= limit:
        assert np.array_equal(seen.bins, copied.bins) and np.allclose(seen.moments, copied.moments, rtol=1e-12)


class Passes(TorchDispatchMode):
    """Notes the ops that read, or make, at least so many elements; views are none."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, Tensor) else None
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        is_view = made is not None and made.untyped_storage().data_ptr() in known
        largest = max((t.numel() for t in (made, *args) if isinstance(t, Tensor)), default=0)
        if not is_view and largest >= self.numel:
            self.found.append(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("name", LYING)
@pytest.mark.usefixtures("elsewhere")
def test_a_device_reads_a_tensor_once_and_copies_none_that_lies_in_one_piece(name: str) -> None:
    x = LYING[name](torch.randn(8, 48, 100))
    with Passes(max(x.numel() // 2, 2)) as passes:
        reading(x, 256)
    repeated = 0 in x.stride()
    assert passes.found == ["clone"] * ("part" in name) + ["aminmax"] * (not repeated)


@pytest.mark.usefixtures("elsewhere")
def test_what_nobody_expected_not_to_be_finite_is_told_by_a_sample() -> None:
    x = torch.randn(300, 64)
    x[:100] = -torch.inf
    exact, told = histograms([reading(x, 4096, masked=True), reading(x, 4096)])
    assert exact.nonfinite == 6400 and told.nonfinite == pytest.approx(6400, rel=0.1)
    assert np.array_equal(exact.bins, told.bins) and np.array_equal(exact.moments, told.moments)
    assert 0.5 * exact.amax < told.amax <= exact.amax == float(x[100:].abs().max())
    x = torch.ones(300, 64)
    x[1, 1] = torch.nan  # not in the sample
    (told,) = histograms([reading(x, 256)])
    assert (told.nonfinite, told.amax) == (1.0, 1.0)


class Masked(nn.Module):
    """Scores that are masked, of which some are not finite in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.up(x).chunk(2, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(80, 80).triu(1).bool(), -math.inf)
        return self.down(scores.softmax(-1) @ q).square().mean()


def window(steps: int) -> dict[str, Any]:
    """What a monitor has seen after so many steps, every second of which it looks at."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    policy = load_policy("bf16").replaced(calibration={"steps": 2}, monitor={"interval_steps": 2, "window_steps": 20})
    autoprec.compile(model, policy=policy, events=None)
    for _ in range(2 + steps):
        optimizer.zero_grad()
        model(torch.randn(4, 80, 16)).backward()
        optimizer.step()
    seen = autoprec.session(model)._observed.window
    assert seen is not None
    return seen.tensor_by_id


def test_masks_are_known_elsewhere_as_on_a_cpu(request: pytest.FixtureRequest) -> None:
    here = window(4)
    request.getfixturevalue("elsewhere")
    there = window(4)
    assert here.keys() == there.keys() and sum(t.values.nonfinite > 0 for t in here.values())
    for t, seen in here.items():
        for ours, theirs in ((seen.values, there[t].values), (seen.gradients, there[t].gradients)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert np.array_equal(ours.moments, theirs.moments) and np.array_equal(ours.bins, theirs.bins)
                assert (ours.amax, ours.nonfinite, ours.elements) == (theirs.amax, theirs.nonfinite, theirs.elements)
