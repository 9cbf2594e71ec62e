"""Modules that graph breaks leave in frames which Dynamo runs eagerly, captured on their own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from autoprec.execution import dispatch

__all__ = ["Parts"]


class Parts:
    """Mutable; owned by the session.

    Frames of torch.nn classes are skipped by Dynamo unless a function of ours calls them.

    Attributes:
        names: of the modules, in the order in which they were captured.
    """

    def __init__(self, owner: dispatch.Owner) -> None:
        self.names: list[str] = []
        self._owner = owner
        self._modules: list[nn.Module] = []

    def capture(self, model: nn.Module, names: Iterable[str]) -> bool:
        """Capture these submodules of the model; False if none of them is new."""
        found = {name: model.get_submodule(name) for name in sorted(names)}
        new = {n: m for n, m in found.items() if m is not model and all(m is not known for known in self._modules)}
        for name, module in new.items():
            dispatch.install(module, self._owner)
            self._modules.append(module)
            self.names.append(name)
        return bool(new)

    def close(self) -> None:
        """Take them off again."""
        for module in self._modules:
            dispatch.uninstall(module)
