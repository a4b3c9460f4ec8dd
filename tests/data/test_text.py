"""Pretraining text: concatenated texts, each followed by EOS, in blocks of equal length."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.data.datasets import DataError, shuffled
from fastppo.data.text import PretrainingText

EOS = 1
ROWS = [{"text": "w1 w2 w3"}, {"text": "w4"}, {"text": "w5 w6"}]
"""With an EOS each: 4 + 2 + 3 tokens."""


def test_texts_are_concatenated_and_an_incomplete_block_is_dropped() -> None:
    text = PretrainingText(ROWS, tiny.tokenizer(), 4)
    assert text.blocks.tolist() == [[4, 5, 6, EOS], [7, EOS, 8, 9]]
    assert len(text) == 2


def test_blocks_are_visited_in_shuffled_epochs() -> None:
    text = PretrainingText(ROWS * 5, tiny.tokenizer(), 3)
    order = [block for epoch in range(3) for block in shuffled(len(text), 8, epoch)]
    assert torch.equal(text.at(0, 40, seed=8), text.blocks[order[:40]])
    parts = [text.at(start, 8, seed=8) for start in range(0, 40, 8)]
    assert torch.equal(torch.cat(parts), text.at(0, 40, seed=8))
    assert not torch.equal(text.at(0, 15, seed=8), text.at(0, 15, seed=9))


@pytest.mark.parametrize(
    ("rows", "block_size", "named"),
    [
        ([ROWS[0], {"body": "w1"}], 4, "mine, row 2: .*'text'.* None"),
        ([{"text": 3}], 4, "mine, row 1: .*'text'.* 3"),
        (ROWS, 10, "mine: .* 10 .* 9"),
    ],
)
def test_unusable_text_is_named(rows, block_size: int, named: str) -> None:
    with pytest.raises(DataError, match=named):
        PretrainingText(rows, tiny.tokenizer(), block_size, source="mine")


def test_a_tokenizer_without_eos_is_rejected() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="EOS"):
        PretrainingText(ROWS, tokenizer, 4)
