"""A graph as text that another process makes the same graph of: for a compiler that works beside the run.

Plain data, JSON's: functions and types are written by the names under which both processes find them, and read by
nobody else. What has no such name, or sizes that are symbols, is refused: then the run compiles for itself.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoprec.checks import described
from autoprec.errors import UnsupportedError
from autoprec.numerics.compilers import OF_TENSOR
from autoprec.numerics.frozen import NarrowParameter
from autoprec.rewriting.calls import Method, With

__all__ = ["read_graph", "write_graph"]

#: Whose values are written by their names in torch ("torch.float32").
_TORCHS = (torch.dtype, torch.layout, torch.memory_format)


def write_graph(module: fx.GraphModule, examples: Sequence[Any]) -> dict[str, Any]:
    """The graph and the inputs that it is traced with: fake tensors and plain values. Raises `UnsupportedError` for
    what another process could not make again."""
    storages: dict[int, int] = {}
    for x in examples:
        if isinstance(x, Tensor) and x.layout is torch.strided:
            storages.setdefault(x.untyped_storage()._cdata, len(storages))
    return {"graph": _written_module(module), "inputs": [_written_input(x, storages) for x in examples]}


def read_graph(written: Mapping[str, Any]) -> tuple[fx.GraphModule, list[Any], FakeTensorMode]:
    """What `write_graph` wrote, and the mode of its fake tensors."""
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one the compiler keeps nothing on the disk
    storages: dict[int, torch.UntypedStorage] = {}
    return _module(written["graph"]), [_input(x, mode, storages) for x in written["inputs"]], mode


# -- graphs --------------------------------------------------------------------------------------------------------


def _written_module(module: fx.GraphModule) -> dict[str, Any]:
    if "_checkpoint_context_fn" in module.meta:
        raise UnsupportedError("a checkpoint has a context function of its own")
    nodes, bodies = [], {}
    for node in module.graph.nodes:
        target = node.target
        if node.op == "get_attr":
            body = module.get_submodule(target) if target in dict(module.named_modules()) else None
            if not isinstance(body, fx.GraphModule):
                raise UnsupportedError(f"{target} is a constant of the graph")
            bodies[target] = _written_module(body)
        written = {"name": node.name, "op": node.op, "args": _written(node.args), "kwargs": _written(dict(node.kwargs))}
        written["target"] = _written(target) if node.op == "call_function" else target
        tensor = node.meta.get("custom", {}).get(OF_TENSOR)  # a part of what the compiler's cache goes by
        nodes.append(written if tensor is None else {**written, "tensor": tensor})
    return {"nodes": nodes, "bodies": bodies}


def _module(written: Mapping[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for w in written["nodes"]:
        args, kwargs = _read(w["args"], made), _read(w["kwargs"], made)
        target = _read(w["target"], made) if w["op"] == "call_function" else w["target"]
        node = made[w["name"]] = graph.create_node(w["op"], target, args, kwargs, name=w["name"])
        if "tensor" in w:
            node.meta["custom"] = {OF_TENSOR: w["tensor"]}
    bodies = {name: _module(body) for name, body in written["bodies"].items()}
    return fx.GraphModule(bodies, graph)


# -- inputs --------------------------------------------------------------------------------------------------------


class _Input(NamedTuple):
    """An input that is a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_parameter: bool
    offset: int
    storage: int
    storage_bytes: int


def _written_input(x: Any, storages: Mapping[int, int]) -> Any:
    if not isinstance(x, Tensor):
        return _written(x)
    if isinstance(x, NarrowParameter):
        raise UnsupportedError(f"a frozen parameter lives in {x.format}")
    if x.layout is not torch.strided:
        raise UnsupportedError("an input of the graph is sparse")
    memory = x.untyped_storage()
    how = x.requires_grad, isinstance(x, nn.Parameter), x.storage_offset(), storages[memory._cdata], memory.nbytes()
    return _written(_Input(tuple(x.shape), x.stride(), x.dtype, x.device, *how))


def _input(written: Any, mode: FakeTensorMode, storages: dict[int, torch.UntypedStorage]) -> Any:
    x = _read(written, {})
    if not isinstance(x, _Input):
        return x
    with mode:
        if x.storage not in storages:
            storages[x.storage] = torch.empty(x.storage_bytes, dtype=torch.uint8, device=x.device).untyped_storage()
        made = torch.empty(0, dtype=x.dtype, device=x.device).set_(storages[x.storage], x.offset, x.shape, x.stride)
        return nn.Parameter(made, x.requires_grad) if x.is_parameter else made.requires_grad_(x.requires_grad)


# -- values --------------------------------------------------------------------------------------------------------


def _written(value: Any) -> Any:
    """Plain data of a value: itself, or a mapping with one key, which says how it is read."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {"float": str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, _TORCHS):
        return {"torch": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": [_written(v) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": None}
    if isinstance(value, Enum):
        return {"enum": [_named(type(value)), value.name]}
    if isinstance(value, Mapping):
        return {"mapping": [[_written(k), _written(v)] for k, v in value.items()]}
    if isinstance(value, (tuple, list)):
        return _written_items(value)
    if type(value) is With:
        return {"with": [_written(value.function), _written_items(value.fixed), _written(value.named)]}
    if type(value) is Method:
        return {"method": value.__name__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _written(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"object": [_named(type(value)), fields]}
    if callable(value):
        return {"named": _named(value)}
    raise UnsupportedError(f"the graph reads {described(value)}")


def _written_items(value: Sequence[Any]) -> dict[str, Any]:
    items = [_written(v) for v in value]
    if hasattr(value, "_fields"):  # a named tuple
        return {"record": [_named(type(value)), items]}
    return {"tuple" if isinstance(value, tuple) else "list": items}


def _named(value: Any) -> str:
    """The name under which any process finds a function or a type."""
    try:
        name = str(torch.fx.node._get_qualified_name(value))
        if not name.startswith("__main__.") and _found(name) is value:
            return name
    except (AttributeError, ImportError, RuntimeError):  # torch's words for a function without a home
        pass
    raise UnsupportedError(f"{getattr(value, '__qualname__', described(value))} has no name in its module")


def _found(name: str) -> Any:
    """What has a name: that of a module first, and of what is in it."""
    parts = name.split(".")
    if len(parts) == 1:
        return getattr(builtins, name)
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def _read(written: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if not isinstance(written, dict):
        return written
    ((how, what),) = written.items()
    return _READ[how](what, lambda w: _read(w, nodes)) if how != "node" else nodes[what]


def _slice(what: Any, read: Callable[[Any], Any]) -> slice:
    start, stop, step = map(read, what)
    return slice(start, stop, step)


def _with(what: Any, read: Callable[[Any], Any]) -> With:
    function, fixed, named = map(read, what)
    return With(function, *fixed, **named)


def _object(what: Any, read: Callable[[Any], Any]) -> Any:
    kind, fields = what
    return _found(kind)(**{name: read(w) for name, w in fields.items()})


def _record(what: Any, read: Callable[[Any], Any]) -> Any:
    kind, items = what
    return _found(kind)(*map(read, items))


_READ: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "float": lambda what, _: float(what),
    "torch": lambda what, _: _found(what),
    "device": lambda what, _: torch.device(what),
    "slice": _slice,
    "ellipsis": lambda *_: ...,
    "enum": lambda what, _: _found(what[0])[what[1]],
    "mapping": lambda what, read: {read(k): read(v) for k, v in what},
    "tuple": lambda what, read: tuple(map(read, what)),
    "list": lambda what, read: list(map(read, what)),
    "with": _with,
    "method": lambda what, _: Method(what),
    "object": _object,
    "record": _record,
    "named": lambda what, _: _found(what),
}
