"""KV caches of decoding: transformers' growing one, and one of a fixed size for CUDA graphs.

Both keep keys and values in the dtype of the matrix products. Under autocast rotary embeddings
leave keys in fp32, and attention would round the whole cache anew at every step; rounded once, when
they come, keys give the same bits and take half of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

ROOM = 64
"""Tokens by which a growing cache grows: all of it is copied once in so many steps."""


class GrowingCache(DynamicCache):
    """transformers' cache, a token longer with each step. Layers that keep all tokens write them
    into memory that is there already, where transformers copies the whole cache for each token.

    Args:
        config: of the model.
        dtype: of keys and values; None leaves them as they come.
    """

    def __init__(self, config: Any, dtype: torch.dtype | None) -> None:
        super().__init__(config=config)
        layers: list[Any] = self.layers
        self.layers = [_RoomyLayer() if type(x) is DynamicLayer else x for x in layers]
        self.dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values [B, heads, S, D] to a layer; returns all that it has."""
        key_states = key_states.to(self.dtype)
        value_states = value_states.to(self.dtype)
        return super().update(key_states, value_states, layer_idx, *args, **more)


class _RoomyLayer(DynamicLayer):
    """`keys` and `values` are windows of `key_room` and `value_room`, which are longer."""

    key_room: Tensor
    value_room: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.key_room = key_states[:, :, :0]
            self.value_room = value_states[:, :, :0]
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if end > self.key_room.shape[-2]:
            self.key_room = _longer(self.key_room, end + ROOM)
            self.value_room = _longer(self.value_room, end + ROOM)
        self.key_room[:, :, begin:end] = key_states
        self.value_room[:, :, begin:end] = value_states
        return self._show(end)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` [n], in that order."""
        if self.is_initialized:  # not if it reads another layer's keys and values
            self.key_room = self.key_room[indices]
            self.value_room = self.value_room[indices]
            self._show(self.get_seq_length())

    def _show(self, tokens: int) -> tuple[Tensor, Tensor]:
        self.keys = self.key_room[:, :, :tokens]
        self.values = self.value_room[:, :, :tokens]
        return self.keys, self.values


def _longer(room: Tensor, tokens: int) -> Tensor:
    """A copy of keys or values [B, heads, S, D] with room for so many tokens."""
    longer = room.new_empty(*room.shape[:2], tokens, room.shape[3])
    longer[:, :, : room.shape[2]] = room
    return longer


class FixedCache(Cache):
    """Memory for so many rows and tokens, of which decoding steps see a window.

    Every layer keeps all tokens, and a mask hides those outside a sliding window: the layers that
    transformers has for it branch on the host by how many tokens they have seen. In the first pass
    over the prompts attention gets their own keys, as it would without a cache; from then on it
    gets the window, in which a mask hides what has not been written.

    Args:
        config: of a model for which `has_fixed_cache` is true.
        rows, tokens: what it has memory for; a layer allocates its share when it is first used.
        dtype: of keys and values; None is what comes first.

    Attributes:
        position: [1] int64 on the device, the place of the next token. The caller counts it up,
            since all layers of a step write at the same one.
    """

    def __init__(
        self,
        config: Any,
        *,
        rows: int,
        tokens: int,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._shape = _Shape(rows=rows, tokens=tokens, dtype=dtype, position=self.position)
        count = len(StaticCache(config=config, max_cache_len=tokens).layers)
        super().__init__(layers=[_FixedLayer(self._shape) for _ in range(count)])

    def begin(self) -> None:
        """The next pass is of the prompts."""
        self._shape.is_prefill = True

    def show(self, rows: int, tokens: int) -> None:
        """The steps to come are of the first `rows` and see the first `tokens`."""
        self._shape.is_prefill = False
        for layer in self._used_layers():
            layer.show(rows, tokens)

    def select(self, rows: Tensor, tokens: int) -> None:
        """Moves rows [n] to the top, as far as their first `tokens`."""
        for layer in self._used_layers():
            for states in (layer.all_keys, layer.all_values):
                states[: len(rows), :, :tokens] = states[rows, :, :tokens]

    def _used_layers(self) -> list[Any]:
        """All layers except those that read another's keys and values."""
        layers: list[Any] = self.layers
        return [layer for layer in layers if layer.is_initialized]


@dataclass(slots=True)
class _Shape:
    """What the layers of a fixed cache have in common."""

    rows: int
    tokens: int
    dtype: torch.dtype | None
    position: Tensor
    is_prefill: bool = True


class _FixedLayer(StaticLayer):
    """One layer's keys and values: `keys` and `values` are windows of `all_keys` and `all_values`,
    [rows, heads, tokens, D]."""

    all_keys: Tensor
    all_values: Tensor

    def __init__(self, shape: _Shape) -> None:
        super().__init__(max_cache_len=shape.tokens)
        self.shape = shape

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.all_keys = self._empty(key_states)
        self.all_values = self._empty(value_states)
        self.is_initialized = True

    def _empty(self, states: Tensor) -> Tensor:
        # Zeros, for attention multiplies even what its mask hides, and 0·NaN is NaN.
        shape = self.shape
        size = (shape.rows, states.shape[1], shape.tokens, states.shape[3])
        return states.new_zeros(size, dtype=shape.dtype)

    def show(self, rows: int, tokens: int) -> None:
        self.max_cache_len = tokens
        self.keys = self.all_keys[:rows, :, :tokens]
        self.values = self.all_values[:rows, :, :tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key_states = key_states.to(self.all_keys.dtype)
        value_states = value_states.to(self.all_values.dtype)
        if self.shape.is_prefill:
            rows, _, tokens, _ = key_states.shape
            self.all_keys[:rows, :, :tokens] = key_states
            self.all_values[:rows, :, :tokens] = value_states
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.shape.position, key_states)
        self.values.index_copy_(2, self.shape.position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.shape.is_prefill else self.max_cache_len), 0

    def get_seq_length(self) -> Any:
        return 0 if self.shape.is_prefill else self.shape.position.squeeze(0)


def has_fixed_cache(config: Any) -> bool:
    """Whether all that a model's layers keep is keys and values of each token."""
    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except (KeyError, ValueError):  # layers that transformers has no fixed size for
        return False
    return all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers)
