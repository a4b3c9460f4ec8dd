"""The KV cache of the decoder.

Keys and values have the dtype of the matrix products. Under autocast, rotary embeddings leave keys
in fp32, and attention would round the whole cache at every step. Rounding keys once, when they are
written, gives the same bits in half of the memory.

`Prefix` and `KeptPrefixes` keep the entries of conversations between the turns of an episode.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

GROWTH = 64
"""Tokens by which a full buffer grows."""


class Prefix(NamedTuple):
    """Tokens of a conversation, and their keys and values in all layers."""

    tokens: tuple[int, ...]
    keys: Tensor
    """[layers, heads, tokens, D]."""
    values: Tensor
    """[layers, heads, tokens, D']."""


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

    @property
    def has_keys(self) -> bool:
        """Whether some layers store keys and values, and not recurrent states alone."""
        return any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    @property
    def has_keys_alone(self) -> bool:
        """Whether all layers store the keys and values of every token, and nothing else.

        A recurrent state or a sliding window cannot go back to an earlier token.
        """
        return all(type(layer) is _BufferedLayer for layer in self.layers)

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
        layers: list[Any] = self.layers
        for layer in layers:
            layer.reorder_cache(rows)

    def prefix(self, row: int, begin: int, tokens: Sequence[int]) -> Prefix | None:
        """Copy the entries of a row, which are those of `tokens` from column `begin` on.

        Returns:
            None if layers differ in shape, or if one has no entries of its own.
        """
        layers: list[Any] = self.layers
        if not all(layer.is_initialized for layer in layers):
            return None
        if len({(layer.keys.shape, layer.values.shape) for layer in layers}) > 1:
            return None
        end = begin + len(tokens)
        return Prefix(
            tuple(tokens),
            keys=torch.stack([layer.keys[row, :, begin:end] for layer in layers]),
            values=torch.stack([layer.values[row, :, begin:end] for layer in layers]),
        )

    def begin_with(self, prefixes: Sequence[Prefix], columns: Sequence[int], length: int) -> None:
        """Fill an empty cache with `length` columns.

        Args:
            prefixes: [B], one of each row.
            columns: [B], the column of each row's first token; what is left of it is padding.
        """
        layers: list[Any] = self.layers
        for name in ("keys", "values"):
            heads, _, width = getattr(prefixes[0], name)[0].shape
            shape = (len(layers), len(prefixes), heads, length + GROWTH, width)
            # The padding is masked, but must be finite.
            states = getattr(prefixes[0], name).new_zeros(shape)
            for row, (prefix, column) in enumerate(zip(prefixes, columns, strict=True)):
                count = max(0, length - column)
                states[:, row, :, length - count : length] = getattr(prefix, name)[:, :, :count]
            for layer, buffer in zip(layers, states, strict=True):
                setattr(layer, f"{name.removesuffix('s')}_buffer", buffer)
        for layer in layers:
            layer.begin(length)


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

    def begin(self, tokens: int) -> None:
        """Begin with `tokens` entries that are in the buffers already."""
        self.lazy_initialization(self.key_buffer, self.value_buffer)
        self._view(tokens)

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


class KeptPrefixes:
    """Cache entries of conversations, to be continued in a later turn.

    They take at most as many tokens as the largest cache of the calls so far; the oldest leave
    first.
    """

    def __init__(self) -> None:
        self.limit = 0
        """Tokens of the largest cache so far: rows times columns."""
        self._by_tokens: list[Prefix] = []
        """In the order of their tokens, so that the longest common prefix is a neighbor's."""
        self._by_age: list[Prefix] = []

    def best(self, prompt: Sequence[int]) -> tuple[Prefix | None, int]:
        """Return the prefix that has most tokens in common with a prompt, and how many."""
        tokens = tuple(prompt)
        place = bisect.bisect(self._by_tokens, tokens, key=_tokens)
        neighbors = self._by_tokens[max(0, place - 1) : place + 1]
        counts = [_common(prefix.tokens, tokens) for prefix in neighbors]
        if not counts:
            return None, 0
        most = max(counts)
        return neighbors[counts.index(most)], most

    def add(self, prefix: Prefix) -> None:
        """Keep a conversation instead of its beginning; the oldest leave if there is no room."""
        before, common = self.best(prefix.tokens)
        if before is not None and common == len(before.tokens):
            self._remove(before)
        bisect.insort(self._by_tokens, prefix, key=_tokens)
        self._by_age.append(prefix)
        while sum(len(kept.tokens) for kept in self._by_age) > self.limit:
            self._remove(self._by_age[0])

    def _remove(self, prefix: Prefix) -> None:
        self._by_age = [kept for kept in self._by_age if kept is not prefix]
        self._by_tokens = [kept for kept in self._by_tokens if kept is not prefix]


def _tokens(prefix: Prefix) -> tuple[int, ...]:
    return prefix.tokens


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
