"""One run directory, one run: a lock that the kernel holds for a living process.

The lock is `flock` on the file `.lock`, which is free again as soon as its process is gone, however
it went, so no lock is ever stale. The file says who holds it. On a file system that has no locks
(some network mounts) a run goes on without one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastppo.data.world import World

FILE = ".lock"

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_held: dict[Path, int] = {}
"""Descriptors of the locks of this process."""


def _close_in_child() -> None:
    # A child that outlives the run would hold its lock: it has the same open file.
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def held(run_dir: str | Path, world: World | None = None) -> Iterator[None]:
    """Holds a run directory for the block; a process that holds it already may enter again. Of
    several ranks the first holds it for all.

    Raises:
        ValueError: another run holds it, it is a file, or it cannot be written.
    """
    with ExitStack() as stack:
        (world or World()).first(lambda: stack.enter_context(_holding(run_dir)))
        yield


@contextmanager
def _holding(run_dir: str | Path) -> Iterator[None]:
    path = Path(run_dir).absolute()
    if path in _held:
        yield
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir {run_dir} is a file")
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"output_dir {run_dir} cannot be written: {error.strerror}") from error
    _held[path] = descriptor
    try:
        _take(descriptor, run_dir)
        yield
    finally:
        # Not by name: a run that comes next may have it open already.
        _held.pop(path, None)
        os.close(descriptor)


def _take(descriptor: int, run_dir: str | Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another run is at work in {run_dir}: {_holder(descriptor)}. Wait for it, stop it, or "
            "choose another output_dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode() + b"\n", 0)


def _holder(descriptor: int) -> str:
    try:
        record: Any = json.loads(os.pread(descriptor, 1024, 0))
        return f"process {record['pid']} on {record['host']}, since {record['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "it has not said who it is yet"
