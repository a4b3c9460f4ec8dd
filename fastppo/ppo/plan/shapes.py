"""Build models on fake tensors, and count the bytes they would take.

Models are built from their config.json on the meta device, then given fake tensors, with a shape, a
dtype, a device and no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# torch documents fake tensors under this name only. The meta device has no autocast.
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForSequenceClassification

from fastppo.models.multimodal import auto_class
from fastppo.models.pretrained import model_config
from fastppo.ppo.setup.run_models import ModelLoader


@dataclass(slots=True)
class Peak:
    """Largest number of bytes held at once."""

    bytes: int = 0


class LiveBytes(FakeTensorMode):
    """Mode of fake tensors that counts the bytes of the live storages that operations return."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.bytes = 0
        self.most = 0
        """The peak since the last call of `peak`."""
        self._storages: dict[int, weakref.ref] = {}
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._depth += 1
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if self._depth == 0:  # skip nested operations: torch caches them across calls
            self._count_tensors(out)
        return out

    def _count_tensors(self, out: Any) -> None:
        """Count a tensor, or those of a list or tuple."""
        if isinstance(out, (list, tuple)):
            for part in out:
                self._count_tensors(part)
        elif isinstance(out, Tensor) and out.device.type != "meta":
            self._count(out.untyped_storage())

    def _count(self, storage: Any) -> None:
        key = id(storage)  # unique, since the Python object lives as long as the storage
        if key in self._storages:
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            del self._storages[key]
            self.bytes -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.most = max(self.most, self.bytes)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Measure the peak of new bytes in the block; the result is set at its end."""
        before = self.bytes
        self.most = before
        peak = Peak()
        yield peak
        peak.bytes = self.most - before


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, counting each storage once."""
    storages = {id(x.untyped_storage()): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class ShapeLoader(ModelLoader):
    """Build models from their config.json on the meta device."""

    def causal_lm(self, name: str, option: str) -> Any:
        chosen = self.config.attn_implementation
        # flash-attn saves what SDPA saves, and cannot be called without a GPU.
        attention = None if chosen == "auto" or chosen.startswith("flash") else chosen
        config = model_config(name, option)
        with torch.device("meta"):
            return auto_class(config).from_config(
                config, dtype=self.dtype, attn_implementation=attention
            )

    def classifier(self, name: str, option: str) -> Any:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(
                model_config(name, option), dtype=self.dtype
            )


def materialize(model: nn.Module) -> None:
    """Replace a model's meta tensors by fake ones, which are counted as memory.

    `Module.to` does not support fake tensors.
    """
    materialized: dict[Tensor, Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        tensors = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if tensor not in materialized:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, tensor.requires_grad)
                materialized[tensor] = fake
            setattr(module, name, materialized[tensor])
