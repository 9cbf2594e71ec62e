"""When precision is raised by the policy's schedule, in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction

from autoprec.errors import InputError
from autoprec.graphs import OpGraph
from autoprec.policies import Policy, Raise

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Entries of a policy's schedule, each with the number of optimizer steps after which it counts."""

    entries: tuple[tuple[int, Raise], ...] = ()

    @classmethod
    def of(cls, policy: Policy, total_steps: int | None) -> Schedule:
        """`InputError` for a share of the planned steps where nobody says how many those are."""
        found = []
        for i, entry in enumerate(policy.schedule):
            after = entry.after
            if after < 1.0:
                if total_steps is None:
                    raise InputError(
                        f"schedule[{i}].after is {after:g} of the planned steps of policy {policy.name!r}: say how many"
                        " those are, compile(…, total_steps=100_000), or give a number of steps"
                    )
                after = math.ceil(Fraction(str(after)) * total_steps)  # as it is written: 0.07 of 100 is 7
            found.append((int(after), entry))
        return cls(entries=tuple(found))

    def due(self, steps: int, raised: Collection[int]) -> frozenset[int]:
        """Numbers of the entries that count after so many steps, without those that the plan knows (`raised`)."""
        return frozenset(i for i, (after, _) in enumerate(self.entries) if after <= steps) - frozenset(raised)

    def banned(
        self, steps: int, graph: OpGraph | None, formats: Iterable[str], raised: Collection[int] = ()
    ) -> frozenset[tuple[str, str, str]]:
        """(op, format, role) that no plan may have by now. What was `raised` stays so, also where a run goes on with
        more steps planned."""
        if graph is None:
            return frozenset()
        begun = [e for i, (after, e) in enumerate(self.entries) if after <= steps or i in raised]
        formats = tuple(formats)
        return frozenset(ban for entry in begun for op in graph.ops for ban in entry.bans(op, formats))

    def said(self, steps: int, due: Collection[int]) -> str:
        """What begins to count after so many steps, for people; "" if nothing does."""
        texts = [_text(e) + _late(steps - after) for i, (after, e) in enumerate(self.entries) if i in due]
        return f"after {steps} steps {', '.join(texts)}" if texts else ""


def _late(steps: int) -> str:
    return f" ({steps} steps after it was due)" if steps else ""


def _text(entry: Raise) -> str:
    roles = f" ({', '.join(entry.roles)})" if entry.roles else ""
    return f"{entry.match!r}{roles} to {entry.to} or wider"
