"""The times of a simulated step.

An op has a forward and a backward *moment*. Each moment has two *phases*: one in which the op runs, and one in which
the tensors that it is the first to read are cast, before its forward pass, and their gradients are cast back, after its
backward pass. So the gradient in the format of the readers, and the one in which the tensor was born, are both held
while nothing else is.
"""

from __future__ import annotations

__all__ = ["NEVER", "Phases"]

#: A moment before all others.
NEVER = -1


class Phases:
    """The moments and phases of the ops of a problem."""

    ops: tuple[str, ...]

    def backward(self, moment: int) -> int:
        """The moment at which the op of a forward moment runs backward."""
        return 2 * len(self.ops) - 1 - moment

    @property
    def phases(self) -> int:
        """How many there are."""
        return 4 * len(self.ops)

    def phase(self, moment: int) -> int:
        """The phase in which the op of a (forward or backward) moment runs."""
        return 2 * moment + (moment < len(self.ops))

    def cast_phase(self, moment: int) -> int:
        """The phase of a moment in which casts are made."""
        return 2 * moment + (moment >= len(self.ops))

    def with_casts(self, first: int, last: int) -> tuple[int, int]:
        """From one backward moment to another: also while the gradients of the moments before and of the last are
        cast."""
        return self.phase(first) if first == len(self.ops) else self.cast_phase(first - 1), self.cast_phase(last)

    def phase_name(self, phase: int) -> str:
        """A phase for people: "forward of blocks.0:linear#0"."""
        moment = phase // 2
        cast = "" if phase == self.phase(moment) else "casts of the "
        return f"{cast}{'forward' if moment < len(self.ops) else 'backward'} of {self.op_at(moment)}"

    def op_at(self, moment: int) -> str:
        """The op that runs, forward or backward, at a moment."""
        return self.ops[moment] if moment < len(self.ops) else self.ops[self.backward(moment)]
