"""The growing cache gives the bits of transformers' own, and keeps keys and values in the dtype of
the matrix products."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor
from transformers import DynamicCache

from fastppo.models.cache import GROWTH, GrowingCache
from fastppo.models.trunk import last_states

IDS = torch.tensor([[5, 9, 4, 8], [7, 3, 6, 11]])


def _decoded(trunk, cache) -> Tensor:
    """[2, 3, H]: last states after two prompts of two tokens, and after each of two more tokens."""
    states = []
    trunk.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for begin, end in ((0, 2), (2, 3), (3, 4)):
            states.append(
                last_states(
                    trunk,
                    IDS[:, begin:end],
                    attention_mask=None,
                    position_ids=torch.arange(begin, end).expand(2, -1),
                    cache=cache,
                )
            )
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "gemma3"])
def test_rounding_keys_once_changes_no_bit(architecture: str) -> None:
    """Attention would round them anyway."""
    trunk = tiny.model(architecture).base_model
    cache = GrowingCache(trunk.config, torch.bfloat16)
    plain = DynamicCache(config=trunk.config)
    assert torch.equal(_decoded(trunk, cache), _decoded(trunk, plain))
    held = [states.dtype for layer in cache.layers for states in (layer.keys, layer.values)]
    assert {*held} == {torch.bfloat16}
    if architecture == "llama":  # its rotary embeddings leave keys in fp32
        assert {layer.keys.dtype for layer in plain.layers} == {torch.float32}


def test_it_grows_and_keeps_the_selected_rows_as_a_dynamic_cache_does() -> None:
    caches = [GrowingCache(tiny.model().config, None), DynamicCache(config=tiny.model().config)]
    generator = torch.Generator().manual_seed(0)
    for step in range(2 * GROWTH + 3):
        rows = 3 if step < GROWTH // 2 else 2
        keys, values = torch.randn(2, rows, 2, 1, 8, generator=generator)
        outputs = [cache.update(keys.clone(), values.clone(), 0) for cache in caches]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        if step == GROWTH // 2 - 1:
            for cache in caches:
                cache.reorder_cache(torch.tensor([2, 0]))
