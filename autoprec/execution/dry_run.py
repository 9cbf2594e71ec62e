"""How much a compiled graph will hold at once, before it runs: its code with every kernel left out, on tensors without
memory.

What torch's compiler generates for a graph is Python that allocates, calls kernels and lets go. Here the same code runs
on meta tensors, so what it allocates is counted as it will be, reuse and order of the kernels included. What kernels of
torch (products, convolutions, attention) take for themselves is measured, each once, on zeros.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autoprec.devices import DEVICE_TYPES
from autoprec.execution.measuring import workspace_bytes

__all__ = ["DryRun", "as_first_seen", "dry_run", "size_hint"]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a call would do.

    Attributes:
        peak_bytes: most that it holds at once, its results among it.
        held_bytes: what its results hold, and inputs that it was given to own and did not let go of.
        output_bytes: of these, what the results hold that count as outputs.
        own: of each result, whether it has memory of its own; what the inputs own is not.
    """

    peak_bytes: int
    held_bytes: int
    output_bytes: int
    own: tuple[bool, ...]


def dry_run(
    code: Callable[..., Any], inputs: Sequence[Any], owned: Sequence[bool], outputs: int | None = None
) -> DryRun | None:
    """A call of generated code on such `inputs`; those that it is given to own count, until it lets go of them. So many
    of the first results are outputs; None: all. None where nobody can tell: on other devices than CPUs and GPUs of
    CUDA, and where an op of it says nothing about its results.
    """
    code = _unwrapped(code)
    function = getattr(code, "__func__", None)
    if not isinstance(code, MethodType) or not isinstance(function, FunctionType):
        return None
    types = {x.device.type for x in inputs if isinstance(x, Tensor)}
    if "empty_strided_cpu" not in function.__globals__ or types - set(DEVICE_TYPES):
        return None
    device = torch.device("cuda" if "cuda" in types else "cpu")
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):  # not all kernels of torch take meta tensors
            return _run(code, function, inputs, owned, outputs, device)
    # What an op says of layouts that it cannot work on, a size that nobody knows, another profiler: a prediction is not
    # worth a compilation.
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
        return None


def _unwrapped(code: Callable[..., Any]) -> Callable[..., Any]:
    """The code itself: on a GPU what is called may be a function that aligns its inputs first."""
    if not isinstance(code, FunctionType):
        return code
    seen = zip(code.__code__.co_freevars, code.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in seen if name == "model"), code)


def _run(
    code: MethodType,
    function: FunctionType,
    inputs: Sequence[Any],
    owned: Sequence[bool],
    outputs: int | None,
    device: torch.device,
) -> DryRun:
    arguments: list[Any] = []
    storages: dict[int, torch.UntypedStorage] = {}  # some are views of the same tensor
    for x in inputs:
        if isinstance(x, Tensor):
            arguments.append(_without_memory(x, storages))
        else:
            arguments.append(size_hint(x) if isinstance(x, torch.SymInt) else x)
    storages.clear()
    stay = [x for x, own in zip(arguments, owned, strict=True) if not own and isinstance(x, Tensor)]
    there = {x.untyped_storage()._cdata for x in stay}
    held = _Held(there, device)
    for i, counts in enumerate(owned):  # by place: nothing here holds what the code lets go of
        if counts and isinstance(arguments[i], Tensor):
            held.count(arguments[i])
    names = {name: _without_kernels(name, value, held) for name, value in function.__globals__.items()}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    with torch.no_grad(), held:
        results = made(code.__self__, arguments)
    own = tuple(isinstance(y, Tensor) and y.untyped_storage()._cdata not in there for y in results)
    held_bytes = held.now
    given = [y.untyped_storage() for y, mine in zip(results[:outputs], own, strict=False) if mine]
    output_bytes = sum({storage._cdata: storage.nbytes() for storage in given}.values())
    del results, stay, given
    return DryRun(peak_bytes=held.peak(), held_bytes=held_bytes, output_bytes=output_bytes, own=own)


def _without_memory(x: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A meta tensor like `x`; those of one storage have one."""
    storage = x.untyped_storage()
    there = storages.get(storage._cdata)
    if there is None:
        made = torch.empty(size_hint(storage.nbytes()), dtype=torch.uint8, device="meta").untyped_storage()
        there = storages.setdefault(storage._cdata, made)
    shape, stride = (tuple(map(size_hint, sizes)) for sizes in (x.shape, x.stride()))
    return torch.empty(0, dtype=x.dtype, device="meta").set_(there, size_hint(x.storage_offset()), shape, stride)


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was at the first call."""
    return size if isinstance(size, int) else int(size.node.hint)


def as_first_seen(x: Any) -> Any:
    """An input of a graph with the sizes of the first call for symbols, which not all kernels of torch take."""
    if isinstance(x, torch.SymInt):
        return size_hint(x)
    if isinstance(x, Tensor) and any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())):
        return x.new_empty_strided(tuple(map(size_hint, x.shape)), tuple(map(size_hint, x.stride())))
    return x


def _without_kernels(name: str, value: Any, held: _Held) -> Any:
    """What stands for a name of the generated module."""
    if name.startswith("empty_strided"):
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if name == "reinterpret_tensor":  # it passes by what a mode sees
        return lambda *arguments: held.count(value(*arguments))
    if name == "assert_size_stride":
        return _as_it_will_be
    if name.startswith(("assert_", "cpp_fused")) or name == "get_raw_stream":
        return _nothing
    if name.startswith("triton_") and hasattr(value, "run"):
        return _Kernel
    return value


class _Kernel:
    """In the place of one for a GPU."""

    @staticmethod
    def run(*arguments: Any, **options: Any) -> None:
        """Nothing."""


def _as_it_will_be(x: Any, size: Sequence[int], stride: Sequence[int], *told: Any) -> None:
    """The code says which layout a kernel of torch gives on its device; on meta tensors it may give another, and what
    reads that would copy it first."""
    if isinstance(x, Tensor) and x.stride() != tuple(stride):
        with _disable_current_modes():
            x.as_strided_(size, stride)


def _nothing(*arguments: Any, **options: Any) -> None:
    """In the place of a kernel, and of checks of what meta tensors do not have."""


class _Held(TorchDispatchMode):
    """Bytes of the storages of tensors that are alive, of those that it was told of and of all results, but for those
    that are `lent`: views of them are no bytes."""

    def __init__(self, lent: Container[int], device: torch.device) -> None:
        super().__init__()
        self._lent, self._device = lent, device
        self._users: Counter[int] = Counter()
        self.now = self._most = 0
        #: By call of a kernel, as text: what measures its workspace, and the most that was held beside it.
        self._kernels: dict[str, tuple[Callable[[], int], int]] = {}

    def peak(self) -> int:
        """Most bytes at once."""
        with torch.no_grad():
            return max(self._most, *(held + workspace() for workspace, held in self._kernels.values()), 0)

    def count(self, x: Tensor) -> Tensor:
        """Count its storage while it lives."""
        storage = x.untyped_storage()
        if storage._cdata in self._lent:
            return x
        if not self._users[storage._cdata]:
            self.now += storage.nbytes()
            self._most = max(self._most, self.now)
        self._users[storage._cdata] += 1
        weakref.finalize(x, self._release, storage._cdata, storage.nbytes())
        return x

    def _release(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (kwargs or {}).get("out")  # not all that write into what is given say what they do on meta tensors
        result = func(*args, **(kwargs or {})) if given is None else given
        before = {id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and id(x) not in before:
                self.count(x)
        if not func.is_view and "empty" not in func.name():
            call = pytree.tree_map_only(Tensor, _layout, (args, kwargs or {}))
            key = f"{func} {call}"
            held = max(self.now, self._kernels[key][1]) if key in self._kernels else self.now
            self._kernels[key] = partial(_workspace, func, *call, self._device), held
        return result


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _layout(x: Tensor) -> _Layout:
    return _Layout(x.shape, x.stride(), x.dtype)


#: Kernels that read what the forward pass has left them: on as many zeros as torch's compiler takes that for, they end
#: the process.
_NEVER_ON_ZEROS = {"aten::mkldnn_rnn_layer_backward"}


def _workspace(kernel: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """Bytes that a kernel takes for itself: of zeros of these layouts. `RuntimeError` where it takes no zeros."""
    if kernel.name() in _NEVER_ON_ZEROS:
        raise RuntimeError(f"{kernel.name()} takes no zeros")

    def zeros(x: Any) -> Any:
        if not isinstance(x, _Layout):
            return x
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=device).zero_()

    positional, named = pytree.tree_map(zeros, (args, kwargs), is_leaf=lambda x: isinstance(x, _Layout))
    return workspace_bytes(lambda: kernel(*positional, **named), device)
