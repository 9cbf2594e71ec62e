"""Casts into every format, built in or made up, against gfloat, a table made from the format's definition alone,
torch's own dtypes where it has one, and against torchao's emulation."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from functools import cache

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary16,
    format_info_ocp_e2m1,
    format_info_ocp_e2m3,
    format_info_ocp_e3m2,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
)

from autoprec.errors import InputError
from autoprec.execution.measuring import workspace_bytes
from autoprec.formats import BF16, FORMATS, FP32, TF32, Format, format_named, is_scaled
from autoprec.numerics import packing
from autoprec.numerics.casts import scaled_cast
from autoprec.numerics.dtypes import dtype_of, has_dtype
from autoprec.numerics.packing import amax_of, decode, encode, piece_numel
from autoprec.numerics.rounding import from_codes, rounded, to_codes

#: The last five are made up: IEEE-like, without an infinity, evenly spaced.
NAMES = ["tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "fp8_e3m4", "fp8_e2m5", "fp6_e3m2fn", "int8", "int4"]
SCALED = [n for n in NAMES if is_scaled(n)]

#: gfloat's integers are two's complement, and its 6-bit formats have no NaN.
TABLE_ALONE = ["int8", "int4", "fp6_e3m2fn"]

#: What gfloat calls them; IEEE 754's rules give it the made-up ones.
GFLOAT = {
    "bf16": format_info_bfloat16,
    "fp16": format_info_binary16,
    "fp8_e5m2": format_info_ocp_e5m2,
    "fp8_e4m3": format_info_ocp_e4m3,
}


def bf16_patterns() -> torch.Tensor:
    """All 65,536, as float32."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


@cache
def numbers_of(fmt: Format) -> np.ndarray:
    """Every finite number ≥ 0 of a format, ascending, by the definition: (1 + k/2^m)·2^E, or k/2^m·2^e_min below the
    normal ones. The exponent is biased by 2^(e−1) − 1; the largest one is kept for inf and NaN, in finite formats for
    all but the NaN of all ones."""
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    if e == 0:
        return np.array([float(k) for k in range(2**m)])
    bias = 2 ** (e - 1) - 1
    found = [Fraction(k, 2**m) * Fraction(2) ** (1 - bias) for k in range(2**m)]
    for exponent in range(1, 2**e if fmt.finite else 2**e - 1):
        found += [(1 + Fraction(k, 2**m)) * Fraction(2) ** (exponent - bias) for k in range(2**m)]
    if fmt.finite:
        found.pop()
    return np.array([float(v) for v in found])


def by_table(x: np.ndarray, fmt: Format) -> np.ndarray:
    """The nearest number of the table, of two equally near ones that with an even place (its last bit is 0)."""
    table = numbers_of(fmt)
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    below = above - 1
    down, up = size - table[below], table[above] - size  # exact: float64 holds differences of such neighbours
    pick = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    y = table[pick]
    # Beyond the largest number: what half a step more would round to is out of range.
    step = table[-1] - table[-2]
    out = size >= table[-1] + step / 2
    y = np.where(out, table[-1] if fmt.scaled else np.inf, y)
    return np.copysign(y, x)


def sweep(fmt: Format) -> torch.Tensor:
    """Random float32 patterns; the format's numbers, the middles between them and their float32 neighbours."""
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=torch.Generator().manual_seed(0))
    random = bits.to(torch.int32).view(torch.float32)
    table = numbers_of(fmt)
    if len(table) > 1 << 12:
        table = np.concatenate([table[: 1 << 11], table[-(1 << 11) :]])
    ends = np.append(table, table[-1] + (table[-1] - table[-2]))
    exact = torch.tensor(np.concatenate([table, (ends[:-1] + ends[1:]) / 2]), dtype=torch.float32)
    up, down = torch.nextafter(exact, torch.tensor(math.inf)), torch.nextafter(exact, torch.tensor(-math.inf))
    found = torch.cat([random, exact, up, down, -exact, -up, -down])
    return found[found.isfinite()]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, signs of zeros included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_casts_are_those_of_the_table(name: str) -> None:
    fmt = format_named(name)
    for x in (bf16_patterns(), sweep(fmt)):
        x = x[x.isfinite()]
        assert same(rounded(x, fmt), torch.from_numpy(by_table(x.numpy(), fmt)).float())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TABLE_ALONE])
def test_casts_are_those_of_gfloat(name: str) -> None:
    fmt = format_named(name)
    info = GFLOAT.get(name)
    if info is None:
        info = gfloat.FormatInfo(
            name=name, k=fmt.bits, precision=fmt.mantissa_bits + 1, bias=2 ** (fmt.exponent_bits - 1) - 1,
            is_signed=True, domain=gfloat.Domain.Extended, has_nz=True, num_high_nans=2**fmt.mantissa_bits - 1,
            has_subnormals=True, is_twos_complement=False,
        )  # fmt: skip
    for x in (bf16_patterns(), sweep(fmt)[::7]):
        x = x[x.isfinite()]
        expected = gfloat.round_ndarray(info, x.numpy().astype(np.float64), sat=fmt.overflow == "saturate")
        assert same(rounded(x, fmt), torch.from_numpy(expected).float())


@pytest.mark.parametrize("name", [f.name for f in FORMATS if f not in (FP32, TF32)])
def test_casts_are_those_of_torch(name: str) -> None:
    """Its own E4M3 casts saturate or give NaN, by version: the clamp is ours."""
    fmt = format_named(name)
    for x in (bf16_patterns(), sweep(fmt)):
        x = x[x.isfinite()]
        inside = x.clamp(-fmt.max_value, fmt.max_value) if fmt.scaled else x
        assert same(rounded(x, fmt), inside.to(dtype_of(name)).float())


@pytest.mark.parametrize("name", NAMES)
def test_casts_are_idempotent_monotone_and_exact_on_numbers_of_the_format(name: str) -> None:
    fmt = format_named(name)
    numbers = torch.tensor(numbers_of(fmt), dtype=torch.float32)
    assert same(rounded(numbers, fmt), numbers) and same(rounded(-numbers, fmt), -numbers)
    x = torch.sort(sweep(fmt)).values
    y = rounded(x, fmt)
    assert same(rounded(y, fmt), y)
    assert bool((y[1:] >= y[:-1]).all())
    kept = torch.tensor([math.inf, -math.inf, math.nan])
    assert rounded(kept, fmt).tolist()[:2] == [math.inf, -math.inf] and rounded(kept, fmt).isnan().tolist()[2]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("tf32", "bf16", "fp16")])
def test_codes_are_places_in_the_table(name: str) -> None:
    fmt = format_named(name)
    numbers = torch.tensor(numbers_of(fmt), dtype=torch.float32)
    codes = to_codes(numbers, fmt)
    assert codes.tolist() == list(range(len(numbers)))
    assert same(from_codes(codes, fmt), numbers) and same(from_codes(to_codes(-numbers, fmt), fmt), -numbers)
    if has_dtype(name):
        assert torch.equal(codes.view(dtype_of(name)).float(), numbers)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_scales_rounds_and_decodes_exactly(name: str, rowwise: bool, dtype: torch.dtype) -> None:
    """The scale is the largest power of two that fits; what is read again is the rounded value, in any wider dtype."""
    fmt = format_named(name)
    torch.manual_seed(0)
    x = (torch.randn(5, 64, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 0.0, 30.0, 2.0])[:, None]).to(dtype)
    packed = encode(x, name, rowwise=rowwise)
    assert packed.payload.dtype is torch.uint8 and packed.inverse_scale is not None
    amax = amax_of(x, rowwise=rowwise).double()
    top = amax / packed.inverse_scale.double()
    assert bool(((top <= fmt.max_value) & ((2 * top > fmt.max_value) | (amax == 0))).all())
    scaled = (x.double() / packed.inverse_scale.double()).float()
    expected = torch.from_numpy(by_table(scaled.numpy(), fmt)) * packed.inverse_scale.double()
    for wide in (torch.float32, torch.bfloat16, torch.float16):
        found = decode(packed, wide)
        assert found.dtype is wide
        if wide is not torch.float16:  # whose own numbers end at 2^-24
            assert torch.equal(found.double(), expected)
    again = encode(decode(packed, torch.float32), name, rowwise=rowwise)
    assert torch.equal(decode(again, torch.float32), decode(packed, torch.float32))


@pytest.mark.parametrize("name", SCALED)
def test_packing_zeros_extremes_and_what_is_not_finite(name: str) -> None:
    """Overflow is seen before the cast: no finite number ever stands for inf or NaN."""
    assert torch.equal(decode(encode(torch.zeros(5), name), torch.float32), torch.zeros(5))
    assert decode(encode(torch.zeros(0, 3), name), torch.bfloat16).shape == (0, 3)
    assert decode(encode(torch.zeros(0, 3), name, rowwise=True), torch.bfloat16).shape == (0, 3)
    for size in (2e38, 1e-37):  # next to the largest and the smallest normal numbers of float32
        found = decode(encode(torch.tensor([size]), name), torch.float32)
        fmt = format_named(name)
        half_step = 0.5**fmt.mantissa_bits / 2 if fmt.exponent_bits else 1 / fmt.max_value
        assert float(found) == pytest.approx(size, rel=half_step)
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.tensor([[1.0, bad], [1.0, 2.0]])
        assert bool(decode(encode(x, name), torch.float32).isnan().all())
        by_row = decode(encode(x, name, rowwise=True), torch.float32)
        assert bool(by_row[0].isnan().all()) and by_row[1].tolist() == [1.0, 2.0]


def worst_sqnr_db(fmt: Format) -> float:
    """Of normal data, far from subnormals, whatever the scale. With x in [2^E, 2^(E+1)) the error is uniform in a step
    of 2^(E−m), so the ratio is Σx² / Σ4^E·4^−m/12 = 12·4^m · E[x²] / E[4^⌊log₂|x|⌋]; the last quotient depends on where
    σ lies between two powers of two: 1.78 to 2.14."""
    z = (np.arange(200_000) + 0.5) / 200_000 * 8
    density = np.exp(-z * z / 2)
    quotients = []
    for phase in np.linspace(0, 1, 64):
        x = z * 2**phase
        quotients.append((x * x * density).sum() / (4 ** np.floor(np.log2(x)) * density).sum())
    return 10 * math.log10(12 * 4**fmt.mantissa_bits * min(quotients))


def sqnr_db(exact: torch.Tensor, found: torch.Tensor) -> float:
    exact = exact.double()
    return float(10 * torch.log10(exact.square().sum() / (exact - found.double()).square().sum()))


@pytest.mark.parametrize(("name", "least"), [("fp8_e4m3", 31.0), ("fp8_e5m2", 25.0)])
def test_signal_to_noise_of_normal_data(name: str, least: float) -> None:
    """The derived bound less 0.1 dB for the sample, and the figures that users are promised."""
    fmt = format_named(name)
    bound = worst_sqnr_db(fmt)
    assert bound > least
    for seed, sigma in enumerate([1e-4, 0.02, 0.7, 1.0, 1.3, 5.0, 900.0]):
        x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(seed)) * sigma
        assert sqnr_db(x, decode(encode(x, name), torch.float32)) >= bound - 0.1


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_no_worse_than_torchao(name: str, rowwise: bool) -> None:
    """As in its recipes: one scale for the tensor is amax / M as it is, one per row the power of two below, as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

    kinds = {
        "normal": torch.randn(256, 512, generator=torch.Generator().manual_seed(0)),
        "heavy tails": torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) ** 3,
        "rows of all sizes": torch.randn(256, 512, generator=torch.Generator().manual_seed(2))
        * torch.logspace(-3, 3, 256)[:, None],
    }
    for x in kinds.values():
        granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
        theirs = hp_tensor_to_float8_dynamic(
            x,
            dtype_of(name),
            LinearMMConfig(),
            scaling_granularity=granularity,
            axiswise_dim=-1 if rowwise else None,
            round_scales_to_power_of_2=rowwise,
        ).to_original_precision()
        ours = decode(encode(x, name, rowwise=rowwise), torch.float32)
        assert sqnr_db(x, ours) >= sqnr_db(x, theirs) - 0.5


@pytest.mark.parametrize(
    ("name", "info"), [("fp4_e2m1", format_info_ocp_e2m1), ("fp6_e2m3", format_info_ocp_e2m3),
                       ("fp6_e3m2", format_info_ocp_e3m2)],
)  # fmt: skip
def test_ieee_rules_end_below_ocps_small_formats(name: str, info: gfloat.FormatInfo) -> None:
    """OCP's formats of 4 and 6 bits have neither inf nor NaN, so one exponent more than `e2m1` says here."""
    assert format_named(name).max_value < info.max


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8_e4m3fn", "is fp8_e4m3; call it that"),
        ("fp9_e3m4", "make 8 bits, not 9"),
        ("fp16_e6m9", "8 bits in all"),
        ("fp8_e0m7", "at least 2 and 1 of them"),
        ("fp8e4m3", "named after its bits"),
        ("int9", "unknown format 'int9'"),
    ],
)
def test_a_name_says_what_the_format_is(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        format_named(name)


def test_a_described_format_is_the_one_that_is_made() -> None:
    assert format_named("fp8_e3m4") == Format(name="fp8_e3m4", exponent_bits=3, mantissa_bits=4)
    assert format_named("fp8_e3m4").max_value == 15.5 and format_named("int8").max_value == 127.0
    assert BF16.max_value == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_log2", [-9, 12])
def test_a_scaled_cast_is_multiplied_in_fp32_and_makes_no_copy_of_it(dtype: torch.dtype, scale_log2: int) -> None:
    x = torch.randn(64, 1 << 15, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    plain = (x.float() * 2.0**scale_log2).to(dtype)
    with torch.no_grad():
        assert scaled_cast(x, scale_log2, dtype).equal(plain)
        assert scaled_cast(x.t(), scale_log2, dtype).equal(plain.t())
        made = workspace_bytes(lambda: scaled_cast(x, scale_log2, dtype), torch.device("cpu"))
        few = x.view(-1)[: 1 << 16]
        made_of_few = workspace_bytes(lambda: scaled_cast(few, scale_log2, dtype), torch.device("cpu"))
    assert made < (100 if dtype is torch.float32 else 5 * piece_numel(x))  # one FP32 copy of a piece
    assert made_of_few < (100 if dtype is torch.float32 else 5 << 14)  # of a quarter
    leaf = x.float().requires_grad_()
    scaled_cast(leaf, scale_log2, torch.float32).sum().backward()
    assert leaf.grad is not None and leaf.grad.eq(2.0**scale_log2).all()


@pytest.mark.parametrize("scale_log2", [-30, -1, 0, 12, 30])
def test_a_gradient_leaves_a_region_for_bf16_without_a_copy(scale_log2: int) -> None:
    """Every FP16 number, subnormals among them: bit for bit what is multiplied in FP32."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)
    plain, there = (x.float() * 2.0**scale_log2).to(torch.bfloat16), ~x.isnan()
    with torch.no_grad():
        found = scaled_cast(x, scale_log2, torch.bfloat16)
        made = workspace_bytes(lambda: scaled_cast(x, scale_log2, torch.bfloat16), torch.device("cpu"))
    assert found[there].view(torch.int16).equal(plain[there].view(torch.int16)) and found[~there].isnan().all()
    assert made < 100


def test_scales_do_not_depend_on_the_default_dtype() -> None:
    """FP16 does not have the inverse of the scale of large numbers."""
    x = torch.full((8,), 2.0**100)
    expected = packing.encode(x, "fp8_e4m3")
    torch.set_default_dtype(torch.float16)
    try:
        found = packing.encode(x, "fp8_e4m3")
        assert torch.equal(packing.decode(found, torch.float32), x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    assert found.inverse_scale.dtype is torch.float32 and torch.equal(found.inverse_scale, expected.inverse_scale)


def test_one_scale_is_the_same_looked_at_or_not() -> None:
    """`encode` finds it by Python's numbers on a CPU, by torch's where each row has one, and on a GPU."""
    amaxes = [
        0.0,
        math.inf,
        math.nan,
        2.0**-149,
        2.0**-126,
        3.4e38,
        *np.exp(np.random.default_rng(0).normal(0, 20, 999)),
    ]
    for most in (448.0, 57344.0, 7.0, 15.5):
        for amax in torch.tensor([*amaxes, most, 4.0 * most, most / 8.0], dtype=torch.float32):
            one, all_ = packing._scale_of(amax, most), packing._scales_of(amax, most)
            assert one[0] == float(all_[0]) and torch.equal(one[1].nan_to_num(-1.0), all_[1].nan_to_num(-1.0))
