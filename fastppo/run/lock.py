"""One run directory, one run: a lock on its file `.lock`, which ends with the process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fastppo.data.world import World

FILE = ".lock"


@contextmanager
def run_lock(run_dir: str | Path, world: World | None = None) -> Iterator[None]:
    """Holds a run directory for the block; a process that holds it already may enter again. Of
    several ranks the first holds it for all.

    Raises:
        ValueError: another run holds it, it is a file, or it cannot be written.
    """
    with ExitStack() as stack:
        (world or World()).first(lambda: stack.enter_context(_locked(Path(run_dir))))
        yield


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"output_dir {run_dir} is a file")
    path = run_dir.absolute() / FILE
    # A singleton counts how often its process has entered; every thread of the run is inside.
    lock = FileLock(path, timeout=0, is_singleton=True, thread_local=False)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        holder = path.read_text(errors="replace").strip() or "it does not say which"
        raise ValueError(
            f"another run is at work in {run_dir}: {holder}. Wait for it, stop it, or choose "
            "another output_dir"
        ) from None
    except OSError as error:
        raise ValueError(f"output_dir {run_dir} cannot be written: {error.strerror}") from error
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        yield
    finally:
        lock.release()
