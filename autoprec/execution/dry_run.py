"""How much a compiled graph will hold at once, before it runs: its code with every kernel left out, on tensors without
memory.

What torch's compiler generates for a graph is Python that allocates, calls kernels and lets go. Here the same code runs
on meta tensors, so what it allocates is counted as it will be, reuse and order of the kernels included. What torch's
convolutions take for themselves is measured, on zeros.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.execution.measuring import workspace_bytes

__all__ = ["peak_bytes_of"]


def peak_bytes_of(code: Callable[..., Any], inputs: Sequence[Any], owned: Sequence[bool]) -> int | None:
    """Most bytes that a call of generated code on such `inputs` holds at once, results and those inputs among them that
    it is given to own (and lets go of when it has read them last). None where nobody can tell: on other devices than
    CPUs, and where an op of it says nothing about its results.
    """
    function = getattr(code, "__func__", None)
    if not isinstance(code, MethodType) or not isinstance(function, FunctionType):
        return None
    if "empty_strided_cpu" not in function.__globals__ or any(
        isinstance(x, Tensor) and x.device.type != "cpu" for x in inputs
    ):
        return None
    held = _Held()
    arguments: list[Any] = []
    for x, own in zip(inputs, owned, strict=True):
        if isinstance(x, Tensor):
            x = torch.empty_strided(_ints(x.shape), _ints(x.stride()), dtype=x.dtype, device="meta")
            if own:
                held.count(x)
        arguments.append(int(x) if isinstance(x, torch.SymInt) else x)
    others = [x for x, own in zip(arguments, owned, strict=True) if not own]  # whose they are, they stay
    names = {name: _without_kernels(name, value, held) for name, value in function.__globals__.items()}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    try:
        with torch.no_grad(), held:
            results = made(code.__self__, arguments)
    except (RuntimeError, TypeError, ValueError):
        return None
    del results, others
    return held.peak()


def _ints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    return [n if isinstance(n, int) else int(n.node.hint) for n in sizes]


def _without_kernels(name: str, value: Any, held: _Held) -> Any:
    """What stands for a name of the generated module."""
    if name.startswith("empty_strided"):
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if name == "reinterpret_tensor":  # it passes by what a mode sees
        return lambda *arguments: held.count(value(*arguments))
    if name.startswith(("assert_", "cpp_fused")):
        return _nothing
    return value


def _nothing(*arguments: Any, **options: Any) -> None:
    """In the place of a kernel, and of checks of layouts that meta tensors do not have."""


#: torch's kernels with a workspace that counts: a megabyte for the suite's convolutions, a few bytes for products.
_WITH_WORKSPACE = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class _Held(TorchDispatchMode):
    """Bytes of the storages of tensors that are alive, of those that it was told of and of all results."""

    def __init__(self) -> None:
        super().__init__()
        self._users: Counter[int] = Counter()
        self._now = self._most = 0
        #: By call of a kernel with a workspace, as text: the call, and the most that was held beside the workspace.
        self._kernels: dict[str, tuple[Callable[[], object], int]] = {}

    def peak(self) -> int:
        """Most bytes at once."""
        with_workspace = [held + workspace_bytes(run, torch.device("cpu")) for run, held in self._kernels.values()]
        return max(self._most, *with_workspace, 0)

    def count(self, x: Tensor) -> Tensor:
        """Count its storage while it lives."""
        storage = x.untyped_storage()
        if not self._users[storage._cdata]:
            self._now += storage.nbytes()
            self._most = max(self._most, self._now)
        self._users[storage._cdata] += 1
        weakref.finalize(x, self._release, storage._cdata, storage.nbytes())
        return x

    def _release(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            self._now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and id(x) not in before:
                self.count(x)
        if func in _WITH_WORKSPACE:
            key = f"{func} {pytree.tree_map_only(Tensor, _layout, args)}"
            held = max(self._now, self._kernels[key][1]) if key in self._kernels else self._now
            self._kernels[key] = partial(_run_on_zeros, func, pytree.tree_map_only(Tensor, _layout, args)), held
        return result


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _layout(x: Tensor) -> _Layout:
    return _Layout(x.shape, x.stride(), x.dtype)


def _run_on_zeros(func: Any, args: Any) -> object:
    def zeros(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype).zero_() if isinstance(x, _Layout) else x

    return func(*pytree.tree_map(zeros, args, is_leaf=lambda x: isinstance(x, _Layout)))
