"""TARGET: a function of the user's, by file or module, that returns `(model, batches, loss_fn)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from autoprec.checks import is_iterable
from autoprec.errors import AutoprecError, InputError, nearest

__all__ = ["Target", "load_target"]

_FORM = "TARGET is file.py:function or module:function"


class Target(NamedTuple):
    """What the user's function returned, and a context in which their code runs."""

    model: nn.Module
    batches: Iterable[Any]
    loss_fn: Callable[..., Any]
    running: Callable[[], Any]


def load_target(text: str) -> Target:
    """Import the file or module and call the function. `InputError` says what is wrong, and in which line of theirs."""
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise InputError(f"{_FORM}, not {text!r}" + ("" if colon else ": there is no colon"))
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _import_file(Path(place)) if is_file else _import_module(place)
    function = _function(text, module, name)
    source = getattr(getattr(function, "__code__", None), "co_filename", getattr(module, "__file__", None) or text)
    with _their_code(source):
        made = function()
    return _checked(text, made, lambda: _their_code(source))


def _function(text: str, module: ModuleType, name: str) -> Callable[[], Any]:
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        what = f"{name!r} is not a function" if hasattr(module, name) else f"there is no function {name!r}"
        raise InputError(f"{text}: {what}.{nearest(name, functions)}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{text}: must be callable without arguments, but {error}") from error
    return function


def _checked(text: str, made: Any, running: Callable[[], Any]) -> Target:
    wanted = f"{text}: must return (model, batches, loss_fn)"
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise InputError(f"{wanted}, not {type(made).__name__}{size}")
    model, batches, loss_fn = made
    if not isinstance(model, nn.Module):
        raise InputError(f"{wanted}; the model must be an nn.Module, not {type(model).__name__}")
    if not is_iterable(batches):
        raise InputError(f"{wanted}; batches must be iterable, not {type(batches).__name__}")
    if not callable(loss_fn):
        raise InputError(f"{wanted}; loss_fn must be callable as loss_fn(model, batch), not {type(loss_fn).__name__}")
    return Target(model, batches, loss_fn, running)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise InputError(f"{path}: {what}. {_FORM}")
    name = f"autoprec_target_{path.stem}"  # a name of its own: their file may be called json.py
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: is not a Python file. {_FORM}")
    with _their_code(spec.origin or str(path)):
        module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    sys.path.insert(0, str(path.resolve().parent))  # as for `python file.py`
    with _their_code(spec.origin or str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise InputError(f"no module named {name!r} here. {_FORM}")
    with _their_code(spec.origin or name):
        return importlib.import_module(name)


@contextmanager
def _their_code(source: str) -> Iterator[None]:
    """Exceptions become an `InputError` that names the last line of `source` that they passed through; where there is
    none (an import failed, or what it returned was called), the last line at all."""
    log = logging.getLogger("torch")  # it would print the traceback of what is reported here in one line
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except AutoprecError:
        raise
    except SyntaxError as error:
        where = source if error.filename is None else f"{error.filename}:{error.lineno}"
        raise InputError(f"{where}: SyntaxError: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if f.filename == source]
        line = (theirs or frames)[-1]
        raised = _unwrapped(error)
        message = str(raised).strip().partition("\n")[0]
        where = f"{line.filename}:{line.lineno} (in {line.name})"
        if theirs:
            raise InputError(f"{where}: {type(raised).__name__}: {message}") from error
        raise InputError(f"{source}: {type(raised).__name__}: {message} (raised at {where})") from error
    finally:
        log.setLevel(level)


def _unwrapped(error: BaseException) -> BaseException:
    """What the model raised; torch.compile wraps it in errors of its own."""
    while type(error).__module__.startswith("torch._dynamo"):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error
