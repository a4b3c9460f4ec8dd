"""The interface of trackers, which show the records of a run elsewhere.

`report_to` names entry points of the group `fastppo.trackers`. TensorBoard is always on.
"""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fastppo.data.files import write_whole
from fastppo.plugins import entry_points
from fastppo.run.options import Options

FILE = "trackers.json"

PROJECT = "fastppo"
"""The project in a tracker, unless an environment variable names another."""


class TrackedRun:
    """The name and ids of a run in its trackers, saved in its directory for a resume.

    The name is that of the directory with the time of the first start.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._path = self.directory / FILE
        self.ids: dict[str, str] = {}
        """The id of the run by tracker."""
        self.name = f"{self.directory.resolve().name}-{datetime.now():%Y%m%d-%H%M%S}"
        if self._path.exists():
            self.ids = json.loads(self._path.read_text("utf-8"))
            self.name = self.ids.pop("run_name")

    def keep(self, **ids: str) -> None:
        """Add ids and save them with the name."""
        self.ids |= ids
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"run_name": self.name, **self.ids}, indent=1)
        write_whole(self._path, text)


class Tracker(ABC):
    """A tracker of a run. Its module must be importable without the package of the tracker.

    Args:
        run: name, directory and earlier ids of the run.
        config: the options.
        first: number of the next record; larger than 0 after a resume.
    """

    requirement = ""
    """Name for pip of a package that is not installed with the tracker."""

    @abstractmethod
    def __init__(self, run: TrackedRun, config: Options, *, first: int = 0) -> None: ...

    @abstractmethod
    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str]) -> None:
        """Track the metrics and warnings of an iteration or step, counted from 0."""

    def samples(self, number: int, samples: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Track samples of the training responses, as in samples.jsonl."""

    @abstractmethod
    def close(self) -> None:
        """End the tracking, also after an error."""


def load_tracker(name: str) -> type[Tracker]:
    """Return the tracker of this name.

    Raises:
        ImportError: its package is not installed.
    """
    tracker: type[Tracker] = entry_points.load(entry_points.TRACKERS, name)
    needed = tracker.requirement
    if needed and importlib.util.find_spec(needed) is None:
        raise ImportError(f"report_to={name} needs {needed}: pip install {needed}")
    return tracker
