"""How often the host would wait for a GPU: reads of a value, or of a shape that depends on one.

On a GPU torch itself refuses them; on a CPU, where nothing waits, they are counted as operations.
Host arithmetic on lengths is NumPy's or Python's, and so is none.
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
"""`fastppo.functional.gradients._scaled` looks at a CPU's factor, and never at a GPU's.
transformers makes a mask for packed rows where there are no kernels for them, which a GPU in half
precision has."""


def _reads_on_a_cpu_alone() -> bool:
    return any(frame.name in ON_A_CPU_ALONE for frame in traceback.extract_stack(limit=12))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The reads within the block, by operation; `tolist` of a tensor, which needs none on a CPU,
    is one of them."""
    seen: Counter[str] = Counter()
    tolist = Tensor.tolist

    def counting(x: Tensor) -> Any:
        # Lengths are int64 on the host by contract; what is computed on the device is float.
        if x.is_floating_point():
            seen["tolist"] += 1
        return tolist(x)

    with pytest.MonkeyPatch.context() as patch, _Reads(seen):
        patch.setattr(Tensor, "tolist", counting)
        yield seen


@contextmanager
def refused_by_torch() -> Iterator[None]:
    """On a GPU: torch raises where the host would wait; afterwards the mode is what it was.

    Setting a mode warns, which is an error in these tests.
    """
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
