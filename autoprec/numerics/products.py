"""Operands of matrix products rounded to the formats of a plan, and the products themselves.

A product is computed in the format of its operands where the device does that; elsewhere the rounded operands are
upcast (exactly), multiplied with FP32 accumulation, and the result is rounded once: it is emulated. FP8 products come
out in BF16 or FP32. FP8 tensors are bytes here, never a torch dtype with which a plain product would go along. A device
with products in TF32 rounds FP32 operands itself (and how it does is its own affair); elsewhere they are rounded here.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.formats import TF32, is_operands_only, is_scaled, other_operand, result_format
from autoprec.numerics.casts import scaled_cast
from autoprec.numerics.compilers import made_in_backward
from autoprec.numerics.dtypes import dtype_of
from autoprec.numerics.frozen import packed_of
from autoprec.numerics.packing import Packed, decode, encode
from autoprec.numerics.rounding import rounded
from autoprec.numerics.switches import tf32_products

__all__ = ["GemmSpec", "operands_product", "rows_times_rows"]

#: What CUDA's FP8 kernels want the sizes of an operand's rows and of the result's rows to be multiples of.
_FP8_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """The arithmetic of one op.

    Attributes:
        output, grad_input, grad_weight: format names by role. The format of a gradient role is that of the gradient
            that arrives; what it is multiplied by has the format that goes with it (`formats.other_operand`).
        native: formats in which the device computes this product itself.
        scale_log2: of the FP16 region: gradients that arrive carry the factor 2**scale_log2.
        local_scale_log2: where only gradient roles are FP16, the arriving gradient is multiplied by 2**local_scale_log2
            before it is rounded, and each product divided by it.
        rowwise: whether operands in formats with a scale have one for each row (of length K, in the product), or one.
    """

    output: str
    grad_input: str
    grad_weight: str
    native: tuple[str, ...]
    scale_log2: int = 0
    local_scale_log2: int = 0
    rowwise: bool = False

    @property
    def result(self) -> torch.dtype:
        """In which the op's output is born."""
        return dtype_of(result_format(self.output))

    def packed(self, x: Tensor | Packed, fmt: str) -> Packed:
        """An operand of shape (…, K) in a format with a scale."""
        x = packed_of(x)
        if isinstance(x, Packed):
            if x.inverse_scale is not None and x.format == fmt and bool(x.inverse_scale.dim()) == self.rowwise:
                return x
            x = decode(x, self.wide(x.format))
        return encode(x, fmt, rowwise=self.rowwise)

    def operand(self, x: Tensor | Packed, fmt: str) -> Tensor:
        """An operand of shape (…, K), rounded, in the dtype in which the product is computed (emulated, if need be)."""
        if is_scaled(fmt):
            return decode(self.packed(x, fmt), self.wide(fmt))
        x = packed_of(x)
        x = decode(x, dtype_of(fmt)) if isinstance(x, Packed) else _cast(x, dtype_of(fmt))
        if fmt in self.native:
            return x
        with made_in_backward(x):  # what is kept is the rounded one
            return rounded(x, TF32) if fmt == TF32.name else x.float()

    def computing(self, fmt: str) -> AbstractContextManager[None]:
        """To be around the product itself: where the device has TF32, FP32 operands are multiplied in it."""
        return tf32_products() if fmt == TF32.name and fmt in self.native else nullcontext()

    def wide(self, fmt: str) -> torch.dtype:
        """A dtype that has all numbers of a narrow format, and in which the device computes."""
        wide = result_format(fmt)
        return dtype_of(wide) if wide in self.native else torch.float32

    def computed_in(self, fmt: str) -> torch.dtype:
        """Of `operand`."""
        if is_scaled(fmt):
            return self.wide(fmt)
        return dtype_of(fmt) if fmt in self.native else torch.float32

    @property
    def plain(self) -> bool:
        """Whether every operand is a cast that autograd can follow, so that there are second derivatives."""
        return not any(map(is_operands_only, (self.output, self.grad_input, self.grad_weight)))

    def shifts(self, fmt: str) -> bool:
        """Whether the arriving gradient needs the local scale in this format."""
        return bool(self.local_scale_log2) and fmt == "fp16"

    def gradient(self, g: Tensor, fmt: str) -> Tensor:
        """The arriving gradient; where the format needs the local scale, with that, and rounded to the format."""
        if not self.shifts(fmt):
            return g
        return scaled_cast(g, self.local_scale_log2, torch.float16)

    def product(self, p: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
        """A product of `gradient(…, fmt)` in `dtype`, without the local scale. Changes `p`, which is nobody else's."""
        if not self.shifts(fmt):
            return p.to(dtype)
        wide = torch.float32 if dtype is torch.float16 else dtype  # BF16 has the exponents of FP32
        return p.to(wide).mul_(2.0**-self.local_scale_log2).to(dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype. Compiled, too, the narrower of the two is kept."""
    with made_in_backward(x) if x.element_size() < dtype.itemsize else nullcontext():
        return x.to(dtype)


def rows_times_rows(
    a: Tensor | Packed, b: Tensor | Packed, fmt: str, spec: GemmSpec, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a·bᵀ (+ bias) for a (…, K) in `fmt` and b (N, K) in the format that goes with it; (…, N) in `dtype`."""
    if is_scaled(fmt) and fmt in spec.native:
        return scaled_product(spec.packed(a, fmt), spec.packed(b, other_operand(fmt)), dtype, bias)
    return _product(a, b, fmt, spec, dtype, bias).to(dtype)


def _product(
    a: Tensor | Packed, b: Tensor | Packed, fmt: str, spec: GemmSpec, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """The same as the device gives it. What is made of the operands is gone when it returns, and the result is cast."""
    left, right = spec.operand(a, fmt), spec.operand(b, other_operand(fmt))
    return operands_product(left, right.t(), fmt, spec, dtype, bias)


def operands_product(
    left: Tensor, right: Tensor, fmt: str, spec: GemmSpec, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """left·right (+ bias) of two of `GemmSpec.operand`, as the device gives it; in `dtype` where that costs nothing."""
    if left.is_cuda and dtype is torch.float32 and left.dtype is not torch.float32 and bias is None:
        return torch.mm(left, right, out_dtype=torch.float32)  # as it was accumulated
    with spec.computing(fmt):
        return left @ right if bias is None else F.linear(left, right.t(), bias.to(spec.result).to(left.dtype))


def scaled_product(a: Packed, b: Packed, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a·bᵀ (+ bias) for FP8 tensors a (…, K) and b (N, K), by the device's own FP8 product; (…, N) in `dtype`.

    Sizes that its kernels do not take are padded with zeros. Scales per row give BF16 (all that CUDA has), and FP32 of
    that.
    """
    assert a.inverse_scale is not None and b.inverse_scale is not None
    rowwise = a.inverse_scale.dim() > 0
    shape, n = a.payload.shape, b.payload.shape[0]
    left = _padded(a.payload.reshape(math.prod(shape[:-1]), shape[-1]).view(dtype_of(a.format)), 1)
    right = _padded(b.payload.view(dtype_of(b.format)), _FP8_MULTIPLE)
    columns = right.shape[0]
    scale_a, scale_b = a.inverse_scale.reshape(-1, 1) if rowwise else a.inverse_scale, b.inverse_scale
    if rowwise:
        scale_b = F.pad(scale_b, (0, 0, 0, columns - n), value=1.0).t()
    made = torch.bfloat16 if rowwise and dtype is torch.float32 else dtype
    recipe = F.ScalingType.RowWise if rowwise else F.ScalingType.TensorWise
    # cuBLAS adds no bias to an FP32 result.
    fused = None if bias is None or made is torch.float32 else F.pad(bias.to(made), (0, columns - n))
    y = F.scaled_mm(left, right.t(), scale_a, recipe, scale_b, recipe, bias=fused, output_dtype=made)
    y = (y[:, :n] if columns > n else y).to(dtype)
    y = y if bias is None or fused is not None else y + bias
    return y.reshape(*shape[:-1], n)


def _padded(x: Tensor, rows: int) -> Tensor:
    """A contiguous matrix whose rows, and their number, are multiples of what FP8 kernels take: with zeros behind."""
    below, beside = -x.shape[0] % rows, -x.shape[1] % _FP8_MULTIPLE
    if not below and not beside:
        return x.contiguous()
    return F.pad(x.view(torch.uint8), (0, beside, 0, below)).view(x.dtype)
