"""Count the synchronizations of host and GPU: reads of a value, or of a shape that depends on one.

On a GPU, torch refuses them. On a CPU they are counted as operations. Host arithmetic on lengths
uses NumPy or Python, so it is not counted.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_"}


class _Reads(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        booleans = name in INDEXING and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if (name in READS or booleans) and not _reads_on_a_cpu_alone():
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


ON_A_CPU_ALONE = {"_scaled", "find_packed_sequence_indices"}
"""Reads that do not happen on a GPU: `fastppo.functional.gradients._scaled` only reads the factor
of a CPU, and transformers makes a mask for packed rows only without flash-attn kernels."""


def _reads_on_a_cpu_alone() -> bool:
    return any(frame.name in ON_A_CPU_ALONE for frame in traceback.extract_stack(limit=12))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the reads in the block by operation, including `tolist` of a tensor."""
    seen: Counter[str] = Counter()
    tolist = Tensor.tolist

    def counting(x: Tensor) -> Any:
        # Lengths are int64 tensors of the host; floats are computed on the device.
        if x.is_floating_point():
            seen["tolist"] += 1
        return tolist(x)

    with pytest.MonkeyPatch.context() as patch, _Reads(seen):
        patch.setattr(Tensor, "tolist", counting)
        yield seen


@contextmanager
def refused_by_torch() -> Iterator[None]:
    """On a GPU, raise an error at every synchronization in the block."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
