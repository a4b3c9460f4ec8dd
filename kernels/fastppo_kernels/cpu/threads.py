"""Compilation, memory and threads of the CPU's loops.

The threads are Python's, and the loops release the GIL. A pool of OpenMP or numba would spin on the
same cores as torch's after every call, die after a fork, or refuse calls from two threads. These
threads block while they wait; there are as many as torch has at the time of the call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import sys
import weakref
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
"""Arithmetic flags: the compiler may contract a product and a sum into one multiply-add."""

IN_LANES = EXACT | {"reassoc", "nsz"}
"""Flags of loops whose sums may be carried in vector lanes. NaN and infinities are kept."""

CLEARANCE = 256
"""Unused numbers before a buffer that a loop writes while it carries a sum.

If the output starts less than a vector iteration (256 bytes with AVX-512) behind an input, the
compiled loop takes its scalar form, which adds in another order. So the bits of a short row would
depend on where the allocator happened to place the buffer.
"""

HUGE_PAGE = 2**21

LARGE = 2 * HUGE_PAGE
"""Bytes from which NumPy requests huge pages. Below, torch allocates the memory."""

ALIGNMENT = 64
"""Bytes, as torch aligns. NumPy's large memory starts 16 bytes into a page."""

KEPT = 2**18
"""Bytes from which freed memory is kept for the next result."""

ENTRIES_PER_THREAD = 2**18
"""Work that is worth a second thread, given the time to wake one: GAE of 64 × 4096 on two busy
processors took 0.5 ms on one thread and 2.6 ms on two."""

_pool: ThreadPoolExecutor | None = None


def _hash_of_sources(package: Path) -> str:
    """Hash the sources that compiled loops depend on: loops, and the records and constants."""
    digest = hashlib.sha256(numba.__version__.encode())
    for file in (package / "records.py", *sorted((package / "cpu").glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


SOURCES = _hash_of_sources(Path(__file__).parents[1])


class _Files:
    """The machine code of a function: one file per signature, replaced atomically."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def _path(self, signature: Any) -> Path:
        digest = hashlib.sha256(repr(signature).encode()).hexdigest()
        return Path(f"{self._prefix}.{digest[:16]}.nbc")

    def load(self, signature: Any) -> Any:
        """Return the code, or None if it is missing, truncated or for other sources."""
        try:
            sources, code = pickle.loads(self._path(signature).read_bytes())
            return pickle.loads(code) if sources == SOURCES else None
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, signature: Any, code: Any) -> None:
        """Save the code, unless the disk is full; then later processes compile again."""
        path = self._path(signature)
        written = path.with_suffix(f".{os.getpid()}")
        try:
            written.write_bytes(pickle.dumps((SOURCES, dumps(code))))
            written.replace(path)
        except OSError:
            written.unlink(missing_ok=True)


class _Cache(FunctionCache):
    """numba's cache, made safe for concurrent compilation and for functions in several files.

    numba reads and writes its index without a lock: if two processes add a signature at once, the
    code of one may stay under the name of the other. It also checks only the function's own file
    for changes, not those of the functions that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(str(Path(self.cache_path) / self._impl.filename_base))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function, and cache the machine code if a folder is writable."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": set(EXACT),
        "no_cfunc_wrapper": True,
    }
    loop = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # no writable folder
        loop._cache = _Cache(function)
    return loop


def compiled(function: Callable[..., Any], arithmetic: frozenset[str] = EXACT) -> Any:
    """Compile a part of kernels, inlined, that Python cannot call.

    A wrapper for Python would add a tenth to the compile time. Without inlining it would be
    compiled twice, alone and with the kernel, with sums in two orders, and the bits of a process
    would depend on whether its code was compiled or loaded.
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
    """`compiled`, with sums carried in vector lanes."""
    return compiled(function, IN_LANES)


@functools.cache
def _say_that_it_compiles() -> None:
    print("FastPPO is compiling its loops for this CPU: a few seconds", file=sys.stderr)


def _say_if_it_compiles(kernel: Any) -> None:
    if not kernel.signatures:
        _say_that_it_compiles()


def in_threads(
    kernel: Any, count: int, *arguments: Any, entries: int, buffers: Callable[[], Any] | None = None
) -> None:
    """Run `kernel(start, stop, *arguments)` over parts of `range(count)`, one per thread.

    On a terminal, a compilation of more than a second is announced in one line.

    Args:
        entries: the total number of logits or tokens, which limits the number of threads.
        buffers: allocates a thread's buffers, which are passed before the arguments. Allocating
            them inside the kernel would take longer to compile.
    """
    if not kernel.signatures and sys.stderr is not None and sys.stderr.isatty():
        clock = Timer(1.0, _say_if_it_compiles, [kernel])
        clock.daemon = True
        clock.start()
    threads = max(1, min(torch.get_num_threads(), count, entries // ENTRIES_PER_THREAD))

    def work(start: int, stop: int) -> None:
        thread_buffers = () if buffers is None else (buffers(),)
        kernel(start, stop, *thread_buffers, *arguments)

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
    """Drop the pool in a forked child, which has none of the parent's threads."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_threads)


def fresh(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a contiguous tensor of this shape, in huge pages if it is large.

    Page faults take two thirds of the time of writing a new tensor, and huge pages have 512 times
    fewer. NumPy requests them from the system; torch does not. If the system has none ready, a page
    takes milliseconds. So the memory of a freed tensor is kept for the next one: see `empty_cache`.
    """
    dtype = dtype or like.dtype
    size = like.numel() * dtype.itemsize
    if size < KEPT or like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    buffer = _take(size if size < LARGE else size + ALIGNMENT)
    start = -buffer.ctypes.data % ALIGNMENT
    memory = buffer[start : start + size]  # lives as long as the tensor's storage
    weakref.finalize(memory, _keep, buffer).atexit = False
    return torch.from_numpy(memory).view(dtype).view(like.shape)


SPARES = 2
"""Freed buffers of at least `LARGE` bytes to keep."""

SMALL_SPARES = 4
"""Smaller ones to keep, such as advantages and returns."""

_spares: dict[int, np.ndarray] = {}
"""Freed buffers by `id`, oldest first. Only atomic operations change it, since a garbage collection
can free a tensor at any point of any thread."""


def _take(size: int) -> np.ndarray:
    """Return a kept buffer of `size` bytes, at most twice as large, or a new one."""
    for buffer in list(_spares.values()):
        if size <= buffer.nbytes <= 2 * size and _spares.pop(id(buffer), None) is not None:
            return buffer
    if size < LARGE:
        return torch.empty(size, dtype=torch.uint8).numpy()
    return np.empty(size, dtype=np.uint8)


def _keep(buffer: np.ndarray) -> None:
    _spares[id(buffer)] = buffer
    for is_large, limit in ((True, SPARES), (False, SMALL_SPARES)):
        alike = [each for each in list(_spares.values()) if (each.nbytes >= LARGE) == is_large]
        for each in alike[:-limit]:
            _spares.pop(id(each), None)


def empty_cache() -> None:
    """Return the memory of freed gradients on a CPU to the system.

    The CPU kernels keep the memory of the last two freed results of at least 4 MiB, and of the last
    four of 256 KiB to 4 MiB, because new memory can take longer than the kernel.
    `torch.cuda.empty_cache` does the same for a GPU.
    """
    _spares.clear()
