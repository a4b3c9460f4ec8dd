"""The mark gives the same states as a mask."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.models import attention
from fastppo.models.attention import has_wrapped_attention, mark
from fastppo.models.trunk import hidden_states, prepare, takes_mark

MARKED = ("llama", "qwen2", "qwen3", "mistral", "mistral-window", "gpt2", "gpt_neox", "gemma3")
BATCH = Batch.of([[5, 9], [7, 8, 6, 12], [4]], [[10, 11, 1, 9], [13, 3, 17, 20], [21]])


@pytest.mark.parametrize("architecture", MARKED)
def test_a_marked_trunk_gives_the_states_of_a_mask(architecture: str) -> None:
    """The rows are right-padded, and longer than sliding windows of 4."""
    trunk = tiny.model(architecture).eval().base_model
    layout = BATCH.layout()
    tokens = torch.cat([layout.predicting, layout.final])
    mask = (torch.arange(layout.input_ids.shape[1]) < BATCH.lengths.unsqueeze(1)).long()
    with torch.no_grad():
        wanted = hidden_states(trunk, layout.input_ids, mask).flatten(0, 1)[tokens]
        prepare(trunk)
        assert takes_mark(trunk)
        actual = hidden_states(trunk, layout.input_ids).flatten(0, 1)[tokens]
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_a_trunk_that_reads_its_mask_is_not_marked() -> None:
    """OPT computes positions from the mask."""
    trunk = tiny.model("opt").eval().base_model
    prepare(trunk)
    assert not takes_mark(trunk)
    with torch.no_grad():
        actual = hidden_states(trunk, torch.arange(3, 11).view(2, 4))
        wanted = trunk(input_ids=torch.arange(3, 11).view(2, 4)).last_hidden_state
    assert torch.equal(actual, wanted)


def test_other_attention_functions_are_not_marked() -> None:
    model = tiny.model("llama").eval()
    assert has_wrapped_attention(model.base_model)
    model.set_attn_implementation("eager")
    assert not has_wrapped_attention(model.base_model)
    prepare(model.base_model)
    assert not takes_mark(model.base_model)


# ---------------------------------------------------------------------------------- packed rows


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *, window_size: tuple[int, int], scale: float
) -> Tensor:
    """Compute varlen attention sequence by sequence."""
    left, right = window_size
    assert right == 0
    rows = []
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        distance = torch.arange(end - begin).unsqueeze(1) - torch.arange(end - begin)
        seen = (distance >= 0) & ((distance <= left) | torch.tensor(left < 0))
        parts = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        parts[1:] = [x.repeat_interleave(len(parts[0]) // len(x), 0) for x in parts[1:]]
        row = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale)
        rows.append(row.transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("architecture", MARKED)
def test_varlen_attn_gets_lengths_scale_and_window(architecture: str, monkeypatch) -> None:
    """With a stand-in for the kernel, packed rows give the states of padded ones."""
    trunk = tiny.model(architecture).eval().base_model
    prepare(trunk)
    calls: list[tuple[int, int]] = []

    def kernel(q, k, v, *, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale, enable_gqa=True):
        assert cu_seq_q is cu_seq_k
        assert max_q == max_k == 8
        calls.append(window_size)
        return _one_by_one(q, k, v, cu_seq_q, window_size=window_size, scale=scale)

    monkeypatch.setattr("fastppo.models.trunk.packs_without_mask", lambda trunk: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    states_by_packing = []
    for layout in (BATCH.layout(), BATCH.packed_layout()):
        tokens = torch.cat([layout.predicting, layout.final])
        with torch.no_grad():
            states = hidden_states(trunk, layout.input_ids, packing=layout.packing)
        states_by_packing.append(states.flatten(0, 1)[tokens])
    windows = {"mistral-window": {(3, 0)}, "gemma3": {(3, 0), (-1, 0)}}.get(architecture)
    assert {*calls} <= (windows or {(-1, 0)})
    assert calls
    torch.testing.assert_close(states_by_packing[1], states_by_packing[0], rtol=1e-5, atol=1e-5)


def test_flash_attn_is_used_if_the_model_was_loaded_with_it(monkeypatch) -> None:
    q, (k, v) = torch.randn(1, 4, 9, 8), torch.randn(2, 1, 2, 9, 8)
    cu = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    seen: dict[str, Any] = {}

    def kernel(q, k, v, *, cu_seqlens_q, window_size, softmax_scale, **options):
        seen.update(options)
        return _one_by_one(q, k, v, cu_seqlens_q, window_size=window_size, scale=softmax_scale)

    stand_in = SimpleNamespace(flash_attn_varlen_func=kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    layer: Any = SimpleNamespace(config=SimpleNamespace(sliding_window=3))
    wrapped = attention._knowing_the_mark("flash_attention_2", None)  # type: ignore[arg-type]
    actual, _ = wrapped(
        layer,
        q,
        k,
        v,
        mark(q.device),
        cu_seq_lens_q=cu,
        max_length_q=4,
        scaling=0.3,
        sliding_window=3,
        softcap=20.0,
    )
    assert seen["softcap"] == 20.0
    assert (seen["causal"], seen["max_seqlen_q"], seen["max_seqlen_k"]) == (True, 4, 4)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    wanted = _one_by_one(*rows, cu, scale=0.3, window_size=(2, 0))
    torch.testing.assert_close(actual[0], wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_that_keeps_its_window_from_attention_is_refused() -> None:
    """Packed rows would attend to the whole sequence."""
    layer: Any = SimpleNamespace(config=SimpleNamespace(sliding_window=3))
    wrapped = attention._knowing_the_mark("sdpa", None)  # type: ignore[arg-type]
    x = torch.zeros(1, 1, 2, 4)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="sliding window"):
        wrapped(layer, x, x, x, mark(x.device), cu_seq_lens_q=cu, max_length_q=2)
