"""One run directory, one run: a lock on its file `.lock`, which ends with the process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from fastppo.data.world import World

FILE = ".lock"
NO_FILE = (0, 0)
"""In place of device and inode."""

_held: dict[Path, tuple[tuple[int, int], tuple[int, int]]] = {}
"""Device and inode of each lock file that this process holds, and of its directory, by its path."""


@contextmanager
def run_lock(run_dir: str | Path, world: World | None = None) -> Iterator[None]:
    """Holds a run directory for the block; a process that holds it already may enter again. Of
    several ranks the first holds it for all.

    Raises:
        ValueError: another run holds it, it is a file, or it cannot be written.
    """
    with ExitStack() as stack:
        (world or World()).on_main_rank(lambda: stack.enter_context(_locked(Path(run_dir))))
        yield


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"output_dir {run_dir} is a file")
    path = run_dir.absolute() / FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _acquired(path)
    except Timeout:
        holder = path.read_text(errors="replace").strip() or "it does not say which"
        raise ValueError(
            f"another run is using {run_dir}: {holder}. Wait for it, stop it, or choose "
            "another output_dir"
        ) from None
    except OSError as error:
        raise ValueError(f"output_dir {run_dir} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
        if not lock.is_locked:
            _held.pop(path, None)


def check_still_held(run_dir: str | Path) -> None:
    """Before something is written: the lock file of a run directory that this process holds is
    still the one that it has locked. One that somebody has deleted is made anew.

    Raises:
        RuntimeError: another run has had the directory since, it is no longer there, or it cannot
            be locked.
    """
    path = Path(run_dir).absolute() / FILE
    if path not in _held:
        return
    there = _file(path)
    held, directory = _held[path]
    if _file(path.parent) != directory:
        raise RuntimeError(
            f"{run_dir} was removed or renamed while the run was at work there: it ends, and "
            "writes nothing more"
        )
    if there == held:
        return
    _lock(path).release(force=True)
    try:
        if there != NO_FILE:  # whoever made it has begun a run, and may have ended it
            raise Timeout(str(path))
        _acquired(path)
    except Timeout:
        raise RuntimeError(
            f"{path} was deleted, and another run has begun in {run_dir}: this one ends, and "
            "writes nothing more there"
        ) from None
    except OSError as error:  # no wrong input: the run has begun
        raise RuntimeError(f"{path} was deleted, and cannot be locked anew: {error}") from error


def _acquired(path: Path) -> BaseFileLock:
    """The lock, which this process holds from now on, and which says so.

    Raises:
        Timeout: another process holds it.
        OSError: it cannot be written.
    """
    lock = _lock(path)
    lock.acquire()
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
    _held[path] = (_file(path), _file(path.parent))
    return lock


def _lock(path: Path) -> BaseFileLock:
    # A singleton counts how often its process has entered; every thread of the run is inside.
    return FileLock(path, timeout=0, is_singleton=True, thread_local=False)


def _file(path: Path) -> tuple[int, int]:
    """Device and inode; `NO_FILE` where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return NO_FILE
    return status.st_dev, status.st_ino
