"""The manifest of a checkpoint: every file with its size and SHA-256, and the run it belongs to.

`manifest.json` is the last file that is written into a checkpoint, after all others have reached
the disk; a directory without one was never finished. A checkpoint is read only after its manifest
agrees with every file, so that no damaged byte is ever trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "manifest.json"


class DamagedError(ValueError):
    """A checkpoint is not what its manifest says, or has none."""


class Newest(NamedTuple):
    """The newest checkpoint that is intact."""

    path: Path
    owner: dict[str, Any]
    """What was given to `write`."""
    passed_over: list[Path]
    """Newer ones that are damaged."""
    reasons: list[str]
    """A sentence for each of them."""


def write(directory: Path, number: int, owner: dict[str, Any]) -> None:
    """Brings every file below `directory` to the disk, then the manifest, then the directory.

    Args:
        number: of the checkpoint, which its directory's name has too.
        owner: the run that it belongs to, as JSON has it.
    """
    files = {}
    for path in _files(directory):
        sync(path)
        files[path.relative_to(directory).as_posix()] = [path.stat().st_size, _sha256(path)]
    record = {"number": number, "files": files, "about": owner}
    record["sha256"] = _digest(record)
    manifest = directory / FILE
    manifest.write_text(json.dumps(record, indent=1), encoding="utf-8")
    sync(manifest)
    permit(directory)
    sync(directory)


def read(directory: Path, number: int) -> dict[str, Any]:
    """The owner of a checkpoint whose every file is as it was written.

    Raises:
        DamagedError: a file is not there, has other bytes or is none; it says which.
    """
    manifest = directory / FILE
    listed = _files(directory)
    try:
        record = json.loads(manifest.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{directory}: no {FILE}, so it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{directory}: {FILE} cannot be read") from error
    if not isinstance(record, dict) or record.pop("sha256", None) != _digest(record):
        raise DamagedError(f"{directory}: {FILE} has other bytes than were written")
    if not _is_record(record):
        raise DamagedError(f"{directory}: {FILE} is none that a run has written")
    if record["number"] != number:
        raise DamagedError(f"{directory}: expected checkpoint {number}, got {record['number']}")
    unlisted = {path.relative_to(directory).as_posix(): path for path in listed}
    for name, (size, sha256) in record["files"].items():
        path = unlisted.pop(name, None)
        if path is None:
            raise DamagedError(f"{directory}: {name[:200]} is not there")
        try:
            if path.stat().st_size != size:
                raise DamagedError(
                    f"{directory}: {name} has {path.stat().st_size} bytes; expected {size}"
                )
            if _sha256(path) != sha256:
                raise DamagedError(f"{directory}: {name} has other bytes than were written")
        except OSError as error:
            raise DamagedError(f"{directory}: {name} cannot be read: {error.strerror}") from error
    for name, path in unlisted.items():
        if not path.name.startswith(".nfs"):  # deleted while somebody reads it; we never do
            raise DamagedError(f"{directory}: {name} was not written with it")
    return record["about"]


def newest(checkpoints: Sequence[Path]) -> Newest | None:
    """The newest intact checkpoint of a list, oldest first; None if the list is empty.

    Raises:
        DamagedError: there are some, and all are damaged.
    """
    reasons: list[str] = []
    passed_over: list[Path] = []
    for path in reversed(checkpoints):
        try:
            owner = read(path, int(path.name.rsplit("-", 1)[1]))
        except DamagedError as error:
            reasons.append(str(error))
            passed_over.append(path)
        else:
            return Newest(path=path, owner=owner, passed_over=passed_over, reasons=reasons)
    if reasons:
        raise DamagedError(
            f"no checkpoint can be resumed from: {'; '.join(reasons)}. To begin again, choose "
            "another output_dir"
        )
    return None


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that no later run finds or counts it; its new path."""
    aside = path.with_name(f"damaged-{path.name}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"damaged-{count}-{path.name}")
    path.rename(aside)
    return aside


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def permit(directory: Path, *more: Path) -> None:
    """Gives the safetensors files of a directory, and `more`, the permissions that a new file gets
    there: safetensors makes them readable by their owner alone, whatever the umask says."""
    probe = directory / f".mode-{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in (*directory.rglob("*.safetensors"), *more):
        if path.is_file():
            path.chmod(mode)


def _is_record(record: dict[str, Any]) -> bool:
    """Whether it has the fields that `write` writes; nothing proves who wrote them."""
    files = record.get("files")
    about = record.get("about")
    run = about.get("run") if isinstance(about, dict) else None
    return (
        "number" in record
        and isinstance(files, dict)
        and all(isinstance(entry, list) and len(entry) == 2 for entry in files.values())
        and isinstance(run, dict)
    )


def _files(directory: Path) -> list[Path]:
    """The files below a directory, but for its manifest.

    Raises:
        DamagedError: something there is neither a file nor a directory: a pipe would be waited for
            without end, and a link leads elsewhere.
    """
    files = []
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            name = path.relative_to(directory)
            raise DamagedError(f"{directory}: {name} is neither a file nor a directory")
        if stat.S_ISREG(mode) and path != directory / FILE:
            files.append(path)
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
