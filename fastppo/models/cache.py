"""The KV cache of the decoder.

Keys and values have the dtype of the matrix products. Under autocast, rotary embeddings leave keys
in fp32, and attention would round the whole cache at every step. Rounding keys once, when they are
written, gives the same bits in half of the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

GROWTH = 64
"""Tokens by which a full buffer grows."""


class GrowingCache(DynamicCache):
    """A `DynamicCache` whose full-attention layers write into preallocated buffers.

    transformers' own layers copy the whole cache for every token.

    Args:
        config: the model's config.
        dtype: the dtype of the cached keys and values; None keeps the dtype they arrive in.
    """

    def __init__(self, config: Any, dtype: torch.dtype | None) -> None:
        super().__init__(config=config)
        layers: list[Any] = self.layers
        self.layers = [_BufferedLayer() if type(x) is DynamicLayer else x for x in layers]
        self.dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, S, D] to a layer and return all of them."""
        key_states = key_states.to(self.dtype)
        value_states = value_states.to(self.dtype)
        return super().update(key_states, value_states, layer_idx, *args, **more)

    def select(self, rows: Tensor) -> None:
        """Keep `rows` [n], int64, in that order; a row may occur more than once.

        `reorder_cache` is the one method that every kind of layer has, with recurrent and
        convolution states as well as keys and values.
        """
        self.reorder_cache(rows)


class _BufferedLayer(DynamicLayer):
    """Cache layer whose `keys` and `values` are views of preallocated buffers."""

    key_buffer: Tensor
    value_buffer: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.key_buffer = key_states[:, :, :0]
            self.value_buffer = value_states[:, :, :0]
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self.key_buffer = _grown(self.key_buffer, end + GROWTH)
            self.value_buffer = _grown(self.value_buffer, end + GROWTH)
        self.key_buffer[:, :, begin:end] = key_states
        self.value_buffer[:, :, begin:end] = value_states
        return self._view(end)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx` [n], in that order."""
        if self.is_initialized:  # a layer that shares another's keys and values is not
            self.key_buffer = self.key_buffer[beam_idx]
            self.value_buffer = self.value_buffer[beam_idx]
            self._view(self.get_seq_length())

    def _view(self, tokens: int) -> tuple[Tensor, Tensor]:
        self.keys = self.key_buffer[:, :, :tokens]
        self.values = self.value_buffer[:, :, :tokens]
        return self.keys, self.values


def _grown(buffer: Tensor, tokens: int) -> Tensor:
    """Copy keys or values [B, heads, S, D] into a buffer for `tokens` tokens."""
    grown = buffer.new_empty(*buffer.shape[:2], tokens, buffer.shape[3])
    grown[:, :, : buffer.shape[2]] = buffer
    return grown
