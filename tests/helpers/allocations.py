"""Memory allocated by a function: the tensors that its operations return, and the live total.

Workspace of a BLAS or a library inside an operation differs between CPUs and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastppo
from fastppo.functional.record_operator import Operator


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.live = {key: x for key, x in self.live.items() if not x[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _storage(tensor)._cdata not in given:
                storage = _storage(tensor)
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def _storage(x: Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


def _transparent(operator: Operator, **operands: Any) -> Any:
    """Replace a custom operator, which would hide the operations inside."""
    compute = operator.choose(**operands)
    del operands["backend"]
    with torch.no_grad():
        return compute(**operands)


def allocations(work: Callable[[], Any]) -> tuple[int, int]:
    """Return (largest single allocation, peak above the live memory before) of `work`, bytes."""
    fastppo.empty_cache()
    with pytest.MonkeyPatch.context() as patch, _Watch() as watch:
        patch.setattr(Operator, "__call__", _transparent)
        work()
    return watch.largest, watch.peak
