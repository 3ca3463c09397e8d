"""Progress of long commands on standard error: bars on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TimeRemainingColumn,
)

from ragcache_api.cli import console as ui

LOG_SECONDS = 10.0
"""Seconds between the lines of a log."""


class StageProgress:
    """Reports the progress of stages, such as reading and encoding.

    Args:
        bars: Bars on a terminal. Without a terminal they are disabled, and lines are written.
        now: Clock, in seconds.
    """

    def __init__(self, bars: Progress, now: Callable[[], float] = time.monotonic) -> None:
        self._bars, self._now = bars, now
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[float, int]] = {}  # time, parts that were done
        self._written = now()

    def report(self, stage: str, done: int, total: int) -> None:
        """Show that a stage has done a number of parts out of a total."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._began[stage] = self._now(), done
        if not self._bars.disable:
            self._bars.update(self._tasks[stage], completed=done, total=total)
        elif total and self._now() - self._written >= LOG_SECONDS:
            self._written = self._now()
            ui.errors.print(self._line(stage, done, total), markup=False)

    def _line(self, stage: str, done: int, total: int) -> str:
        line = f"{stage}: {done:,} of {total:,} ({done / total:.0%})"
        began, before = self._began[stage]
        if not before < done < total:
            return line
        left = (self._now() - began) / (done - before) * (total - done)
        return f"{line}, about {format_duration(left)} left"


def format_duration(seconds: float) -> str:
    """Format a duration in its largest fitting unit: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def stages(*columns: ProgressColumn) -> Iterator[Callable[[str, int, int], None]]:
    """Yield `report(stage, done, total)`, which shows a bar for each stage, or lines in a log.

    Args:
        *columns: Columns of a bar after its name. Defaults to a percentage.
    """
    shown = columns or (TaskProgressColumn(),)
    with Progress(
        "{task.description}",
        BarColumn(),
        *shown,
        TimeRemainingColumn(),
        console=ui.errors,
        transient=True,
        disable=not ui.errors.is_terminal,
    ) as bars:
        yield StageProgress(bars).report


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `report(done, total)`, which shows a bar with numbers, or lines in a log."""
    with stages(MofNCompleteColumn()) as report:
        yield partial(report, label)
