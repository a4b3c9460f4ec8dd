"""Microbatches: every sequence once, similar lengths together, within the limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastppo.data.batch import Batch
from fastppo.data.microbatches import Limits, microbatches, split

BATCH = Batch.of([[5, 6], [7], [8, 9, 10], [4]], [[1, 1, 4], [2], [1, 3, 5, 6], [3, 2, 8]])


@pytest.mark.parametrize(
    ("lengths", "size", "rows"),
    [
        ([3, 9, 5, 7, 1], 2, [[1, 3], [2, 0], [4]]),
        ([3, 9, 5], 16, [[0, 1, 2]]),  # all fit into one, in their order
        ([], 2, []),
    ],
)
def test_the_longest_sequences_go_first(lengths, size, rows) -> None:
    cut = microbatches(torch.tensor(lengths, dtype=torch.int64), Limits(size))
    assert [part.tolist() for part in cut] == rows
    assert all(part.dtype == torch.int64 and part.device.type == "cpu" for part in cut)


@pytest.mark.parametrize(
    ("tokens", "packed", "rows"),
    [
        (12, False, [[1], [3], [2, 0], [4]]),  # 9; 7; 2 · 5, and a third row would make 15; 1
        (12, True, [[1], [3, 2], [0, 4]]),  # 9; 7 + 5; 3 + 1
        (25, True, [[0, 1, 2, 3, 4]]),
        (1, False, [[1], [3], [2], [0], [4]]),  # each exceeds the limit
    ],
)
def test_the_token_limit_counts_padding_unless_packed(tokens, packed, rows) -> None:
    cut = microbatches(torch.tensor([3, 9, 5, 7, 1]), Limits(2, tokens, packed))
    assert [part.tolist() for part in cut] == rows


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    tokens=st.integers(1, 120),
    packed=st.booleans(),
)
def test_every_sequence_is_in_one_microbatch_within_the_limit(lengths, tokens, packed) -> None:
    cut = microbatches(torch.tensor(lengths, dtype=torch.int64), Limits(4, tokens, packed))
    assert sorted(row for rows in cut for row in rows.tolist()) == list(range(len(lengths)))
    for rows in cut:
        part_lengths = [lengths[row] for row in rows]
        computed = sum(part_lengths) if packed else len(part_lengths) * max(part_lengths)
        assert computed <= tokens or len(part_lengths) == 1


def test_count_of_sequences_of_one_length() -> None:
    assert Limits(16).count(10) == 16
    assert Limits(16, 50).count(10) == 5
    assert Limits(16, 5).count(10) == 1


@pytest.mark.parametrize("limits", [Limits(3), Limits(16), Limits(1, tokens=10)])
def test_results_return_in_the_order_of_the_batch(limits: Limits) -> None:
    parts = split(BATCH, limits)
    assert sum(map(len, parts.batches)) == len(BATCH)
    tokens = torch.cat([part.response_tokens for part in parts.batches])
    assert torch.equal(parts.in_order(tokens), BATCH.response_tokens)
    lengths = torch.cat([part.lengths for part in parts.batches])
    assert torch.equal(parts.sequences_in_order(lengths), BATCH.lengths)


def test_a_batch_that_fits_is_not_copied() -> None:
    (part,) = split(BATCH, Limits(4)).batches
    assert part is BATCH
    nothing = BATCH.select(torch.tensor([], dtype=torch.int64))
    assert split(nothing, Limits(4)).batches == []
