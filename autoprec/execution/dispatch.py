"""One Dynamo backend for the process, and who runs a captured graph.

A captured graph is shared by everything that has the same code. Its parameters are inputs, so the identity of the
first of them says whose graph is about to run. The function that is compiled is our own, with a code object of its own
per model: with one shared wrapper the ninth architecture in a process would run eager.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from autoprec.errors import InputError
from autoprec.tracing.templates import Template

__all__ = ["RECOMPILE_LIMIT", "Owner", "adopt", "install", "installed", "owner_of", "release", "uninstall"]


class Owner(Protocol):
    """What a captured graph is handed to: the session that owns its parameters."""

    def enter(self) -> None:
        """The model is called."""

    def run(self, template: Template, arguments: Sequence[Any]) -> Any:
        """Run the template with these arguments."""

    def run_unowned(self, template: Template, arguments: Sequence[Any]) -> Any:
        """Run a template without parameters inside a call of this owner's model."""


class _Entry:
    """A parameter and its owner, both weak, so that neither is kept alive."""

    __slots__ = ("owner", "parameter")

    def __init__(self, parameter: nn.Parameter, owner: Owner) -> None:
        self.parameter = weakref.ref(parameter)
        self.owner = weakref.ref(owner)


_entries: dict[int, _Entry] = {}
_running = threading.local()
_numbers = itertools.count()
#: Captures of one piece of code (shapes, modes, sequence lengths) after which Dynamo runs it eager.
RECOMPILE_LIMIT = 64

#: Without allow_rnn a module that holds an LSTM or GRU is not captured at all; a GRU is captured once per sequence
#: length, so the limit is raised. A frame that Dynamo fails on runs eager; the coverage law notices the parameters in
#: it. Hooks that are put on modules later, or taken off, are noticed. A number that a module counts up is captured once
#: more, and then as a number: as a constant it would be captured in every step, up to the limit.
_CONFIG = {
    "allow_rnn": True,
    "recompile_limit": RECOMPILE_LIMIT,
    "suppress_errors": True,
    "skip_nnmodule_hook_guards": False,
    "allow_unspec_int_on_nn_module": True,
}

#: Those that no call is inside of. torch keeps a context variable for each patch that was ever made: one for each call
#: of a model would fill the memory in a long run.
_patches: list[Any] = []


def owner_of(parameter: nn.Parameter) -> Owner | None:
    """The owner of a parameter, None if it was never adopted or its owner is gone."""
    entry = _entries.get(id(parameter))
    if entry is None or entry.parameter() is not parameter:
        return None
    return entry.owner()


def adopt(parameters: Sequence[nn.Parameter], owner: Owner) -> None:
    """Make `owner` the one that runs graphs with these parameters. Raises `InputError` if another has them."""
    for p in parameters:
        other = owner_of(p)
        if other is not None and other is not owner:
            raise InputError(
                f"a parameter of shape {tuple(p.shape)} already belongs to another model compiled by autoprec;"
                " autoprec.unwrap(that model) first, or compile only the outermost model"
            )
    for p in parameters:
        _entries[id(p)] = _Entry(p, owner)
        weakref.finalize(p, _entries.pop, id(p), None)


def release(parameters: Sequence[nn.Parameter]) -> None:
    """Undo `adopt`."""
    for p in parameters:
        _entries.pop(id(p), None)


def _backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    template = Template.capture(module, example_inputs)

    def run(*arguments: Any) -> Any:
        _running.ran = True
        for position in template.parameter_positions:
            owner = owner_of(arguments[position])
            if owner is not None:
                return owner.run(template, arguments)
        current: Owner | None = getattr(_running, "owner", None)
        if current is not None:
            return current.run_unowned(template, arguments)
        return module.forward(*arguments)

    return run


def install(model: nn.Module, owner: Owner) -> None:
    """Make calls of `model` go through Dynamo and our backend; the model stays the same object.

    `nn.Module.compile()` captures nothing for `nn.Sequential` and every class defined in torch.nn: Dynamo skips their
    frames. A function of ours around `_call_impl` is captured.
    """

    compiled = _compiled(model)
    weak_owner = weakref.ref(owner)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # Inside a torch.func transform Dynamo would fail, and never look at this code again.
            return model._call_impl(*args, **kwargs)
        before = getattr(_running, "owner", None)
        _running.owner = weak_owner()
        _running.ran = False
        if _running.owner is not None and _running.owner is not before:
            _running.owner.enter()
        try:
            patch = _patches.pop()
        except IndexError:
            patch = torch._dynamo.config.patch(**_CONFIG)
        try:
            with patch:
                return compiled(*args, **kwargs)
        except Exception:  # whatever the user's code raised goes on to the user
            if not _running.ran:  # Dynamo never looks again at code that failed while it was captured
                compiled = _compiled(model)
            raise
        finally:
            _patches.append(patch)
            _running.owner = before

    # The model keeps its owner alive here, in the one attribute that a deepcopy and a pickle leave out.
    call.owner = owner  # type: ignore[attr-defined]
    model._compiled_call_impl = call


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """A function of ours around the model's call, with a code object of its own: Dynamo's recompile limit counts per
    code object."""

    def call_model(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    call_model.__code__ = call_model.__code__.replace(co_name=f"autoprec_call_{next(_numbers)}")
    compiled: Callable[..., Any] = torch.compile(call_model, backend=_backend)
    return compiled


def installed(model: nn.Module) -> Owner | None:
    """The owner that `install` gave to a model."""
    found: Owner | None = getattr(getattr(model, "_compiled_call_impl", None), "owner", None)
    return found


def uninstall(model: nn.Module) -> None:
    """Undo `install`."""
    model._compiled_call_impl = None
