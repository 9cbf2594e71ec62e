"""Functions as targets of fx nodes, and what is known of captured calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoprec.graphs import OpClass
from autoprec.tracing.kinds import CONVS, class_of, kind_of

__all__ = ["Method", "With", "is_copy", "is_image", "operands"]


class With:
    """A function with its last arguments fixed: fx writes only plain values into the code that it generates."""

    def __init__(self, function: Callable[..., Any], /, *fixed: Any, **named: Any) -> None:
        self.function, self.fixed, self.named = function, fixed, named
        self.__name__, self.__module__ = function.__name__, function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.function(*args, *self.fixed, **kwargs, **self.named)


class Method:
    """A method as a function of its object and arguments."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return getattr(x, self.__name__)(*args, **kwargs)


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Both factors of a matrix product, however they are passed."""
    values = [*node.args, *(node.kwargs[k] for k in ("input", "mat2", "other") if k in node.kwargs)]
    a, b = values[0], values[1]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def is_copy(node: fx.Node, base: fx.Node) -> bool:
    """Whether a view of a tensor is one in name: has memory of its own."""
    made, given = (n.meta["example_value"].untyped_storage() for n in (node, base))
    return bool(made._cdata != given._cdata)


def is_image(node: fx.Node) -> bool:
    """Whether a value of four or five dimensions is what a convolution makes, or ops that keep its layout make of it:
    compilers have the channels last in memory there, whatever the user's layout is."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5):
        return False
    current: fx.Node | None = node
    while current is not None and kind_of(current) not in CONVS:
        keeps = class_of(kind_of(current)) in (OpClass.POINTWISE, OpClass.NORM)
        current = next(iter(current.all_input_nodes), None) if keeps else None
    return current is not None
