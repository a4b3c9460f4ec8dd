"""Messages and the progress bar of a run, on a terminal or as lines of a log file.

The remaining time is estimated from the steps after the first, which compiles kernels and fills
caches, once there are `STEPS_FOR_ESTIMATE` of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from fastppo.functional.scalars import describe
from fastppo.run.console import printable

if TYPE_CHECKING:
    from fastppo.data.world import World

LINE_SECONDS = 10.0
"""Between two lines of progress in a log file."""

STEPS_FOR_ESTIMATE = 3
"""Steps after the first that an estimate of the remaining time needs."""

NARROW = 80
"""Columns of a terminal below which numbers take the bar's place."""


def console_of_first(world: World, console: Console | None = None) -> Console:
    """The console that is given, or stderr; of a process that is not the first one that is quiet.

    Raises:
        TypeError: it is no console.
    """
    if console is not None and not isinstance(console, Console):
        raise TypeError(f"console must be a rich.console.Console, got {describe(console)}")
    if not world.is_main:
        return Console(quiet=True)
    return console or Console(stderr=True)


def say(console: Console, sentence: str, style: str = "") -> None:
    """Shows a sentence as it is, on one line where it goes to a file: brackets in names are no
    markup, and what would steer a terminal is escaped."""
    console.print(Text(printable(sentence), style=style), soft_wrap=True)


@contextmanager
def progress(
    title: str, console: Console, *, total: int | None = None, completed: int = 0
) -> Iterator[Callable[..., None]]:
    """Shows how far a run is: gives `update(completed=…, total=…, status=…)`.

    A bar on a terminal; elsewhere a line, the first and last ones and one every `LINE_SECONDS`.
    """
    if not console.is_terminal:
        lines = _ProgressLines(title, console, total=total, completed=completed)
        yield lines.update
        lines.show()
        return
    columns = [
        TextColumn(title, table_column=Column(no_wrap=True, min_width=len(title))),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=len(f"{total}") * 2 + 1)),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
    ]
    if console.width >= NARROW:
        columns.insert(1, BarColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(title, total=total, completed=completed, status="", left="")
        pace = _Pace(completed)

        def update(**fields: Any) -> None:
            bars.update(task, **fields)
            done = bars.tasks[0]
            bars.update(task, left=pace.left(int(done.completed), done.total))

        yield update


class _Pace:
    """Estimates the remaining time from the duration of the steps so far."""

    def __init__(self, completed: int) -> None:
        self._first = completed + 1
        self._start: float | None = None
        """When the first step ended, seconds."""

    def left(self, completed: int, total: float | None) -> str:
        """The remaining time as text; empty before there is an estimate."""
        now = time.monotonic()
        if self._start is None and completed >= self._first:
            self._start = now
            self._first = completed
        steps = completed - self._first
        if self._start is None or total is None or steps < STEPS_FOR_ESTIMATE or completed >= total:
            return ""
        seconds = (now - self._start) / steps * (total - completed)
        minutes, rest_seconds = divmod(round(seconds), 60)
        return f"{minutes} min {rest_seconds} s left" if minutes else f"{rest_seconds} s left"


class _ProgressLines:
    """Prints progress as lines instead of a bar."""

    def __init__(self, title: str, console: Console, *, total: int | None, completed: int) -> None:
        self.title = title
        self.console = console
        self.total = total
        self.completed = completed
        self.status = ""
        self._first = completed
        self._pace = _Pace(completed)
        self._left = ""
        self._start = time.monotonic()
        self._shown_at = -math.inf
        self._shown: tuple[int, str] = (completed, "")

    def update(self, **changed: Any) -> None:
        """Takes the arguments that `progress` describes; prints a line if the last one is old
        enough."""
        self.total = changed.get("total", self.total)
        self.completed = changed.get("completed", self.completed)
        self.status = changed.get("status", self.status)
        self._left = self._pace.left(self.completed, self.total)
        if time.monotonic() - self._shown_at >= LINE_SECONDS:
            self.show()

    def show(self) -> None:
        """A line, unless it has been shown."""
        if self._shown == (self.completed, self.status) or self.completed == self._first:
            return
        self._shown = (self.completed, self.status)
        self._shown_at = time.monotonic()
        seconds = self._shown_at - self._start
        line = f"{self.title} {self.completed}/{self.total or '?'}"
        if self.status:
            line += f"  {self.status}"
        line += f"  {seconds:.0f} s"
        if self._left:
            line += f", {self._left}"
        say(self.console, line)
