"""`autoprec demo`: run it, show progress, and answer whether everything held that has to."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autoprec.cli.output import progress_console, show

__all__ = ["show_demo"]


def show_demo(seeds: int, *, as_json: bool) -> int:
    """Run the demo; 1 if a claim does not hold."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        part = bar.add_task("loading torch", total=None)
        from autoprec.demo.report import demo_data, demo_tables
        from autoprec.demo.run import parts, run_demo

        total = parts(seeds)
        begun = iter(range(total))
        demo = run_demo(seeds, lambda what: bar.update(part, description=what, total=total, completed=next(begun)))
    data = demo_data(demo)
    show(data, *demo_tables(demo), as_json=as_json)
    return 0 if data["holds"] else 1
