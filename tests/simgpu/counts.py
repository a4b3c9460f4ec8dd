"""Launches and waits of the host, by phase and by line of the project."""

from __future__ import annotations

import collections
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fastppo", "kernels", "benchmarks", "examples")
"""Of the project, without its tests. The repository's own name may be that of a package."""

LIBRARIES = ("transformers", "peft")


class Counts:
    """Counters of operations, by phase.

    Attributes:
        launches: of kernels and copies: {phase: {(operation, place): count}}.
        waits: of the host for the device, in the same form.
        calls: how often a phase was entered.
        phase: the current phase.
    """

    def __init__(self) -> None:
        self.phase = "setup"
        self.paused = False
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        counter = collections.Counter[tuple[str, str]]
        self.launches: dict[str, collections.Counter[tuple[str, str]]]
        self.waits: dict[str, collections.Counter[tuple[str, str]]]
        self.launches = collections.defaultdict(counter)
        self.waits = collections.defaultdict(counter)
        self.calls: collections.Counter[str] = collections.Counter()

    def add(self, operation: str, *, launches: int = 1, waits: int = 0) -> None:
        """Count an operation at the current place."""
        if self.paused:
            return
        key = operation, place()
        if launches:
            self.launches[self.phase][key] += launches
        if waits:
            self.waits[self.phase][key] += waits

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what happens in the block under a phase."""
        before, self.phase = self.phase, phase
        self.calls[phase] += 1
        try:
            yield
        finally:
            self.phase = before

    def launches_in(self, phase: str) -> int:
        """Return the launches of all calls of a phase."""
        return sum(self.launches[phase].values())

    def waits_in(self, phase: str) -> int:
        """Return the waits of all calls of a phase."""
        return sum(self.waits[phase].values())

    def places_of_waits(self, phase: str) -> list[str]:
        """Return one line per wait of a phase: how often, what, where."""
        found = self.waits[phase].most_common()
        return [f"{count} x {operation} at {where}" for (operation, where), count in found]

    def summary(self) -> dict[str, Any]:
        """Return calls, launches, waits and places of waits, by phase."""
        return {
            "calls": dict(self.calls),
            "launches": {phase: self.launches_in(phase) for phase in self.launches},
            "waits": {phase: self.waits_in(phase) for phase in self.waits},
            "places": {phase: self.places_of_waits(phase) for phase in self.waits},
        }


counts = Counts()


def place() -> str:
    """Return the innermost line of the project, and the library's line that it called.

    Autograd runs on a thread without Python frames. It counts at the line that called `backward`.
    """
    found = _place_in(sys._getframe(2))
    if found is None:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        found = _place_in(main)
    return found or "elsewhere"


def _place_in(frame: FrameType | None) -> str | None:
    library = ""
    while frame is not None:
        kind, name = _file(frame.f_code.co_filename)
        if kind == "project":
            return f"{name}:{frame.f_lineno}{library}"
        if kind == "library" and not library:
            library = f" < {name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache
def _file(path: str) -> tuple[str, str]:
    """Return whether a file belongs to the project or to a library, and its short name."""
    parts = Path(path).parts
    if "site-packages" in parts:
        inside = parts[len(parts) - parts[::-1].index("site-packages") :]
        return ("library" if inside[0] in LIBRARIES else "other"), "/".join(inside)
    if Path(path).is_relative_to(ROOT):
        inside = Path(path).relative_to(ROOT).parts
        if inside[0] in FOLDERS:
            return "project", "/".join(inside)
    return "other", path
