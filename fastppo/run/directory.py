"""A run directory: whether a run may start in it, and the lock of the run that uses it.

The lock is the file `.lock`. The operating system releases it when the process ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from fastppo.data.world import World

LOCK = ".lock"


def check_no_run(run_dir: str | Path) -> None:
    """Raise ValueError if a run has left records in a directory, or if it is a file.

    A run that failed before its first record leaves nothing worth keeping.
    """
    run_dir = Path(run_dir)
    check_is_directory(run_dir)
    if holds_run(run_dir):
        sentence = (
            f"{run_dir} holds a run already: resume it with `--resume true`, or start another one "
            f"with `--output_dir {run_dir}-2`"
        )
        if (run_dir / "samples.jsonl").exists():  # of PPO; the other stages have no report
            sentence += f", and `fastppo report {run_dir} {run_dir}-2` compares the two"
        raise ValueError(sentence)


def holds_run(run_dir: str | Path) -> bool:
    """Return whether a directory has records or checkpoints of a run."""
    records = Path(run_dir) / "metrics.jsonl"
    left = records.exists() and records.stat().st_size > 0
    return left or any(Path(run_dir).glob("checkpoint-*"))


@contextmanager
def run_lock(run_dir: str | Path, world: World | None = None) -> Iterator[None]:
    """Lock a run directory for the block. A process may lock the same directory again.

    Args:
        world: the first rank locks the directory for all.

    Raises:
        ValueError: another run holds the lock, or the directory cannot be written.
    """
    with ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(_locked(Path(run_dir)))

        if world is None:
            lock()
        else:
            world.on_main_rank(lock)
        yield


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    check_is_directory(run_dir)
    path = run_dir.absolute() / LOCK
    # A singleton can be acquired again by its process, from any thread.
    lock = FileLock(path, timeout=0, is_singleton=True, thread_local=False)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout:
        holder = path.read_text(errors="replace").strip() or "unknown process"
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


def check_is_directory(run_dir: str | Path) -> None:
    """Raise ValueError if a file is in the way of a directory."""
    run_dir = Path(run_dir)
    for path in (run_dir, *run_dir.parents):
        if path.is_file():
            raise ValueError(f"output_dir {run_dir} cannot be created: {path} is a file")
