"""Show messages and the progress of a run, as a bar on a terminal or as lines in a log file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fastppo.functional.scalars import describe
from fastppo.run.console import printable

if TYPE_CHECKING:
    from fastppo.data.world import World

PACKAGE_LOGGER = logging.getLogger("fastppo")
"""Parent of the loggers of all modules."""

LINE_SECONDS = 10.0
"""Seconds between two lines of progress in a log file."""

NARROW = 80
"""Terminal width in columns below which no bar is shown."""


def console_of_first(world: World, console: Console | None = None) -> Console:
    """Return the given console, or one on stderr; all ranks but the first get a quiet one.

    Raises:
        TypeError: `console` is not a rich console.
    """
    if console is not None and not isinstance(console, Console):
        raise TypeError(f"console must be a rich.console.Console, got {describe(console)}")
    if not world.is_main:
        return Console(quiet=True)
    return console or Console(stderr=True)


def say(console: Console, sentence: str, style: str = "") -> None:
    """Print a sentence without interpreting markup or control characters, and without wrapping."""
    console.print(Text(printable(sentence), style=style), soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Print log records on a console, in yellow from WARNING up."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else ""
        say(self.console, record.getMessage(), style)


def show_messages(console: Console) -> None:
    """Show the messages that FastPPO logs on this console, and no longer on an earlier one.

    Rich's `RichHandler` is not used, because it wraps long lines and would cut paths in two.
    """
    for handler in list(PACKAGE_LOGGER.handlers):
        if isinstance(handler, ConsoleHandler):
            PACKAGE_LOGGER.removeHandler(handler)
    PACKAGE_LOGGER.addHandler(ConsoleHandler(console))
    PACKAGE_LOGGER.setLevel(logging.INFO)


@contextmanager
def only_warnings() -> Iterator[None]:
    """Log no message below WARNING within the block."""
    before = PACKAGE_LOGGER.level
    PACKAGE_LOGGER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        PACKAGE_LOGGER.setLevel(before)


@contextmanager
def progress(
    title: str, console: Console, *, total: int | None = None, completed: int = 0
) -> Iterator[Callable[..., None]]:
    """Show the progress of a run; yields `update(completed=…, total=…, status=…)`.

    On a terminal it is a bar. Elsewhere the first and the last update are printed as lines, and one
    update every `LINE_SECONDS`.
    """
    columns = [
        TextColumn(title, table_column=Column(no_wrap=True, min_width=len(title))),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=len(f"{total}") * 2 + 1)),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    ]
    if console.width >= NARROW:
        columns.insert(1, BarColumn())
    # The speed is the mean over all steps but the first, which compiles kernels.
    bars = Progress(*columns, console=console, speed_estimate_period=math.inf)
    bars.add_task(title, total=total, completed=completed, status="")
    (task,) = bars.tasks
    if console.is_terminal:
        with bars:
            yield lambda **changed: bars.update(task.id, **changed)
        return
    start = console.get_time()
    shown_at = -math.inf
    shown: tuple[float, str] | None = None

    def show() -> None:
        nonlocal shown, shown_at
        status = task.fields["status"]
        if task.completed == completed or shown == (task.completed, status):
            return
        shown = (task.completed, status)
        shown_at = console.get_time()
        parts = [f"{title} {task.completed}/{task.total or '?'}", status]
        parts.append(f"{shown_at - start:.0f} s")
        if task.time_remaining:
            parts[-1] += f", {timedelta(seconds=math.ceil(task.time_remaining))} left"
        say(console, "  ".join(filter(None, parts)))

    def update(**changed: Any) -> None:
        bars.update(task.id, **changed)
        if console.get_time() - shown_at >= LINE_SECONDS:
            show()

    yield update
    show()
