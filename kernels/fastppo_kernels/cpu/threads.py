"""How the CPU's compiled loops are compiled, given memory and spread over threads.

The threads are Python's, and the loops release its lock. A pool of OpenMP's or numba's own would
spin beside torch's on the same cores after every call, dies after a fork or refuses to be called
from two threads at once; these wait in the kernel, and are as many as torch has at the call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps
from torch import Tensor

EXACT = frozenset({"contract"})
"""What the compiler may change in arithmetic: a product and a sum may become one multiply-add."""

IN_LANES = EXACT | {"reassoc", "nsz"}
"""For loops with sums, besides: they may be carried in lanes. NaN and infinities are kept."""

HUGE_PAGE = 2**21
"""Bytes: below twice as many, memory is torch's."""

ENTRIES_PER_THREAD = 2**18
"""A thread that waits takes longer to wake than another takes for as many: GAE, 64 × 4096, two
processors that other processes kept busy, took 0.5 ms on one thread and 2.6 on two."""

_pool: ThreadPoolExecutor | None = None


def _hash_of_sources(folder: Path) -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


SOURCES = _hash_of_sources(Path(__file__).parent)


class _Files:
    """The machine code of a function, in a file for each signature that is replaced as a whole."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def _path(self, signature: Any) -> Path:
        digest = hashlib.sha256(repr(signature).encode()).hexdigest()
        return Path(f"{self._prefix}.{digest[:16]}.nbc")

    def load(self, signature: Any) -> Any:
        """None where there is no code for these sources, or a file that a power cut has cut."""
        try:
            sources, code = pickle.loads(self._path(signature).read_bytes())
            return pickle.loads(code) if sources == SOURCES else None
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, signature: Any, code: Any) -> None:
        """Keeps nothing where the disk is full: later processes compile it anew."""
        path = self._path(signature)
        written = path.with_suffix(f".{os.getpid()}")
        try:
            written.write_bytes(pickle.dumps((SOURCES, dumps(code))))
            written.replace(path)
        except OSError:
            written.unlink(missing_ok=True)


class _Cache(FunctionCache):
    """numba's, but safe for processes that compile at once, and for functions of several files.

    numba's index of a function's versions is read and written without a lock: when two processes
    add one, the code of one signature may lie under the other for good. And its code is fresh as
    long as the function's own file is, whatever became of those that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(str(Path(self.cache_path) / self._impl.filename_base))


def kernel(function: Callable[..., Any]) -> Any:
    """The function in machine code, which is kept for later processes where there is a place."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": set(EXACT),
        "no_cfunc_wrapper": True,
    }
    loop = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # no folder can be written to
        loop._cache = _Cache(function)
    return loop


def compiled(function: Callable[..., Any], arithmetic: frozenset[str] = EXACT) -> Any:
    """A part of kernels, which Python cannot call: that would take a tenth longer to compile.

    It stands within the kernel wherever it is used. As a function of its own it would be compiled
    twice, by itself and with the kernel, with sums in two orders; which one a process runs would
    depend on whether its code was compiled or loaded.
    """
    options: dict[str, Any] = {
        "error_model": "numpy",
        "fastmath": set(arithmetic),
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
        "forceinline": True,
    }
    return numba.njit(**options)(function)


def compiled_in_lanes(function: Callable[..., Any]) -> Any:
    """The same, where sums may be carried in lanes."""
    return compiled(function, IN_LANES)


@functools.cache
def _say_that_it_compiles() -> None:
    print("FastPPO is compiling its loops for this CPU: a few seconds", file=sys.stderr)


def _say_if_it_compiles(kernel: Any) -> None:
    if not kernel.signatures:
        _say_that_it_compiles()


def in_threads(
    kernel: Any, count: int, *arguments: Any, entries: int, room: Callable[[], Any] | None = None
) -> None:
    """`kernel(start, stop, *arguments)` for parts of `range(count)`, one to a thread.

    `room()`, if given, stands before the arguments: memory that a thread works in. A kernel that
    asked for it would take some hundredths of a second longer to compile for each kind of array.
    `entries` is how many logits or tokens there are in all: few are not worth a second thread. On a
    terminal one line tells of a compilation that takes more than a second.
    """
    if not kernel.signatures and sys.stderr is not None and sys.stderr.isatty():
        clock = Timer(1.0, _say_if_it_compiles, [kernel])
        clock.daemon = True
        clock.start()
    threads = max(1, min(torch.get_num_threads(), count, entries // ENTRIES_PER_THREAD))

    def work(start: int, stop: int) -> None:
        rooms = () if room is None else (room(),)
        kernel(start, stop, *rooms, *arguments)

    bounds = [count * i // threads for i in range(threads + 1)]
    parts = [_threads().submit(work, start, stop) for start, stop in itertools.pairwise(bounds[1:])]
    work(0, bounds[1])
    for part in parts:
        part.result()


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fastppo")
    return _pool


def _forget_threads() -> None:
    """A child of a fork has none of its parent's threads."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_threads)


def fresh(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a contiguous tensor of this shape, in huge pages where it is large.

    Two thirds of the time of writing a new tensor are page faults, which are 512 times fewer in
    huge pages. NumPy asks the system for them, and torch does not.
    """
    dtype = dtype or like.dtype
    if like.numel() * dtype.itemsize < 2 * HUGE_PAGE or like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    memory = np.empty(like.numel() * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(like.shape)
