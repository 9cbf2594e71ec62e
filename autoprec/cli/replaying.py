"""`autoprec replay`: a recorded planning problem, solved again."""

from __future__ import annotations

from pathlib import Path

from autoprec.cli.output import progress_console, show
from autoprec.planning.replays import replay
from autoprec.reporting.replays import replay_data, replay_tables
from autoprec.serial import read_case

__all__ = ["show_replay"]


def show_replay(path: Path, *, as_json: bool) -> int:
    """Solve a case by every solver that can; 1 if they do not agree."""
    case = read_case(path)
    with progress_console().status("solving") as status:
        found = replay(case, begin=lambda name: status.update(f"solving by {name}"))
    show({"case": str(path), **replay_data(case, found)}, *replay_tables(case, found), as_json=as_json)
    return 1 if found.complaints else 0
