"""How the CPU's compiled loops are compiled, given memory and spread over threads.

The threads are Python's, and the loops release its lock. A pool of OpenMP's or numba's own would
spin beside torch's on the same cores after every call, dies after a fork or refuses to be called
from two threads at once; these wait in the kernel, and are as many as torch has at the call.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

EXACT = frozenset({"contract"})
"""What the compiler may change in arithmetic: a product and a sum may become one multiply-add."""

IN_LANES = EXACT | {"reassoc", "nsz"}
"""For loops with sums, besides: they may be carried in lanes. NaN and infinities are kept."""

HUGE_PAGE = 2**21
"""Bytes: below twice as many, memory is torch's."""

_pool: ThreadPoolExecutor | None = None


def compiled(function: Callable[..., Any], arithmetic: frozenset[str] = EXACT) -> Any:
    """The function in machine code, which is kept for later processes where there is a place."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": set(arithmetic),
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to
        return numba.njit(**options)(function)


def compiled_in_lanes(function: Callable[..., Any]) -> Any:
    """The same, where sums may be carried in lanes."""
    return compiled(function, IN_LANES)


def in_threads(kernel: Callable[..., None], count: int, *arguments: Any) -> None:
    """`kernel(start, stop, *arguments)` for parts of `range(count)`, one to a thread."""
    threads = max(1, min(torch.get_num_threads(), count))
    if threads == 1:
        kernel(0, count, *arguments)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    parts = [
        _threads().submit(kernel, start, stop, *arguments)
        for start, stop in itertools.pairwise(bounds[1:])
    ]
    kernel(0, bounds[1], *arguments)
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
