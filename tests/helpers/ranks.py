"""Run functions in several processes on the CPU, like torchrun."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import FORKSERVER

TIMEOUT = 240
"""Seconds until a hanging process is killed."""


def run(
    count: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    timeout: float = TIMEOUT,
) -> Any:
    """Run `function(*arguments)` on `count` ranks and return the result of the first.

    Raises:
        AssertionError: a rank raised; the message is its traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = start(count, function, folder, *arguments, timeout=timeout)
    assert all(code == 0 for code, _ in ended), "\n".join(said for _, said in ended)
    return torch.load(folder / "result.pt", weights_only=False)


def start(
    count: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    timeout: float = TIMEOUT,
) -> list[tuple[int | None, str]]:
    """Run `function(*arguments)` on `count` ranks; return (exit code, traceback) of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    given = count, port, str(folder), function, arguments
    ranks = [FORKSERVER.Process(target=_rank, args=(rank, *given)) for rank in range(count)]
    for process in ranks:
        process.start()
    ended = []
    for rank, process in enumerate(ranks):
        process.join(timeout)
        killed = process.is_alive()
        if killed:
            process.kill()
            process.join()
        file = folder / f"rank-{rank}.txt"
        said = file.read_text() if file.exists() else ""
        if killed:
            said += f"rank {rank} was killed after {timeout} seconds"
        ended.append((process.exitcode, said))
    return ended


def _rank(
    rank: int,
    count: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    from fastppo.data.world import leave

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        result = function(*arguments)
        if rank == 0:
            torch.save(result, Path(folder) / "result.pt")
        leave()
    except BaseException:
        (Path(folder) / f"rank-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
