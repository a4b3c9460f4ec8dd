"""Steps that are replayed without a GPU, as their operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


class Replayed:
    """A decoding step as the operations that it is of, on the tensors that it reads and writes.

    With a CUDA graph it has in common that no line of Python runs again and no number of the host's
    changes.

    Args:
        step: of a batch at fixed shapes.
        memory: what the step writes to, with its cache.
    """

    def __init__(self, step: Callable[[], None], memory: Any) -> None:
        held = [x for x in vars(memory).values() if isinstance(x, Tensor)]
        held += [x for x in vars(memory.record).values() if isinstance(x, Tensor)]
        held.append(memory.cache.position)
        for layer in memory.cache.layers:
            held += [layer.all_keys, layer.all_values] if layer.is_initialized else []
        before = [x.clone() for x in held]
        self._operations = make_fx(step)()  # runs the step, and a capture runs nothing
        for x, value in zip(held, before, strict=True):
            x.copy_(value)
        self._device = memory.next.device.type

    def replay(self) -> None:
        with torch.autocast(self._device, enabled=False):  # its casts are among the operations
            self._operations()
