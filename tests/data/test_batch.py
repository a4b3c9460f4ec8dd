"""Batches: masks and positions from lengths, packed values, turns."""

from __future__ import annotations

import pytest
import torch

from fastppo.data.batch import ALIGNMENT, Batch, in_one_copy

PROMPTS = [[5, 6], [7], [8, 9, 10]]


RESPONSES = [[1, 1, 4], [2], [1, 3]]


BATCH = Batch.of(PROMPTS, RESPONSES)


def test_select_keeps_the_order_of_the_rows() -> None:
    part = BATCH.select(torch.tensor([2, 0]))
    assert part.tokens.tolist() == [8, 9, 10, 1, 3, 5, 6, 1, 1, 4]
    assert part.response_tokens.tolist() == [1, 3, 1, 1, 4]
    assert len(part) == 2
    assert BATCH.select(torch.tensor([1])).layout().input_ids.shape == (1, 2), "no more padding"


def test_tensors_reach_a_gpu_in_one_copy_and_aligned(monkeypatch) -> None:
    copied = []

    def keep(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(x)
        return x

    monkeypatch.setattr("fastppo.data.batch.on_device", keep)
    tensors = [
        torch.arange(3),
        torch.arange(5, dtype=torch.int32),
        torch.tensor([True, False]),
        torch.zeros(0, dtype=torch.int64),
        torch.rand(2, 7).T,
    ]
    actual = in_one_copy(tensors, torch.device("cuda"))
    assert len(copied) == 1
    torch.testing.assert_close(actual, tensors, rtol=0, atol=0)
    assert all(x.data_ptr() % ALIGNMENT == 0 for x in actual)


def test_empty_prompts_and_unequal_counts_are_rejected() -> None:
    with pytest.raises(ValueError, match="prompt 1"):
        Batch.of([[1], []], [[1], [1]])
    with pytest.raises(ValueError, match=r"1 .* 2"):
        Batch.of([[1]], [[1], [1]])


def test_an_empty_response_has_a_final_position_only() -> None:
    batch = Batch.of([[5, 6], [7]], [[], [8]])
    layout = batch.layout()
    assert batch.response_tokens.tolist() == [8]
    assert batch.cu_seqlens.tolist() == [0, 0, 1]
    assert layout.predicting.tolist() == [2]
    assert layout.final.tolist() == [1, 3]


def test_tokens_not_written_by_the_policy_are_read_but_not_packed() -> None:
    mask = [[True, False, True], [True], [False, True]]
    batch = Batch.of(PROMPTS, RESPONSES, response_mask=mask)
    assert batch.tokens.tolist() == BATCH.tokens.tolist()
    assert batch.layout().input_ids.tolist() == BATCH.layout().input_ids.tolist()
    assert batch.layout().final.tolist() == BATCH.layout().final.tolist()
    assert batch.response_tokens.tolist() == [1, 4, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 4]
    assert batch.response_count == 4
    assert batch.packed_layout().predicting.tolist() == [1, 3, 5, 10]
    part = batch.select(torch.tensor([2, 0]))
    assert part.response_tokens.tolist() == [3, 1, 4]
    assert part.generated_lengths.tolist() == [1, 2]
    assert part.packed_layout().predicting.tolist() == [3, 6, 8]


@pytest.mark.parametrize(
    ("mask", "counts", "lengths"),
    [
        ([[1, 1, 1], [1], [1, 1]], [1, 1, 1], [3, 1, 2]),
        ([[1, 0, 1], [1], [0, 1]], [2, 1, 1], [1, 1, 1, 1]),
        ([[0, 1, 1], [1], [1, 0]], [1, 1, 1], [2, 1, 1]),
        ([[0, 0, 0], [1], [1, 1]], [0, 1, 1], [1, 2]),
        ([[1, 1, 0], [0], [1, 0]], [1, 0, 1], [2, 1]),
    ],
)
def test_a_turn_is_a_run_of_generated_tokens_within_one_response(mask, counts, lengths) -> None:
    masks = [[bool(flag) for flag in row] for row in mask]
    actual = Batch.of(PROMPTS, RESPONSES, response_mask=masks).turns()
    assert [tensor.tolist() for tensor in actual] == [counts, lengths]
    if all(map(all, masks)):
        assert [tensor.tolist() for tensor in BATCH.turns()] == [counts, lengths]
