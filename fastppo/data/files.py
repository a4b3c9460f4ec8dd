"""Files that are written completely or not at all, even if the process is killed."""

from __future__ import annotations

import os
from pathlib import Path


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
        try:
            path.write_bytes(content)
        except OSError as error:  # of a write, which names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
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
