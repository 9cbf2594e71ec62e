"""What all campaigns share: what they count, and how they are run and told."""

from __future__ import annotations

import argparse
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Tally", "main", "quietly"]


@dataclass
class Tally(ABC):
    """What was counted. `left_out`: why something was not run, and how often; `reasons`: the same by name."""

    broken: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def summary(self) -> str:
        """The counts in one line."""


@contextmanager
def quietly() -> Iterator[None]:
    """One thread, because ops are small, and no advice from torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def main(
    description: str | None,
    campaign: Callable[..., Tally],
    argv: Sequence[str] | None,
    *,
    samples: bool = False,
) -> int:
    """Run a campaign from the command line: exit code 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="only these")
    if samples:
        parser.add_argument("--samples", type=int, default=1, help="samples of each, 0 for all")
    given = vars(parser.parse_args(argv))
    begin = time.perf_counter()
    tally = campaign(given["names"], *([given["samples"]] if samples else []))
    print(f"{tally.summary()}, {len(tally.broken)} broken")
    for reason, n in tally.left_out.most_common():
        print(f"  {n:5} left out: {reason}")
    for name, reason in tally.reasons.items():
        print(f"  {name}: {reason}")
    for line in tally.broken:
        print(f"RED {line}")
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if tally.broken else 0
