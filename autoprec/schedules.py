"""When precision is raised by the policy's schedule, in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autoprec.errors import InputError
from autoprec.formats import format_named
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
                after = math.ceil(after * total_steps)
            found.append((int(after), entry))
        return cls(entries=tuple(found))

    def is_due(self, steps: int) -> bool:
        """Whether an entry begins to count after so many steps."""
        return any(after == steps for after, _ in self.entries)

    def banned(self, steps: int, graph: OpGraph | None, formats: Iterable[str]) -> frozenset[tuple[str, str, str]]:
        """(op, format, role) that no plan may have by now."""
        if graph is None:
            return frozenset()
        narrow = {e: [f for f in formats if format_named(f).bits < format_named(e.to).bits] for e in self._begun(steps)}
        return frozenset(
            (op.id, name, str(role))
            for entry, names in narrow.items()
            for op in graph.ops
            for role in entry.roles_of(op)
            for name in names
        )

    def said(self, steps: int) -> str | None:
        """What begins to count after so many steps, for people."""
        due = [entry for after, entry in self.entries if after == steps]
        texts = [_text(e) for e in due]
        return f"after {steps} steps {', '.join(texts)}" if due else None

    def _begun(self, steps: int) -> list[Raise]:
        return [entry for after, entry in self.entries if after <= steps]


def _text(entry: Raise) -> str:
    roles = f" ({', '.join(entry.roles)})" if entry.roles else ""
    return f"{entry.match!r}{roles} to {entry.to} or wider"
