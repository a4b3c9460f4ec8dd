"""Caches keep keys and values in the dtype of the products, and one keeps its memory."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor
from transformers import DynamicCache, FalconMambaConfig

from fastppo.models.cache import ROOM, FixedCache, GrowingCache, has_fixed_cache
from fastppo.models.trunk import last_states

IDS = torch.tensor([[5, 9, 4, 8], [7, 3, 6, 11]])
CPU = torch.device("cpu")


def _fixed(trunk, rows: int, tokens: int, dtype: torch.dtype | None = None) -> FixedCache:
    return FixedCache(trunk.config, rows=rows, tokens=tokens, dtype=dtype, device=CPU)


def _decoded(trunk, cache, dtype) -> Tensor:
    """[2, 3, H]: the last states of two prompts of two tokens, and of two tokens more."""
    states = []
    trunk.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        for begin, end in ((0, 2), (2, 3), (3, 4)):
            if isinstance(cache, FixedCache):
                cache.show(2, 6) if begin else cache.begin()
                cache.position.fill_(begin)
            positions = torch.arange(begin, end).expand(2, -1)
            states.append(
                last_states(
                    trunk,
                    IDS[:, begin:end],
                    attention_mask=None,
                    position_ids=positions,
                    cache=cache,
                )
            )
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "gemma3"])
@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_keys_in_the_dtype_of_the_products_change_no_bit(architecture: str, kind: str) -> None:
    """Attention would round them to it anyway."""
    trunk, dtype = tiny.model(architecture).base_model, torch.bfloat16
    cache = GrowingCache(trunk.config, dtype)
    if kind == "fixed":
        cache = _fixed(trunk, 2, 8, dtype)
    plain = DynamicCache(config=trunk.config)
    actual, wanted = _decoded(trunk, cache, dtype), _decoded(trunk, plain, dtype)
    if kind == "growing":
        assert torch.equal(actual, wanted)
    else:  # sums over a longer row, whose end is masked
        torch.testing.assert_close(actual, wanted, rtol=2**-6, atol=2**-6)
    held = [states.dtype for layer in cache.layers for states in (layer.keys, layer.values)]
    assert {*held} == {dtype}
    if architecture == "llama":  # its rotary embeddings leave keys in fp32
        assert {layer.keys.dtype for layer in plain.layers} == {torch.float32}


def test_its_memory_stays_and_rows_move_to_the_top() -> None:
    trunk = tiny.model().base_model
    cache = _fixed(trunk, 3, 9)
    _decoded(trunk, cache, None)
    layer = cache.layers[0]
    assert layer.all_keys.shape == (3, 2, 9, 8)
    assert layer.keys.shape == (2, 2, 6, 8)
    held, second = layer.all_keys.data_ptr(), layer.all_keys[1, :, :4].clone()
    cache.select(torch.tensor([1]), 4)
    assert torch.equal(layer.all_keys[0, :, :4], second)
    assert layer.all_keys.data_ptr() == held


def test_a_growing_cache_outgrows_its_memory_and_keeps_the_rows_that_are_selected() -> None:
    """As transformers' own does, token after token."""
    caches = [GrowingCache(tiny.model().config, None), DynamicCache(config=tiny.model().config)]
    generator = torch.Generator().manual_seed(0)
    for step in range(2 * ROOM + 3):
        rows = 3 if step < ROOM // 2 else 2
        keys, values = torch.randn(2, rows, 2, 1, 8, generator=generator)
        outputs = [cache.update(keys.clone(), values.clone(), 0) for cache in caches]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        if step == ROOM // 2 - 1:
            for cache in caches:
                cache.batch_select_indices(torch.tensor([2, 0]))


def test_every_model_has_a_fixed_cache_but_one_whose_state_is_no_keys() -> None:
    assert all(has_fixed_cache(tiny.model(architecture).config) for architecture in tiny.CONFIGS)
    config = FalconMambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=40)
    assert not has_fixed_cache(config)
