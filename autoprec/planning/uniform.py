"""One format for everything: the answers that a plan has to beat."""

from __future__ import annotations

from autoprec.formats import format_named
from autoprec.planning.solutions import Choice
from autoprec.planning.values import Problem

__all__ = ["uniform_choice"]


def uniform_choice(problem: Problem, format_name: str) -> Choice:
    """Every unit in `format_name`, saved tensors as they are.

    Units that may not have it take the option nearest in bytes, the wider one of two; tied units follow each other
    because their options are the same.
    """
    wanted = format_named(format_name).bytes
    options = []
    for unit in problem.units:
        distances = [
            (f != format_name, abs(format_named(f).bytes - wanted), -format_named(f).bytes) for f in unit.options
        ]
        options.append(distances.index(min(distances)))
    return Choice(options=tuple(options))
