"""Write files completely or not at all, even if the process is killed, and append records.

Libraries write their files into the directory of `written_whole`, or into that of an unfinished
checkpoint.
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
"""Suffix of a directory whose files are still being written."""


class MissingPathError(ValueError):
    """Raised when an option names a path that does not exist."""

    def __init__(self, sentence: str, path: str = "") -> None:
        super().__init__(sentence)
        self.path = path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file under a temporary name, and rename it once it is on the disk.

    Args:
        content: text is encoded as UTF-8.

    Raises:
        OSError: the file could not be written; an older file remains.
    """
    path = Path(path)
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_bytes(content)
        return
    path = path.resolve()  # keeps a symlink
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
    """Yield a directory to save a model to, and move its files to `directory` at the end.

    config.json is moved last, so a kill or a full disk never leaves half a model.

    Raises:
        RuntimeError: the files could not be written.
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
        from safetensors import SafetensorError  # slow to import

        if isinstance(error, (OSError, SafetensorError)):
            raise RuntimeError(f"{directory} could not be written: {error}") from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Append records to a file as lines of JSON.

    Raises:
        RuntimeError: the file could not be written.
    """
    lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
    try:
        with path.open("ab") as file:
            file.write("".join(lines).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise RuntimeError(f"{path} could not be written: {error}") from error
