"""The records of a run: `metrics.jsonl` and `samples.jsonl` in its directory, and the trackers.

Every iteration, or optimizer step of SFT and the reward model, appends one line of JSON. After a
resume, the lines past the checkpoint are deleted, since they are written again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fastppo.data.datasets import write_rows
from fastppo.data.files import append_lines, write_whole
from fastppo.data.world import World
from fastppo.run.identity import versions
from fastppo.run.options import Options
from fastppo.run.trackers import TrackedRun, load_tracker

PARTS = "parts.jsonl"
"""File with one line per start of the run."""

SAMPLES = {False: "samples.jsonl", True: "eval_samples.jsonl"}
"""Files of the responses to training prompts (False) and to held-out prompts (True)."""


class RunLog:
    """The records of a run directory.

    Args:
        config: the options, saved as config.yaml.
        index: what the records count: `iteration` or `step`.
        first: the number of the next record. Older records from there on are deleted.
        device: the device's name, for the report.
    """

    def __init__(
        self,
        directory: str | Path,
        config: Options,
        *,
        index: str = "iteration",
        first: int = 0,
        device: str = "",
    ) -> None:
        self.directory = Path(directory)
        self.index = index
        self.notes: list[str] = []
        """Messages to the user, for example about an incomplete line."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config.save(self.directory / "config.yaml")
        self._begin_part(first, device)
        for name in ("metrics.jsonl", *SAMPLES.values()):
            self.notes += cut(self.directory / name, index, first)
        run = TrackedRun(self.directory)
        names = dict.fromkeys(["tensorboard", *getattr(config, "report_to", ())])
        self._trackers = [load_tracker(name)(run, config, first=first) for name in names]

    def _begin_part(self, first: int, device: str) -> None:
        """Append the time, device and versions of this start to parts.jsonl."""
        path = self.directory / PARTS
        self.notes += cut(path, "first", sys.maxsize)  # only an incomplete last line
        started = datetime.now().astimezone().isoformat(" ", "minutes")
        part = {"first": first, "started": started, "device": device, "versions": versions()}
        append_lines(path, [part])

    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str] = ()) -> None:
        """Append a line to metrics.jsonl, and pass the metrics to the trackers.

        Args:
            warnings: sentences, written under `warnings` if there are any.
        """
        record: dict[str, Any] = {self.index: number, **metrics}
        try:
            if warnings:
                record["warnings"] = list(warnings)
            append_lines(self.directory / "metrics.jsonl", [record])
            for tracker in self._trackers:
                tracker.metrics(number, metrics, warnings)
        except OSError as error:
            raise RuntimeError(
                f"{self.directory}: records could not be written: {error}"
            ) from error

    def ended(self, reason: str) -> None:
        """Record in parts.jsonl why the run ended before its last iteration."""
        path = self.directory / PARTS
        *before, newest = read_jsonl(path)
        write_rows(path, [*before, newest | {"ended": reason}])

    def samples(
        self, number: int, samples: list[dict[str, Any]], *, held_out: bool = False
    ) -> None:
        """Append samples to samples.jsonl or eval_samples.jsonl.

        Args:
            samples: prompt, completion and reward terms of each sample, with the KL for training
                prompts.
        """
        records = [{self.index: number, **sample} for sample in samples]
        if records or not held_out:
            append_lines(self.directory / SAMPLES[held_out], records)
        if samples and not held_out:
            for tracker in self._trackers:
                tracker.samples(number, samples)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()


class SharedLog:
    """The records of a run of several ranks.

    The first rank writes them while the others wait, so that a disk error is raised on all ranks.

    Args:
        directory, config, index, first, device: as in `RunLog`.
        callbacks: `fastppo.run.callbacks.Callbacks`, notified of every record.
    """

    def __init__(
        self,
        world: World,
        directory: str | Path,
        config: Options,
        *,
        callbacks: Any = None,
        index: str = "iteration",
        first: int = 0,
        device: str = "",
    ) -> None:
        self.world = world
        self.callbacks = callbacks
        self._log: Any = None

        def begin() -> list[str]:
            self._log = RunLog(directory, config, index=index, first=first, device=device)
            return self._log.notes

        self.notes = world.on_main_rank(begin)

    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str] = ()) -> None:
        self.world.on_main_rank(lambda: self._log.metrics(number, metrics, warnings))
        if self.callbacks is not None:
            self.callbacks.logged(number, metrics)

    def ended(self, reason: str) -> None:
        self.world.on_main_rank(lambda: self._log.ended(reason))

    def failed(self, error: Exception) -> None:
        """Record an error that ended the run.

        The error may be local to this rank, so do not synchronize. An error of the disk must not
        replace it.
        """
        if self.world.is_main:
            with suppress(OSError, RuntimeError, ValueError):
                self._log.ended(str(error) or type(error).__name__)

    def samples(
        self, number: int, samples: list[dict[str, Any]], *, held_out: bool = False
    ) -> None:
        self.world.on_main_rank(lambda: self._log.samples(number, samples, held_out=held_out))
        if self.callbacks is not None and samples and not held_out:
            self.callbacks.tell("on_samples", samples=samples)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def why_ended(run_dir: str | Path) -> str:
    """Return why the latest start of a run ended before its last iteration, or ""."""
    parts = read_jsonl(Path(run_dir) / PARTS)
    return str(parts[-1].get("ended", "")) if parts else ""


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """Return the shortest endings that tell the paths apart: `a/policy`, `b/policy`."""
    parts = [Path(path).parts or (str(path),) for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path_parts[-length:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i})" for i, path in enumerate(paths, 1)]  # the same path twice


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file, without an incomplete last line.

    Raises:
        ValueError: another line is not a JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines, _ = _lines(path)
    return [_record(line, path, number) for number, line in enumerate(lines, 1)]


def cut(path: Path, index: str, first: int) -> list[str]:
    """Delete the records from number `first` on, and an incomplete last line.

    The other lines keep their bytes.

    Returns:
        list: a sentence if there was an incomplete line.

    Raises:
        ValueError: another line is not a JSON object.
    """
    if not path.exists():
        return []
    lines, incomplete = _lines(path)
    kept = [
        line
        for number, line in enumerate(lines, 1)
        if _record(line, path, number).get(index, -1) < first
    ]
    if incomplete or len(kept) < len(lines):
        write_whole(path, b"".join(line + b"\n" for line in kept))
    return [f"{path}: deleted an incomplete last line"] if incomplete else []


def _lines(path: Path) -> tuple[list[bytes], bytes]:
    """Return (complete lines, the rest), as bytes: a line may end inside a character."""
    *lines, rest = path.read_bytes().split(b"\n")
    return lines, rest


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object")
    return record
