"""The manifest of a checkpoint: the size and SHA-256 of every file, and the identity of the run.

`manifest.json` is written last, after all other files are on the disk, so a directory without one
was never finished. A checkpoint is read only after every file agrees with its manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "manifest.json"


class DamagedError(ValueError):
    """A checkpoint has no manifest or does not agree with it."""


class Newest(NamedTuple):
    """The newest intact checkpoint."""

    path: Path
    owner: dict[str, Any]
    """The value that was passed to `write`."""
    passed_over: list[Path]
    """Newer checkpoints that are damaged."""
    reasons: list[str]
    """One sentence per damaged checkpoint."""


def write(directory: Path, owner: dict[str, Any]) -> None:
    """Sync every file below `directory` to the disk, then write and sync the manifest.

    Args:
        owner: the run of the checkpoint, serializable as JSON.
    """
    files = {}
    for name, path in _files(directory).items():
        sync(path)
        files[name] = _entry(path)
    manifest = directory / FILE
    manifest.write_text(json.dumps({"files": files, "about": owner}, indent=1), encoding="utf-8")
    sync(manifest)
    permit(directory)
    sync(directory)


def read(directory: Path) -> dict[str, Any]:
    """Verify every file of a checkpoint and return its owner.

    Raises:
        DamagedError: a file is missing, has changed, or is not in the manifest.
    """
    try:
        record = json.loads((directory / FILE).read_bytes())
        listed, owner = record["files"], record["about"]
        found = _files(directory)
        for name in sorted({*listed, *found}):
            if name not in found:
                raise DamagedError(f"{directory}: {name} is missing")
            if name not in listed:
                raise DamagedError(f"{directory}: {name} is not in {FILE}")
            if listed[name] != _entry(found[name]):
                raise DamagedError(f"{directory}: {name} has changed since it was written")
    except FileNotFoundError:
        raise DamagedError(f"{directory}: no {FILE}, so it was never finished") from None
    except DamagedError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedError(f"{directory} cannot be read: {error}") from error
    return owner


def newest(checkpoints: Sequence[Path]) -> Newest | None:
    """Return the newest intact checkpoint, or None if the list is empty.

    Args:
        checkpoints: oldest first.

    Raises:
        DamagedError: all of them are damaged.
    """
    reasons: list[str] = []
    passed_over: list[Path] = []
    for path in reversed(checkpoints):
        try:
            owner = read(path)
        except DamagedError as error:
            reasons.append(str(error))
            passed_over.append(path)
        else:
            return Newest(path=path, owner=owner, passed_over=passed_over, reasons=reasons)
    if reasons:
        raise DamagedError(
            f"no checkpoint can be resumed from: {'; '.join(reasons)}. To start over, choose "
            "another output_dir"
        )
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that later runs ignore it, and return its new path."""
    aside = path.with_name(f"damaged-{path.name}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"damaged-{count}-{path.name}")
    path.rename(aside)
    return aside


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def permit(directory: Path, *more: Path) -> None:
    """Give the safetensors files of a directory, and `more`, the default permissions of new files.

    safetensors makes them readable by their owner alone, whatever the umask is.
    """
    probe = directory / f".mode-{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in (*directory.rglob("*.safetensors"), *more):
        if path.is_file():
            path.chmod(mode)


def _files(directory: Path) -> dict[str, Path]:
    """Return the files below a directory by their relative path, except the manifest."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {
        path.relative_to(directory).as_posix(): path for path in paths if path != directory / FILE
    }


def _entry(path: Path) -> list[Any]:
    """Return [size in bytes, SHA-256] of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
