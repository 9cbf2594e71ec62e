"""Other processes that train the same model.

torch's DistributedDataParallel averages the gradients of all of them, in a callback at the end of the backward pass; a
loop of one's own may do so later. A step that is bad for one is bad for all: of one average every rank makes the same
verdict, and what a rank alone can see (its buffers, its loss) is told to all.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Ranks", "may_average", "own_file"]


def may_average() -> bool:
    """Whether this is one of several processes, which may change gradients between the backward pass and the update."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def own_file(path: Path) -> Path:
    """Of several processes each writes a file of its own: `events.jsonl` is rank 0's, `events.rank3.jsonl` rank 3's."""
    rank = dist.get_rank() if may_average() else 0
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


class Ranks:
    """The processes that the model's calls are averaged over. Mutable; owned by the guard."""

    def __init__(self) -> None:
        self._ddp: weakref.ref[Any] | None = None

    def look(self) -> None:
        """A training forward pass of the model begins."""
        ddp = DistributedDataParallel._get_active_ddp_module() if may_average() else None  # type: ignore[no-untyped-call]
        averages = ddp is not None and ddp.require_backward_grad_sync
        self._ddp = weakref.ref(ddp) if averages else None

    @property
    def average(self) -> bool:
        """Whether the backward pass of the last forward pass ends with averaged gradients, in every rank at once."""
        return self._ddp is not None and self._ddp() is not None

    def spread(self, flag: Tensor) -> Tensor:
        """The largest of all ranks' flags, each of one number. All ranks have to call it; the host waits no more than
        their devices make it."""
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is not None and not ddp._join_config.enable:  # a rank without batches left would not answer
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ddp.process_group)
        return flag
