"""A captured graph as a template: its parameters by position, its modules by path.

Dynamo shares one captured graph among identical blocks and instances. The graph's parameters are inputs, so their
identity at call time says who runs. Module paths of the template are mapped to FQNs of the owner through them.
"""

from __future__ import annotations

import linecache
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx

from autoprec.tracing.checkpoints import Flat, flatten, prepare

__all__ = ["Template", "module_path", "user_frame"]

_TOKEN = re.compile(r"\['([^']*)'\]|\.([^.[]+)|\[(\d+)\]")  # a module's name has no dot, and may have all else
_CONTAINERS = {"_modules", "_parameters", "_buffers"}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Path = tuple[str, ...]


def parse_path(source: str) -> Path:
    """`L['model']._modules['blocks']._modules['0']` and `L['model'].blocks.0` → ("model", "blocks", "0")."""
    parts = (next(p for p in groups if p) for groups in _TOKEN.findall(source) if any(groups))
    return tuple(p for p in parts if p not in _CONTAINERS)


@dataclass(frozen=True, eq=False)
class Template:
    """One graph from Dynamo, as it came.

    Attributes:
        module: the captured GraphModule; never changed.
        flat: its ops with those of checkpoints among them: what is named, priced and rewritten.
        placeholders: its inputs in order (nodes of the flat graph).
        parameter_positions: indices of the inputs that are parameters.
        parameter_paths: template path of each of them (from where Dynamo found it), or () if unknown.
    """

    module: fx.GraphModule
    flat: Flat
    placeholders: tuple[fx.Node, ...]
    parameter_positions: tuple[int, ...]
    parameter_paths: tuple[Path, ...]

    @cached_property
    def value_positions(self) -> tuple[int, ...]:
        """Indices of the other inputs."""
        return tuple(i for i in range(len(self.placeholders)) if i not in set(self.parameter_positions))

    @classmethod
    def capture(cls, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Template:
        """From what Dynamo hands to a backend."""
        prepare(module)
        flat = flatten(module)
        placeholders = tuple(n for n in flat.graph.nodes if n.op == "placeholder")
        positions = tuple(i for i, v in enumerate(example_inputs) if isinstance(v, torch.nn.Parameter))
        paths = tuple(_source_path(placeholders[i]) for i in positions)
        return cls(
            module=module,
            flat=flat,
            placeholders=placeholders,
            parameter_positions=positions,
            parameter_paths=paths,
        )

    def __hash__(self) -> int:
        return id(self)


def _source_path(placeholder: fx.Node) -> Path:
    grapharg = placeholder.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return ()
    name = source.name
    return parse_path(name() if callable(name) else name)


def module_path(node: fx.Node) -> Path:
    """Template path of the innermost module that a node was traced in, () if Dynamo does not say."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ()
    path, _ = list(stack.values())[-1]
    return parse_path(path)


def user_frame(node: fx.Node) -> str:
    """`file@digest:line` of the innermost source line of a node: with an occurrence number, its call site."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}@{_digest(file)}:{line}"


@cache
def _digest(file: str) -> str:
    """Of a source as Python shows it; of none where there is no file."""
    return f"{zlib.crc32(''.join(linecache.getlines(file)).encode(errors='replace')):08x}"
