"""The report of a run: one HTML file, with its pictures inside and nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autoprec.errors import InputError
from autoprec.graphs import Role
from autoprec.plans import Event
from autoprec.reporting.histories import RunHistory, history_of
from autoprec.reporting.timelines import curves_svg, formats_svg
from autoprec.reporting.watching import run_header
from autoprec.serial.files import write_text

__all__ = ["run_page", "write_page"]

#: Events that a page has rows for. A run of weeks may have any number of steps without effect.
_MOST_EVENTS = 1000


def write_page(out: Path, name: str, events: Sequence[Event]) -> RunHistory:
    """Write the page of a file of events that is called `name`. `InputError` if `out` is no page, or cannot be
    written; what `history_of` raises."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{out}: the report is an HTML page; name a file that ends in .html")
    history = history_of(events)
    write_text(out, run_page(history, name), InputError)
    return history


def run_page(history: RunHistory, name: str) -> str:
    """HTML. `name`: of the file of events."""
    pages = Environment(
        loader=PackageLoader("autoprec.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    pages.filters["dict"] = dict
    head = run_header(history.now, name)
    told = history.told[-_MOST_EVENTS:]
    return pages.get_template("run.html").render(
        title=f"autoprec: {name}",
        head=head,
        counts=history.counts,
        formats_svg=_inline(formats_svg(history)) if history.formats else "",
        curves_svg=_inline(curves_svg(history)),
        ops=history.now.ops,
        roles=tuple(Role),
        told=told,
        left_out=len(history.told) - len(told),
    )


def _inline(svg: str) -> Markup:
    """A picture as a part of a page: without what a file of its own begins with. matplotlib has escaped its texts."""
    return Markup(svg[max(svg.find("<svg"), 0) :])
