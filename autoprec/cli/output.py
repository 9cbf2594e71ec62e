"""What commands print: tables for people on a console, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console, RenderableType

__all__ = ["console", "progress_console", "show"]

#: Columns where the output is no terminal, so that a table in a file or a pipe is not squeezed.
FILE_COLUMNS = 160


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The command answers a closed pipe, as it does where it prints JSON."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output. Op ids hold brackets and colons, so nothing in a text is markup."""
    width = None if sys.stdout.isatty() else FILE_COLUMNS
    return _Console(width=width, markup=False, emoji=False, highlight=False)


def progress_console() -> Console:
    """Standard error, for progress."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def show(data: dict[str, Any], *tables: RenderableType | None, as_json: bool) -> None:
    """Print the data as JSON, or the tables."""
    if as_json:
        print(json.dumps(_plain(data), indent=1, ensure_ascii=not _has_all_of_unicode(), allow_nan=False))
        return
    out = console()
    for i, table in enumerate(t for t in tables if t is not None):
        if i:
            out.print()
        out.print(table)


def _has_all_of_unicode() -> bool:
    """Whether standard output has; elsewhere JSON has escapes of its own."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def _plain(value: Any) -> Any:
    """Without non-finite numbers, which JSON does not know: null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
