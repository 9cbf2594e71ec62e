"""What a process that compiles beside the run does, and how both have torch's switches stand the same.

A switch that is missing here costs time, and nothing else: what the compiler left is then not found, and the run
compiles for itself.
"""

from __future__ import annotations

import importlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

__all__ = ["compile_whole_files", "main", "set_switches", "switches_here", "whole"]

#: Attributes of torch that traced graphs, or the names of compiled ones, depend on.
_SWITCHES = (
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "utils.deterministic.fill_uninitialized_memory",
)

#: Kernels of attention that may be chosen.
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")

#: Between two looks whether the process that asked is there.
_LOOK_SECONDS = 0.5

#: Modules of the compiler's own switches.
_CONFIGS = ("torch._inductor.config", "torch._functorch.config")


def switches_here() -> dict[str, Any]:
    """As they stand: plain data."""
    return {
        "fp32": torch.get_float32_matmul_precision(),
        "torch": {name: _get(name) for name in _SWITCHES},
        "attention": [name for name in _KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cuda_device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "configs": {name: _changed(name) for name in _CONFIGS},
    }


def _get(name: str) -> Any:
    """None where this version of torch has no such switch."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _changed(name: str) -> dict[str, Any]:
    """What is not as it was imported, of values that text can hold."""
    config = importlib.import_module(name)
    portable: Mapping[str, Any] = config.save_config_portable(ignore_private_configs=False)
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in portable.items() if isinstance(v, plain) and not config._is_default(k)}


def set_switches(told: Mapping[str, Any]) -> None:
    """As another process told them."""
    torch.set_num_threads(told["threads"])
    if told["cuda_device"] is not None:
        torch.cuda.set_device(told["cuda_device"])
    torch.set_default_dtype(getattr(torch, told["dtype"]))
    torch.use_deterministic_algorithms(told["deterministic"][0], warn_only=told["deterministic"][1])
    for name in _KERNELS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in told["attention"])
    if torch.get_float32_matmul_precision() != told["fp32"]:  # the old switch first: torch refuses a mixture
        torch.set_float32_matmul_precision(told["fp32"])
    for name, value in told["torch"].items():
        place, _, last = name.rpartition(".")
        if _get(name) != value:
            setattr(_get(place), last, value)
    for name, values in told["configs"].items():
        config = importlib.import_module(name)
        for key, value in values.items():
            with suppress(AttributeError):  # one that cannot be set, or that only the other process has
                setattr(config, key, value)


def compile_whole_files() -> None:
    """From now on what a compiler's command makes in this process has its name when it is whole: the process may be
    ended at any time, and what has the name is taken for good."""
    from torch._inductor import config, cpp_builder

    config.compile_threads = 1  # what is started for more would live on, and take more cores
    cpp_builder.run_compile_cmd = whole(cpp_builder.run_compile_cmd)


def whole(build: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """A compiler's command that makes its result under another name first."""

    def call(command: str, cwd: str) -> None:
        words = shlex.split(command)
        if "-o" not in words:
            return build(command, cwd)
        place = words.index("-o") + 1
        made, target = f"{words[place]}.{os.getpid()}", words[place]
        words[place] = made
        build(shlex.join(words), cwd)
        os.replace(os.path.join(cwd, made), os.path.join(cwd, target))

    return call


def main(order: Mapping[str, Any]) -> None:
    """Compile what a `Worker` has asked for."""
    threading.Thread(target=_end_with, args=(order["parent"],), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)
    from torch._guards import TracingContext, tracing

    from autoprec.execution.inductor import Order, compile_graph
    from autoprec.execution.written import read_graph

    set_switches(order["switches"])
    compile_whole_files()
    for graph in order["graphs"]:
        module, examples, mode = read_graph(graph)
        with tracing(TracingContext(mode)), torch.enable_grad():
            compile_graph(Order(module, examples, graph["is_lean"]))  # what it keeps is the run's to know


def _end_with(parent: int) -> None:
    """End when that process does. Processes that it has copied may hold this one's input open; on Windows, where none
    are, an orphan keeps its parent's number."""
    if os.name == "posix":
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
    else:
        os.read(0, 1)
    os._exit(1)
