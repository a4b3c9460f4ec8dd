"""What a run is doing at the moment: its phase, and how much of it is done.

Code deep inside a phase, such as a decoder or the turns of an episode, reports its progress here,
and the console of the run shows it (`fastppo.run.progress`). Outside of `shown_by`, and in threads
that the code starts itself, the reports go nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase in progress."""

    name: str
    """Participle, such as `generating`."""
    start: float
    """Time when the phase began, seconds."""
    stage: str = ""
    """Part of the phase, such as `turn 2`."""
    done: int = 0
    """Finished items of the stage."""
    total: int = 0
    """Items of the stage; 0 if they are not counted."""

    def __str__(self) -> str:
        counted = f"{self.done} of {self.total} done" if self.total else ""
        return ", ".join(filter(None, (self.name, self.stage, counted)))


class Activity:
    """The current phase of a run.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.phase: Phase | None = None
        """None between two phases."""

    def __str__(self) -> str:
        """Return the phase with its progress and elapsed time, or "" between two phases."""
        phase = self.phase  # another thread may replace it
        return "" if phase is None else f"{phase}, {self.clock() - phase.start:.0f} s"

    @property
    def seconds(self) -> float:
        """Seconds since the phase began; 0 between two phases."""
        phase = self.phase
        return 0.0 if phase is None else self.clock() - phase.start


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)


@contextmanager
def shown_by(activity: Activity) -> Iterator[None]:
    """Send the reports of the block to `activity`."""
    token = _current.set(activity)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def during(name: str) -> Iterator[None]:
    """Report a phase for the block. Another phase within it interrupts this one."""
    activity = _current.get()
    if activity is None:
        yield
        return
    outer = activity.phase
    activity.phase = Phase(name, activity.clock())
    try:
        yield
    finally:
        activity.phase = outer


def begin_stage(name: str) -> None:
    """Report the next part of the phase, such as `turn 2`."""
    _change(stage=name, done=0, total=0)


def begin_count(total: int) -> None:
    """Report that `total` items follow in this stage."""
    _change(done=0, total=total)


def count(items: int = 1) -> None:
    """Report that more items are done."""
    activity = _current.get()
    if activity is not None and activity.phase is not None:
        _change(done=activity.phase.done + items)


def counted(items: Sequence[Item], stage: str = "") -> Iterator[Item]:
    """Yield the items, and report each as done when the next one is requested."""
    begin_stage(stage)
    begin_count(len(items))
    for item in items:
        yield item
        count()


def _change(**fields: Any) -> None:
    activity = _current.get()
    if activity is not None and activity.phase is not None:
        activity.phase = replace(activity.phase, **fields)
