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
"""Tokens for which a growing cache has room: one copy of it in so many steps."""


class GrowingCache(DynamicCache):
    """transformers' cache, a token longer with each step; layers that keep all tokens write them
    into room that is there already, where transformers copies the whole cache for each.

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
        """Takes up keys and values [B, heads, S, D] of a layer; all that it has."""
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        return super().update(key_states, value_states, layer_idx, *args, **more)


class _RoomyLayer(DynamicLayer):
    """`keys` and `values` are windows of tensors that have room for tokens to come."""

    rooms: tuple[Tensor, Tensor] | None = None
    windows: tuple[Tensor, Tensor] | None = None
    """As `update` left them; others when a method of transformers has replaced them since."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        assert self.keys is not None
        assert self.values is not None
        is_ours = self.windows is not None and self.keys is self.windows[0]
        if self.rooms is None or not is_ours or end > self.rooms[0].shape[-2]:
            held = self.keys, self.values
            self.rooms = _roomy(key_states, end), _roomy(value_states, end)
            if begin:
                for room, before in zip(self.rooms, held, strict=True):
                    room[:, :, :begin] = before
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = states
        self.windows = self.rooms[0][:, :, :end], self.rooms[1][:, :, :end]
        self.keys, self.values = self.windows
        return self.windows


def _roomy(states: Tensor, tokens: int) -> Tensor:
    """Room for so many tokens, and some, of the rows of `states` [B, heads, S, D]."""
    return states.new_empty(*states.shape[:2], tokens + ROOM, states.shape[3])


class FixedCache(Cache):
    """Memory for so many rows and tokens, of which decoding steps see a window.

    Every layer keeps all tokens: a sliding window is the mask's affair, for the layers that
    transformers has for it branch on the host by how many tokens they have seen. In the first pass
    over the prompts attention gets their own keys, as it would without a cache; from then on it
    gets the window, in which a mask hides what has not been written.

    Args:
        config: of a model for which `has_fixed_cache` is true.
        rows, tokens: what there is memory for; a layer allocates its own when it is first used.
        dtype: of keys and values; None is what comes first.

    Attributes:
        position: [1] int64 on the device, the place of the next token. Counting it up is the
            caller's affair: all layers of a step write at the same one.
    """

    def __init__(
        self, config: Any, rows: int, tokens: int, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.tokens = tokens
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._shape = _Shape(rows, tokens, dtype, self.position)
        count = len(StaticCache(config=config, max_cache_len=tokens).layers)
        super().__init__(layers=[_FixedLayer(self._shape) for _ in range(count)])

    def begin(self) -> None:
        """The next pass is of the prompts."""
        self._shape.is_prefill = True

    def show(self, rows: int, tokens: int) -> None:
        """The steps to come are of the first `rows` and see the first `tokens`."""
        self._shape.is_prefill = False
        for layer in self._used():
            layer.show(rows, tokens)

    def select(self, rows: Tensor, tokens: int) -> None:
        """Moves rows [n] to the top, as far as their first `tokens`."""
        for layer in self._used():
            for held in (layer.all_keys, layer.all_values):
                held[: len(rows), :, :tokens] = held[rows, :, :tokens]

    def _used(self) -> list[Any]:
        """The layers but those that read another's keys and values."""
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
    """One layer's keys and values."""

    all_keys: Tensor
    """[rows, heads, tokens, D], as `all_values`; `keys` and `values` are the window of them."""
    all_values: Tensor

    def __init__(self, shape: _Shape) -> None:
        super().__init__(max_cache_len=shape.tokens)
        self.shape = shape

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, tokens, dtype = self.shape.rows, self.shape.tokens, self.shape.dtype
        self.all_keys, self.all_values = (
            # Zeros, for attention multiplies even what its mask hides, and 0·NaN is NaN.
            states.new_zeros(rows, states.shape[1], tokens, states.shape[3], dtype=dtype)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

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
