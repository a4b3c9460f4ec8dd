"""Right-padded ids, and a mask that knows lengths and not tokens."""

from __future__ import annotations

import torch

from fastppo.data.padding import pad, padded_batch

ROWS = [[5, 0, 0], [7], [0, 0]]


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    padded = pad(ROWS, -100)
    assert padded.tolist() == [[5, 0, 0], [7, -100, -100], [0, 0, -100]]
    assert padded.dtype == torch.int64


def test_the_mask_follows_from_the_lengths_where_the_pad_token_is_in_the_text() -> None:
    batch = padded_batch(ROWS, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 0, 0], [7, 0, 0], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert {value.dtype for value in batch.values()} == {torch.int64}
