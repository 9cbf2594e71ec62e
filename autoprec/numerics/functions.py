"""A user's own `autograd.Function` in a captured graph.

Dynamo captures both of its bodies. torch's operator for that makes a class at each call, which has what the forward
body keeps until Python collects garbage: a model of such functions holds activations of steps that are over. Here
autograd has it, as it has what the user's own function saves: it goes when the function has run backward, and
checkpoints and hooks see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoprec.numerics.compilers import is_traced

__all__ = ["function_of", "user_function"]

_TORCHS = torch.ops.higher_order.autograd_function_apply


class _UserFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Callable[..., Any], then: Callable[..., Any], options: dict[str, Sequence[int]], *args: Any
    ) -> Any:
        results, kept = first(*args)
        given = results if isinstance(results, (tuple, list)) else (results,)
        if dirty := options.get("dirty_idx"):
            ctx.mark_dirty(*(given[i] for i in dirty))
        if constant := options.get("non_differentiable_idx"):
            ctx.mark_non_differentiable(*(given[i] for i in constant))
        # What the user stashed on `ctx` is held there as long as theirs: changing it in place is no error.
        ctx.then, ctx.kept, ctx.places = then, list(kept), []
        for i in options["saved_for_backward_idx"]:
            if isinstance(kept[i], Tensor):
                ctx.places.append(i)
                ctx.kept[i] = None
        ctx.save_for_backward(*(kept[i] for i in ctx.places))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        kept = ctx.kept[:]
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            kept[i] = x
        then = _Recorded(ctx.then).run if torch.is_grad_enabled() else ctx.then
        found = then(*gradients, *kept)
        return None, None, None, *(found if isinstance(found, (tuple, list)) else (found,))


class _Recorded(fx.Interpreter):
    """Runs a backward body where its own derivative is wanted. Dynamo has put it between two nodes that turn recording
    off and on, which the user's function does not have."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        calls = [n for n in body.graph.nodes if n.op == "call_function"]
        self._around = {n for n in (*calls[:1], *calls[-1:]) if n.target is torch._C._set_grad_enabled}

    def run_node(self, n: fx.Node) -> Any:
        return None if n in self._around else super().run_node(n)


def user_function(first: Callable[..., Any], then: Callable[..., Any], *args: Any, **options: Sequence[int]) -> Any:
    """The function of which `first` is the forward body, giving results and what is kept, and `then` the backward body,
    which is given gradients and what was kept. `options` are those of torch's operator, which a compiler and a
    transform of torch.func get."""
    traced = any(isinstance(x, Tensor) and is_traced(x) for x in args)
    if traced or torch._C._functorch.peek_interpreter_stack() is not None:
        return _TORCHS(first, then, *args, **options)
    return _UserFunction.apply(first, then, options, *args)


def function_of(target: Any) -> Any:
    """The function of this module that stands for a call's target, or the target itself."""
    return user_function if target is _TORCHS else target
