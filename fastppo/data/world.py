"""The processes of a run: assignment of rows to ranks, and collectives for their results.

Control is replicated, compute is distributed. Ranks share the rows of a batch for generation,
scoring, forward and backward passes. Results are gathered, and every rank computes the same
advantages, permutations, minibatches, metrics and decisions from the full batch. So no statistic
needs a reduction across ranks, and a single process runs the same code.

To keep ranks in step, no `if` between two collectives may depend on local knowledge. Errors are
gathered like results, and every rank raises them.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

Result = TypeVar("Result")

TIMEOUT = 1800.0
"""Seconds to wait for other ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The ranks of a run; by default one process."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """Device of this rank; None lets the run choose it."""
    mesh: Any = None
    """`DeviceMesh` of the ranks, whose last dimension shards one copy of the weights."""
    timeout: float = TIMEOUT
    """Seconds to wait for other ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def local_rows(self, count: int) -> range:
        """Return this rank's contiguous share of `count` rows; shares differ by at most one row."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, value)
        return gathered

    def cat(self, rows: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Concatenate the rows [n, …] of all ranks; n may differ.

        Args:
            lengths: n of each rank. Without them the ranks exchange n, for which the host waits.
        """
        if self.size == 1:
            return rows
        if lengths is None:
            count = torch.tensor([len(rows)], device=rows.device)
            lengths = [int(length) for length in self._all(count)]
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = zip(self._all(padded), lengths, strict=True)
        return torch.cat([part[:length] for part, length in parts])

    def _all(self, value: Tensor) -> list[Tensor]:
        gathered = [torch.zeros_like(value) for _ in range(self.size)]
        distributed.all_gather(gathered, value)
        return gathered

    def gather_results(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on every rank and return all results, in rank order.

        If one rank raises, all ranks raise the same error.
        """
        if self.size == 1:
            return [work()]
        value: Any = None
        error: Exception | None = None
        try:
            value = work()
        except Exception as raised:  # the other ranks are waiting
            error = raised
        portable = None if error is None else _portable(error)
        results = self.gather((value, portable))
        for rank, (_, other_error) in enumerate(results):
            if other_error is None:
                continue
            if rank != self.rank or portable is None:
                raise other_error
            if portable is error:
                raise portable
            raise portable from error
        return [result for result, _ in results]

    def on_main_rank(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the first rank and return its result, or raise its error, on all ranks."""
        results: list[Any] = self.gather_results(work if self.is_main else _nothing)
        return results[0]

    def sum(self, value: Tensor) -> Tensor:
        """Sum a 0-d tensor over the ranks, in rank order."""
        return value if self.size == 1 else self.cat(value.reshape(1), [1] * self.size).sum()

    def total(self, value: Tensor) -> Tensor:
        """Sum a tensor over the ranks; all ranks get the same bits."""
        if self.size > 1:
            value = value.clone()
            distributed.all_reduce(value)
        return value

    @contextmanager
    def with_timeout(self) -> Iterator[None]:
        """Translate errors of collectives in this block.

        Raises:
            RuntimeError: another rank timed out or ended.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if self.size == 1 or not (isinstance(error, distributed.DistError) or "gloo" in text):
                raise
            reason = "another rank has ended"
            if "timed out" in text.lower() or "timeout" in text.lower():
                reason = f"another rank did not respond within {self.timeout:g} s"
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: {reason}; see the last output of that rank, or "
                "torchrun's root cause"
            ) from error


def join(device: torch.device, *, timeout: float = TIMEOUT, shard_size: int | None = None) -> World:
    """Join the processes started by torchrun, or return a world of one process.

    Args:
        device: type of device; each rank takes the GPU of its local rank.
        timeout: seconds to wait for other ranks.
        shard_size: number of ranks that share one copy of the weights; default all.

    Raises:
        ValueError: `shard_size` does not divide the number of ranks, or there are more ranks than
            GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        if shard_size not in (None, 1):
            raise ValueError(
                f"shard_size={shard_size} needs several processes; start them with torchrun"
            )
        return World()
    shard_size = shards_of(size, shard_size)
    backend = "gloo"
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"expected device=cuda with several processes, got {device}")
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"at least {local + 1} processes on a node with {torch.cuda.device_count()} GPUs; "
                "start one per GPU (--nproc_per_node)"
            )
        device = torch.device("cuda", local)
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        # Without this, a process may abort at exit in the threads of its process group.
        atexit.register(leave)
    shape: tuple[int, ...] = (shard_size,)
    names: tuple[str, ...] = ("shard",)
    if shard_size < size:
        shape = (size // shard_size, shard_size)
        names = ("copy", "shard")
    mesh = distributed.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=names)
    return World(rank=distributed.get_rank(), size=size, device=device, mesh=mesh, timeout=timeout)


def shards_of(size: int, shard_size: int | None) -> int:
    """Return how many of `size` processes share one copy of the weights: by default all.

    Raises:
        ValueError: `shard_size` does not divide `size`.
    """
    if shard_size is None:
        return size
    if size % shard_size:
        raise ValueError(f"shard_size must divide the {size} processes, got {shard_size}")
    return shard_size


def is_first() -> bool:
    """Return whether this is the first process started by torchrun, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


def leave() -> None:
    """Undo `join`."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _nothing() -> Any:
    return None


def _portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else one of a base class with the same message."""
    message = f"{type(error).__name__}: {error}"
    for kind in type(error).__mro__:
        if kind is Exception:
            break
        if not issubclass(kind, Exception):  # a mixin
            continue
        try:
            candidate = error if kind is type(error) else kind(message)
            unpickled = pickle.loads(pickle.dumps(candidate))
            if isinstance(unpickled, kind) and str(unpickled) == str(candidate):
                return candidate
        except Exception:  # depends on the error's class
            continue
    return RuntimeError(message)
