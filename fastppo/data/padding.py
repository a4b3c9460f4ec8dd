"""Right-padded tensors from lists of token ids, for models that read whole texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Return rows of ids as a right-padded tensor, [B, S] int64."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def padded_batch(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, [B, S] int64 each."""
    return {
        "input_ids": pad(rows, pad_token_id),
        "attention_mask": pad([[1] * len(row) for row in rows], 0),
    }
