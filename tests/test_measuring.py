"""Bytes at the allocator, as torch's profiler tells them."""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.execution.measuring import held_bytes, peak_bytes

CPU = torch.device("cpu")


def _at(address: int, elements: int, *, tries: int = 64) -> Tensor | None:
    """A tensor at an address that was just let go of; None if the allocator has something else for it.

    An allocator that aligns takes a block again only for less than it held: it asks for room to shift in.
    """
    others = []
    for _ in range(tries):
        others.append(torch.empty(elements, dtype=torch.uint8))
        if others[-1].data_ptr() == address:
            return others.pop()
    return None


def test_what_an_earlier_run_left_at_an_address_is_no_release_of_this_one() -> None:
    """The profiler knows sizes by address, and forgets none that is let go of while it does not look."""
    taken = 0
    for size in range(4096, 65536, 1024):
        made: list[Tensor] = []
        peak_bytes(lambda: made.append(torch.empty(size, dtype=torch.uint8)), CPU)  # noqa: B023
        address = made[0].data_ptr()
        made.clear()
        other = _at(address, size - 1024)  # not seen
        if other is None:
            continue
        before, taken = [other], taken + 1
        del other

        def step() -> Tensor:
            before.clear()  # noqa: B023
            return torch.empty(1 << 20, dtype=torch.uint8)

        assert peak_bytes(step, CPU) == held_bytes(lambda: torch.empty(1 << 20, dtype=torch.uint8)) >= 1 << 20
    assert taken >= 8


def test_what_a_run_lets_go_of_leaves_room_for_what_follows() -> None:
    def step() -> Tensor:
        for _ in range(3):
            torch.empty(1 << 20, dtype=torch.uint8)
        return torch.empty(1 << 10, dtype=torch.uint8)

    assert 1 << 20 <= peak_bytes(step, CPU) < 1.1 * (1 << 20)
    assert 1 << 10 <= held_bytes(step) < 1 << 12
