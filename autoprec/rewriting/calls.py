"""Functions as targets of fx nodes, and the operands of captured calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["Method", "With", "operands"]


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
