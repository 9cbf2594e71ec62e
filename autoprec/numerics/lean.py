"""Ops that keep less for their backward pass than torch's own kernels do, and give the same bits forward and backward.

torch's dropout on a CPU keeps its factors, as wide as its input, and ReLU its result; one bit per element says as much.
Numbers are looked at as integers there, because comparing BF16 numbers, or choosing between them (`torch.where`), takes
a CPU ten to thirty times as long (docs/measurements/pieces.md). Attention that torch's fused kernels do not take
(dropout on a CPU, a mask that is trained, or one for each head) keeps its probabilities twice; what it was given, and
the state of the random generator, say the same, for computing it once more. A compiled graph has no such state: there
it is a bit for each probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from autoprec.numerics import elements
from autoprec.numerics.compilers import is_traced, made_in_backward
from autoprec.numerics.double_backward import refuse_double_backward
from autoprec.numerics.packing import pack_bits, piece_numel, unpack_bits

__all__ = ["attention", "dropout", "lean", "relu_keeping_bits"]

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_not_zero(x: Tensor) -> Tensor:
    """Where x is neither 0 nor −0, as NaN is: a boolean, or for a compiler, whose code takes forty times as long to
    store a boolean, a byte."""
    if is_traced(x):
        return torch.where(x != 0, 1.0, 0.0).to(torch.uint8)
    return (x.view(_INTEGER[x.element_size()]) << 1).bool()


def _bits(x: Tensor) -> Tensor:
    """One bit per element: where x is not zero. Piece by piece, so that what is made on the way stays small."""
    if is_traced(x):
        return pack_bits(_is_not_zero(x))
    if elements.serve(x):
        return elements.nonzero_bits(x)
    return torch.cat([pack_bits(_is_not_zero(part)) for part in x.reshape(-1).split(piece_numel(x))])


@torch.library.custom_op("autoprec::nonzero_bits", mutates_args=(), device_types="cpu", tags=torch.Tag.flexible_layout)
def _traced_bits(x: Tensor) -> Tensor:
    """`_bits` of a result that is there anyway, as one op of a compiled graph. x may have any order in memory."""
    return _bits(x.contiguous())


_traced_bits.register_fake(lambda x: x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8))


@torch.library.custom_op("autoprec::masked", mutates_args=(), device_types="cpu")
def _traced_mask(x: Tensor, bits: Tensor) -> Tensor:
    """`_masked_in_order` as one op of a compiled graph."""
    return _masked_in_order(x, bits)


_traced_mask.register_fake(lambda x, bits: torch.empty_like(x, memory_format=torch.contiguous_format))


def _has_channels_last(y: Tensor, images: bool) -> bool:
    """Whether the channels are last in memory. Compilers put them there of `images`."""
    if is_traced(y):
        return images
    return y.dim() in (4, 5) and not y.is_contiguous() and y.movedim(1, -1).is_contiguous()


def _bits_of_result(y: Tensor, channels_last: bool) -> Tensor:
    """In the order of memory, in which nothing is copied."""
    seen = y.movedim(1, -1) if channels_last else y
    return _traced_bits(seen) if is_traced(y) and y.device.type == "cpu" else _bits(seen)


def _masked(x: Tensor, bits: Tensor, channels_last: bool = False) -> Tensor:
    """x where a bit is set, 0 elsewhere, whatever x is there."""
    if torch.is_grad_enabled():
        result = _Masked.apply(x, bits, channels_last)
        assert isinstance(result, Tensor)
        return result
    made = _masked_in_order(x.movedim(1, -1) if channels_last else x, bits)
    return made.movedim(-1, 1) if channels_last else made


def _masked_in_order(x: Tensor, bits: Tensor) -> Tensor:
    if is_traced(x):
        if x.device.type == "cpu":
            return _traced_mask(x.contiguous(), bits)
        return torch.where(unpack_bits(bits, x.shape) != 0, x, 0.0)
    x = x.contiguous()
    if elements.serve(x):
        return elements.where_set(x, bits)
    numel = piece_numel(x)
    flat = x.view(_INTEGER[x.element_size()]).view(-1)
    made = torch.empty_like(flat)
    for part, packed, target in zip(flat.split(numel), bits.split(numel // 8), made.split(numel), strict=True):
        torch.mul(part, unpack_bits(packed, part.shape), out=target)  # an integer times 0 or 1
    return made.view(x.dtype).view(x.shape)


class _Masked(torch.autograd.Function):
    """`_masked` with a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor, channels_last: bool) -> Tensor:
        ctx.channels_last = channels_last
        ctx.save_for_backward(bits)
        return _masked(x, bits, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        return _masked(grad, *ctx.saved_tensors, ctx.channels_last), None, None


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, images: bool) -> Tensor:
        y = torch.relu(x)
        ctx.channels_last = _has_channels_last(y, images)
        # torch's own formula: the gradient is stopped where y ≤ 0, so it passes a NaN.
        ctx.save_for_backward(_bits_of_result(y, ctx.channels_last))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        return _masked(grad, *ctx.saved_tensors, ctx.channels_last), None


def relu_keeping_bits(x: Tensor, images: bool = False) -> Tensor:
    """relu(x), bitwise the same forward and backward, keeping one bit per element. `images`: whether x, of four or five
    dimensions, is what convolutions make."""
    result = _Relu.apply(x, images)
    assert isinstance(result, Tensor)
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        factors = torch.empty_like(x).bernoulli_(1.0 - p)
        ctx.p, ctx.like = p, factors.new_empty(())
        ctx.save_for_backward(_bits(factors))
        return x * factors.div_(1.0 - p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        kept = unpack_bits(bits, grad.shape).to(ctx.like.dtype)
        return grad * kept.div_(1.0 - ctx.p), None


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """`F.dropout`, never in place; on a CPU it keeps one bit per element."""
    if input.is_cuda or not training or not 0.0 < p < 1.0 or not input.numel() or not torch.is_grad_enabled():
        return F.dropout(input, p, training)
    result = _Dropout.apply(input, p)
    assert isinstance(result, Tensor)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(query, key, value, mask, torch.get_rng_state())
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("attention that runs op by op")
        *inputs, state = ctx.saved_tensors

        def again(*given: Any) -> Tensor:
            with torch.random.fork_rng(devices=()):
                torch.set_rng_state(state)
                return F.scaled_dot_product_attention(*given, **ctx.options)

        return *_gradients(again, inputs, ctx.needs_input_grad[:4], grad), None


def _gradients(
    again: Callable[..., Tensor], inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> Iterator[Tensor | None]:
    """Of the inputs that are wanted, when a function is computed once more."""
    leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        y = again(*leaves)
    found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None and t.requires_grad], grad))
    return (next(found) if w else None for w in wanted)


class _TracedAttention(torch.autograd.Function):
    """The same for a compiler, which makes the random numbers of both passes itself: what dropout left is kept, as one
    bit for each probability, and the rest is marked as what is made again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        result, left = _op_by_op(query, key, value, mask, options)
        ctx.options, ctx.shape = options, None if left is None else left.shape
        ctx.save_for_backward(query, key, value, mask, None if left is None else pack_bits(_is_not_zero(left)))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("attention that runs op by op")
        *inputs, bits = ctx.saved_tensors

        def again(*given: Any) -> Tensor:
            with made_in_backward(grad):
                left = None if bits is None else unpack_bits(bits, ctx.shape)
                return _op_by_op(*given, ctx.options, left)[0]

        return *_gradients(again, inputs, ctx.needs_input_grad[:4], grad), None


def _op_by_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    left: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention as torch computes it without a fused kernel: FP16 and BF16 in FP32, each probability with its random
    number. And which of these dropout left (1 or 0), None without; `left`: which it left before."""
    p, made = options["dropout_p"], {k: v for k, v in options.items() if k not in ("dropout_p", "is_causal")}
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (query, key, value))
    if mask is not None and mask.dtype is torch.bool:  # what is underneath only adds masks
        mask = torch.zeros_like(mask, dtype=wide).masked_fill(~mask, -torch.inf)
    elif mask is not None:
        mask = mask.to(wide)
    y, probabilities = torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, mask, 0.0, options["is_causal"], **made
    )
    if p > 0.0:
        if left is None:
            left = torch.empty_like(probabilities).bernoulli_(1.0 - p)
        if v.shape[-3:-2] != probabilities.shape[-3:-2]:
            v = v.repeat_interleave(probabilities.shape[-3] // v.shape[-3], -3)
        y = (probabilities * left.to(wide).div_(1.0 - p)) @ v  # what was made above is not read then, nor compiled
    return y.to(query.dtype), left


def _is_unfused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether torch runs attention op by op on a CPU: with dropout or a trained mask, and also with a mask for each
    head, values narrower than keys, or three dimensions. A compiler asks for what it always does so."""
    if is_traced(query):
        return options["dropout_p"] > 0.0 or (mask is not None and mask.requires_grad)
    return torch.ops.aten._fused_sdp_choice(query, key, value, mask, **options) == SDPBackend.MATH.value  # type: ignore[attr-defined]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`; where torch has no fused kernel for it on a CPU it keeps what it was given and
    is computed once more in the backward pass."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if query.is_cuda or not torch.is_grad_enabled() or not _is_unfused(query, key, value, attn_mask, options):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)  # type: ignore[arg-type]
    ours = _TracedAttention if is_traced(query) else _Attention
    result = ours.apply(query, key, value, attn_mask, options)
    assert isinstance(result, Tensor)
    return result


_LEAN = {
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    torch._C._nn.scaled_dot_product_attention: attention,
}


def lean(target: Any) -> Any:
    """The function of this module that stands for a call's target, or the target itself."""
    return _LEAN.get(target, target) if callable(target) else target
