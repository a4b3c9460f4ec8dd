"""The files that a command leaves. A file is written completely or not at all, even if the process
is killed; records are appended line by line as a run goes on.

Libraries write their own files in a directory of `written_whole`, and in a checkpoint's directory
before it gets its name. The lock is not written here, for it is no result: it is one place in the
file system that processes meet at.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"
"""A directory that is being written: nothing in it counts."""


class MissingPathError(ValueError):
    """An option names a path at which there is nothing."""

    def __init__(self, sentence: str, path: str = "") -> None:
        super().__init__(sentence)
        self.path = path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file beside its place, and gives it its name once it is on the disk.

    Args:
        content: bytes, or a text, written as UTF-8; half of a surrogate pair is escaped.

    Raises:
        OSError: it could not be written; what was there before stays.
    """
    path = Path(path)
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout
        path.write_bytes(content)
        return
    path = path.resolve()  # a link stays one
    unfinished = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A directory to save a model to: what is there in the end is moved to `directory`, its
    config.json last. A kill or a full disk leaves no model there that is half of one.

    Raises:
        RuntimeError: it could not be written.
    """
    unfinished = directory / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        (directory / "config.json").unlink(missing_ok=True)
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(directory / path.name)
    except Exception as error:
        from safetensors import SafetensorError  # of a write, which names no file

        if isinstance(error, (OSError, SafetensorError)):
            raise RuntimeError(f"{directory} could not be written: {error}") from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Appends records as lines of JSON.

    Raises:
        RuntimeError: as from `append`.
    """
    lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
    # Half of a surrogate pair, which a tokenizer may write, is no UTF-8.
    append(path, "".join(lines).encode("utf-8", "backslashreplace"))


def append(path: Path, data: bytes, *, make_directory: bool = False) -> None:
    """Appends to a file, which is made where it is not there.

    Args:
        make_directory: makes its directory too, but nothing above it: a run's directory that was
            removed while the run was at work stays removed.

    Raises:
        RuntimeError: it could not be written; the run has begun, so this is no wrong value.
    """
    try:
        if make_directory:
            path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise RuntimeError(f"{path} could not be written: {error}") from error
