"""LSTMs in compiled graphs: each layer and direction by oneDNN's one kernel, as torch's own CPU code runs them.

torch's compiler takes an LSTM that is trained apart into the ops of every time step: a layer of 16 steps is compiled in
16 to 18 seconds, and takes 1.3 to 1.9 times as long as the kernel (docs/measurements/recurrent.md).

What the kernel leaves for its backward pass has a size that oneDNN tells of numbers, and not of symbols. A graph for
any batch or length keeps nothing of it, and the backward pass runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from autoprec.numerics.dtypes import native_formats

__all__ = ["as_one_kernel", "lstm"]

#: How oneDNN's binding in torch numbers kinds of recurrent layers.
_LSTM = 2

_kernel = torch.ops.aten.mkldnn_rnn_layer.default
_backward_kernel = torch.ops.aten.mkldnn_rnn_layer_backward.default


def as_one_kernel(module: fx.GraphModule) -> None:
    """Let each LSTM of the graph, and of those inside of it, call `lstm` from now on."""
    for inner in (m for m in module.modules() if isinstance(m, fx.GraphModule)):
        for node in inner.graph.nodes:
            if node.target is torch.lstm and len(node.args) == 9 and isinstance(node.args[1], (tuple, list)):
                node.target = lstm  # of tensors, and not of a packed sequence
        inner.recompile()


def lstm(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm`, to which it leaves what oneDNN's kernel is not for: (output, last hidden states, last cell states),
    of the same bits."""
    tensors = (x, *states, *weights)
    if not _is_served(tensors):
        return torch.lstm(x, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first)
    h, c = (s.contiguous() for s in states)
    directions, of_one = 1 + bidirectional, 2 + 2 * has_biases
    keeps = not any(isinstance(n, torch.SymInt) for n in (*x.shape, *h.shape))
    there = (x.transpose(0, 1) if batch_first else x).contiguous()
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        made = []
        for reverse in range(directions):
            k = layer * directions + reverse
            given = [w.contiguous() for w in weights[k * of_one : (k + 1) * of_one]]
            biases = given[2:] or [torch.zeros_like(given[0][:, 0])] * 2
            y, *states_after, _ = _layer(there, *given[:2], *biases, h[k], c[k], bool(reverse), has_biases, keeps)
            made.append(y)
            last.append((states_after[0], states_after[1]))
        there = made[0] if len(made) == 1 else torch.cat(made, -1)
        if dropout and train and layer < layers - 1:
            there = torch.dropout(there, dropout, True)
    hidden, cells = (torch.stack(s) for s in zip(*last, strict=True))
    return there.transpose(0, 1) if batch_first else there, hidden, cells


def _is_served(tensors: Sequence[Tensor]) -> bool:
    """As torch asks before it takes oneDNN's kernel; a projection makes hidden states narrower than cell states."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    x, h, c = tensors[:3]
    if not all(t.is_cpu and t.dtype == x.dtype for t in tensors) or x.numel() == 0 or h.shape != c.shape:
        return False
    return x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and "bf16" in native_formats("cpu"))


@torch.library.custom_op("autoprec::lstm_layer", mutates_args=(), device_types="cpu")
def _layer(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    h: Tensor,
    c: Tensor,
    reverse: bool,
    has_biases: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x: (time, batch, width). (Output, last hidden state, last cell state, bytes for the backward pass if it keeps
    them.)"""
    given = [t.detach() for t in (x, w_ih, w_hh, b_ih, b_hh, h, c)]
    with torch.enable_grad():  # without, the kernel leaves nothing for its backward pass
        y, h, c, left = _kernel(*given, reverse, [], _LSTM, h.shape[-1], 1, has_biases, False, False, True)
    return y, h, c, left if keeps else left.new_empty(0)


@_layer.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, h, c, _, _, keeps = others
    size = _workspace_bytes(*map(int, (*x.shape, h.shape[-1])), x.dtype) if keeps else 0
    left = x.new_empty(size, dtype=torch.uint8)
    return x.new_empty(*x.shape[:2], h.shape[-1]), torch.empty_like(h), torch.empty_like(c), left


@cache
def _workspace_bytes(time: int, batch: int, width: int, hidden: int, dtype: torch.dtype) -> int:
    """What the kernel leaves for its backward pass. oneDNN says this only of a call."""
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        x, state = torch.zeros(time, batch, width, dtype=dtype), torch.zeros(batch, hidden, dtype=dtype)
        weights = (torch.zeros(4 * hidden, n, dtype=dtype) for n in (width, hidden))
        bias = torch.zeros(4 * hidden, dtype=dtype)
        return int(_layer(x, *weights, bias, bias, state, state, False, True, True)[-1].numel())


@torch.library.custom_op("autoprec::lstm_layer_backward", mutates_args=(), device_types="cpu")
def _layer_backward(
    given: list[Tensor], made: list[Tensor], gradients: list[Tensor | None], reverse: bool, has_biases: bool
) -> list[Tensor]:
    """`given` and `made` are what `_layer` was given and gave. Gradients of x, both weights, a bias and both states, in
    FP32: the kernel's own. It works in a part of what the forward pass has left, of which a second backward pass reads
    nothing: for a compiler nothing is written to."""
    if not made[-1].numel():
        made = list(_layer(*given, reverse, has_biases, True))
    *results, left = made
    options = (reverse, _LSTM, given[5].shape[-1], 1, has_biases, True, False, [], False)
    dense = [None if g is None else g.contiguous() for g in gradients]
    x, w_ih, w_hh, bias, _, h, c = _backward_kernel(*given, *results, *dense, *options, left)
    return [x, w_ih, w_hh, bias, h, c]


@_layer_backward.register_fake
def _(given: list[Tensor], *_: Any) -> list[Tensor]:
    return [t.new_empty(t.shape, dtype=torch.float32) for k, t in enumerate(given) if k != 4]  # of one bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.options = inputs[7:9]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    given, made = list(ctx.saved_tensors[:7]), list(ctx.saved_tensors[7:])
    found = _layer_backward(given, made, list(gradients[:3]), *ctx.options)
    x, w_ih, w_hh, bias, h, c = (g.to(given[0].dtype) for g in found)
    return x, w_ih, w_hh, bias, bias.clone(), h, c, None, None, None


_layer.register_autograd(_differentiate, setup_context=_save)
