"""Single passes of numba over elements, against torch's passes: the same bits."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from autoprec.numerics import elements, lean
from autoprec.numerics.packing import Packed, amax_of, decode, encode, largest_of

#: Every BF16 number, NaN and infinities among them.
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = ALL_BF16[ALL_BF16.isfinite()]


@contextmanager
def by_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elements, "MOST_THREADS", 0)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert elements.serve(torch.ones(1))
    yield
    torch.set_num_threads(threads)


def fp32_near(x: Tensor) -> Tensor:
    """FP32 numbers at, just below and just above BF16 ones, and halfway between them."""
    bits = x.float().view(torch.int32)
    return torch.cat([(bits + d).view(torch.float32) for d in (-1, 0, 1, 2**15 - 1, 2**15, 2**15 + 1)])


@pytest.mark.parametrize("largest", [2.0**-120, 2.0**-9, 0.9, 1.0, 240.0, 448.0, 465.0, 2.0**100, 3e38])
def test_to_e4m3(largest: float) -> None:
    """The tensor's largest number makes the scale: with these, every BF16 number is rounded at every place."""
    for numbers in (FINITE, fp32_near(FINITE)):
        x = torch.cat([numbers[numbers.float().abs() <= largest], torch.tensor([largest], dtype=numbers.dtype)])
        assert x.isfinite().all()
        found = encode(x, "fp8_e4m3")
        with by_torch():
            expected = encode(x, "fp8_e4m3")
        assert found.inverse_scale is not None and expected.inverse_scale is not None
        assert found.inverse_scale.equal(expected.inverse_scale) and found.inverse_scale.dtype is torch.float32
        assert found.payload.equal(expected.payload)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_makes_all_nan(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=dtype)
    x[501] = bad
    packed = encode(x, "fp8_e4m3")
    assert packed.inverse_scale is not None and packed.inverse_scale.isnan()
    assert decode(packed, dtype).isnan().all()


@pytest.mark.parametrize("log2", [-126, -125, -124, -123, -117, -8, 0, 7, 8, 100, 118, 119, 126])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_from_e4m3(log2: int, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    packed = Packed(codes, torch.tensor(2.0**log2), "fp8_e4m3")
    found = decode(packed, dtype)
    with by_torch():
        assert found.equal(decode(packed, dtype)) and found.dtype is dtype
    assert found.equal((codes.view(torch.float8_e4m3fn).double() * 2.0**log2).float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_needs_no_subnormal_numbers(dtype: torch.dtype) -> None:
    """A process that flushes them to zero reads the same."""
    codes = torch.arange(256, dtype=torch.uint8)
    packed = Packed(codes, torch.tensor(2.0**-5), "fp8_e4m3")
    expected = decode(packed, dtype)
    assert torch.set_flush_denormal(True)
    try:
        assert decode(packed, dtype).equal(expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (13,), (3, 5, 7), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_and_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    special = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, 1e-45 if dtype is torch.float32 else 1e-40])
    x.view(-1)[: special.numel()] = special[: x.numel()].to(dtype)
    g = torch.randn(shape).to(dtype).masked_fill(torch.rand(shape) < 0.3, math.nan)
    bits = lean._bits(x)
    with torch.no_grad():
        found = lean._masked(g, bits)
        with by_torch():
            assert bits.equal(lean._bits(x))
            expected = lean._masked(g, bits)
    assert found.view(torch.uint8).equal(expected.view(torch.uint8)) and found.shape == expected.shape
    for layout in (lambda t: t.transpose(0, -1), lambda t: t[..., ::2]):
        with by_torch():
            expected = lean._bits(layout(x))
        assert lean._bits(layout(x)).equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [0.0, math.nan, -math.nan, math.inf, -math.inf])
def test_the_largest_magnitude(dtype: torch.dtype, bad: float) -> None:
    for numel in (1, 17, 4096):
        x = torch.randn(numel).to(dtype)
        x[-1] = bad
        assert torch.tensor(elements.largest_magnitude(x)).equal(amax_of(x)) or math.isnan(bad)
        assert math.isnan(elements.largest_magnitude(x)) == math.isnan(bad)
    assert elements.largest_magnitude(torch.empty(0, dtype=dtype)) == 0.0
    assert elements.largest_magnitude(-torch.ones(3, dtype=dtype)) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_the_largest_magnitude_of_any_numbers(dtype: torch.dtype) -> None:
    """Whoever looks for it."""
    x = torch.randn(6, 8).to(dtype)
    for y in (x, x.t(), x[:, ::2], x[:0], x.clone().requires_grad_()):
        assert largest_of(y) == float(amax_of(y))
    x[2, 3] = math.nan
    assert math.isnan(largest_of(x)) and math.isnan(largest_of(x.t()))


def test_what_is_read_stays_the_users() -> None:
    """torch does not resize the memory of a tensor again that was once shown to numpy."""
    for dtype in (torch.bfloat16, torch.float32, torch.bool):
        x = torch.ones(64).to(dtype)
        elements.nonzero_bits(x)
        if dtype is not torch.bool:
            elements.largest_magnitude(x)
            elements.to_e4m3(x, 1.0)
            elements.where_set(x, torch.zeros(8, dtype=torch.uint8))
        assert x.resize_(128).numel() == 128


def test_who_serves() -> None:
    """Few threads, and what lies in one piece on a CPU."""
    x = torch.randn(4, 6)
    assert elements.serve(x) and elements.serve(x.bfloat16())
    assert not elements.serve(x.half()) and not elements.serve(x.t()) and not elements.serve(x.to("meta"))
    torch.set_num_threads(elements.MOST_THREADS + 1)
    assert not elements.serve(x)


WITHOUT = """
import importlib.abc, sys, torch
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numba":
            raise ModuleNotFoundError(name)
import importlib.util
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else plain(name, *rest)
sys.meta_path.insert(0, Refuse())
from autoprec.numerics import elements
from autoprec.numerics.packing import decode, encode
assert not elements.is_installed() and not elements.serve(torch.ones(1))
x = torch.tensor([0.5, -3.0, 448.0])
assert decode(encode(x, "fp8_e4m3"), torch.float32).equal(x)
"""


NOWHERE = """
import torch
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from autoprec.numerics import elements, loops
from autoprec.numerics.packing import decode, encode
torch.set_num_threads(1)
x = torch.tensor([0.5, -3.0, 448.0])
assert elements.serve(x) and decode(encode(x, "fp8_e4m3"), torch.float32).equal(x)
assert "Null" in type(loops.largest._cache).__name__
"""


def test_compiled_loops_need_no_place_on_a_disk() -> None:
    done = subprocess.run([sys.executable, "-c", NOWHERE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_numba_need_not_be_there() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
