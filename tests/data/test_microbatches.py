"""How a batch is cut: consecutive sequences, none twice and none left out."""

from __future__ import annotations

import pytest
import torch

from fastppo.data.batch import Batch
from fastppo.data.microbatches import microbatches


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(5, 2, [2, 2, 1]), (4, 2, [2, 2]), (3, 16, [3]), (1, 1, [1]), (0, 2, [])],
)
def test_microbatches_are_consecutive_and_hold_every_sequence_once(count, size, sizes) -> None:
    cut = microbatches(count, size)
    assert [len(rows) for rows in cut] == sizes
    assert [row for rows in cut for row in rows.tolist()] == list(range(count))
    assert all(rows.dtype == torch.int64 and rows.device.type == "cpu" for rows in cut)


def test_their_rows_select_the_sequences_of_a_batch() -> None:
    batch = Batch.of([[5, 6], [7], [8, 9, 10]], [[1, 1, 4], [2], [1, 3]])
    parts = [batch.select(rows) for rows in microbatches(len(batch), 2)]
    assert [len(part) for part in parts] == [2, 1]
    packed = torch.cat([part.response_tokens for part in parts])
    assert torch.equal(packed, batch.response_tokens)
