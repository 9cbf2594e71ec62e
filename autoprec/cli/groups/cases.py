"""Commands that speak of planning problems: replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.command import Json, command

__all__ = ["replay"]


@command
def replay(
    case: Annotated[Path, typer.Argument(metavar="CASE", help="What plan --save-case wrote.")],
    json: Json = False,
) -> int:
    """Solve a recorded planning problem by every solver.

    Exit code 1 if the solvers differ by more than their gaps, or from the objective in the file, or if the evaluator
    does not allow a choice.
    """
    from autoprec.cli.replaying import show_replay

    return show_replay(case, as_json=json)
