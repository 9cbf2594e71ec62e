"""`autoprec tensorboard`: what a run's file of events says, as curves and texts that TensorBoard shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from autoprec.cli.output import console
from autoprec.cli.watching import check_interval, opened
from autoprec.errors import InputError
from autoprec.plans import Event
from autoprec.reporting.curves import Curves, is_told
from autoprec.reporting.runs import WatchedRun
from autoprec.reporting.runs import follow as follow_run
from autoprec.serial.events import EventsFile

__all__ = ["write_curves"]


def write_curves(run: Path, logdir: Path, interval_seconds: float, *, follow: bool) -> int:
    """Write all that there is into a folder, and with `follow` what comes, until Ctrl-C."""
    check_interval(interval_seconds)
    writer_of = _summary_writer()
    if logdir.exists() and (not logdir.is_dir() or any(logdir.glob("events.out.tfevents.*"))):
        what = "has TensorBoard's files in it already" if logdir.is_dir() else "is no folder"
        raise InputError(f"{logdir}: {what}; name a new folder, since each of its points would be there twice")
    file = opened(run, list, _extended)
    try:
        curves = _Written(writer_of, logdir)
        told = curves.write(file.run)
    except OSError as error:
        raise InputError(f"{logdir}: cannot be written: {error.strerror or error}; check its permissions") from error
    console().print(f"{told} points of {file.path}: tensorboard --logdir {logdir}", soft_wrap=True)
    while follow:
        time.sleep(interval_seconds)
        _read_on(file)
        curves.write(file.run)
    return 0


def _read_on(file: EventsFile[list[Event]]) -> None:
    try:
        file.read()
    except FileNotFoundError:
        return  # gone; a run that goes on from a checkpoint writes a new one


def _extended(known: list[Event], events: Sequence[Event]) -> list[Event]:
    follow_run(WatchedRun(), events)  # here the reader of the file knows the line of what cannot be read
    known.extend(events)
    return known


class _Written:
    """What was written of a list of events that grows, or is another one from some place on: a run that went on from a
    checkpoint takes its later events out of the file. TensorBoard then drops the points from that step on."""

    def __init__(self, writer_of: Any, logdir: Path) -> None:
        self._writer_of, self._logdir = writer_of, logdir
        self._begin(None)

    def _begin(self, purge_step: int | None) -> None:
        self._writer = self._writer_of(str(self._logdir), purge_step=purge_step)
        self._curves, self._events = Curves(), list[Event]()

    def write(self, events: Sequence[Event]) -> int:
        """Write what is new; how many points that were."""
        if self._events != events[: len(self._events)]:
            pairs = enumerate(zip_longest(self._events, events))
            same = next(i for i, (before, now) in pairs if before != now)
            step = min(e.step for e in (*self._events[same:], *events[same:]))
            self._writer.close()
            self._begin(step)
        else:
            step = 0
        new = list(events[len(self._events) :])
        points = [p for p in self._curves.after(new) if p.step >= step]
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.step)
        for event in filter(is_told, new):
            if event.step >= step:
                self._writer.add_text(f"events/{event.kind}", _text(event), event.step)
        self._events += new
        self._writer.flush()
        return len(points)


def _text(event: Event) -> str:
    """In Markdown, where nothing of it is markup."""
    change = f" {event.was or 'fp32'} → {event.now}" if event.now else ""
    return f"    {event.op}{change} {event.trigger}: {' '.join(event.evidence.split())}"


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(f"TensorBoard is not there ({error}); pip install 'autoprec[tensorboard]'") from None
    return SummaryWriter
