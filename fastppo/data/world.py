"""The processes of a run: which rows belong to this one, and how results reach all of them.

Control is replicated, compute is shared. Ranks share the rows of a batch for generation, scores,
forward and backward passes; the results are gathered, and every rank then computes the same
advantages, permutations, minibatches, metrics and decisions from the same full batch. So nothing
is normalised by a reduction that could be forgotten, and a world of one is the same code.

The rule that keeps ranks together: between two collectives no `if` depends on what only one rank
knows. An error is gathered like a result, and every rank raises it.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from fastppo.data.shards import shards_of
from fastppo.functional.scalars import describe

Result = TypeVar("Result")

LONGEST_NUMBER = 6
"""Digits of a number of processes at most; a longer one is a mistake."""

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others, unless another time is asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The ranks of a run and this process's place among them; by default one process."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """This rank's; None leaves the choice to the run."""
    mesh: Any = None
    """A `DeviceMesh` of the ranks, those that hold one copy of the weights last."""
    timeout: float = TIMEOUT
    """Seconds."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0

    def local_rows(self, count: int) -> range:
        """This rank's share of `count` rows: neighbouring rows, and at most one more than another
        rank has."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks; it must be picklable."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, value)
        return gathered

    def cat(self, rows: Tensor) -> Tensor:
        """The rows of every rank [n, …], end to end; n may differ."""
        if self.size == 1:
            return rows
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
        """Every rank's result of `work`, in the order of the ranks; if one raises, all raise the
        same."""
        if self.size == 1:
            return [work()]
        value: Any = None
        error: Exception | None = None
        try:
            value = work()
        except Exception as raised:  # whatever it is, the other ranks wait
            error = raised
        results = self.gather((value, None if error is None else _portable(error)))
        for rank, (_, other_error) in enumerate(results):
            if other_error is not None:
                raise error if error is not None and rank == self.rank else other_error
        return [result for result, _ in results]

    def on_main_rank(self, work: Callable[[], Result]) -> Result:
        """The first rank's result of `work`, on every rank; if it raises, all raise the same."""
        results: list[Any] = self.gather_results(work if self.is_main else _nothing)
        return results[0]

    def sum(self, value: Tensor) -> Tensor:
        """A 0-d tensor, added up over the ranks in their order."""
        return value if self.size == 1 else self.cat(value.reshape(1)).sum()

    def total(self, value: Tensor) -> Tensor:
        """A tensor, added up over the ranks; every rank gets the same bits."""
        if self.size > 1:
            value = value.clone()
            distributed.all_reduce(value)
        return value

    @contextmanager
    def with_timeout(self) -> Iterator[None]:
        """If another rank no longer answers, the block ends with a clear error.

        Raises:
            RuntimeError: one is late by more than `timeout`, or gone.
        """
        try:
            yield
        except RuntimeError as error:
            sentence = self._silence(error)
            if sentence is None:
                raise
            raise RuntimeError(sentence) from error

    def _silence(self, error: RuntimeError) -> str | None:
        """What an error of torch's collectives means; None for any other."""
        text = str(error)
        if self.size == 1 or not (isinstance(error, distributed.DistError) or "gloo" in text):
            return None
        if "timed out" in text.lower() or "timeout" in text.lower():
            return (
                f"rank {self.rank} of {self.size} waited {self.timeout:g} s for the others, and "
                "one did not answer; look at what that rank last said"
            )
        return f"rank {self.rank} of {self.size}: another rank has ended; look at what it said last"


def join(device: torch.device, *, timeout: float = TIMEOUT, shard_size: int | None = None) -> World:
    """The world of the processes that torchrun started; of one process where it did not.

    Args:
        device: the kind of device; of several GPUs a rank takes the one of its local number.
        timeout: seconds that a rank waits for the others.
        shard_size: ranks that hold one copy of the weights; all by default.

    Raises:
        ValueError: the ranks cannot be divided into copies, or have no GPU each.
    """
    size = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0)
    if rank >= size:
        raise ValueError(
            f"RANK must be below WORLD_SIZE, as torchrun sets them, got {rank}, {size}"
        )
    if size == 1:
        if shard_size not in (None, 1):
            raise ValueError(f"shard_size={shard_size} needs as many processes: start by torchrun")
        return World()
    shard_size = shards_of(size, shard_size)
    backend = "gloo"
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"device={device}: with several processes each has its own; use cuda")
        local = _number("LOCAL_RANK", 0)
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"{local + 1} processes or more on a node with {torch.cuda.device_count()} GPUs: "
                "start one for each GPU (--nproc_per_node)"
            )
        device = torch.device("cuda", local)
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        # A process that ends while its group is open may abort in the group's threads.
        atexit.register(leave)
    shape: tuple[int, ...] = (shard_size,)
    names: tuple[str, ...] = ("shard",)
    if shard_size < size:
        shape = (size // shard_size, shard_size)
        names = ("copy", "shard")
    mesh = distributed.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=names)
    return World(rank=distributed.get_rank(), size=size, device=device, mesh=mesh, timeout=timeout)


VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Environment variables by which torchrun says a process's place."""


@contextmanager
def torchrun_hidden() -> Iterator[None]:
    """Within it a library that reads torchrun's variables finds a single process."""
    before = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ |= before


def is_first() -> bool:
    """Whether this process is the first of those that torchrun started, or the only one."""
    return _number("RANK", 0) == 0


def leave() -> None:
    """Ends what `join` began."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _number(name: str, default: int) -> int:
    """An environment variable of torchrun; raises ValueError where it is not a number."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or len(text) > LONGEST_NUMBER or int(text) < default:
        raise ValueError(f"{name} must be a number, as torchrun sets it, got {describe(text)}")
    return int(text)


def _nothing() -> Any:
    return None


def _portable(error: Exception) -> Exception:
    """The error in a form that another process can raise: itself, if it can be pickled."""
    try:
        unpickled = pickle.loads(pickle.dumps(error))
        if str(unpickled) == str(error):
            return error
    except Exception:  # of whatever its class does
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
