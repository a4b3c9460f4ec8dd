"""What a terminal, or the file in its place, shows of a run: sentences, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fastppo.run.console import printable

LINE_SECONDS = 10.0
"""Between two lines of progress in a log file."""

NARROW = 80
"""Columns of a terminal below which numbers take the bar's place."""


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
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
    ]
    if console.width >= NARROW:
        columns.insert(1, BarColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(title, total=total, completed=completed, status="")

        def update(**fields: Any) -> None:
            bars.update(task, **fields)

        yield update


class _ProgressLines:
    """Lines in the place of a bar."""

    def __init__(self, title: str, console: Console, *, total: int | None, completed: int) -> None:
        self.title = title
        self.console = console
        self.total = total
        self.completed = completed
        self.status = ""
        self._first = completed
        self._start = time.monotonic()
        self._shown_at = -math.inf
        self._shown: tuple[int, str] = (completed, "")

    def update(self, **changed: Any) -> None:
        """Takes what `progress` says, and shows it if it is time."""
        self.total = changed.get("total", self.total)
        self.completed = changed.get("completed", self.completed)
        self.status = changed.get("status", self.status)
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
        if self.total and self.completed < self.total:
            a_step = seconds / (self.completed - self._first)
            line += f", {a_step * (self.total - self.completed):.0f} s left"
        say(self.console, line)
