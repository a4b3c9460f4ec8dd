"""Masks come from lengths, and packed tensors stay with their sequences."""

from __future__ import annotations

import pytest
import torch

from fastppo.batch import Experience, Sequences
from fastppo.trainer import token_weights

PROMPTS = [[5, 6], [7], [8, 9, 10]]
RESPONSES = [[1, 1, 4], [2], [1, 3]]


def _sequences(pad: int = 1) -> Sequences:
    return Sequences.pack(PROMPTS, RESPONSES, pad)


def test_response_tokens_are_packed_in_order_even_where_they_are_the_pad_token() -> None:
    sequences = _sequences(pad=1)
    assert sequences.response_tokens.tolist() == [1, 1, 4, 2, 1, 3]
    assert sequences.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert sequences.attention_mask.sum(1).tolist() == [5, 2, 5]


def test_the_position_before_a_token_predicts_it() -> None:
    row, column = _sequences().predicting_positions
    assert row.tolist() == [0, 0, 0, 1, 2, 2]
    assert column.tolist() == [1, 2, 3, 0, 2, 3]
    assert [p.tolist() for p in _sequences().final_positions] == [[0, 1, 2], [4, 1, 4]]


def _experience() -> Experience:
    packed = torch.arange(6, dtype=torch.float32)
    return Experience(_sequences(), packed, packed + 10, packed + 20, packed + 30)


def test_selecting_sequences_selects_their_tokens() -> None:
    part = _experience().select(torch.tensor([2, 0]))
    assert part.logprobs.tolist() == [4, 5, 0, 1, 2]
    assert part.returns.tolist() == [34, 35, 30, 31, 32]
    assert part.sequences.response_tokens.tolist() == [1, 3, 1, 1, 4]
    assert part.ref_logprobs is None


def test_padding_that_no_selected_row_needs_is_cut_off() -> None:
    assert _experience().select(torch.tensor([1])).sequences.input_ids.shape == (1, 2)


def test_splitting_loses_nothing() -> None:
    parts = _experience().split(2)
    assert [len(part) for part in parts] == [2, 1]
    assert torch.cat([part.values for part in parts]).tolist() == list(range(10, 16))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 6] * 6),
        ("seq-mean-token-mean", [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2),
        ("seq-mean-token-sum", [1 / 3] * 6),
        ("token-sum", [1.0] * 6),
    ],
)
def test_packed_weights_follow_the_aggregation(aggregation: str, expected: list[float]) -> None:
    weights = token_weights(torch.tensor([3, 1, 2]), aggregation)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_wrong_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        Sequences.pack([[1], []], [[1], [1]], 0)
    with pytest.raises(ValueError, match="1 prompts and 2 responses"):
        Sequences.pack([[1]], [[1], [1]], 0)
