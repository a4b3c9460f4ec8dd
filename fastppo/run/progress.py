"""Show messages and the progress of a run, as a bar on a terminal or as lines in a log file."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from fastppo.activity import Activity, shown_by
from fastppo.functional.scalars import describe
from fastppo.run.console import printable

if TYPE_CHECKING:
    from fastppo.data.world import World

PACKAGE_LOGGER = logging.getLogger("fastppo")
"""Parent of the loggers of all modules."""

LINE_SECONDS = 10.0
"""Seconds between two lines of progress in a log file."""

PHASE_SECONDS = 30.0
"""Seconds without a line in a log file after which the current phase is printed."""

SHOWN_PHASE_SECONDS = 2.0
"""Seconds after which a terminal shows the current phase; shorter ones would flicker."""

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


class _Bars(Progress):
    """Progress bars, with a line below on the current phase."""

    def __init__(self, *columns: ProgressColumn, activity: Activity, **options: Any) -> None:
        self.activity = activity
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.activity.seconds >= SHOWN_PHASE_SECONDS:
            yield Text(printable(str(self.activity)), style="dim", no_wrap=True)


class _Lines:
    """Progress as lines of a log file.

    Args:
        bars: hold the step, the status and the estimate of the time left.
    """

    def __init__(self, title: str, bars: _Bars, completed: int) -> None:
        self.title = title
        self.bars = bars
        self.console = bars.console
        self.completed = completed
        self.start = self.console.get_time()
        self.shown_at = -math.inf
        self.shown: tuple[float, str] | None = None
        self.lock = threading.Lock()

    def update(self, **changed: Any) -> None:
        """Take the next step, and show it if the last line is old enough."""
        (task,) = self.bars.tasks
        self.bars.update(task.id, **changed)
        if self.console.get_time() - self.shown_at >= LINE_SECONDS:
            self.show()

    def show(self) -> None:
        """Print the step if it is a new one."""
        (task,) = self.bars.tasks
        status = task.fields["status"]
        if task.completed == self.completed or self.shown == (task.completed, status):
            return
        self.shown = (task.completed, status)
        seconds = f"{self.console.get_time() - self.start:.0f} s"
        if task.time_remaining:
            seconds += f", {timedelta(seconds=math.ceil(task.time_remaining))} left"
        self._say(f"{task.completed}/{task.total or '?'}", status, seconds)

    def show_phase(self) -> None:
        """Print the current phase if it is a long one, and no line was printed meanwhile."""
        now = self.console.get_time()
        if min(self.bars.activity.seconds, now - self.shown_at) >= PHASE_SECONDS:
            (task,) = self.bars.tasks
            self._say(f"{task.completed + 1}/{task.total or '?'}", str(self.bars.activity))

    def _say(self, step: str, *parts: str) -> None:
        with self.lock:
            self.shown_at = self.console.get_time()
            say(self.console, "  ".join(filter(None, (f"{self.title} {step}", *parts))))


@contextmanager
def progress(
    title: str, console: Console, *, total: int | None = None, completed: int = 0
) -> Iterator[Callable[..., None]]:
    """Show the progress of a run; yields `update(completed=…, total=…, status=…)`.

    On a terminal it is a bar, and a line below it has the phase that the code within the block
    reports (`fastppo.activity`). Elsewhere the first and the last update are printed as lines, one
    update every `LINE_SECONDS`, and the current phase when there was no line for `PHASE_SECONDS`.
    """
    columns: list[ProgressColumn] = [
        TextColumn(title, table_column=Column(no_wrap=True, min_width=len(title))),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=len(f"{total}") * 2 + 1)),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    ]
    if console.width >= NARROW:
        columns.insert(1, BarColumn())
    activity = Activity(console.get_time)
    # The speed is the mean over all steps but the first, which compiles kernels.
    bars = _Bars(*columns, activity=activity, console=console, speed_estimate_period=math.inf)
    task = bars.add_task(title, total=total, completed=completed, status="")
    if console.is_terminal:
        with bars, shown_by(activity):
            yield lambda **changed: bars.update(task, **changed)
        return
    lines = _Lines(title, bars, completed)
    with shown_by(activity), _every_second(lines.show_phase):
        yield lines.update
    lines.show()


@contextmanager
def _every_second(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` every second in another thread during the block."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(1.0):
            act()

    thread = threading.Thread(target=repeat, name="fastppo-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
