"""A run directory's records: `metrics.jsonl`, `samples.jsonl`, TensorBoard events.

One line of JSON per iteration (or optimiser step, in the supervised stages), so that a run can be
read with any tool while it is going. After a resume the lines past the checkpoint are cut off: they
are about to be written again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fastppo.data.files import append_lines, write_whole
from fastppo.data.rows import write_rows
from fastppo.data.world import World
from fastppo.functional.scalars import describe
from fastppo.run.console import console_notes
from fastppo.run.events import EventFile
from fastppo.run.identity import versions
from fastppo.run.lock import check_still_held
from fastppo.run.options import Options

PARTS = "parts.jsonl"
"""A line for each start of a run."""

SAMPLES = {False: "samples.jsonl", True: "eval_samples.jsonl"}
"""Responses that are trained on, and those to held-out prompts."""


class RunLog:
    """Appends to the records of a run directory.

    Args:
        config: kept as config.yaml.
        index: what a record is numbered by: iteration, or step.
        first: the number of the first record to come; older ones from there on are cut off.
        device: its name, for the report.
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
        """Sentences for the user, such as on a line that was cut off."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config.save(self.directory / "config.yaml")
        self._begin_part(first, device)
        for name in ("metrics.jsonl", *SAMPLES.values()):
            self.notes += cut(self.directory / name, index, first)
        # Of a run that was killed before its first checkpoint every point is written anew.
        self._events = EventFile(self.directory / "tensorboard", first)

    def _begin_part(self, first: int, device: str) -> None:
        """Adds a line to parts.jsonl: when the run was started or resumed, on which device and
        versions."""
        path = self.directory / PARTS
        self.notes += cut(path, "first", sys.maxsize)  # of an earlier part all lines stay
        started = datetime.now().astimezone().isoformat(" ", "minutes")
        part = {"first": first, "started": started, "device": device, "versions": versions()}
        append_lines(path, [part])

    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str] = ()) -> None:
        """One line of metrics.jsonl, and the same numbers as TensorBoard scalars. The sentences of
        warnings are written under `warnings`, if there are any."""
        check_still_held(self.directory)
        record: dict[str, Any] = {self.index: number, **metrics}
        warnings = [*warnings, *console_notes()]
        if warnings:
            record["warnings"] = warnings
        append_lines(self.directory / "metrics.jsonl", [record])
        self._events.add(number, metrics, warnings)

    def ended(self, reason: str) -> None:
        """Adds to the newest line of parts.jsonl why the run ended before its last iteration."""
        check_still_held(self.directory)
        path = self.directory / PARTS
        *before, newest = read_jsonl(path)
        write_rows(path, [*before, newest | {"ended": reason}])

    def samples(
        self, number: int, samples: list[dict[str, Any]], *, held_out: bool = False
    ) -> None:
        """Lines of samples.jsonl, or of eval_samples.jsonl: prompt, completion, each reward term;
        the KL of what is trained on."""
        records = [{self.index: number, **sample} for sample in samples]
        if records or not held_out:
            append_lines(self.directory / SAMPLES[held_out], records)


class SharedLog:
    """The records of a run of several ranks: the first writes them, and the others wait, so that
    an error of the disk is everyone's.

    Args:
        directory, config, index, first, device: those of `RunLog`.
        callbacks: `fastppo.run.callbacks.Callbacks`, told of what is written.
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
        """As `ended`, of an error, which some ranks may not have met: so nobody waits for them, and
        what cannot be written hides no error."""
        if self.world.is_main:
            with suppress(OSError, RuntimeError, ValueError):
                self._log.ended(str(error) or type(error).__name__)

    def samples(
        self, number: int, samples: list[dict[str, Any]], *, held_out: bool = False
    ) -> None:
        self.world.on_main_rank(lambda: self._log.samples(number, samples, held_out=held_out))
        if self.callbacks is not None and samples and not held_out:
            self.callbacks.tell("on_samples", samples=samples)


def why_ended(run_dir: str | Path) -> str:
    """Why the newest part of a run ended before its last iteration; "" where nothing says it."""
    parts = read_jsonl(Path(run_dir) / PARTS)
    return str(parts[-1].get("ended", "")) if parts else ""


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest distinct ends of the paths: `a/policy`, `b/policy`."""
    parts = [Path(path).parts or (str(path),) for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path_parts[-length:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i})" for i, path in enumerate(paths, 1)]  # one given twice


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line that was cut off while being written is left out.

    Raises:
        ValueError: another line is no record; it is named.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines, _ = _lines(path)
    return [_record(line, path, number) for number, line in enumerate(lines, 1)]


def cut(path: Path, index: str, first: int) -> list[str]:
    """Removes the records from number `first` on, which are about to be written anew, and a last
    line that was cut off while being written; everything else stays, byte for byte.

    Returns:
        list: a sentence, if a line was cut off.

    Raises:
        ValueError: another line is no record; it is named.
    """
    if not path.exists():
        return []
    lines, torn = _lines(path)
    kept = []
    for number, line in enumerate(lines, 1):
        at = _record(line, path, number).get(index, -1)
        if not isinstance(at, int):
            raise ValueError(
                f"{path}, line {number}: {index} must be a whole number, got {describe(at)}"
            )
        if at < first:
            kept.append(line)
    if torn or len(kept) < len(lines):
        write_whole(path, b"".join(line + b"\n" for line in kept))
    if not torn:
        return []
    return [f"{path}: the last line was cut off while it was written, and is dropped"]


def _lines(path: Path) -> tuple[list[bytes], bytes]:
    """(the whole lines, what is after the last of them). In bytes: a text may hold characters that
    Python takes for the end of a line, and a line may end inside a character."""
    if not path.is_file():  # a device or a pipe may have no end
        raise ValueError(f"{path} is no file")
    *lines, torn = path.read_bytes().split(b"\n")
    return lines, torn


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object, as a run writes them")
    return record
