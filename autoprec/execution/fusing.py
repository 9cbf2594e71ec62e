"""Code for a CPU of a plan that was made for little memory: nothing is held that need not be.

torch's compiler puts ops that read the same tensor into one kernel, and kernels that follow each other into one
function, for whose time all that any of them reads or writes is there; and what is not needed any more it holds until
something of the same size is. That saves reads, calls and allocations, and little or no time on the suite, whose
peaks it raised by up to 18 % (docs/measurements/lowering.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.dependencies import Dep
from torch._inductor.scheduler import BaseSchedulerNode, BaseScheduling, Scheduler
from torch._inductor.virtualized import V

__all__ = ["INPUT", "lean_code"]

#: How torch names parameters, buffers and inputs of a graph.
INPUT = "primals_"

#: Bytes that a fusion, or a function, may hold more: biases, scales and statistics. Functions of less than that are not
#: worth a call of the C++ compiler each.
_FEW_BYTES = 1 << 16


@contextmanager
def lean_code() -> Iterator[None]:
    """What this thread compiles meanwhile is fused where that holds no more bytes at once, and lets go of what nobody
    needs any more. The kernels are otherwise torch's."""
    init_backend_registration()
    cpu = device_codegens["cpu"]
    if not isinstance(cpu.scheduling, _Scheduling):
        device_codegens["cpu"] = dataclasses.replace(cpu, scheduling=_Scheduling(cpu.scheduling))
    with V.set_choices_handler(_LeanChoices()), inductor_config.patch(allow_buffer_reuse=False):
        yield


class _LeanChoices(InductorChoices):
    """torch's own choices of what becomes one kernel, without those that hold more."""

    @staticmethod
    def can_fuse_horizontal(
        scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """Whether two nodes that do not depend on each other may become one."""
        first, second = sorted((node1, node2), key=lambda n: n.min_order)
        may = InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
        return may and not _holds_both(first, second)

    @staticmethod
    def can_fuse_vertical(
        scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """Whether `node2` may become one with `node1`, whose results it reads."""
        may = InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
        return may and not _is_made_too_early(scheduler, node1, node2)


def _follows(first: BaseSchedulerNode, second: BaseSchedulerNode) -> bool:
    """Whether nothing runs between them."""
    return second.min_order <= first.max_order + 1


def _holds_both(first: BaseSchedulerNode, second: BaseSchedulerNode) -> bool:
    """Whether one kernel of both would have beside what the second makes what the first could let go of. With others in
    between, the first waits for them, and so does what reads its results, and holds other things until then."""
    if not _follows(first, second):
        return sum(_bytes((*n.read_writes.reads, *n.read_writes.writes)) for n in (first, second)) > _FEW_BYTES
    let_go = _bytes(first.read_writes.reads, but={d.name for d in second.read_writes.reads})
    return min(let_go, _bytes(second.read_writes.writes)) > _FEW_BYTES


def _is_made_too_early(scheduler: Scheduler, first: BaseSchedulerNode, second: BaseSchedulerNode) -> bool:
    """Whether the second would make, before what runs in between, more than then need not be stored any more: results
    of the first that nobody else reads."""
    if _follows(first, second):
        return False
    inner = {n.get_name() for n in (*first.get_nodes(), *second.get_nodes())}
    users = {d: {u.node.get_name() for u in scheduler.name_to_buf[d.name].users} for d in first.read_writes.writes}
    spared = _bytes(d for d, names in users.items() if names <= inner)
    return _bytes(second.read_writes.writes) > spared + _FEW_BYTES


def _bytes(accesses: Iterable[Dep], but: Container[str] = ()) -> int:
    """Of what is read or written; inputs of the graph are there before and after, and do not count."""
    named = {d.name: d for d in accesses if d.name not in but and not d.name.startswith(INPUT)}
    return sum(V.graph.get_dep_size_hint(d) for d in named.values())


class _OneByOne(CppScheduling):
    """torch's backend of a CPU, but each kernel is a function of its own, with no more than a few bytes beside it."""

    def ready_to_flush(self) -> bool:
        """Whether the function that is being written is whole."""
        accesses = (n.read_writes for n in self.kernel_group.scheduled_nodes)
        return super().ready_to_flush() or sum(_bytes(a.reads) + _bytes(a.writes) for a in accesses) > _FEW_BYTES


class _Scheduling:
    """What torch has registered for a CPU, and `_OneByOne` where this thread compiles lean code. torch has one registry
    for all threads, so this stays there. A backend that somebody else has chosen makes functions as it likes."""

    def __init__(self, registered: Callable[[Any], BaseScheduling]) -> None:
        self._registered = registered

    def __call__(self, scheduler: Scheduler | None) -> BaseScheduling:
        found = self._registered(scheduler)
        is_lean = type(found) is CppScheduling and isinstance(V.choices, _LeanChoices)
        return _OneByOne(scheduler) if is_lean else found
